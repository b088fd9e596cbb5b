"""New checkpoints: the paths where one may be written, and the files there that are not touched."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from kvjax._formats.atomic import NewFolder, NewInStore, new_folder, saying
from kvjax._formats.manifest import checkpoint_around
from kvjax._formats.paths import AnyPath
from kvjax._formats.releases import releases_around
from kvjax._values.errors import fail
from kvjax.checkpoint._chains.built_on import built_on, listed
from kvjax.checkpoint._chains.catalog import write_manifest
from kvjax.checkpoint._chains.chain import Chain
from kvjax.checkpoint._chains.locate import is_checkpoint, is_table_folder, is_unfinished
from kvjax.checkpoint._disk.files import is_same
from kvjax.checkpoint._disk.format import META, POOL, CheckpointError


@contextlib.contextmanager
def new_checkpoint(
    out: AnyPath, overwrite: bool, op: str, source: Chain | None = None, stands_for: Sequence[str] = ()
) -> Generator[AnyPath]:
    """A folder to write tables into, which becomes the checkpoint at `out` when the body ends, and is gone if it fails.

    Args:
      out: resolved.
      overwrite, op, source: as of `check_free`.
      stands_for: as of `write_manifest`.

    Raises:
      CheckpointError: as `begin`.
    """
    new = new_folder(out)
    try:
        begin(new, overwrite, op, source)
        yield new.path
        write_manifest(new.path, stands_for)
        new.install()
    except BaseException:
        new.discard()
        raise


def begin(
    new: NewFolder | NewInStore, overwrite: bool, op: str, source: Chain | None = None, over_base: bool = False
) -> None:
    """Begins a checkpoint, for an operation of that name.

    Raises:
      CheckpointError: as `check_free`, or another process is saving to the same path.
    """
    try:
        with saying(op, new.target):
            check_free(new.target, overwrite, op, source, over_base)
            new.begin()
    except BlockingIOError as error:
        raise fail(
            CheckpointError, None, op, f"{new.target} for this {op} alone", "another one that is under way",
            "wait for that, or give another path",
        ) from error  # fmt: skip


def check_free(target: AnyPath, overwrite: bool, op: str, source: Chain | None = None, over_base: bool = False) -> None:
    """Whether a checkpoint may be put there.

    Args:
      target: the place.
      overwrite: whether it may take that of another.
      op: the operation.
      source: the checkpoint that it is made of, if it is.
      over_base: whether it may take that of one on which others build: `save` only warns, since a stream of deltas that
        a release has followed needs no base, and training should not end for one.

    Raises:
      CheckpointError: something is there, or it is no checkpoint, or has something else in its folder, which is not
        ours to replace, or it is the source, or another builds on it; or it would be in a checkpoint, or a
        release.
    """

    def refused(want: str, but: str = "", mend: str = "give another path") -> Exception:
        return fail(CheckpointError, None, op, want, f"{target}{but}", mend)

    check_outside(target, op)
    if not target.exists():
        return
    nothing, tool = "a path with nothing there", "with the store's own tool"
    if is_unfinished(target):
        but = ", where another save is under way, or was killed"
        raise refused(nothing, but, f"give another path, or delete that {tool}")
    if not isinstance(target, Path):
        but = ", which exists, and nothing in a store can be replaced at once"
        raise refused(nothing, but, f"give another, or delete that first {tool}")
    if not overwrite:
        raise refused(nothing, ", which exists", "give another, or overwrite=True")
    if source is not None and is_same(target, source.catalog.directory):
        raise refused("another place than that of the checkpoint it reads")
    if not is_checkpoint(target) and not (target.is_dir() and not any(target.iterdir())):
        mend = "give another path, or delete that first"
        raise refused("a checkpoint to replace, or nothing", ", which is something else", mend)
    if others := sorted(_foreign(target)):
        but = f", in which there is {', '.join(map(repr, others[:3]))}, too"
        raise refused("a folder with a checkpoint alone to replace", but, "move that elsewhere, or give another path")
    if not over_base and (builders := built_on(target, source)):
        but = f": {listed(builders)} on it, and would not restore any more"
        raise refused("to replace a checkpoint that no other builds on", but)


def _foreign(checkpoint: Path) -> Iterator[str]:
    """What is in the folder of a checkpoint, or of one of its tables, and is none of its own. What is in the folders of
    shards and arrays is not looked at."""
    for path in checkpoint.iterdir():
        if is_table_folder(path):
            for each in path.iterdir():
                if each.name not in (META, POOL) and not _SHARD.fullmatch(each.name):
                    yield f"{path.name}/{each.name}"
        elif path.name != META:
            yield path.name


_SHARD = re.compile(r"shard-\d+-of-\d+(\.json)?")


def check_outside(target: AnyPath, op: str) -> None:
    """Whether a place is in no checkpoint, nor a release's of `kvjax.serving.Releases`, with which it would go.

    Raises:
      CheckpointError: it is.
    """
    for what, around in (("checkpoints", checkpoint_around(target)), ("releases", releases_around(target))):
        if around is not None:
            want, got = f"a place outside of {what}", f"{target}, which is in {around}"
            raise fail(CheckpointError, None, op, want, got, "give another path")
