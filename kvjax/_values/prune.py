"""Pruning: which rows an export or a checkpoint leaves out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvjax._values.arrays import ArrayLike
from kvjax._values.exported import Exported


@dataclasses.dataclass(frozen=True)
class Prune:
    """Which rows an export leaves out. A row is kept if it passes every test that is set.

    Attributes:
      min_frequency: keep rows that occurred at least so often.
      max_age: keep rows written within so many steps of the table's last step.
      min_norm: keep rows whose Euclidean norm is at least this.
      zero_rows: leave out rows that are exactly zero.
      top_k: of the rows that pass, keep the so many most frequent; ties go to the row that was written later,
        then to the order of the export.
      keep: keys ``(m,)`` that are kept whatever the tests say.

    Example:
      >>> import kvjax
      >>> kvjax.Prune(min_frequency=2, max_age=1000)
      Prune(min_frequency=2, max_age=1000)
    """

    min_frequency: int | None = None
    max_age: int | None = None
    min_norm: float | None = None
    zero_rows: bool = False
    top_k: int | None = None
    keep: ArrayLike | None = None

    def __post_init__(self) -> None:
        for name in ("min_frequency", "max_age", "min_norm", "top_k"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"kvjax: Prune wants {name} >= 0, got {value!r}")

    def mask(self, rows: Exported) -> np.ndarray:
        """Which rows are kept.

        Args:
          rows: an export of n rows.

        Returns:
          ``(n,)`` bool.
        """
        keep = np.ones(len(rows), bool)
        if self.min_frequency is not None:
            keep &= rows.freqs >= self.min_frequency
        if self.max_age is not None:
            keep &= rows.last_step - rows.versions <= self.max_age
        if self.min_norm is not None:
            keep &= np.linalg.norm(rows.values.astype(np.float32), axis=1) >= self.min_norm
        if self.zero_rows:
            keep &= (rows.values != 0).any(axis=1)
        if self.top_k is not None and keep.sum() > self.top_k:
            candidates = np.flatnonzero(keep)
            order = np.lexsort((-rows.versions[candidates], -rows.freqs[candidates]))
            keep[:] = False
            keep[candidates[order[: self.top_k]]] = True
        if self.keep is not None:
            keep |= np.isin(rows.keys, np.asarray(self.keep).astype(rows.keys.dtype))
        return keep

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)
                 if getattr(self, f.name) is not f.default]  # fmt: skip
        return f"Prune({', '.join(given)})"


PruneLike = Prune | Callable[[Exported], np.ndarray]


def keep_mask(prune: PruneLike, rows: Exported) -> np.ndarray:
    """Which rows `prune` keeps: ``(n,)`` bool."""
    if isinstance(prune, Prune):
        return prune.mask(rows)
    mask = np.asarray(prune(rows))
    if mask.dtype != bool or mask.shape != (len(rows),):
        raise ValueError(f"kvjax: prune wants a function that gives ({len(rows)},) bool, got {mask.shape} {mask.dtype}")
    return mask
