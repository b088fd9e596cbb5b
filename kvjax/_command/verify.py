"""``kvjax verify``: whether a checkpoint is as it was written."""

from __future__ import annotations

import argparse
import dataclasses

from kvjax._command.errors import as_said
from kvjax._command.output import print_json, print_table, progress, size


def run(args: argparse.Namespace) -> int:
    """Prints what is damaged, or lost of what it builds on; 1 if something is."""
    from kvjax.checkpoint._verify import verify

    with progress("reading files", args.json):
        found = verify(args.checkpoint, base=args.base, alone=args.alone)
    missing = [dataclasses.replace(base, problem=as_said(base.problem, args)) for base in found.missing]
    if args.json:
        print_json({
            "checkpoint": found.path, "ok": found.ok, "has_manifest": found.has_manifest, "files": len(found.files),
            "bytes": found.bytes, "problems": found.problems, "unlisted": found.unlisted,
            "missing": missing,
        })  # fmt: skip
    else:
        if found.problems:
            print_table("damaged", ("table", "file", "problem"), [(p.table, p.path, p.problem) for p in found.problems])
        if missing:
            lines = [(", ".join(base.tables), base.digest, base.problem) for base in missing]
            print_table("lost, of what it builds on", ("tables", "digest", "problem"), lines)
        kind = "" if found.has_manifest else "; an old format without digests: only what zarr's checksums say"
        state = f"{len(found.problems)} damaged" if found.problems else "as written"
        where = "--base says where to look, --alone does not ask"
        state += f", {len(missing)} lost that it builds on ({where})" if missing else ""
        print(f"{found.path}: {len(found.files)} files, {size(found.bytes)}, {state}{kind}")
    return 0 if found.ok else 1
