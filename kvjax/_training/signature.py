"""Signatures: a number that identifies the transform that made a state, on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LEAST = 1e-30
_NEAR = 1e-2  # more than the last bits of another processor, less than a rate that is off by a thousandth


def signature(numbers: Sequence[Any]) -> np.float32:
    """Of numbers that follow from a transform, arrays of any shape: the sum of their logarithms, each with a weight."""
    flat = np.concatenate([np.zeros(1), *(np.ravel(np.asarray(x, np.float64)) for x in numbers)])
    weights = 1 + np.arange(flat.size) * 0.6180339887 % 1
    return np.float32(np.sum(weights * np.log(np.maximum(np.abs(flat), _LEAST))))


def is_of(made_by: jax.Array, wanted: np.float32) -> jax.Array:
    """Whether a state has this signature, ``()`` bool."""
    return jnp.abs(made_by - wanted) <= np.float32(_NEAR)
