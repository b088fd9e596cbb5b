"""Stores: paths in object stores and other file systems that fsspec reaches, with pathlib's methods."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import fsspec

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from kvjax._formats.paths import AnyPath

_EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
"""What of kvjax's extras installs the package of an object store."""


def store_path(url: str, scheme: str, rest: str, op: str) -> StorePath:
    """The path of a URL, ``scheme://rest``, as `anywhere` gives it."""
    mend = f"want a path here, or of a store that fsspec knows, got {url!r}"
    if scheme.lower() in ("file", "local"):
        raise ValueError(f"kvjax: {op}: {mend}; give the path alone, without '{scheme}://'")
    if "::" in scheme:
        raise ValueError(f"kvjax: {op}: {mend}; give that of one store")
    try:
        # What other processes write has to be seen, so listings are asked for each time.
        files: Any = fsspec.filesystem(scheme.lower(), use_listings_cache=False)
    except ImportError as error:
        extra = _EXTRAS.get(scheme.lower())
        how = f"pip install 'kvjax[{extra}]'" if extra else str(error)
        raise ImportError(f"kvjax: {op}: want the package that reaches {scheme}://, got none; {how}") from error
    except ValueError as error:
        raise ValueError(f"kvjax: {op}: {mend}; save here, and copy it with the store's own tool") from error
    except Exception as error:  # of any class: what a package needs may be missing, or a part of the URL
        raise OSError(
            f"kvjax: {op}: want the client of {url}, got {_said(error)}; see to what that store's package needs"
        ) from error
    # Of "memory:///x", too, which is how fsspec says "memory://x".
    path = PurePosixPath(rest.strip("/"))
    if not path.name:
        raise ValueError(f"kvjax: {op}: want a path in a store, got {url!r}; name a bucket, and a folder in it")
    return StorePath(files, scheme.lower(), path)


def _is_refusal(error: Exception) -> bool:
    """Whether a store has said that the credentials do not allow this, as the packages for S3, Azure and Google do."""
    return (
        isinstance(error, PermissionError)
        or getattr(error, "status_code", None) == 403
        or str(error).startswith("Forbidden")
    )


def _said(error: Exception, by: str = "") -> str:
    """What an error is, and how its text begins, if it has one."""
    return f"{type(error).__name__}{by}" + (f": {str(error)[:300]}" if str(error) else "")


def _mend(error: Exception) -> str:
    """What to do about an error of a store's package."""
    if "Credential" in type(error).__name__:  # as all three call them
        return "set the credentials where the store's own tools find them"
    if isinstance(error, NotImplementedError):
        return "the store's package cannot do that: give a path elsewhere, and copy it with the store's own tool"
    return "see whether it can be reached, the bucket is there and the credentials allow that"


_STAMPS = ("ETag", "etag", "generation", "LastModified", "last_modified", "mtime", "created")
"""By what names packages of stores say which of two files of one path it is."""


