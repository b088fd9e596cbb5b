"""``kvjax get``: the rows of some keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvjax._command.output import print_json, print_table, progress
from kvjax._values.exported import SLOT, Exported
from kvjax._values.integers import as_int64
from kvjax._values.key_width import own_bits
from kvjax._values.prune import norms_of
from kvjax.checkpoint._chains.chain import Chain, only_table, unreplaced
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._merged_counts import Waiting
from kvjax.checkpoint._rows import pieces_of

_SHOWN = 8
"""Elements of a row on a terminal."""


def run(args: argparse.Namespace) -> int:
    """Prints them; 1 if a key has none."""
    with progress("reading rows", args.json):
        name, keys, rows, counts = unreplaced(args.checkpoint, args.base, "get", lambda chain: _read(chain, args))
    lost = [key for key in keys if key not in rows]
    if args.json:
        found = {"table": name, "rows": [rows[key] for key in keys if key in rows], "without_row": lost}
        print_json(found | {"waiting": [{"key": key, "frequency": count} for key, count in counts.items()]})
        return 1 if lost else 0
    names = ("key", "frequency", "version", "age", "norm", "values")
    names += tuple(name for name in next(iter(rows.values()), {}) if name.startswith(SLOT))
    without = {key: {"values": "no row", "frequency": counts.get(key)} for key in lost}
    lines = [[_short(((rows | without)[key] | {"key": key}).get(name)) for name in names] for key in keys]
    print_table(f"{name}: rows of {len(keys) - len(lost)} of {len(keys)} keys", names, lines)
    return 1 if lost else 0


def _read(chain: Chain, args: argparse.Namespace) -> tuple[str, list[int], dict[int, dict[str, Any]], dict[int, int]]:
    """The name of the table, the keys as it has them, what there is of each row, and the count of each key that waits
    for one, by their keys."""
    found = ChainRows(chain, only_table(chain, args.table))
    asked = np.array([key % 2**64 for key in args.keys], np.uint64)
    bits = own_bits(asked, found.meta["key_dtype"], "get")
    rows = {row["key"]: row for piece in pieces_of(found, args.slots, bits) for row in _rows_of(piece)}
    own = bits.view(found.types["keys"][0])
    lost = own[~np.isin(own, np.array([*rows], own.dtype))]
    return found.name, list(dict.fromkeys(own.tolist())), rows, _waiting(found, lost)


def _waiting(table: ChainRows, lost: np.ndarray) -> dict[int, int]:
    """The counts of keys without a row, where they are counted one by one; all of them are read, if one is lost."""
    if not len(lost):
        return {}
    waiting = Waiting(table.counts(), table.meta.get("options", {}).get("admit"))
    return {key: count for key, count in zip(lost.tolist(), waiting.of(as_int64(lost)).tolist(), strict=True) if count}


def _rows_of(piece: Exported) -> Iterator[dict[str, Any]]:
    columns = {
        "key": piece.keys, "frequency": piece.freqs, "version": piece.versions,
        "age": piece.last_step - piece.versions, "norm": norms_of(piece.values), "pinned": piece.pinned,
        "values": piece.values,
    }  # fmt: skip
    for row, trained in enumerate(piece.has_slots):
        slots = {SLOT + name: slot[row].tolist() if trained else None for name, slot in piece.slots.items()}
        yield {name: column[row].tolist() for name, column in columns.items()} | slots


def _short(cell: Any) -> object:
    """A cell, of many elements the first ones."""
    return [*cell[:_SHOWN], "..."] if isinstance(cell, list) and len(cell) > _SHOWN else cell
