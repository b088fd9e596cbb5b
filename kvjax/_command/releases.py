"""``kvjax releases``: the releases in a folder, and which of them servers read."""

from __future__ import annotations

import argparse
from typing import Any

from kvjax._command.errors import text_of
from kvjax._command.output import print_json, print_table, progress, size
from kvjax.serving import FrozenError, Release, ReleaseInfo, Releases


def run(args: argparse.Namespace) -> int:
    """Makes another release the current one, or lets others take its place, if that is asked; prints what is there. 1
    if something is damaged, unless something else was asked, and was done."""
    releases = Releases(args.folder)
    try:
        if args.rollback is not None:
            releases.rollback(args.rollback)
        if args.resume:
            releases.resume()
    except KeyError as error:  # whose own text is in quotes
        raise ValueError(error.args[0]) from error
    found, damaged = [], []
    for info in releases.history():
        release = None
        try:
            release = releases.open(info.number)
        except KeyError:  # it went meanwhile
            continue
        except (FrozenError, OSError) as error:  # which no server can open, and so who rolls back wants to know
            damaged.append(text_of(error, "releases"))
        found.append((info, release))
    if args.verify:
        with progress("reading tables", args.json):
            damaged += [problem for _, release in found if release is not None for problem in _damage_of(release)]
    changed = args.rollback is not None or args.resume
    status = 1 if damaged and (args.verify or not changed) else 0
    described, current, paused = [_described(*each) for each in found], found[-1][0].number, None
    try:
        paused = releases.paused
    except FrozenError as error:
        damaged.append(text_of(error, "releases"))
        status = 1
    if args.json:
        about = {"folder": str(args.folder), "current": current, "paused": paused}
        print_json(about | {"releases": described, "damaged": damaged})
        return status
    state = {
        True: ", paused: no other takes its place until --resume", False: "",
        None: ", and nobody knows whether it is paused: no other takes its place until --resume or --rollback",
    }  # fmt: skip
    print(f"{args.folder}: release {current} is the current one{state[paused]}")
    columns = ("release", "published", "is again", "tables", "rows", "files", "on disk", "from")
    print_table("", columns, map(_line, described))
    for problem in damaged:
        print(problem)
    return status


def _described(info: ReleaseInfo, release: Release | None) -> dict[str, Any]:
    """A release; of one that cannot be opened tables and files are None."""
    tables = files = None
    if release is not None:
        files = {name: len(data) for name, data in release.files.items()}
        tables = {
            name: {"rows": len(t), "dim": t.dim, "dtype": t.dtype, "step": t.step, "bytes": t.path.stat().st_size}
            for name, t in release.items()
        }
    return {
        "number": info.number, "published": info.published.isoformat(timespec="seconds"), "again": info.again,
        "tables": tables, "files": files, "checkpoint": info.checkpoint, "source": info.source, "prune": info.prune,
    }  # fmt: skip


def _line(about: dict[str, Any]) -> tuple[Any, ...]:
    published = about["published"].replace("T", " ").replace("+00:00", " UTC")
    first, tables, files = (about["number"], published, about["again"]), about["tables"], about["files"]
    if tables is None:
        return *first, "damaged", None, None, None, about["source"]
    rows, on_disk = (sum(table[field] for table in tables.values()) for field in ("rows", "bytes"))
    return *first, sorted(tables), rows, sorted(files), size(on_disk + sum(files.values())), about["source"]


def _damage_of(release: Release) -> list[str]:
    problems = []
    for table in release.values():
        try:
            table.verify()
        except FrozenError as error:
            problems.append(str(error))
    return problems
