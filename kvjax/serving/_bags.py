"""Bags in NumPy: sums and maxima of rows, from which `kvjax._values.bags` makes bags."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvjax._values.arrays import check_no_mask
from kvjax._values.bags import OP, Bags, Sums, bags_of, combine, counts, lengths_error
from kvjax._values.errors import where_of

_BLOCK = 1 << 15
"""Elements that are put into bags at a time, so that their places stay in the cache."""


def places_of(
    lengths: Any, segment_ids: Any, num_segments: Any, shape: tuple[int, ...], table: str
) -> tuple[np.ndarray, tuple[int, ...]]:
    """The bag of each key, and the shape of the bags.

    Args:
      lengths: as `kvjax.lookup_bag` takes them; so the two that follow.
      segment_ids: likewise.
      num_segments: likewise.
      shape: of the keys.
      table: its name, for errors.

    Returns:
      ``(n,)`` int64 of the keys, flat; -1 marks padding. And the shape.

    Raises:
      TypeError, ValueError: they do not fit each other or the keys.
    """
    for each in (lengths, segment_ids):
        check_no_mask(each, where_of(table, OP))
    lengths, segment_ids = (None if x is None else np.asarray(x) for x in (lengths, segment_ids))
    given = bags_of(lengths, segment_ids, num_segments, shape, table)
    if given is None:
        return np.repeat(np.arange(math.prod(shape[:-1])), shape[-1]), shape[:-1]
    ids = _of_lengths(given, shape[0], table) if given.ids is None else given.ids.astype(np.int64)
    return np.where(ids < given.number, ids, -1), (given.number,)


def _of_lengths(given: Bags, n: int, table: str) -> np.ndarray:
    lengths = given.lengths
    if (lengths < 0).any() or lengths.sum(dtype=np.int64) > n:
        raise lengths_error(lengths, n, table)
    ids = np.full(n, -1)
    each = np.repeat(np.arange(given.number), lengths)
    ids[: len(each)] = each
    return ids


def combined(
    combiner: str, shape: tuple[int, ...], ids: np.ndarray, rows: np.ndarray, weights: Any, empty: Any
) -> np.ndarray:
    """Bags of a shape, ``(*shape, dim)`` float32.

    Args:
      combiner: as `kvjax.lookup_bag` takes it.
      shape: of the bags.
      ids: ``(n,)`` int64, the bag of each row; there is no padding any more.
      rows: ``(n, dim)`` float32.
      weights: ``(n,)`` float32, or None.
      empty: ``(dim,)``, what bags without rows get; None for zeros.
    """
    bags = math.prod(shape)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and what becomes of them are results
        made = combine(np, _SUMS, combiner, bags, ids, rows, weights)
    if empty is not None:
        made[counts(np, _SUMS, bags, ids) == 0] = empty
    return made.reshape(*shape, rows.shape[1])


def _sum(bags: int, ids: np.ndarray, weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return _put(np.add, 0, bags, ids, weights[:, None] * rows)


def _max(bags: int, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    most = _put(np.maximum, -np.inf, bags, ids, rows)
    most[np.bincount(ids, minlength=bags) == 0] = 0
    return most


def _put(ufunc: Any, start: float, bags: int, ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Bags ``(bags, dim)`` that begin with a number, to which rows come in their order."""
    dim = rows.shape[1]
    out, columns, step = np.full((bags, dim), start, np.float32), np.arange(dim), max(1, _BLOCK // dim)
    for at in range(0, len(ids), step):
        some = slice(at, at + step)
        # Flat, because NumPy has loops of its own for that alone. They take one after the other, where reduceat sums in
        # pairs.
        ufunc.at(out.reshape(-1), (ids[some, None] * dim + columns).reshape(-1), rows[some].reshape(-1))
    return out


_SUMS = Sums(_sum, _max)