class StorePath:
    """A path in a store: what of `pathlib.Path` the checkpoints need, and nothing of what a store cannot do.

    A file is there once it is written whole. There are no links, no locks, and no folders but those of its files.

    Args:
      files: the store.
      scheme: of its URLs.
      path: below its root.
      log: gets the files that are written through this path and those that are made of it.
    """

    def __init__(
        self, files: AbstractFileSystem, scheme: str, path: PurePosixPath, log: list[StorePath] | None = None
    ) -> None:
        self._files, self._scheme, self._path, self._log = files, scheme, path, log

    # ---- names -----------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path}"

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: StorePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, below: str) -> StorePath:
        return self._at(self._path / below)

    @property
    def name(self) -> str:
        return self._path.name

    @property
    def stem(self) -> str:
        return self._path.stem

    @property
    def suffix(self) -> str:
        return self._path.suffix

    @property
    def parent(self) -> StorePath:
        """Of a bucket itself, as of the root of a file system."""
        return self._at(self._path.parent) if self._path.parent.name else self

    @property
    def parents(self) -> list[StorePath]:
        """Those that are in a bucket, or are it."""
        return [self._at(path) for path in self._path.parents if path.name]

    def _at(self, path: PurePosixPath) -> StorePath:
        return StorePath(self._files, self._scheme, path, self._log)

    def logged(self, log: list[StorePath]) -> StorePath:
        """The same path, with a log."""
        return StorePath(self._files, self._scheme, self._path, log)

    def relative_to(self, other: AnyPath) -> PurePosixPath:
        return self._path.relative_to(other._path if isinstance(other, StorePath) else other)

    def resolve(self) -> StorePath:
        return self

    # ---- what is there ---------------------------------------------------------------------------------------

    def exists(self) -> bool:
        return self._info() is not None

    def is_dir(self) -> bool:
        found = self._info()
        return found is not None and found["type"] == "directory"

    def is_file(self) -> bool:
        found = self._info()
        return found is not None and found["type"] == "file"

    def size(self) -> int:
        """Bytes of the file.

        Raises:
          FileNotFoundError: there is none.
        """
        found = self._info()
        if found is None or found["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "kvjax: want a file, got none", str(self))
        return int(found["size"])

    def stamp(self) -> tuple[object, ...] | None:
        """What the store says of when the file was written, or of its contents; None if it says nothing.

        Raises:
          OSError: the store cannot be reached.
        """
        found = self._info() or {}
        said = tuple(found[name] for name in _STAMPS if found.get(name))
        return (found.get("size"), *said) if said else None

    def _info(self) -> dict[str, Any] | None:
        """What the store says of it; None if it is not there."""
        try:
            with self._asked("look for"):
                return self._files.info(str(self))
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _asked(self, what: str, missing: type[Exception] | tuple[()] = FileNotFoundError) -> Generator[None]:
        """Has errors of the store's package, which may be of any class, say what they are of.

        Args:
          what: is done in the body, "read".
          missing: the error that goes through as it is: that nothing is there; () for none.

        Raises:
          PermissionError: the store does not allow that.
          OSError: anything else.
        """
        try:
            yield
        except missing:
            raise
        except Exception as error:
            raise (PermissionError if _is_refusal(error) else OSError)(
                f"kvjax: want to {what} {self}, got {_said(error, ' from the store')}; {_mend(error)}"
            ) from error

    def iterdir(self) -> Iterator[StorePath]:
        return iter(self.inside())

    def folders(self) -> list[StorePath]:
        """The folders in this one."""
        return [path for path, is_folder in self.inside().items() if is_folder]

    def inside(self) -> dict[StorePath, bool]:
        """What is in this folder, by name, and whether it is a folder; nothing, if there is no such folder."""
        try:
            with self._asked("list"):
                found = self._files.ls(str(self), detail=True)
        except FileNotFoundError:
            return {}
        listed = {self._at(PurePosixPath(str(entry["name"]).strip("/"))): entry["type"] for entry in found}
        # A store may list a folder in itself, as an empty file or as a folder.
        return {path: listed[path] == "directory" for path in sorted(listed) if path != self}

    def glob(self, pattern: str) -> Iterator[StorePath]:
        """The paths below this one that match a pattern, of which the first part may have "*", each for a part of a
        name."""
        first, _, rest = pattern.partition("/")
        for path in self.iterdir():
            if not fnmatchcase(path.name, first):
                continue
            if not rest:
                yield path
            elif (path / rest).exists():
                yield path / rest

    def below(self) -> dict[StorePath, int]:
        """The sizes of all files in this folder and in those below it."""
        with self._asked("list"):
            found = cast("dict[str, Any]", self._files.find(str(self), detail=True))
        return {self._at(PurePosixPath(str(path).strip("/"))): int(entry["size"]) for path, entry in found.items()}

    # ---- bytes -----------------------------------------------------------------------------------------------

    def read_at_most(self, most: int) -> bytes:
        """The first bytes of the file, at most so many; in one request, which needs not know the size.

        Raises:
          FileNotFoundError: there is none.
        """
        try:
            with self._asked("read"):
                return cast("bytes", self._files.cat_file(str(self), end=most))
        except PermissionError:
            raise
        except OSError as error:
            if isinstance(error, FileNotFoundError) or self.size() > 0:
                raise
            return b""  # of which stores have no first byte

    def write_bytes(self, data: bytes) -> None:
        """Writes the file, which is there as a whole or not at all."""
        self._note()
        with self._asked("write", ()):
            self._files.pipe_file(str(self), data)

    def create(self, data: bytes) -> None:
        """Writes a file where there is none.

        Raises:
          FileExistsError: there is another.
        """
        try:
            with self._asked("write", FileExistsError):
                self._files.pipe_file(str(self), data, mode="create")
        except FileExistsError:
            if self.read_at_most(len(data) + 1) != data:  # else it is this one, and the store's answer was lost once
                raise
        self._note()

    def _note(self) -> None:
        if self._log is not None:
            self._log.append(self)

    def remove(self) -> None:
        """Removes the file."""
        with self._asked("remove"):
            self._files.rm_file(str(self))

    def download(self, file: Path) -> None:
        """Writes what is here into a new file.

        Raises:
          FileNotFoundError: nothing is here.
          OSError: the store cannot be reached, or the disk of the file is full.
        """
        self.size()
        try:
            with self._asked("read"):
                self._files.get_file(str(self), str(file))
        except OSError as error:
            said = error.__cause__
            if isinstance(said, OSError) and said.errno in (errno.ENOSPC, errno.EDQUOT):  # not by the store: it is read
                raise said from None
            raise

    def upload(self, file: Path) -> None:
        """Writes the bytes of a file here."""
        with self._asked("write", ()):
            self._files.put_file(str(file), str(self))

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Makes a folder where a store has such things."""
        if self._scheme in _EXTRAS:  # to which it would mean a bucket
            return
        with self._asked("write", ()):
            self._files.makedirs(str(self), exist_ok=True)
