"""Locating: the checkpoint of tables that a path means."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvjax._formats.atomic import recovered
from kvjax.checkpoint._files import MOST_JSON, read, read_json
from kvjax.checkpoint._format import META, UNLISTED, CheckpointError, Damaged

PathLike = str | os.PathLike[str]


def locate(path: PathLike) -> Path:
    """The folder of a checkpoint: `path` itself, the one below an Orbax step, or that of the last step below its root.

    Where numbered checkpoints are right below `path`, as "12" or "delta_12", it is the last of them, whatever other
    checkpoints are beside them.

    Raises:
      CheckpointError: there is none, or more than one.
    """
    path = recovered(Path(path))
    if is_checkpoint(path):
        return path
    found = _below(path)
    if not found:
        found = next((items for _, step in reversed(_numbered(_folders(path))) if (items := _below(step))), [])
    elif (numbered := _numbered(found)) and not (path / "_CHECKPOINT_METADATA").exists():  # whose items are its own
        found = [numbered[-1][1]]
    if len(found) != 1:
        none = f"none in {path}" + ("" if path.exists() else ", which is not there")
        got = none if not found else f"{[str(item.relative_to(path)) for item in found]} in {path}"
        raise CheckpointError(
            f"kvjax: checkpoint: want a checkpoint of tables, got {got}; give the folder of one, of a step of an Orbax "
            "CheckpointManager that has one, or of the manager"
        )
    return found[0]


def steps_at(path: PathLike) -> Iterator[tuple[int, list[Path]]]:
    """The numbered checkpoints below a folder, or the steps of an Orbax manager, in order; what there is in each."""
    for step, folder in _numbered([] if is_checkpoint(path := Path(path)) else _folders(path)):
        yield step, [folder] if is_checkpoint(folder) else _below(folder)


def all_at(path: PathLike) -> list[Path]:
    """The checkpoint at a path, or all in a folder, or in the steps of a manager, the last ones first.

    Raises:
      CheckpointError: there is none.
    """
    path = recovered(Path(path))
    if is_checkpoint(path):
        return [path]
    found = _below(path) or [item for _, items in steps_at(path) for item in items] or [locate(path)]
    return found[::-1]


def is_checkpoint(path: Path) -> bool:
    """Whether tables have been saved at this path, in the format with a manifest or in the one without."""
    if (path / META).exists():
        return True
    return any(_format_of(child / META) == UNLISTED for child in _folders(path))


def _numbered(folders: list[Path]) -> list[tuple[int, Path]]:
    """Those whose names end with a number, in that order."""
    return sorted((int(name[2]), folder) for folder in folders if (name := _STEP.fullmatch(folder.name)))


def _below(path: Path) -> list[Path]:
    return [child for child in _folders(path) if is_checkpoint(child)]


def _folders(path: Path) -> list[Path]:
    """But for hidden ones, which are on their way to their place or from it."""
    if not path.is_dir():
        return []
    return sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))


def _format_of(path: Path) -> object:
    if not path.exists():
        return None
    try:
        meta = read_json(read(path, MOST_JSON))
    except Damaged:
        return None
    return meta.get("format") if isinstance(meta, dict) else None


# Orbax's names of finished steps, too: "12", "00012", "step_12".
_STEP = re.compile(r"(.*_)?(\d+)")
