"""New checkpoints: the paths where one may be written, and the files there that are not touched."""

from __future__ import annotations

from pathlib import Path

from kvjax._formats.atomic import NewFolder, saying
from kvjax.checkpoint._format import CheckpointError
from kvjax.checkpoint._locate import is_checkpoint


def begin(new: NewFolder, overwrite: bool, op: str = "save") -> None:
    """Begins a checkpoint, for an operation of that name.

    Raises:
      CheckpointError: as `check_free`, or another process is saving to the same path.
    """
    check_free(new.target, overwrite, op)
    try:
        with saying(op, new.target):
            new.begin()
    except BlockingIOError as error:
        raise CheckpointError(
            f"kvjax: {op}: want {new.target} for this {op} alone, got another one that is under way; wait for that, or "
            "give another path"
        ) from error


def check_free(target: Path, overwrite: bool, op: str = "save") -> None:
    """Whether a checkpoint may be put there.

    Raises:
      CheckpointError: something is there, or it is no checkpoint, which is not ours to replace.
    """
    if not target.exists():
        return
    if not overwrite:
        raise CheckpointError(
            f"kvjax: {op}: want a path with nothing there, got {target}, which exists; give another, or overwrite=True"
        )
    if not is_checkpoint(target) and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"kvjax: {op}: want a checkpoint to replace, or nothing, got {target}, which is something else; give "
            "another path, or delete that first"
        )
