"""Locating: the checkpoint of tables that a path means."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kvjax._formats.atomic import UNFINISHED, recovered, saying
from kvjax._formats.choices import FILE_FORMATS
from kvjax._formats.paths import AnyPath, anywhere
from kvjax._formats.paths import PathLike as PathLike
from kvjax.checkpoint._disk.files import json_at
from kvjax.checkpoint._disk.format import FORMAT, META, PACKED, UNLISTED, CheckpointError, Damaged
from kvjax.checkpoint._disk.threads import side_by_side


def locate(path: PathLike, op: str) -> AnyPath:
    """The folder of a checkpoint: `path` itself, the one below an Orbax step, or that of the last step below its root.

    Where numbered checkpoints or steps are right below `path`, as "12" or "delta_12", it is that of the last of them,
    whatever other checkpoints are beside them. A step whose tables have lost their manifest, or which says that it has
    tables and has none, is the one that is meant all the same: whoever reads it gets an error, and never those of an
    older one. A step that was saved without tables is passed over.

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
    here = Look(path)
    if here.is_unfinished:
        raise CheckpointError(
            f"kvjax: {op}: want a whole checkpoint, got {path}, where a save is under way, or was killed before its "
            "end; wait for it, or give another"
        )
    if here.is_table:
        raise CheckpointError(
            f"kvjax: {op}: want a checkpoint of tables, got {path}, the folder of one of its tables; give "
            f"{path.resolve().parent}, and say there which tables you want"
        )
    found = [path] if here.has(META) else _last_of(here) or ([path] if here.tables else here.checkpoints)
    if len(found) != 1:
        mend = "give the folder of one, of a step of an Orbax CheckpointManager that has one, or of the manager"
        got = f"{[str(item.relative_to(path)) for item in found]} in {path}"
        got, mend = (got, mend) if found else _other(path, mend) or (f"none in {path}", mend)
        raise CheckpointError(f"kvjax: {op}: want a checkpoint of tables, got {got}; {mend}")
    return found[0]


def _last_of(root: Look) -> list[AnyPath]:
    """The last numbered checkpoint in a folder, or what the last step there has that has any. Those before it are not
    looked at: there may be many, and a store takes its time for each."""
    if root.has(_OF_STEP):  # whose items are its own
        return []
    for _, folder in reversed(_numbered(root.named)):
        if folder.is_under_way:
            continue
        if folder.is_table:  # of a checkpoint that has lost its manifest
            return []
        if found := [folder.path] if folder.is_checkpoint else folder.checkpoints:
            return found
    return []


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
    if path.is_file() and path.suffix != ".frozen":
        return f"{path}, a file", mend
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
    return _steps_of(Look(anywhere(path, "read")))


def _steps_of(root: Look) -> Iterator[tuple[int, list[AnyPath]]]:
    for step, folder in _numbered([] if root.is_checkpoint else root.folders):
        yield step, [folder.path] if folder.is_checkpoint else folder.checkpoints


def all_at(path: PathLike, op: str) -> list[AnyPath]:
    """The checkpoint at a path, or all in a folder, or in the steps of a manager, the last ones first.

    Raises:
      CheckpointError: there is none.
    """
    with saying(op, path, reads=True):
        here = Look(recovered(anywhere(path, op)))
        if here.is_checkpoint:
            return [here.path]
        found = here.checkpoints or [item for _, items in _steps_of(here) for item in items]
        return found[::-1] or [_located(here.path, op)]


def is_checkpoint(path: AnyPath) -> bool:
    """Whether tables have been saved at this path: there is a manifest, or there are tables, which may have lost it."""
    return Look(path).is_checkpoint


def is_unfinished(path: AnyPath) -> bool:
    """Whether a save into a store is under way at this path, or was killed there."""
    return Look(path).is_unfinished


def is_table_folder(path: AnyPath) -> bool:
    """Whether a folder is that of one table, of which something may be lost."""
    return Look(path).is_table


def unlisted_tables(path: AnyPath) -> list[AnyPath]:
    """The folders of the tables of a checkpoint without a manifest, as there were before there were manifests.

    Raises:
      Damaged: they are of a format with a manifest, or there is none.
    """
    found = Look(path).tables
    if not found:
        raise Damaged(f"want a checkpoint of tables, got none in {path}")
    if any(table.format in (FORMAT, PACKED) or any(table.path.glob(_LISTS)) for table in found):
        got = f"no such file beside the tables {[table.path.name for table in found]!s:.200}"
        raise Damaged(f"want {path / META}, the manifest that lists all tables, got {got}")
    return [table.path for table in found]


