"""``kvjax convert``: a table as a file of another program, or another system's as a checkpoint."""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any

from kvjax._command.output import check_new, print_json, print_table, progress
from kvjax._command.prune import rules_of
from kvjax._formats.atomic import scratch_of
from kvjax._formats.choices import EXPORTED, FILE_FORMATS
from kvjax._formats.paths import anywhere
from kvjax.checkpoint._chains.locate import locate
from kvjax.checkpoint._chains.new import check_outside
from kvjax.checkpoint._disk.files import is_same

if TYPE_CHECKING:
    from kvjax._values.prune import PruneLike
    from kvjax.convert import ImportReport


_BARE = ("tfra", "dynamicemb")
"""Systems whose files are arrays alone: they say neither dim nor the dtype of keys."""


def run(args: argparse.Namespace) -> int:
    """Converts, and says what."""
    source, out = anywhere(args.source, "convert"), anywhere(args.out, "convert")
    suffix = source.suffix.removeprefix(".")
    is_files = suffix in FILE_FORMATS and (source.is_file() or any(source.glob(f"*.{suffix}")))
    kind = args.kind or (suffix if is_files else "kvjax")
    to = args.to or out.suffix.removeprefix(".") or "kvjax"
    if to not in (*EXPORTED, "kvjax"):
        raise ValueError(
            f"kvjax convert: {args.out}: want a file with one of {[f'.{each}' for each in FILE_FORMATS]}, or a folder "
            f"without a dot, got .{to}; say --to, or write frozen tables by kvjax.serving.FrozenTable.write"
        )
    if source.exists() and out.exists() and is_same(source, out):
        raise ValueError(
            f"kvjax convert: {args.out}: want another place than the source's, got the same; say another OUT"
        )
    check_outside(out.resolve(), "convert")
    _check_used(args, kind, to)
    if to != "kvjax":
        index = anywhere(f"{args.out}.index", "convert")
        check_new(index if to == "deeprec" else out, args.overwrite, "convert")
    said = _out(args, to) if kind == "kvjax" else _in(args, kind, to)
    if args.json:
        print_json(said)
    else:
        error, left = said.pop("error", None), said.pop("left", ())
        lines = [*said.items(), *(("left out", each) for each in left)]
        lines += [(name, each) for name, each in vars(error).items() if name not in said] if error else []
        print_table(f"{args.source} -> {args.out}", ("", ""), lines)
    return 0


def _check_used(args: argparse.Namespace, kind: str, to: str) -> None:
    """Whether each option that was given means something.

    Raises:
      ValueError: one does not.
    """
    others = kind not in ("kvjax", *FILE_FORMATS)
    bare = kind in _BARE
    used = {
        "table": kind not in FILE_FORMATS or to in ("kvjax", "deeprec"), "base": kind == "kvjax",
        "slots": to != "kvjax", "slot": others, "fill": others,
        "score": kind == "dynamicemb", "column": kind in FILE_FORMATS, "partitions": to == "deeprec",
        "quantise": to in FILE_FORMATS, "dim": bare,
        "key_dtype": bare, "dtype": kind != "kvjax", "source_dtype": kind == "tfra",
    }  # fmt: skip
    for name, is_used in used.items():
        if getattr(args, name) and not is_used:
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"kvjax convert: want options that a way from {kind} to {to} has, got {option}; leave it out, or say "
                "another --from or --to"
            )


def _out(args: argparse.Namespace, to: str) -> dict[str, Any]:
    from kvjax.convert import export_checkpoint

    locate(args.source, "convert")  # before what is said of the other arguments
    if to == "kvjax":
        return _whole(args)
    with progress("reading rows", args.json) as read:
        report = export_checkpoint(
            args.source, args.out, table=args.table, format=to, quantise=args.quantise, slots=args.slots,
            prune=rules_of(args), progress=read, base=args.base, partitions=args.partitions or 1,
        )  # fmt: skip
    return dict(vars(report))


def _whole(args: argparse.Namespace) -> dict[str, Any]:
    """A delta, and what it builds on, as one checkpoint."""
    from kvjax.checkpoint._rewrite import compact

    if args.table or rules_of(args):
        raise ValueError(
            "kvjax convert: want a file as OUT beside --table or rules, got a folder, which gets all of a checkpoint; "
            "say --to, or kvjax prune"
        )
    with progress("reading rows", args.json):
        compact(args.source, args.out, base=args.base, overwrite=args.overwrite)
    return {"format": "kvjax"}


def _in(args: argparse.Namespace, kind: str, to: str) -> dict[str, Any]:
    if kind not in FILE_FORMATS and args.table is None:
        raise ValueError(f"kvjax convert: want the name of {kind}'s variable, got none; say --table")
    if to == "kvjax":
        report = _as_checkpoint(args, kind, args.out, args.table, rules_of(args))
        return vars(report) | {"format": to, "left": list(report.left), "error": None}
    from kvjax.convert import export_checkpoint

    beside = scratch_of(anywhere(args.out, "convert").resolve())
    with tempfile.TemporaryDirectory(dir=beside, prefix=".") as folder:  # so rows need not fit into memory
        report = _as_checkpoint(args, kind, folder + "/whole", args.table, None)
        with progress("reading rows", args.json) as read:
            out = export_checkpoint(
                folder + "/whole", args.out, format=to, quantise=args.quantise, prune=rules_of(args), progress=read,
                slots=args.slots or bool(args.slot or args.fill), partitions=args.partitions or 1,
            )  # fmt: skip
    left = [*report.left, *out.left]
    return {
        "rows": out.rows, "total": out.total, "dim": report.dim, "format": to, "left": left, "error": out.error
    }  # fmt: skip


def _as_checkpoint(
    args: argparse.Namespace, kind: str, out: str, table: str | None, prune: PruneLike | None
) -> ImportReport:
    """As a checkpoint of one table, rows a few at a time."""
    from kvjax.convert import import_checkpoint

    how: dict[str, Any]
    if kind in FILE_FORMATS:
        how = {"columns": {ours: theirs or None for ours, theirs in _named(args.column, "column").items()}}
    else:
        how = {"variable": args.table, "slots": _named(args.slot, "slot"), "fill": _fill(args)}
    if kind in _BARE:
        how |= {"dim": args.dim, "key_dtype": args.key_dtype or "int64"}
    if args.score:
        how["scores"] = [None if each == "none" else each for each in args.score]
    with progress("writing rows", args.json) as written:
        return import_checkpoint(
            args.source, out, table=table, format=kind, prune=prune, overwrite=args.overwrite, dtype=args.dtype,
            source_dtype=args.source_dtype, progress=written, **how,
        )  # fmt: skip


def _named(given: list[str], option: str) -> dict[str, str]:
    """Names by names, of an option that may be said again."""
    found: dict[str, str] = {}
    for each in given:
        first, _, second = each.partition("=")
        if first in found:
            raise ValueError(f"kvjax convert: want --{option} {first} once, got {given}; leave out all but one")
        found[first] = second if "=" in each else first
    return found


def _fill(args: argparse.Namespace) -> dict[str, float]:
    found = {}
    for each in args.fill:
        slot, _, number = each.partition("=")
        try:
            found[slot] = int(number) if number.removeprefix("-").isdecimal() else float(number)
        except ValueError as error:
            raise ValueError(
                f"kvjax convert: want --fill SLOT=NUMBER, got {each}; write the number that each row gets"
            ) from error
    return found
