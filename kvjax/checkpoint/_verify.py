"""Verifying: whether every file of a checkpoint is as it was written; no table is made."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from kvjax._formats.paths import AnyPath
from kvjax._formats.source import ahead
from kvjax.checkpoint._chains.catalog import Catalog
from kvjax.checkpoint._chains.chain import Chain, unreplaced
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._disk.files import MOST_JSON, Files, files_below
from kvjax.checkpoint._disk.format import META, CheckpointError, Damaged, LostBaseError
from kvjax.checkpoint._disk.threads import side_by_side


@dataclasses.dataclass(frozen=True)
class FileReport:
    """One file of a checkpoint.

    Attributes:
      path: below the checkpoint.
      table: name of the table that it belongs to; "" for files of the whole checkpoint.
      size: in bytes, as listed.
      problem: what is wrong with it, or None.

    Example:
      >>> import kvjax, tempfile
      >>> table = kvjax.get_table("doc_file_report", dim=1).upsert([7], [[1.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.checkpoint.save(folder + "/0", [table])
      ...     verified = kvjax.checkpoint.verify(folder + "/0")
      >>> verified.files[0]  # doctest: +ELLIPSIS
      FileReport(path='kvjax.json', table='', size=..., problem=None)
      >>> kvjax.drop_table("doc_file_report")
    """

    path: str
    table: str
    size: int
    problem: str | None


@dataclasses.dataclass(frozen=True)
class BaseReport:
    """A checkpoint that deltas build on, and that is not there, or damaged.

    Attributes:
      digest: of its manifest.
      tables: names of the tables that need it.
      problem: what is wrong, and the mend.

    Example:
      >>> import kvjax, shutil, tempfile
      >>> table = kvjax.get_table("doc_base_report", dim=1).upsert([7], [[1.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.checkpoint.save(folder + "/0", [table], cursor="c")
      ...     table = table.upsert([8], [[2.0]])
      ...     kvjax.checkpoint.save(folder + "/1", [table], since="c")
      ...     shutil.rmtree(folder + "/0")
      ...     verified = kvjax.checkpoint.verify(folder + "/1")
      >>> verified.ok, [lost.tables for lost in verified.missing]
      (False, [('doc_base_report',)])
      >>> kvjax.drop_table("doc_base_report")
    """

    digest: str
    tables: tuple[str, ...]
    problem: str


@dataclasses.dataclass(frozen=True)
class Verified:
    """What `verify` has found.

    Attributes:
      path: of the checkpoint.
      files: reports on all files that it should have.
      unlisted: files in its folder that do not belong to it, which is no problem.
      has_manifest: whether there are digests. In the first format, which has none, arrays have only the checksums of
        zarr, and each of `files` is a whole table.
      missing: for a delta, the missing checkpoints of its chain, each the first one below those that are there.

    Example:
      >>> import kvjax, tempfile
      >>> table = kvjax.get_table("doc_verified", dim=1).upsert([7], [[1.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.checkpoint.save(folder + "/0", [table])
      ...     verified = kvjax.checkpoint.verify(folder + "/0")
      >>> verified.ok, verified.problems, verified.bytes == sum(file.size for file in verified.files)
      (True, (), True)
      >>> kvjax.drop_table("doc_verified")
    """

    path: AnyPath
    files: tuple[FileReport, ...]
    unlisted: tuple[str, ...]
    has_manifest: bool
    missing: tuple[BaseReport, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all files are as they were written, and what they build on is there."""
        return not self.problems and not self.missing

    @property
    def problems(self) -> tuple[FileReport, ...]:
        """The files that are not as they were written."""
        return tuple(file for file in self.files if file.problem is not None)

    @property
    def bytes(self) -> int:
        """The size of all files together, in bytes."""
        return sum(file.size for file in self.files)


def verify(path: PathLike, *, base: PathLike | Sequence[PathLike] | None = None, alone: bool = False) -> Verified:
    """Reads every file of a checkpoint and compares it with what was written. Then it checks whether a restore would
    accept their contents. It makes no tables, starts no JAX backend, and has some files of 4 MiB in memory at a time.

    For a delta it also looks for all checkpoints that it builds on, where `restore` does. It reads what these are, but
    not their rows: verify each of them separately.

    Args:
      path: folder of a checkpoint, of a step of an Orbax ``CheckpointManager``, or of the manager (its last step is
        read).
      base: where to look for the checkpoints that a delta builds on, as in `restore`.
      alone: do not look for them, because they are elsewhere, or are not needed: a release has followed them.

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
    return unreplaced(path, base, "verify", lambda chain: _verified(chain, alone), whole=lambda found: found.ok)


def _verified(chain: Chain, alone: bool) -> Verified:
    catalog = chain.catalog
    try:
        names = catalog.names
    except CheckpointError as error:
        return Verified(catalog.directory, (FileReport(META, "", 0, str(error)),), (), True)
    has_manifest = catalog.digest is not None
    below = {path.as_posix(): size for path, size in files_below(catalog.directory).items()}
    files = [FileReport(META, "", below.get(META, 0), None)] if has_manifest else []
    for name in names:
        files += _listed(catalog, name) if has_manifest else [_unlisted(chain, name)]
        if has_manifest and not any(file.problem for file in files if file.table == name):
            files += _unread(chain, name)
    known = {file.path for file in files}
    unlisted = tuple(sorted(below.keys() - known)) if has_manifest else ()
    damaged = {file.table for file in files if file.problem is not None}
    missing = () if alone else _missing(chain, [name for name in names if name not in damaged])
    return Verified(catalog.directory, tuple(files), unlisted, has_manifest, missing)


def _missing(chain: Chain, names: Sequence[str]) -> tuple[BaseReport, ...]:
    """What tables of a chain, which are themselves as they were written, build on and is lost."""
    found: dict[str, BaseReport] = {}
    for name in names:
        try:
            chain.links(name)
        except LostBaseError as error:
            first = found.get(error.digest, BaseReport(error.digest, (), str(error)))
            found[error.digest] = dataclasses.replace(first, tables=(*first.tables, name))
    return tuple(found.values())


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
        problems: dict[str, str | None] = {}

        def look(one: str, files: Files = files, problems: dict[str, str | None] = problems) -> None:
            problems[one] = _problem(files, one)

        side_by_side([functools.partial(look, one) for one in files.entries])
        for one, (size, _) in files.entries.items():
            yield FileReport(f"{below}/{one}", name, size, problems[one])


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
        for piece in itertools.chain([rows.counts(), rows.pool()], ahead(rows.source().rows())):
            size += sum(array.nbytes for array in piece.values())
    except CheckpointError as error:
        return FileReport(folder, name, 0, str(error))
    return FileReport(folder, name, size, None)
