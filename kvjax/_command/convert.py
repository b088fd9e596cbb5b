"""``kvjax convert``: a table as a file of another program, or another system's as a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax._command.output import print_json, print_table, progress
from kvjax._command.prune import rules_of

if TYPE_CHECKING:
    from kvjax.convert import Imported

_FILES = ("safetensors", "npz", "parquet")


def run(args: argparse.Namespace) -> int:
    """Converts, and says what."""
    suffix = Path(args.source).suffix.removeprefix(".")
    kind = args.kind or (suffix if suffix in _FILES and Path(args.source).is_file() else "kvjax")
    ends = Path(args.out).suffix.removeprefix(".")
    to = args.to or (ends if ends in _FILES else "kvjax")
    said = _out(args, to) if kind == "kvjax" else _in(args, kind, to)
    if args.json:
        print_json(said)
    else:
        error, left = said.pop("error", None), said.pop("left", ())
        lines = [*said.items(), *(("left out", each) for each in left)]
        lines += [(name, each) for name, each in vars(error).items() if name not in said] if error else []
        print_table(f"{args.source} -> {args.out}", ("", ""), lines)
    return 0


def _out(args: argparse.Namespace, to: str) -> dict[str, Any]:
    from kvjax.convert import export_checkpoint

    if to == "kvjax":
        return _whole(args)
    with progress("reading rows", args.json) as read:
        report = export_checkpoint(
            args.source, args.out, table=args.table, format=to, quantise=args.quantise, slots=args.slots,
            prune=rules_of(args), progress=read, base=args.base,
        )  # fmt: skip
    return dict(vars(report))


def _whole(args: argparse.Namespace) -> dict[str, Any]:
    """A delta, and what it builds on, as one checkpoint."""
    from kvjax.checkpoint import compact

    if args.table or args.slots or args.quantise or rules_of(args):
        raise ValueError("kvjax convert: want a file as OUT, or no options, got a checkpoint; say --to, or kvjax prune")
    with progress("reading rows", args.json):
        compact(args.source, args.out, base=args.base, overwrite=args.overwrite)
    return {"format": "kvjax"}


def _in(args: argparse.Namespace, kind: str, to: str) -> dict[str, Any]:
    imported = _read(args, kind)
    rows, prune = imported.rows, rules_of(args)
    if prune is not None:
        rows = rows.take(prune.mask(rows))
    error = None
    if to == "kvjax":
        if args.quantise is not None:
            raise ValueError("kvjax convert: want no --quantise for a checkpoint, got one; tables have --dtype")
        _save(args, imported, rows)
    elif to == "deeprec":
        rows.to_deeprec(args.out, args.table or "table", slots=args.slots)
    else:
        error = getattr(rows, f"to_{to}")(args.out, quantise=args.quantise, slots=args.slots)
    return {"rows": len(rows), "total": len(imported.rows), "format": to, "left": imported.left, "error": error}


def _read(args: argparse.Namespace, kind: str) -> Imported:
    from kvjax import convert

    if kind in _FILES:
        return getattr(convert, f"from_{kind}")(args.source)
    if args.table is None:
        raise ValueError(f"kvjax convert: want the name of {kind}'s variable, got none; say --table")
    slots = dict(each.split("=", 1) if "=" in each else (each, each) for each in args.slot)
    if kind == "tfra":
        kinds = {"key_dtype": args.key_dtype, "dtype": args.dtype}
        return convert.from_tfra(args.source, args.table, args.dim, slots=slots, **kinds)
    read = {"deeprec": convert.from_deeprec, "tfplus": convert.from_tfplus, "sok": convert.from_sok}[kind]
    return read(args.source, args.table, slots=slots)


def _save(args: argparse.Namespace, imported: Imported, rows: Any) -> None:
    """As a checkpoint of one table."""
    import dataclasses

    import kvjax
    from kvjax.checkpoint import save

    name = args.table or Path(args.source).stem
    table = dataclasses.replace(imported, rows=rows).make(name)
    try:
        save(args.out, [table], overwrite=args.overwrite)
    finally:
        kvjax.drop_table(name)
