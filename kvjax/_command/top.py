"""``kvjax top``: the rows that stand out."""

from __future__ import annotations

import argparse

import numpy as np

from kvjax._command.output import print_json, print_table, progress
from kvjax._command.saved import table_at


def run(args: argparse.Namespace) -> int:
    """Prints them."""
    with progress("reading rows", args.json):
        table = table_at(args.checkpoint, args.table)
        freqs, versions, norms = table.column("freqs"), table.column("versions"), table.norms()
        order = {"frequency": -freqs, "recent": -versions, "oldest": versions, "norm": -norms}[args.by]
        chosen = np.argsort(order, kind="stable")[: args.n]
        keys = table.column("keys")[chosen]
        columns = [column[chosen].tolist() for column in (freqs, versions, norms)]
    names = ("key", "frequency", "row version", "age", "norm")
    rows = [
        (key, freq, version, table.last_step - version, norm)
        for key, freq, version, norm in zip(keys.tolist(), *columns, strict=True)
    ]
    if args.json:
        print_json({"table": table.name, "by": args.by, "rows": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        print_table(f"{table.name}: {len(rows)} of {table.rows} rows by {args.by}", names, rows)
    return 0
