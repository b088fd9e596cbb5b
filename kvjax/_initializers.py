"""Initial rows: what a key reads as before it has been trained.

The row of a key depends on the table's seed, the key and the column alone. It is the same before and after a
restart, an eviction or a change of the number of shards, on every platform, to the bit.

Source: the counter-based generator is Philox4x32-10 (Salmon et al., SC 2011); normal deviates come from it by
Wichura's inverse, AS 241.

Example:
  >>> import kvjax
  >>> kvjax.initializers.normal(0.1)
  Initializer(kind='normal', a=0.0, b=0.1)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Initializer:
    """A generator of initial rows; made by the functions of `kvjax.initializers`.

    Attributes:
      kind: "constant", "uniform", "normal" or "truncated_normal".
      a: the constant, the lower bound, or the mean.
      b: the upper bound or the standard deviation.
    """

    kind: str
    a: float = 0.0
    b: float = 0.0


def constant(value: float) -> Initializer:
    """Every element is `value`."""
    return Initializer("constant", float(value))


def zeros() -> Initializer:
    """Every element is 0."""
    return constant(0.0)


def ones() -> Initializer:
    """Every element is 1."""
    return constant(1.0)


def uniform(low: float = -0.05, high: float = 0.05) -> Initializer:
    """Uniform between `low` and `high`."""
    return Initializer("uniform", float(low), float(high))


def normal(stddev: float = 0.01, mean: float = 0.0) -> Initializer:
    """Normal with mean `mean` and standard deviation `stddev`."""
    return Initializer("normal", float(mean), float(stddev))


def truncated_normal(stddev: float = 0.01, mean: float = 0.0) -> Initializer:
    """`mean` plus `stddev` times a standard normal cut at -2 and 2, as in ``jax.nn.initializers``."""
    return Initializer("truncated_normal", float(mean), float(stddev))


def resolve(initializer: Any) -> Initializer:
    """What `get_table` takes as ``initializer``: an `Initializer`, `zeros` or `ones`, or a number.

    Raises:
      TypeError: it is none of these.
      ValueError: its numbers are not finite.
    """
    if initializer is zeros or initializer is ones:
        initializer = initializer()
    if isinstance(initializer, (int, float, np.integer, np.floating)):
        initializer = constant(float(initializer))
    if isinstance(initializer, Initializer):
        if not (np.isfinite(initializer.a) and np.isfinite(initializer.b)):
            raise ValueError(f"initializer wants finite numbers, got {initializer}")
        return initializer
    raise TypeError(
        f"initializer wants a number or one of kvjax.initializers (constant, uniform, normal, truncated_normal, "
        f"zeros, ones), got {initializer!r}: rows are made per key, so a function of (rng, shape) does not fit"
    )
