"""`Versions`: a folder of versions of a model's tables and files, of which one is the current one.

current          the name of the current version, replaced by a rename
lock             held by who writes
00000012/        a version, which never changes: <table>.frozen, and other files under files/
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from kvjax._formats.atomic import flush, written
from kvjax._formats.quantise import Quantised
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail
from kvjax.serving._format import FrozenError
from kvjax.serving._frozen import FrozenTable, IdsLike, PathLike
from kvjax.serving._source import Missing, Source

if TYPE_CHECKING:
    from kvjax._values.prune import PruneLike

_SUFFIX = ".frozen"
_FILES = "files"


@dataclasses.dataclass(frozen=True)
class Changes:
    """What changes in a table.

    Attributes:
      keys: ``(n,)``, distinct.
      rows: ``(n, dim)``, what they read as from now on.
      removed: ``(m,)`` keys that have no row any more.
      step: the table's last step then; None for no change.
    """

    keys: IdsLike = ()
    rows: ArrayLike = ()
    removed: IdsLike = ()
    step: int | None = None


class Version(Mapping[str, FrozenTable]):
    """The tables of one version, by name. Take one for each request, and all that is read belongs together.

    Attributes:
      number: 1 for the first.
      path: of its folder.
    """

    def __init__(self, path: Path) -> None:
        """For `Versions`."""
        self.number, self.path = int(path.name), path
        found = sorted(path.glob(f"*{_SUFFIX}"))
        self._tables = {unquote(file.name.removesuffix(_SUFFIX)): FrozenTable.open(file) for file in found}
        self._files = {unquote(file.name): file.read_bytes() for file in sorted((path / _FILES).iterdir())}
        os.stat(path)  # else it went meanwhile, and some of it may not have been listed

    def __getitem__(self, name: str) -> FrozenTable:
        return self._tables[name]

    def __iter__(self) -> Any:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __bool__(self) -> bool:
        return True

    @property
    def files(self) -> dict[str, bytes]:
        """The other files, by name."""
        return dict(self._files)

    def __repr__(self) -> str:
        return f"Version({self.number}, tables={list(self._tables)}, files={list(self._files)})"


class Versions:
    """A folder in which a trainer publishes versions of a model, and from which servers read the current one.

    A version holds tables and any other files: dense parameters, a program of `kvjax.export`. It is there as a whole
    before it becomes the current one, and a server that has it goes on with it until it asks for another: so nobody
    reads some of one version and some of another. Any number of threads and processes may read, and any may publish,
    one after the other. A writer that is killed leaves the current version as it is.

    Args:
      path: of the folder, on one file system; it is made if there is none.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> from kvjax.serving import Changes, Versions
      >>> user = kvjax.get_table("doc_versions", dim=1).upsert([1, 2], [[1.0], [2.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     first = Versions(folder).publish({"user": user}, {"bias": b"0.5"})
      ...     server = Versions(folder)
      ...     before = server.current()
      ...     _ = Versions(folder).update({"user": Changes([2], [[9.0]], removed=[1])})
      ...     after = server.refresh()
      >>> [v["user"].lookup([1, 2])[:, 0].tolist() for v in (before, after)], after.files
      ([[1.0, 2.0], [0.0, 9.0]], {'bias': b'0.5'})
      >>> kvjax.drop_table("doc_versions")
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._current: Version | None = None
        self._opening = threading.Lock()

    # ---- reading ---------------------------------------------------------------------------------------------

    def current(self) -> Version:
        """The version that was current when this was last asked for by `refresh`, or now, the first time.

        Raises:
          FrozenError: none has been published, or it is damaged.
        """
        current = self._current
        return self.refresh() if current is None else current

    def refresh(self) -> Version:
        """The version that is current now. To ask costs the reading of a small file.

        Raises:
          FrozenError: none has been published, or it is damaged: `current` goes on with the one from before.
        """
        with self._opening:
            while True:
                name = self._name()
                if self._current is not None and self._current.path.name == name:
                    return self._current
                try:
                    self._current = Version(self.path / name)
                    return self._current
                except FileNotFoundError as error:
                    if self._name() == name:  # else it went while this one came
                        raise self._damaged("the files of the current version", str(error)) from error

    def _name(self) -> str:
        try:
            text = (self.path / "current").read_bytes()
        except FileNotFoundError as error:
            raise self._damaged("a version that has been published", "none") from error
        if not re.fullmatch(rb"[0-9]{8}", text):
            raise self._damaged("the name of a version in its file 'current'", f"{text!r:.50}")
        return text.decode()

    def _damaged(self, want: str, got: str) -> Exception:
        return fail(FrozenError, str(self.path), "refresh", want, got, "publish a version with Versions.publish")

    # ---- writing ---------------------------------------------------------------------------------------------

    def publish(
        self,
        tables: Mapping[str, Source],
        files: Mapping[str, bytes] | None = None,
        *,
        keep: int = 2,
        quantise: Quantised | None = None,
        prune: PruneLike | None = None,
        missing: Missing | None = None,
    ) -> Version:
        """Makes a version of whole tables the current one.

        Args:
          tables: what each is written from, by name, as `FrozenTable.write` takes it.
          files: other files of the version, by name.
          keep: how many versions stay on the disk. Servers that have an older one open keep it all the same.
          quantise: rows of all tables, as `FrozenTable.write` does.
          prune: as there.
          missing: as there.

        Raises:
          ValueError, OSError: as `FrozenTable.write`; the current version stays.
        """
        with self._new(keep) as folder:
            for name, source in tables.items():
                path = folder / (quote(name, safe="") + _SUFFIX)
                FrozenTable.write(path, source, quantise=quantise, prune=prune, missing=missing)
            _write_files(folder, files or {})
        return self.refresh()

    def update(
        self, changes: Mapping[str, Changes], files: Mapping[str, bytes] | None = None, *, keep: int = 2
    ) -> Version:
        """Makes a version the current one that is as the one from before, but for some changes.

        Args:
          changes: of tables, by name; the others stay, and share their files on the disk.
          files: those that change, by name.
          keep: see `publish`.

        Raises:
          KeyError: a table is not in the version from before.
          ValueError, OSError: as `FrozenTable.update`; the current version stays.
        """
        with self._new(keep) as folder:
            before = self.refresh() if (self.path / "current").exists() else None
            old = {} if before is None else dict(before)
            for name in changes.keys() - old.keys():
                raise fail(
                    KeyError, name, "update", "a table of the current version", f"{sorted(old)}",
                    "publish it first, with Versions.publish",
                )  # fmt: skip
            for name, table in old.items():
                path = folder / table.path.name
                if name not in changes:
                    _share(table.path, path)
                    continue
                change = changes[name]
                table.update(change.keys, change.rows, removed=change.removed, path=path, step=change.step)
            _write_files(folder, ({} if before is None else before.files) | dict(files or {}))
        return self.refresh()

    @contextlib.contextmanager
    def _new(self, keep: int) -> Generator[Path]:
        """A folder to fill; when it is filled, it is the current version."""
        with open(self.path / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, however
            for left in [*self.path.glob(".new-*"), *self.path.glob(".old-*")]:  # of writers that were killed
                shutil.rmtree(left, ignore_errors=True)
            # No version gets the number of another, also of one whose folder is lost.
            numbers = [0 if self._current is None else self._current.number, *(int(path.name) for path in self._all())]
            with contextlib.suppress(FrozenError):
                numbers.append(int(self._name()))
            number = max(numbers) + 1
            folder = self.path / f".new-{secrets.token_hex(8)}"
            (folder / _FILES).mkdir(parents=True)
            try:
                yield folder
                flush(folder / _FILES)
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
        return f"Versions({str(self.path)!r})"


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        with written(folder / _FILES / quote(name, safe="")) as file:
            file.write(data)


def _share(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except OSError:  # a file system without links
        shutil.copyfile(old, new)
