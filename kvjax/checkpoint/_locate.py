"""Locating: the checkpoint of tables that a path means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvjax._formats.atomic import is_marked, recovered, saying
from kvjax._formats.choices import FILE_FORMATS
from kvjax._formats.paths import AnyPath, anywhere
from kvjax._formats.paths import PathLike as PathLike
from kvjax.checkpoint._files import json_at
from kvjax.checkpoint._format import FORMAT, META, PACKED, UNLISTED, CheckpointError, Damaged
from kvjax.checkpoint._threads import THREADS


def locate(path: PathLike, op: str = "checkpoint") -> AnyPath:
    """The folder of a checkpoint: `path` itself, the one below an Orbax step, or that of the last step below its root.

    Where numbered checkpoints are right below `path`, as "12" or "delta_12", it is the last of them, whatever other
    checkpoints are beside them. A step whose tables have lost their manifest, or which says that it has tables and has
    none, is the one that is meant all the same: whoever reads it gets an error, and never those of an older one. A step
    that was saved without tables is passed over.

    Args:
      path: see above.
      op: what it is read for, which errors name.

    Raises:
      CheckpointError: there is none, or more than one, or it is the folder of one table.
      OSError: the system does not let it look there.
    """
    with saying(op, path, reads=True):
        return _located(recovered(anywhere(path, op)), op)


def _located(path: AnyPath, op: str) -> AnyPath:
    if is_unfinished(path):
        raise CheckpointError(
            f"kvjax: {op}: want a whole checkpoint, got {path}, where a save is under way, or was killed before its "
            "end; wait for it, or give another"
        )
    if is_checkpoint(path):
        return path
    if is_table_folder(path):
        raise CheckpointError(
            f"kvjax: {op}: want a checkpoint of tables, got {path}, the folder of one of its tables; give "
            f"{path.resolve().parent}, and say there which tables you want"
        )
    found = _below(path)
    if not found:
        found = next((items for _, step in reversed(_numbered(_folders(path))) if (items := _below(step))), [])
    elif (numbered := _numbered(found)) and not (path / _OF_STEP).exists():  # whose items are its own
        found = [numbered[-1][1]]
    if len(found) != 1:
        mend = "give the folder of one, of a step of an Orbax CheckpointManager that has one, or of the manager"
        got = f"{[str(item.relative_to(path)) for item in found]} in {path}"
        got, mend = (got, mend) if found else _other(path, mend) or (f"none in {path}", mend)
        raise CheckpointError(f"kvjax: {op}: want a checkpoint of tables, got {got}; {mend}")
    return found[0]


def _other(path: AnyPath, mend: str) -> tuple[str, str] | None:
    """What is at a path in the place of a checkpoint, and what reads that; None if it is nothing that kvjax reads. A
    folder may have it for another reason, for which there is the usual mend."""
    if not path.exists():
        return f"none in {path}, which is not there", "check the path"
    kind = path.suffix.removeprefix(".")
    if kind in FILE_FORMATS and path.is_file():
        return f"{path}, rows as {kind}", f"kvjax.convert.from_{kind} reads it, and kvjax convert makes a checkpoint"
    if not isinstance(path, Path):
        return None
    if path.suffix == ".frozen" or any(path.glob("*.frozen")):
        return f"{path}, which serving reads", "open it with kvjax.serving, a file with FrozenTable"
    if (path / "current").is_file():
        return f"{path}, a folder of releases", "kvjax releases shows them, and kvjax.serving.Releases opens them"
    for ends, what, system in (*((f".{each}", "rows", each) for each in FILE_FORMATS), *_OF_SYSTEMS):
        if any(path.glob(f"*{ends}")):
            reads = f"kvjax.convert.from_{system}, and kvjax convert --from {system}"
            return f"{path}, which has files *{ends}", f"if they are {what}, {reads} read them; else {mend}"
    return None


_OF_SYSTEMS = (("-keys", "TFRA's", "tfra"), (".index", "a TensorFlow checkpoint of DeepRec's", "deeprec"))
"""Of files that other systems write how their names end, whose they are, and what reads them."""


def steps_at(path: PathLike) -> Iterator[tuple[int, list[AnyPath]]]:
    """The numbered checkpoints below a folder, or the steps of an Orbax manager, in order; what there is in each."""
    for step, folder in _numbered([] if is_checkpoint(path := anywhere(path, "read")) else _folders(path)):
        yield step, [folder] if is_checkpoint(folder) else _below(folder)


def all_at(path: PathLike, op: str) -> list[AnyPath]:
    """The checkpoint at a path, or all in a folder, or in the steps of a manager, the last ones first.

    Raises:
      CheckpointError: there is none.
    """
    with saying(op, path, reads=True):
        here = recovered(anywhere(path, op))
        if is_checkpoint(here):
            return [here]
        found = _below(here) or [item for _, items in steps_at(here) for item in items] or [locate(here, op)]
        return found[::-1]


def is_checkpoint(path: AnyPath) -> bool:
    """Whether tables have been saved at this path: there is a manifest, or there are tables, which may have lost it."""
    if (path / META).exists():
        return not is_table_folder(path)
    return bool(_tables_in(path))


def is_unfinished(path: AnyPath) -> bool:
    """Whether a save into a store is under way at this path, or was killed there."""
    return is_marked(path) and not (path / META).exists()


def unlisted_tables(path: AnyPath) -> list[AnyPath]:
    """The folders of the tables of a checkpoint without a manifest, as there were before there were manifests.

    Raises:
      Damaged: they are of a format with a manifest, or there is none.
    """
    found = _tables_in(path)
    if not found:
        raise Damaged(f"want a checkpoint of tables, got none in {path}")
    if any(_format_of(table) in (FORMAT, PACKED) or any(table.glob(_LISTS)) for table in found):
        got = f"no such file beside the tables {[table.name for table in found]!s:.200}"
        raise Damaged(f"want {path / META}, the manifest that lists all tables, got {got}")
    return found


def said_by_step(step: AnyPath) -> dict[str, Any]:
    """What Orbax says of a step; nothing, if the folder is none."""
    try:
        said = json_at(step / _OF_STEP)
    except (Damaged, PermissionError):
        return {}
    return said if isinstance(said, dict) else {}


def _numbered(folders: list[AnyPath]) -> list[tuple[int, AnyPath]]:
    """Those whose names end with a number, in that order."""
    return sorted((int(name[2]), folder) for folder in folders if (name := _STEP.fullmatch(folder.name)))


def _below(path: AnyPath) -> list[AnyPath]:
    """The checkpoints right below a folder; of a step also those that it says it has."""
    handlers = said_by_step(path).get("item_handlers")
    items = handlers.items() if isinstance(handlers, dict) else ()
    saved = {path / name for name, handler in items if str(handler).startswith("kvjax.orbax.")}
    return sorted(saved | set(_those(_folders(path), is_checkpoint)), key=str)


def _folders(path: AnyPath) -> list[AnyPath]:
    """But for those that are on their way to their place or from it."""
    if isinstance(path, Path):
        inside = [child for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    else:  # whose credentials may be for what is in it, and not for a file of its name
        inside = path.folders()
    named = (child for child in inside if not child.name.startswith(".") and UNDER_WAY not in child.name)
    return _those(sorted(named, key=str), lambda child: not _is_under_way(child))


def _those(paths: list[AnyPath], test: Callable[[AnyPath], bool]) -> list[AnyPath]:
    """The paths that pass a test; side by side in a store, which takes its time for each."""
    if not paths or isinstance(paths[0], Path):
        return [path for path in paths if test(path)]
    passing = [THREADS.submit(test, path) for path in paths]
    return [path for path, passes in zip(paths, passing, strict=True) if passes.result()]


def _is_under_way(path: AnyPath) -> bool:
    """Whether a folder of a store is still written, where all have their names from the beginning."""
    if isinstance(path, Path):
        return False
    if is_unfinished(path):
        return True
    said = said_by_step(path)
    return said.get("init_timestamp_nsecs") is not None and said.get("commit_timestamp_nsecs") is None


def _tables_in(path: AnyPath) -> list[AnyPath]:
    """The folders of the tables below a path."""
    return _those(_folders(path), is_table_folder)


def is_table_folder(path: AnyPath) -> bool:
    """Whether a folder is that of one table, of which something may be lost."""
    return _format_of(path) in (FORMAT, PACKED, UNLISTED) or any(path.glob(f"{_SHARDS}/keys"))


def _format_of(table: AnyPath) -> object:
    try:
        meta = json_at(table / META)
    except (Damaged, PermissionError):
        return None
    return meta.get("format") if isinstance(meta, dict) else None


UNDER_WAY = ".orbax-checkpoint-tmp"
"""In the names of Orbax's steps and items until they are whole."""

# Orbax's names of finished steps, too: "12", "00012", "step_12".
_STEP = re.compile(r"(.*_)?(\d+)")
_OF_STEP = "_CHECKPOINT_METADATA"
_SHARDS = "shard-*-of-*"
_LISTS = _SHARDS + ".json"
