"""Indices of keys: those that NumPy would refuse are refused, where JAX would clamp them or take the words' axis."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_index(index: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    """Whether keys of a shape have what an index asks for, as far as the host knows.

    Raises:
      IndexError: it has more axes than the keys, or an integer that is out of bounds.
    """
    axis = 0
    for i, each in enumerate(index):
        if each is Ellipsis:
            axis = len(shape) - sum(map(_axes, index[i + 1 :]))
        number = each[()] if isinstance(each, np.ndarray) and each.shape == () else each
        known = isinstance(number, (int, np.integer)) and not isinstance(number, bool) and axis < len(shape)
        if known and not -shape[axis] <= number < shape[axis]:
            raise IndexError(f"kvjax: Keys: want an index of axis {axis} of keys {shape}, got {each}: out of bounds")
        axis += _axes(each)
    if sum(map(_axes, index)) > len(shape):
        raise IndexError(f"kvjax: Keys: want at most {len(shape)} indices for keys of shape {shape}, got {index}")


def _axes(index: Any) -> int:
    """How many axes an index takes: a mask all of its own."""
    if index is None or index is Ellipsis:
        return 0
    known = index if hasattr(index, "dtype") else np.asarray(index)
    return known.ndim if known.dtype == bool else 1
