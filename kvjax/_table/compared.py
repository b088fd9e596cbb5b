"""Compared rows: what has changed in a table that does not remember it, found by a digest of each row."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from kvjax._spec.spec import TableSpec
from kvjax._values.exported import Exported
from kvjax._values.snapshot import Snapshot

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Digests:
    """What the rows of this process's shards were at one moment, in 16 bytes for each.

    Attributes:
      table: what the table was, as far as rows of another one would not be its changes.
      slots: dtype and shape of each slot; empty if it had none.
      keys: ``(n,)`` int64, sorted.
      digests: ``(n,)`` uint64, of all that a row has.
    """

    table: tuple[Any, ...]
    slots: dict[str, str]
    keys: np.ndarray
    digests: np.ndarray

    @classmethod
    def of(cls, spec: TableSpec, now: Snapshot) -> Digests:
        keys = now.rows.keys.view(np.int64)
        order = np.argsort(keys)
        return cls(_identity(spec), dict(now.slot_types), keys[order], digests_of(now.rows)[order])

    def changed(self, spec: TableSpec, now: Snapshot) -> tuple[Snapshot, np.ndarray] | None:
        """The rows that are others now, or new, in the order of the disk; and the keys ``(m,)`` int64 that went.

        None if the table is another one, or its slots are gone or others.
        """
        if self.table != _identity(spec) or (self.slots and self.slots != now.slot_types):
            return None
        keys, at = now.rows.keys.view(np.int64), np.zeros(len(now.rows), np.int64)
        if len(self.keys):
            at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
            same = (self.keys[at] == keys) & (self.digests[at] == digests_of(now.rows))
        else:
            same = np.zeros(len(keys), bool)
        gone = np.setdiff1d(self.keys, keys, assume_unique=True)
        offsets = np.concatenate([[0], np.cumsum(~same)])[now.offsets].astype(np.int64)
        return dataclasses.replace(now, rows=now.rows.take(~same), offsets=offsets), gone


def _identity(spec: TableSpec) -> tuple[Any, ...]:
    return spec.dim, spec.dtype, spec.key_dtype, spec.seed, spec.initializer


def digests_of(rows: Exported) -> np.ndarray:
    """Of each row 64 bits of all that it has but its key, ``(n,)`` uint64.

    Each word is mixed in by a bijection of what was there, so rows that differ in one word never have the same.
    """
    n = len(rows)
    out = np.zeros(n, np.uint64)
    for name, array in sorted(rows.columns().items()):
        if name == "keys":
            continue
        size = array.dtype.itemsize * math.prod(array.shape[1:])
        raw = np.ascontiguousarray(array).reshape(n, math.prod(array.shape[1:])).view(np.uint8).reshape(n, size)
        padded = np.zeros((n, -(-size // 8) * 8), np.uint8)
        padded[:, :size] = raw
        for word in padded.view(np.uint64).T:
            out = (out ^ word) * _MULTIPLIER
            out ^= out >> np.uint64(32)
    return out
