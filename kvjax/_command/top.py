"""``kvjax top``: the rows that are used most, or come first by another order."""

from __future__ import annotations

import argparse

import numpy as np

from kvjax._command.output import print_json, print_table, progress
from kvjax._command.saved import table_at
from kvjax._values.prune import norms_of


def run(args: argparse.Namespace) -> int:
    """Prints them."""
    with progress("reading rows", args.json):
        table = table_at(args.checkpoint, args.table, args.base, "top")
        saved = table.open()
        if args.by == "norm":
            order = -saved.norms()
        else:
            order = saved.column("freqs" if args.by == "frequency" else "versions")
            order = order if args.by == "oldest" else -order
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
