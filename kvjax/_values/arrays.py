"""Array-likes: what is taken where an array is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np


class HasArray(Protocol):
    """What NumPy can make an array of: its own arrays and numbers, JAX's arrays, data frames' columns."""

    def __array__(self) -> np.ndarray: ...


class HasJaxArray(Protocol):
    """What JAX can make an array of, such as an ``nnx.Param``."""

    def __jax_array__(self) -> Any: ...


PyTree: TypeAlias = Any
"""Any tree of JAX's: what type checkers cannot say more of."""

ArrayLike: TypeAlias = HasArray | HasJaxArray | complex | Sequence["ArrayLike"]
"""An array, a number, or nested sequences of them; no strings."""
