"""``kvjax verify``: whether a checkpoint is as it was written."""

from __future__ import annotations

import argparse

from kvjax._command.output import print_json, print_table, progress, size


def run(args: argparse.Namespace) -> int:
    """Prints what is damaged; 1 if something is."""
    from kvjax.checkpoint._verify import verify

    with progress("reading files", args.json):
        found = verify(args.checkpoint)
    if args.json:
        print_json({
            "checkpoint": found.path, "ok": found.ok, "has_manifest": found.has_manifest, "files": len(found.files),
            "bytes": found.bytes, "problems": found.problems, "unlisted": found.unlisted,
        })  # fmt: skip
    else:
        if found.problems:
            print_table("damaged", ("table", "file", "problem"), [(p.table, p.path, p.problem) for p in found.problems])
        kind = "" if found.has_manifest else "; an old format without digests: only what zarr's checksums say"
        state = "as written" if found.ok else f"{len(found.problems)} damaged"
        print(f"{found.path}: {len(found.files)} files, {size(found.bytes)}, {state}{kind}")
    return 0 if found.ok else 1
