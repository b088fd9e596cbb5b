"""Flax modules: Linen here, NNX in `kvjax.flax.nnx`."""

from kvjax.flax import nnx as nnx
from kvjax.flax._linen import Embed as Embed

__all__ = ["Embed", "nnx"]
