"""Counts of keys: how often each key of a gradient occurred, kept when keys are made from other keys.

Other keys have none (None), and count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Counts: TypeAlias = jax.Array | None
"""``(...)`` int32; 0 is padding."""


def joined(parts: Sequence[tuple[Counts, tuple[int, ...]]], axis: int) -> Counts:
    """Of keys that are joined along an axis; of each part its counts and its shape."""
    if all(counts is None for counts, _ in parts):
        return None
    return jnp.concatenate([jnp.ones(shape, jnp.int32) if counts is None else counts for counts, shape in parts], axis)


def chosen(holds: Any, mine: Counts, theirs: Counts, shape: tuple[int, ...]) -> Counts:
    """Of keys ``shape`` that are the first where a condition holds, and the others elsewhere."""
    if mine is None and theirs is None:
        return None
    one = jnp.int32(1)
    counts = jnp.where(holds, one if mine is None else mine, one if theirs is None else theirs)
    return jnp.broadcast_to(counts, shape)
