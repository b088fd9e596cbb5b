"""``kvjax top``: the rows that are used most, or come first by another order."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import numpy as np

from kvjax._command.output import print_json, print_table, progress
from kvjax._command.saved import SavedRows, SavedTable
from kvjax._values.prune import norms_of
from kvjax.checkpoint._chains.chain import Chain, unreplaced

ORDERS: Mapping[str, Callable[[SavedRows], np.ndarray]] = {
    "frequency": lambda saved: -saved.column("freqs"),
    "recent": lambda saved: -saved.column("versions"),
    "oldest": lambda saved: saved.column("versions"),
    "norm": lambda saved: -saved.norms(),
}
"""What is least for the rows that come first, by the values of ``--by``."""


def run(args: argparse.Namespace) -> int:
    """Prints them."""
    with progress("reading rows", args.json):
        table, total, found = unreplaced(args.checkpoint, args.base, "top", lambda chain: _read(chain, args))
    columns = (found["keys"], found["freqs"], found["versions"], norms_of(found["values"]))
    names = ("key", "frequency", "version", "age", "norm")
    rows = [
        (key, freq, version, table.last_step - version, norm)
        for key, freq, version, norm in zip(*(column.tolist() for column in columns), strict=True)
    ]
    if args.json:
        print_json({"table": table.name, "by": args.by, "rows": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        print_table(f"{table.name}: {len(rows)} of {total} rows by {args.by}", names, rows)
    return 0


def _read(chain: Chain, args: argparse.Namespace) -> tuple[SavedTable, int, dict[str, np.ndarray]]:
    """The table, how many rows it has, and those that come first."""
    table = SavedTable(chain, args.table)
    rows = table.open()
    chosen = np.argsort(ORDERS[args.by](rows), kind="stable")[: args.n]
    return table, rows.num_rows, rows.at(chosen)
