"""A table's contents as NumPy arrays, and which rows of it to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Exported:
    """Rows of a table, sorted by (bucket, key), so that equal tables give equal arrays.

    Attributes:
      keys: ``(n,)`` int64 (uint64 for a table of unsigned keys).
      values: ``(n, dim)`` of the table's dtype.
      freqs: ``(n,)`` int64, occurrences in training.
      versions: ``(n,)`` int64, the step that last wrote the row.
      slots: optimizer slots by name, each ``(n, ...)``; empty unless asked for.
      has_slots: ``(n,)`` bool, false where no optimizer has written the row's slots yet.
      pinned: ``(n,)`` bool, rows that are never evicted.
      last_step: the table's last step; ages are counted from it.
      total: rows in the table, before pruning.
    """

    keys: np.ndarray
    values: np.ndarray
    freqs: np.ndarray
    versions: np.ndarray
    slots: dict[str, np.ndarray]
    has_slots: np.ndarray
    pinned: np.ndarray
    last_step: int
    total: int

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        rows = f"{len(self)} of {self.total}" if len(self) != self.total else f"{self.total}"
        return (
            f"Exported(rows={rows}, dim={self.values.shape[-1]}, last_step={self.last_step}, slots={list(self.slots)})"
        )

    def take(self, keep: np.ndarray) -> Exported:
        """The rows where `keep` is true.

        Args:
          keep: ``(n,)`` bool.
        """
        names = ("keys", "values", "freqs", "versions", "has_slots", "pinned")
        return dataclasses.replace(
            self,
            **{name: getattr(self, name)[keep] for name in names},
            slots={name: array[keep] for name, array in self.slots.items()},
        )


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
    keep: Any = None

    def __post_init__(self):
        for name in ("min_frequency", "max_age", "min_norm", "top_k"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"Prune wants {name} >= 0, got {value!r}")

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
        raise ValueError(f"prune wants a function that gives ({len(rows)},) bool, got {mask.shape} {mask.dtype}")
    return mask


def slot_type(text: str) -> tuple[np.dtype, tuple[int, ...]]:
    """ "float32[64]" -> (dtype float32, (64,)).

    Raises:
      ValueError: the text is no such type.
    """
    dtype, _, shape = text.rstrip("]").partition("[")
    try:
        return jnp.dtype(dtype), tuple(int(n) for n in shape.split(",") if n)
    except TypeError as error:
        raise ValueError(f'want the type of a slot, as "float32[64]", got {text!r}') from error


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a checkpoint stores of a table.

    Attributes:
      rows: the export.
      offsets: ``(buckets + 1,)`` int64, the first row of each virtual bucket.
      slot_types: dtype and shape of each slot, "float32[64]", in the optimizer's order.
      admission: counts of keys without a row: "pending_keys" ``(m,)`` and "pending_counts" ``(m,)`` int64, sorted by
        (bucket, key), or "sketch" ``(buckets * cells,)`` uint16. Those that the table does not keep are empty.
    """

    rows: Exported
    offsets: np.ndarray
    slot_types: dict[str, str]
    admission: dict[str, np.ndarray]


ADMISSION_ARRAYS = {"pending_keys": "int64", "pending_counts": "int64", "sketch": "uint16"}


def from_host(raw: dict[str, Any], dim: int, row_dtype: Any, key_dtype: str) -> Snapshot:
    """Gives the flat arrays of the C++ side their types and shapes."""
    n = len(raw["keys"])
    slots, types = {}, {}
    for name, text, data in raw["slots"]:
        dtype, shape = slot_type(text)
        slots[name] = data.view(dtype).reshape(n, *shape)
        types[name] = text
    rows = Exported(
        keys=raw["keys"].view(np.uint64 if key_dtype.startswith("u") else np.int64),
        values=raw["values"].view(row_dtype).reshape(n, dim),
        freqs=raw["freqs"],
        versions=raw["versions"],
        slots=slots,
        has_slots=raw["has_slots"].view(bool),
        pinned=raw["pinned"].view(bool),
        last_step=raw["last_step"],
        total=n,
    )
    return Snapshot(rows, raw["offsets"], types, {name: raw[name] for name in ADMISSION_ARRAYS if name in raw})
