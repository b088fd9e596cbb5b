"""``kvjax top``: the rows that are used most, or come first by another order."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import numpy as np

from kvjax._command.output import print_json, print_table, progress
from kvjax._command.saved import SavedRows, table_at
from kvjax._values.prune import norms_of

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
        table = table_at(args.checkpoint, args.table, args.base, "top")
        saved = table.open()
        order = ORDERS[args.by](saved)
        chosen = np.argsort(order, kind="stable")[: args.n]
        found = saved.at(chosen)
    columns = (found["keys"], found["freqs"], found["versions"], norms_of(found["values"]))
    names = ("key", "frequency", "version", "age", "norm")
    rows = [
        (key, freq, version, table.last_step - version, norm)
        for key, freq, version, norm in zip(*(column.tolist() for column in columns), strict=True)
    ]
    if args.json:
        print_json({"table": table.name, "by": args.by, "rows": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        print_table(f"{table.name}: {len(rows)} of {len(order)} rows by {args.by}", names, rows)
    return 0