def said_by_step(step: AnyPath) -> dict[str, Any]:
    """What Orbax says of a step; nothing, if the folder is none."""
    try:
        said = json_at(step / _OF_STEP)
    except (Damaged, PermissionError):
        return {}
    return said if isinstance(said, dict) else {}


class Look:
    """What is at a path, as it is seen at one time: a store, which takes its time for each answer, is asked once.

    Args:
      path: of a folder, or where nothing is.
    """

    def __init__(self, path: AnyPath) -> None:
        self.path = path

    def has(self, name: str) -> bool:
        """Whether something of this name is in the folder."""
        return (self.path / name).exists() if isinstance(self.path, Path) else self.path / name in self._inside

    @functools.cached_property
    def is_unfinished(self) -> bool:
        """Whether a save into a store is under way here, or was killed."""
        return not isinstance(self.path, Path) and self.has(UNFINISHED) and not self.has(META)

    @functools.cached_property
    def is_under_way(self) -> bool:
        """Whether the folder is one of a store that is still written, where all have their names from the beginning."""
        if isinstance(self.path, Path):
            return False
        if self.is_unfinished:
            return True
        return self.said.get("init_timestamp_nsecs") is not None and self.said.get("commit_timestamp_nsecs") is None

    @functools.cached_property
    def is_table(self) -> bool:
        """As `is_table_folder`."""
        shards = (child for child in self._children if fnmatchcase(child.path.name, _SHARDS))
        return self.format in (FORMAT, PACKED, UNLISTED) or any(shard.has("keys") for shard in shards)

    @functools.cached_property
    def is_checkpoint(self) -> bool:
        """As `is_checkpoint`."""
        return not self.is_table if self.has(META) else bool(self.tables)

    @functools.cached_property
    def format(self) -> object:
        """What the file of a table or checkpoint says, if there is one."""
        try:
            meta = json_at(self.path / META) if self.has(META) else None
        except (Damaged, PermissionError):
            return None
        return meta.get("format") if isinstance(meta, dict) else None

    @functools.cached_property
    def said(self) -> dict[str, Any]:
        """What Orbax says of the step that this is."""
        return said_by_step(self.path) if self.has(_OF_STEP) else {}

    @functools.cached_property
    def tables(self) -> list[Look]:
        """The folders of tables in this one."""
        return _those(self.folders, lambda child: child.is_table)

    @functools.cached_property
    def checkpoints(self) -> list[AnyPath]:
        """The checkpoints right below; of a step also those that it says it has."""
        handlers = self.said.get("item_handlers")
        items = handlers.items() if isinstance(handlers, dict) else ()
        saved = {self.path / name for name, handler in items if str(handler).startswith("kvjax.orbax.")}
        there = (child.path for child in _those(self.folders, lambda child: child.is_checkpoint))
        return sorted(saved.union(there), key=str)

    @functools.cached_property
    def folders(self) -> list[Look]:
        """Those in this one, but for those that are on their way to their place or from it."""
        return _those(self.named, lambda child: not child.is_under_way)

    @functools.cached_property
    def named(self) -> list[Look]:
        """The same by their names alone."""
        return [c for c in self._children if not c.path.name.startswith(".") and UNDER_WAY not in c.path.name]

    @functools.cached_property
    def _children(self) -> list[Look]:
        inside = self._inside
        return [Look(path) for path in sorted(path for path, is_folder in inside.items() if is_folder)]

    @functools.cached_property
    def _inside(self) -> Mapping[AnyPath, bool]:
        """What is in the folder, and whether that is a folder."""
        if not isinstance(self.path, Path):
            return {**self.path.inside()}
        return {path: path.is_dir() for path in self.path.iterdir()} if self.path.is_dir() else {}


def _numbered(folders: list[Look]) -> list[tuple[int, Look]]:
    """Those whose names end with a number, in that order."""
    numbered = [(int(name[2]), folder) for folder in folders if (name := _STEP.fullmatch(folder.path.name))]
    return sorted(numbered, key=lambda each: (each[0], str(each[1].path)))


def _those(folders: list[Look], test: Callable[[Look], bool]) -> list[Look]:
    """The folders that pass a test, which keeps what it has seen; side by side in a store."""
    if folders and not isinstance(folders[0].path, Path):
        # Not by `THREADS`, of which one that makes a test cannot wait for others.
        side_by_side([functools.partial(test, folder) for folder in folders])
    return [folder for folder in folders if test(folder)]


UNDER_WAY = ".orbax-checkpoint-tmp"
"""In the names of Orbax's steps and items until they are whole."""

# Orbax's names of finished steps, too: "12", "00012", "step_12".
_STEP = re.compile(r"(.*_)?(\d+)")
_OF_STEP = "_CHECKPOINT_METADATA"
_SHARDS = "shard-*-of-*"
_LISTS = _SHARDS + ".json"
