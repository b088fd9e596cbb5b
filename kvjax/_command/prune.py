"""``kvjax prune``: a checkpoint without the rows that rules leave out, or a dry run that counts them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from kvjax._command.output import print_json, print_table, progress, size

if TYPE_CHECKING:
    from kvjax._values.prune import Prune


def rules_of(args: argparse.Namespace) -> Prune | None:
    """What the arguments say; None if they say nothing."""
    from kvjax._values.prune import Prune

    asked = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Prune)}
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    return Prune(**given) if given else None


def run(args: argparse.Namespace) -> int:
    """Prunes, or says what would go."""
    rules = rules_of(args)
    if rules is None:
        raise ValueError("kvjax prune: want a rule, as --min-norm, got none; see kvjax prune --help")
    if (args.out is None) != args.dry_run:
        got = "both; leave one out" if args.dry_run else "no OUT and no --dry-run; say one"
        raise ValueError(f"kvjax prune: want OUT or --dry-run, got {got}")
    from kvjax.checkpoint._rewrite import prune

    with progress("reading rows", args.json):
        reports = prune(args.checkpoint, args.out, rules, tables=args.table, base=args.base, overwrite=args.overwrite)
    if args.json:
        print_json({
            name: {
                "rows": r.total.rows, "dropped": r.dropped, "norm_lost": r.norm_lost, "by_rule": dict(r.by_rule),
                "waiting": r.waiting,
            } for name, r in reports.items()
        })  # fmt: skip
        return 0
    for name, report in reports.items():
        lines: list[tuple[object, ...]] = [
            (rule, p.rows, size(p.bytes), share(p.norm, report.total.norm))
            for rule, p in (*report.by_rule.items(), ("together", report.dropped))
        ]
        if args.remove is not None:
            lines.append(("waiting keys", report.waiting, None, None))
        title = f"{name}: {report.total.rows} rows, {'would leave' if args.dry_run else 'left'} out"
        print_table(title, ("rule", "rows", "bytes", "of the norms"), lines)
    return 0


def share(part: float, whole: float) -> str:
    """In per cent."""
    return f"{100 * part / whole if whole else 0:.2f}%"
