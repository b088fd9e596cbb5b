"""Snapshots: all that a table holds as columns of arrays, and the flat form in which the C++ side has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax._formats.source import row_bytes
from kvjax._values.exported import Exported, slot_column
from kvjax._values.integers import as_int64
from kvjax._values.slot_layout import parse_type

ADMISSION_COLUMNS = {"pending_keys": "int64", "pending_counts": "int64", "sketch": "uint16"}
"""What admission knows of keys without a row: those that wait, one by one, or the cells of a sketch."""

WAITING_COLUMNS = ("pending_keys", "pending_counts")
"""Those of them that have an element for each waiting key."""


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


Columns = Mapping[str, np.ndarray]


def column_types(
    dim: int, row_dtype: Any, key_dtype: Any, slots: Mapping[str, str]
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Dtype and shape of what a row has in each column.

    Args:
      dim: width of a row.
      row_dtype: of the values.
      key_dtype: of the table.
      slots: type of each slot.
    """
    keys = np.uint64 if str(key_dtype).startswith("u") else np.int64
    dtypes = {"keys": keys, "values": row_dtype, "freqs": np.int64, "versions": np.int64} | dict.fromkeys(
        ("has_slots", "pinned"), np.bool_
    )
    types = {name: (np.dtype(dtype), (dim,) if name == "values" else ()) for name, dtype in dtypes.items()}
    return types | {slot_column(name): parse_type(text) for name, text in slots.items()}


def take(columns: Columns, keep: Any) -> dict[str, np.ndarray]:
    """The rows of each column that a mask or an index chooses."""
    return {name: array[keep] for name, array in columns.items()}


def same_bits(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Which rows ``(n, ...)`` of two arrays of a shape and a dtype are the same to the bit."""
    if one.size == 0:
        return np.ones(len(one), bool)
    bits = [np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1) for x in (one, other)]
    return (bits[0] == bits[1]).all(axis=1)


def waiting_of(admission: Columns) -> dict[str, np.ndarray]:
    """What has an element for each waiting key, of counts of keys without a row."""
    return {name: admission[name] for name in WAITING_COLUMNS}


def joined_admission(parts: Sequence[Columns]) -> dict[str, np.ndarray]:
    """The counts of several shards as one; a shard that lacks one has nothing to keep there."""
    if len(parts) == 1:
        return dict(parts[0])
    out: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        arrays = [part[name] for part in parts if name in part]
        # Of the cells of a sketch, each is used by one shard alone, which owns its bucket.
        out[name] = np.max(arrays, axis=0) if name == "sketch" else np.concatenate(arrays)
    return out


# ---- the flat form of the C++ side ---------------------------------------------------------------------------


def from_native(raw: Mapping[str, Any], dim: int, row_dtype: Any, key_dtype: Any) -> Snapshot:
    """Gives the flat arrays of the C++ side their types and shapes."""
    types = {name: text for name, text, _ in raw["slots"]}
    flat = {**raw, **{slot_column(name): data for name, _, data in raw["slots"]}}
    n = len(raw["keys"])
    columns = {
        name: flat[name].view(dtype).reshape(n, *shape)
        for name, (dtype, shape) in column_types(dim, row_dtype, key_dtype, types).items()
    }
    rows = Exported.of_columns(columns, raw["last_step"], key_dtype=key_dtype)
    return Snapshot(rows, raw["offsets"], types, {name: raw[name] for name in ADMISSION_COLUMNS if name in raw})


def head_to_native(rows: int, last_step: int, slot_types: Mapping[str, str], admission: Columns) -> dict[str, Any]:
    """What the C++ side is told of contents before their rows: how many come, and what is not theirs."""
    slots = [(name, text, row_bytes(parse_type(text))) for name, text in slot_types.items()]
    return {**admission, "rows": rows, "last_step": last_step, "slots": slots}


def rows_to_native(columns: Columns, slot_types: Mapping[str, str]) -> dict[str, Any]:
    """Rows as the flat arrays that the C++ side loads."""
    flat = {name: np.ascontiguousarray(columns[name], np.int64) for name in ("freqs", "versions")}
    flat |= {name: _bytes(np.asarray(columns[name], bool)) for name in ("has_slots", "pinned")}
    slots = [
        (name, text, row_bytes(parse_type(text)), _bytes(columns[slot_column(name)]))
        for name, text in slot_types.items()
    ]
    keys = as_int64(columns["keys"])
    return flat | {"keys": keys, "values": _bytes(columns["values"]), "slots": slots}


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
