"""``kvjax merge``: several checkpoints as one."""

from __future__ import annotations

import argparse
import dataclasses

from kvjax._command.output import print_json, print_table, progress


def run(args: argparse.Namespace) -> int:
    """Merges, and says what."""
    from kvjax.checkpoint._merge import merge

    if len(args.checkpoint) < 2 and not args.ancestor:  # or with --overwrite, one would replace the other
        raise ValueError(
            f"kvjax merge: want two checkpoints or more and then OUT, got {args.checkpoint[0]} and {args.out}; say "
            "what to merge, or copy one with kvjax convert"
        )
    with progress("reading rows", args.json):
        reports = merge(
            args.checkpoint, args.out, args.rule, ancestor=args.ancestor, weights=args.weight or None, base=args.base,
            overwrite=args.overwrite,
        )  # fmt: skip
    if args.json:
        print_json({name: dataclasses.asdict(report) for name, report in reports.items()})
        return 0
    columns = ("table", "rows", *(f"of {path}" for path in args.checkpoint), "shared keys")
    print_table(str(args.out), columns, [(name, r.rows, *r.of, r.shared) for name, r in reports.items()])
    return 0
