"""Verifying: whether every file of a checkpoint is as it was written; no table is made."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from kvjax._formats.paths import AnyPath
from kvjax.checkpoint._catalog import Catalog
from kvjax.checkpoint._chain import Chain, unreplaced
from kvjax.checkpoint._chain_rows import ChainRows
from kvjax.checkpoint._files import MOST_JSON, Files, files_below, size_of
from kvjax.checkpoint._format import META, CheckpointError, Damaged
from kvjax.checkpoint._locate import PathLike


@dataclasses.dataclass(frozen=True)
class FileReport:
    """One file of a checkpoint.

    Attributes:
      path: below the checkpoint.
      table: name of the table that it belongs to; "" for files of the whole checkpoint.
      size: in bytes, as listed.
      problem: what is wrong with it, or None.
    """

    path: str
    table: str
    size: int
    problem: str | None


@dataclasses.dataclass(frozen=True)
class Verified:
    """What `verify` has found.

    Attributes:
      path: of the checkpoint.
      files: reports on all files that it should have.
      unlisted: files in its folder that do not belong to it, which is no problem.
      has_manifest: whether there are digests. In the first format, which has none, arrays have only the checksums of
        zarr, and each of `files` is a whole table.
    """

    path: AnyPath
    files: tuple[FileReport, ...]
    unlisted: tuple[str, ...]
    has_manifest: bool

    @property
    def ok(self) -> bool:
        """Whether all files are as they were written."""
        return not self.problems

    @property
    def problems(self) -> tuple[FileReport, ...]:
        """The files that are not as they were written."""
        return tuple(file for file in self.files if file.problem is not None)

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size for file in self.files)


def verify(path: PathLike) -> Verified:
    """Reads every file of a checkpoint and compares it with what was written. Then it checks whether a restore would
    accept their contents. It makes no tables, starts no JAX backend, and has one file in memory at a time. For a delta
    it reads only the delta's own files: verify the checkpoints that it builds on separately.

    Args:
      path: folder of a checkpoint, of a step of an Orbax ``CheckpointManager``, or of the manager (its last step is
        read).

    Returns:
      What was found. Damage does not raise an error.

    Raises:
      CheckpointError: there is no checkpoint at all.

    Example:
      >>> import kvjax, numpy as np, pathlib, tempfile
      >>> table = kvjax.get_table("doc_verify", dim=2).upsert(np.array([7]), [[1.0, 2.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> kvjax.checkpoint.save(folder.name + "/one", [table])
      >>> kvjax.checkpoint.verify(folder.name + "/one").ok
      True
      >>> meta = pathlib.Path(folder.name, "one/doc_verify/kvjax.json")
      >>> _ = meta.write_text(meta.read_text().replace("0.0", "1.0"))
      >>> [file.path for file in kvjax.checkpoint.verify(folder.name + "/one").problems]
      ['doc_verify/kvjax.json']
      >>> kvjax.drop_table("doc_verify")
      >>> folder.cleanup()
    """
    return unreplaced(path, None, "verify", _verified, whole=lambda found: found.ok)


def _verified(chain: Chain) -> Verified:
    catalog = chain.catalog
    try:
        names = catalog.names
    except CheckpointError as error:
        return Verified(catalog.directory, (FileReport(META, "", 0, str(error)),), (), True)
    has_manifest = (catalog.directory / META).exists()
    files = [FileReport(META, "", size_of(catalog.directory / META), None)] if has_manifest else []
    for name in names:
        files += _listed(catalog, name) if has_manifest else [_unlisted(chain, name)]
        if has_manifest and not any(file.problem for file in files if file.table == name):
            files += _unread(chain, name)
    known = {file.path for file in files}
    found = (path.as_posix() for path in files_below(catalog.directory))
    unlisted = tuple(sorted(set(found) - known)) if has_manifest else ()
    return Verified(catalog.directory, tuple(files), unlisted, has_manifest)


def _listed(catalog: Catalog, name: str) -> Iterator[FileReport]:
    folder = catalog.folder(name)
    below = folder.relative_to(catalog.directory).as_posix()
    for path, (size, saved) in catalog.lists(name).items():
        lists = Files(folder, {path: (size, saved)})
        problem = _problem(lists, path)
        yield FileReport(f"{below}/{path}", name, size, problem)
        if problem is not None:
            continue
        try:
            files = catalog.listed(name, path)
        except Damaged as error:
            yield FileReport(f"{below}/{path}", name, size, str(error))
            continue
        assert files.entries is not None
        for one, (size, _) in files.entries.items():
            yield FileReport(f"{below}/{one}", name, size, _problem(files, one))


def _unread(chain: Chain, name: str) -> list[FileReport]:
    """A table whose files are as they were written, but together not what a restore takes."""
    folder = chain.catalog.folder(name).name
    try:
        delta = chain.catalog.open(name)[0].get("delta")
        ChainRows(chain, name, since=[] if delta is None else [delta["since"]]).check()
    except CheckpointError as error:
        return [FileReport(folder, name, 0, str(error))]
    return []


def _problem(files: Files, path: str) -> str | None:
    assert files.entries is not None
    try:
        files.read(path, MOST_JSON if path.endswith(".json") else files.entries[path][0])
    except Damaged as error:
        return str(error)
    return None


def _unlisted(chain: Chain, name: str) -> FileReport:
    folder, size = chain.catalog.folder(name).name, 0
    try:
        rows = ChainRows(chain, name)
        rows.check()
        for piece in itertools.chain([rows.counts(), rows.pool()], rows.source().rows()):
            size += sum(array.nbytes for array in piece.values())
    except CheckpointError as error:
        return FileReport(folder, name, 0, str(error))
    return FileReport(folder, name, size, None)
