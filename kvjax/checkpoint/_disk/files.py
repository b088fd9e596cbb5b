"""Files: flushed and listed as they are written, and read only if they are what was listed."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvjax._formats.atomic import saying, written
from kvjax._formats.paths import AnyPath
from kvjax._formats.regular import identity_of, opened
from kvjax.checkpoint._disk.direct import write_all
from kvjax.checkpoint._disk.format import Damaged, Missing, digest

if TYPE_CHECKING:
    from kvjax._formats.stores import StorePath

T = TypeVar("T")

MOST_JSON = 1 << 26
"""Bytes of a JSON file that nothing has said the size of."""

FileEntry = tuple[int, str]
"""Size and digest of a file."""

List = Mapping[str, FileEntry]
"""The entry of each file, by its path below a folder, with "/" in it."""


# ---- out -----------------------------------------------------------------------------------------------------


def write_file(path: AnyPath, data: bytes | np.ndarray) -> FileEntry:
    """Writes a new file, which is on the disk then; gives its size and digest.

    Args:
      path: of the file, in a folder that is there.
      data: bytes, or ``(n,)`` uint8.
    """
    if not isinstance(path, Path):
        path.write_bytes(bytes(data))
        return len(data), digest(data)
    with saying("save", path), open(path, "xb", buffering=0) as file:
        write_all(file.fileno(), np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data)
        os.fsync(file.fileno())
    return len(data), digest(data)


def write_text(path: AnyPath, text: str) -> FileEntry:
    """Writes a file that is on the disk then, as a whole or not at all; gives its size and digest."""
    data = text.encode()
    if not isinstance(path, Path):
        path.write_bytes(data)
        return len(data), digest(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written(path) as file:
        file.write(data)
    return len(data), digest(data)


# ---- in ------------------------------------------------------------------------------------------------------


def read(path: AnyPath, most: int) -> bytes:
    """The bytes of a regular file.

    Raises:
      Missing: there is none.
      Damaged: it is something else, or has more than `most` bytes.
      OSError: it cannot be read now: this process may not, or has too many files open.
    """
    if not isinstance(path, Path):
        return _fetched(path, most)
    fd, size = _opened(path, most)
    with open(fd, "rb") as file:
        return file.read(size)


def modified(path: AnyPath) -> float:
    """When a folder was changed last, in s; 0 where nobody can say."""
    try:
        return path.stat().st_mtime if isinstance(path, Path) else 0.0
    except OSError:
        return 0.0


Stamp = tuple[object, ...]
"""The `Identity` of a file, or what a store says of one for this."""


def stamp_of(path: AnyPath) -> Stamp | None:
    """Of the file that is there now; None if there is none, or a store does not say when it was written."""
    try:
        if not isinstance(path, Path):
            return path.stamp()
        return identity_of(path.stat())
    except OSError:
        return None


def files_below(folder: AnyPath) -> dict[PurePath, int]:
    """The sizes of the files in a folder and in those below it, by their paths below it."""
    if isinstance(folder, Path):
        return {path.relative_to(folder): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}
    return {path.relative_to(folder): size for path, size in folder.below().items()}


def is_same(one: AnyPath, other: AnyPath) -> bool:
    """Whether two paths, at both of which something is, are of one thing."""
    if isinstance(one, Path) and isinstance(other, Path):
        return one.samefile(other)
    return one == other


def _fetched(path: StorePath, most: int) -> bytes:
    """The bytes of a file of a store; as `read`. One that is longer than that is not read to its end."""
    try:
        data = path.read_at_most(most + 1)
    except FileNotFoundError as error:
        raise Missing(f"want the file {path}, got none") from error
    if len(data) > most:
        raise Damaged(f"want {path} as a file of at most {most} bytes, got more")
    return data


def read_again(path: AnyPath, ask: Callable[[], T]) -> T:
    """What ask() reads at a path. Of a store it asks once more before it says that something is damaged: that may have
    happened on the way, and the store has it whole."""
    try:
        return ask()
    except Missing:
        raise
    except Damaged:
        if isinstance(path, Path):
            raise
    return ask()


_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_ANOTHER = (errno.EISDIR, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG)
"""What the system says where there is no such file, and where there is something else."""


def _opened(path: Path, most: int) -> tuple[int, int]:
    """A regular file, open, and its size."""
    try:
        fd, found = opened(path)
    except OSError as error:
        if error.errno not in _MISSING + _ANOTHER:  # nothing is known of the file
            with saying("read", path, reads=True):
                raise
        kind = Missing if error.errno in _MISSING else Damaged
        raise kind(f"want the file {path}, got {error.strerror or error}") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size > most:
        os.close(fd)
        got = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "no file of bytes"
        raise Damaged(f"want {path} as a file of at most {most} bytes, got {got}")
    return fd, found.st_size


def read_json(data: bytes) -> Any:
    """What a JSON file says.

    Raises:
      Damaged: it is none.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"want JSON, got {type(error).__name__}: {str(error)[:100]}") from error


