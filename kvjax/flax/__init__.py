"""Flax modules: Linen here, NNX in `kvjax.flax.nnx`."""

from kvjax.flax import nnx as nnx
from kvjax.flax._linen import Embed as Embed
from kvjax.flax._linen import EmbedBag as EmbedBag

__all__ = ["Embed", "EmbedBag", "nnx"]


def __dir__() -> list[str]:
    return sorted(__all__)
