"""`Releases`: a folder of releases of a model's tables and files, of which one is the current one.

current          the name of the current release, replaced by a rename
lock             held by who writes
00000012/        a release, which never changes: <table>.frozen, other files under files/, and "checkpoint", the digests
                 of the one that its tables are of
"""

from __future__ import annotations

import contextlib
import fcntl
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from kvjax._formats.atomic import flush, saying, written
from kvjax._formats.paths import local
from kvjax._formats.quantise import Quantised, check_quantised
from kvjax._values.errors import fail
from kvjax.serving._contents import Missing, RowsLike
from kvjax.serving._format import FrozenError, share
from kvjax.serving._frozen import FrozenTable, PathLike
from kvjax.serving._release import CHECKPOINT, FILES, SUFFIX, Changes, Release

if TYPE_CHECKING:
    from kvjax._values.prune import PruneLike
    from kvjax.checkpoint import Chain

_LONGEST_NAME = 200  # of the 255 bytes that file systems take, as the file has a longer one while it is written


class Releases:
    """A folder in which a trainer publishes releases of a model, and from which servers read the current one.

    A release holds tables and any other files: dense parameters, a program of `kvjax.export`. It is complete before it
    becomes the current one, and a server keeps its release until it asks for another. So no reader sees parts of two
    releases. Any number of threads and processes may read, and any may publish, one after the other. A writer that is
    killed does not change the current release.

    Args:
      path: the folder, on one file system; the first release makes it.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> from kvjax.serving import Changes, Releases
      >>> user = kvjax.get_table("doc_releases", dim=1).upsert([1, 2], [[1.0], [2.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     first = Releases(folder).publish({"user": user}, {"bias": b"0.5"})
      ...     server = Releases(folder)
      ...     before = server.current()
      ...     _ = Releases(folder).update({"user": Changes([2], [[9.0]], removed=[1])})
      ...     after = server.refresh()
      >>> [v["user"].lookup([1, 2])[:, 0].tolist() for v in (before, after)], after.files
      ([[1.0, 2.0], [0.0, 9.0]], {'bias': b'0.5'})
      >>> kvjax.drop_table("doc_releases")
    """

    def __init__(self, path: PathLike) -> None:
        self.path = local(path, "Releases")
        self._current: Release | None = None
        self._opening = threading.Lock()

    # ---- reading ---------------------------------------------------------------------------------------------

    def current(self) -> Release:
        """The release that the last `refresh` returned; at the first call, the current release.

        Raises:
          FrozenError: none has been published, or it is damaged.
        """
        current = self._current
        return self.refresh() if current is None else current

    def refresh(self) -> Release:
        """The release that is current now. The call reads one small file.

        Raises:
          FrozenError: none has been published, or it is damaged; then `current` still returns the previous one.
        """
        with self._opening:
            while True:
                name = self._name()
                if self._current is not None and self._current.path.name == name:
                    return self._current
                try:
                    self._current = Release(self.path / name)
                    return self._current
                except FileNotFoundError as error:
                    if self._name() == name:  # else it went while this one came
                        raise self._damaged("the files of the current release", str(error)) from error

    def _name(self) -> str:
        try:
            text = (self.path / "current").read_bytes()
        except FileNotFoundError as error:
            raise self._damaged("a release that has been published", "none") from error
        if not re.fullmatch(rb"[0-9]{8}", text):
            raise self._damaged("the name of a release in its file 'current'", f"{text!r:.50}")
        return text.decode()

    def _damaged(self, want: str, got: str) -> Exception:
        return FrozenError(
            f"kvjax: releases {str(self.path)!r}, refresh: want {want}, got {got}; publish one with Releases.publish"
        )

    # ---- writing ---------------------------------------------------------------------------------------------

    def publish(
        self,
        tables: Mapping[str, RowsLike],
        files: Mapping[str, bytes] | None = None,
        *,
        keep: int = 2,
        quantise: Quantised | None = None,
        prune: PruneLike | None = None,
        missing: Missing | None = None,
    ) -> Release:
        """Makes a release of whole tables the current one.

        Args:
          tables: the source of each table, by name, as for `FrozenTable.write`.
          files: other files of the release, by name.
          keep: how many releases stay on the disk. A server that has an older one open can still read it.
          quantise: for the rows of all tables, as in `FrozenTable.write`.
          prune: as there.
          missing: as there.

        Raises:
          ValueError, OSError: as `FrozenTable.write`; the current release stays.
          TypeError: `tables` is not a mapping from names.
        """
        _check_by_name("publish", tables)
        with self._new("publish", keep) as folder:
            for name, source in tables.items():
                path = _file_of(folder, name)
                FrozenTable.write(path, source, quantise=quantise, prune=prune, missing=missing)
            _write_files(folder, files or {})
        return self.refresh()

    def update(
        self, changes: Mapping[str, Changes], files: Mapping[str, bytes] | None = None, *, keep: int = 2
    ) -> Release:
        """Publishes a release with some changes to the current one.

        Args:
          changes: changes to tables, by name; other tables stay as they are, and share their files on the disk.
          files: those that change, by name.
          keep: see `publish`.

        Raises:
          KeyError: a table is not in the current release.
          ValueError, OSError: as `FrozenTable.update`; the current release stays.
        """
        _check_by_name("update", changes)
        with self._new("update", keep) as folder:
            before = self._before()
            old = {} if before is None else dict(before)
            for name in changes.keys() - old.keys():
                raise fail(
                    KeyError, name, "update", "a table of the current release", f"{sorted(old)}",
                    "publish it first, with Releases.publish",
                )  # fmt: skip
            for name, table in old.items():
                path = folder / table.path.name
                if name not in changes:
                    share(table.path, path)
                    continue
                change = changes[name]
                table.update(change.keys, change.rows, removed=change.removed, path=path, step=change.step)
            _write_files(folder, ({} if before is None else before.files) | dict(files or {}))
            if before is not None and not changes:
                _write_checkpoint(folder, before.checkpoint)
        return self.refresh()

    def follow(
        self,
        checkpoint: PathLike,
        files: Mapping[str, bytes] | Callable[[Path], Mapping[str, bytes]] | None = None,
        *,
        tables: Collection[str] | None = None,
        keep: int = 2,
        quantise: Quantised | None = None,
        missing: Missing | None = None,
        base: PathLike | Sequence[PathLike] | None = None,
    ) -> Release:
        """Makes the tables of a checkpoint the current release; does nothing if they are that already.

        If the checkpoint is a delta that builds, through any number of others, on the checkpoint of the current
        release, only what has changed since is read, and the rest is copied; unchanged tables share their files.
        Otherwise whole tables are written. So call this repeatedly with the folder in which a trainer saves its deltas
        (``kvjax.checkpoint.save(folder / str(step), tables, since="serving")``, or an Orbax manager). This needs JAX;
        servers do not.

        Args:
          checkpoint: path of the checkpoint, as for `kvjax.checkpoint.restore`.
          files: those that change, by name; or a function that is called once a checkpoint is found that is not the
            current release's, and returns them. It gets the folder of that checkpoint's tables: in a step of Orbax, the
            other items (dense parameters) are beside that folder.
          tables: names of the tables to take; by default all.
          keep: see `publish`.
          quantise: for the rows of all tables, as in `FrozenTable.write`; by default as in the current release.
          missing: as there; by default as in the current release, except for a row that unadmitted keys share.
          base: where to look for the checkpoints that a delta builds on, as in `kvjax.checkpoint.restore`.

        Raises:
          CheckpointError: there is no checkpoint, it is damaged, or has no table of a name in `tables`; the current
            release stays.
          ValueError, OSError: as `FrozenTable.write`; the current release stays.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Releases
          >>> user = kvjax.get_table("doc_follow", dim=1).upsert([1, 2], [[1.0], [2.0]])
          >>> folder = tempfile.TemporaryDirectory()
          >>> saved, server = folder.name + "/saved", Releases(folder.name + "/model")
          >>> kvjax.checkpoint.save(saved + "/0", [user], cursor="serving")
          >>> before = server.follow(saved)
          >>> user = user.upsert([2], [[9.0]]).remove([1])
          >>> kvjax.checkpoint.save(saved + "/1", [user], since="serving")
          >>> after = server.follow(saved)
          >>> [release["doc_follow"].lookup([1, 2])[:, 0].tolist() for release in (before, after)]
          [[1.0, 2.0], [0.0, 9.0]]
          >>> kvjax.drop_table("doc_follow")
          >>> folder.cleanup()
        """
        from kvjax.checkpoint import chosen_tables, unreplaced

        if quantise is not None:
            check_quantised(quantise, str(self.path))
        chosen = chosen_tables(tables, "follow")

        def body(chain: Chain) -> Release:
            return self._follow(chain, files, chosen, keep, quantise, missing)

        return unreplaced(checkpoint, base, "follow", body)

    def _follow(
        self, chain: Chain, files: Any, chosen: frozenset[str] | None, keep: int, quantise: Any, missing: Any
    ) -> Release:
        from kvjax.serving._follow import stays, write_at

        names = chain.names if chosen is None else sorted(chosen)
        for name in chosen or ():
            chain.catalog.open(name)  # or it says what there is
        before, digests = self._before(), chain.catalog.digests
        same = before is not None and set(before.checkpoint) & set(digests) and set(before) == set(names)
        if before is not None and same and (callable(files) or not files):  # noqa: SIM102
            if all(stays(table, quantise, missing) for table in before.values()):
                return before
        if callable(files):
            files = files(chain.catalog.directory)
        _check_by_name("follow, files", {} if files is None else files)
        with self._new("follow", keep) as folder:
            before = self._before()
            old: Mapping[str, FrozenTable] = {} if before is None else before
            since = () if before is None else before.checkpoint
            for name in names:
                write_at(_file_of(folder, name), chain, name, old.get(name), since, quantise, missing)
            _write_files(folder, ({} if before is None else before.files) | dict(files or {}))
            _write_checkpoint(folder, digests)
        return self.refresh()

    def _before(self) -> Release | None:
        return self.refresh() if (self.path / "current").exists() else None

    @contextlib.contextmanager
    def _new(self, op: str, keep: int) -> Generator[Path]:
        """A folder to fill; when it is filled, it is the current release."""
        with saying(op, self.path), _locked(self.path):
            for left in [*self.path.glob(".new-*"), *self.path.glob(".old-*")]:  # of writers that were killed
                shutil.rmtree(left, ignore_errors=True)
            # No release gets the number of another, also of one whose folder is lost.
            numbers = [0 if self._current is None else self._current.number, *(int(path.name) for path in self._all())]
            with contextlib.suppress(FrozenError):
                numbers.append(int(self._name()))
            number = max(numbers) + 1
            folder = self.path / f".new-{secrets.token_hex(8)}"
            (folder / FILES).mkdir(parents=True)
            try:
                yield folder
                flush(folder / FILES)
                flush(folder)
                folder.rename(self.path / f"{number:08}")
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            with written(self.path / "current") as file:
                file.write(f"{number:08}".encode())
            for path in self._all()[: -max(keep, 1)]:
                # Gone at once: who is opening it must not find some of it.
                gone = path.rename(self.path / f".old-{secrets.token_hex(8)}")
                shutil.rmtree(gone, ignore_errors=True)

    def _all(self) -> list[Path]:
        return sorted(path for path in self.path.iterdir() if re.fullmatch("[0-9]{8}", path.name))

    def __repr__(self) -> str:
        return f"Releases({str(self.path)!r})"


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Has a folder, which it makes, for one writer alone."""
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, however
        yield


def _check_by_name(op: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"kvjax: releases, {op}: want a mapping by name, got {type(given).__name__}; give {{name: ...}}"
        )


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        if not isinstance(cast("object", data), (bytes, bytearray, memoryview)):
            raise fail(TypeError, name, "publish", "a file's bytes", type(data).__name__, "encode it")
        with written(_file_of(folder / FILES, name, "")) as file:
            file.write(data)


def _write_checkpoint(folder: Path, digests: Sequence[str]) -> None:
    with written(folder / CHECKPOINT) as file:
        file.write(" ".join(digests).encode())


def _file_of(folder: Path, name: str, suffix: str = SUFFIX) -> Path:
    encoded = quote(name, safe="")
    if not 0 < len(encoded) <= _LONGEST_NAME or encoded + suffix in (".", ".."):
        raise fail(
            ValueError, name, "publish", f"a name of 1 to {_LONGEST_NAME} bytes, percent-encoded, but '.' and '..'",
            f"{len(encoded)}", "publish it under another one",
        )  # fmt: skip
    return folder / (encoded + suffix)