def json_at(path: AnyPath) -> Any:
    """What the JSON file at a path says.

    Raises:
      Missing: there is none.
      Damaged: it is something else.
      OSError: as `read`.
    """
    return read_again(path, lambda: read_json(read(path, MOST_JSON)))


class Files:
    """The files below a folder, each of which is read if it is as it was listed, or if nothing was.

    Args:
      folder: of the files.
      entries: the list; None for a format that has none.
    """

    def __init__(self, folder: AnyPath, entries: List | None) -> None:
        self.folder, self.entries = folder, entries

    def read(self, path: str, most: int) -> bytes:
        """The bytes of the file at this path.

        Raises:
          Damaged: it is not as it was listed, or has more than `most` bytes.
        """
        if self.entries is None:
            return read(self.folder / path, most)
        size, saved = self._entry(path)

        def ask() -> bytes:
            data = read(self.folder / path, min(size, most))
            _check(path, len(data), digest(data), size, saved)
            return data

        return read_again(self.folder, ask)

    def check_size(self, path: str, size: int) -> None:
        """Whether the file at this path was listed with so many bytes, and has them.

        Raises:
          Damaged: it was not, or has not.
        """
        listed, _ = self._entry(path)
        place = self.folder / path
        if isinstance(place, Path):
            fd, found = _opened(place, size)
            os.close(fd)
        elif (found := self._sizes.get(path)) is None:
            raise Missing(f"want the file {place}, got none")
        if listed != size or found != size:
            raise Damaged(f"want {path} with {size} bytes, got {found}, and {listed} in its list of files")

    def read_into(self, path: str, to: np.ndarray) -> None:
        """Reads the file at this path.

        Args:
          path: of a file with as many bytes.
          to: ``(n,)`` uint8, which gets them.

        Raises:
          Damaged: it is not as it was listed.
        """
        size, saved = self._entry(path)
        place = self.folder / path
        if not isinstance(place, Path):
            to[:] = np.frombuffer(self.read(path, len(to)), np.uint8)
            return
        fd, _ = _opened(place, len(to))
        with open(fd, "rb", buffering=0) as file:
            rest = to.data
            while len(rest) > 0 and (got := file.readinto(rest)):
                rest = rest[got:]
        _check(path, len(to) - len(rest), digest(to), size, saved)

    @functools.cached_property
    def _sizes(self) -> Mapping[str, int]:
        """Of all files in a folder of a store, which says them in one answer, as when they were first asked for."""
        return {path.as_posix(): size for path, size in files_below(self.folder).items()}

    def _entry(self, path: str) -> FileEntry:
        assert self.entries is not None
        if path not in self.entries:
            raise Damaged(f"want {path} in the list of files, got none of that name")
        return self.entries[path]


class Copies(Files):
    """The files of a table of which there are copies elsewhere: what is damaged is read from another.

    Args:
      files: of the table.
      others: those of copies, which are asked for where one is damaged.
    """

    def __init__(self, files: Files, others: Iterable[Files]) -> None:
        super().__init__(files.folder, files.entries)
        self._all, self._others, self._lock = [files], iter(others), threading.Lock()

    def read(self, path: str, most: int) -> bytes:
        return self._whole(lambda files: files.read(path, most))

    def check_size(self, path: str, size: int) -> None:
        self._whole(lambda files: files.check_size(path, size))

    def read_into(self, path: str, to: np.ndarray) -> None:
        self._whole(lambda files: files.read_into(path, to))

    def _whole(self, read: Callable[[Files], T]) -> T:
        damage: Damaged | OSError | None = None
        for i in itertools.count():
            with self._lock:  # files are read by several threads
                if i == len(self._all):
                    self._all += itertools.islice(self._others, 1)
                if i == len(self._all):
                    break
            try:
                return read(self._all[i])
            except (Damaged, OSError) as error:
                damage = damage or error
        assert damage is not None
        raise damage


def _check(path: str, size: int, found: str, want: int, saved: str) -> None:
    if size != want or found != saved:
        raise Damaged(f"want {path} with {want} bytes of digest {saved}, got {size} of {found}")
