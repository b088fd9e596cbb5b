"""``kvjax diff``: how two checkpoints differ."""

from __future__ import annotations

import argparse

from kvjax._command.output import print_json, print_table, progress


def run(args: argparse.Namespace) -> int:
    """Prints it; 1 if anything is another."""
    from kvjax.checkpoint._diff import diff

    with progress("comparing rows", args.json):
        found = diff(args.first, args.second, tables=args.table, examples=args.examples, base=args.base)
    if args.json:
        print_json({"same": found.same, "added": found.added, "removed": found.removed, "tables": dict(found.tables)})
        return 0 if found.same else 1
    for kind, names in (("only in the first", found.removed), ("only in the second", found.added)):
        if names:
            print(f"{kind}: {', '.join(names)}")
    columns = ("table", "rows", "rows then", "added", "removed", "changed", "changed columns", "largest difference")
    rows = [(name, *d.rows, d.added, d.removed, d.changed, d.columns, d.largest) for name, d in found.tables.items()]
    print_table("", columns, rows)
    for name, d in found.tables.items():
        if d.fields:
            fields = [(field, a, b) for field, (a, b) in d.fields.items()]
            print_table(f"{name}: described by", ("field", "first", "second"), fields)
        if any(d.examples.values()):
            print_table(f"{name}: keys", ("", "some of them"), [(k, keys) for k, keys in d.examples.items() if keys])
    return 0 if found.same else 1
