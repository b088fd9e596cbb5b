"""The folder of `Releases` on the disk: which releases are there, which is the current one, and how another becomes it.

current          the name of the current release, replaced by a rename
paused           the names of the releases behind which no other comes until somebody says so; of another than the
                 current one it means nothing
lock             held by who writes
00000012/        a release, which never changes: <table>.frozen, other files under files/, "checkpoint", the digests of
                 the one that its tables are of, and "info", what else is known of it, and what belongs to it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import threading
import time
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import ClassVar, cast
from urllib.parse import quote

from kvjax._formats.atomic import flush, saying, unlock, written
from kvjax._formats.manifest import checkpoint_around
from kvjax._formats.releases import is_release_name, releases_around
from kvjax._values.errors import warn
from kvjax.serving._format import FrozenError, contents
from kvjax.serving._info import FILES, INFO, SUFFIX
from kvjax.serving._release import PausedError

_PATIENCE = 10
"""Seconds that a writer waits for another before it says so."""

_MOST_NAMES = 1 << 12
"""Bytes of a file of names of releases, of which there are at most two."""

_LONGEST_NAME = 200  # of the 255 bytes that file systems take, as the file has a longer one while it is written


class Folder:
    """A folder of releases.

    Args:
      path: of the folder, which the first writer makes.

    Attributes:
      opening: held by the thread that opens a release.
    """

    _all: ClassVar[weakref.WeakSet[Folder]] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        self.path, self.opening = path, threading.Lock()
        self._all.add(self)

    @classmethod
    def forget_threads(cls) -> None:
        """Of a process that was forked, in which the one is not that may have been opening a release."""
        for folder in cls._all:
            folder.opening = threading.Lock()

    def place(self, number: int) -> Path:
        """Where the release of a number is."""
        return self.path / f"{number:08}"

    # ---- reading ---------------------------------------------------------------------------------------------

    def name(self, op: str = "refresh") -> str:
        """Of the current release.

        Raises:
          FrozenError: there is none.
        """
        try:
            with saying(f"releases, {op}", reads=True):
                text = contents(self.path / "current", _MOST_NAMES).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError) as error:
            got = "none" if self.path.is_dir() else "no such folder"
            raise self._unnamed(op, "a release that has been published", got) from error
        except FrozenError as error:
            raise self._unnamed(op, "the name of a release in its file 'current'", "no file of that") from error
        if not is_release_name(text):
            raise self._unnamed(op, "the name of a release in its file 'current'", f"{text!r:.50}")
        return text

    def published(self, op: str) -> list[int]:
        """The numbers of the releases that are there, in order. A writer that was killed may have left one behind the
        current release, which nobody has published.

        Raises:
          FrozenError: there is no current release.
        """
        last = int(self.name(op))
        return [number for number in self._numbers() if number <= last]

    def paused(self) -> bool:
        """Whether no other release comes behind the current one.

        Raises:
          FrozenError: the file that says so is damaged; or there is one, and the current release is not known.
        """
        try:  # the current one first: what is paused is written before that
            name = self.name("paused")
        except FrozenError:
            if os.path.lexists(self.path / "paused"):
                raise
            return False
        try:
            with saying("releases, paused", reads=True):
                names = contents(self.path / "paused", _MOST_NAMES).decode(errors="replace").split()
        except FileNotFoundError:
            return False
        except FrozenError as error:
            raise self._unsaid("no file of that") from error
        if not names or not all(map(is_release_name, names)):  # as if it were not: then a bad release would be back
            raise self._unsaid(f"{' '.join(names)!r:.50}")
        return name in names

    def _may_be_paused(self) -> bool:
        try:
            return self.paused()
        except FrozenError:  # nobody knows
            return True

    def _unsaid(self, got: str) -> Exception:
        mend = "call Releases.resume() once another than the current release may take its place, or rollback again"
        return self.failed(FrozenError, "paused", "names of releases in its file 'paused'", got, mend)

    def failed(self, kind: type[Exception], op: str, want: str, got: str, mend: str) -> Exception:
        return kind(f"kvjax: releases {str(self.path)!r}, {op}: want {want}, got {got}; {mend}")

    def damaged(self, op: str, want: str, got: str) -> Exception:
        return self.failed(FrozenError, op, want, got, "publish one with Releases.publish")

    def _unnamed(self, op: str, want: str, got: str) -> Exception:
        there = self._numbers() if self.path.is_dir() else []
        if not there:
            mend = (
                f"give {around}"
                if (around := releases_around(self.path.resolve()))
                else "check the path, or publish one with Releases.publish"
            )
            return self.failed(FrozenError, op, want, got, mend)
        name = self.place(there[-1]).name
        mend = f"write the name of one that is there ({name}, say) into its file 'current', or publish one"
        return self.failed(FrozenError, op, want, got, mend)

    def check_not_paused(self, op: str) -> None:
        """
        Raises:
          PausedError: the current release stays.
        """
        if self.paused():
            want, got = "releases that are not paused", f"release {int(self.name(op))}, which stays the current one"
            raise self.failed(PausedError, op, want, got, "call Releases.resume() once another may take its place")

    # ---- writing ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, op: str) -> Generator[None]:
        """Has the folder, which it makes, for one writer alone, without what others have left that were killed.

        Raises:
          FrozenError: there is something else.
        """
        with saying(op, self.path):
            self._check_place(op)
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(lock, op)
                self._clean()
                yield
            finally:
                unlock(lock)

    def _check_place(self, op: str) -> None:
        """Whether releases may be here: what looks like an old one is removed, and all of it with what is around."""
        if checkpoint := checkpoint_around(self.path.resolve() / "current"):
            raise self.failed(FrozenError, op, "a place outside of checkpoints", f"{checkpoint}", "give another path")
        if around := releases_around(self.path.resolve()):
            raise self.failed(FrozenError, op, "a folder of releases", "a place of one of them", f"give {around}")
        numbered = [self.place(number) for number in self._numbers()] if self.path.is_dir() else []
        if other := next((place for place in numbered if not _is_release(place)), None):
            got = f"one with {other.name}, which is none, and would be removed as an old one"
            raise self.failed(FrozenError, op, "a folder of releases, or a new one", got, "give another path")

    def _lock(self, lock: int, op: str) -> None:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
        warn(
            f"kvjax: releases {str(self.path)!r}, {op}: want a folder that no other writer has, got one that another "
            f"has had for {_PATIENCE} s, so this waits for its end; see which process that is"
        )
        fcntl.flock(lock, fcntl.LOCK_EX)

    @contextlib.contextmanager
    def new(self, least: int = 1, paused: bool = False) -> Generator[Path]:
        """A folder to fill; when it is filled, it is the current release.

        Args:
          least: the number that it has at least.
          paused: whether it is paused as soon as it is the current one.
        """
        place = self.place(max([least, *(number + 1 for number in self._taken())]))
        folder = self.path / f".new-{secrets.token_hex(8)}"
        (folder / FILES).mkdir(parents=True)
        try:
            yield folder
            flush(folder / FILES)
            flush(folder)
            folder.rename(place)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if paused:  # before it is the current one: so both begin at once
            self.pause(place.name)
        with written(self.path / "current") as file:
            file.write(place.name.encode())

    def pause(self, name: str) -> None:
        """Lets no other release come behind one, once that is the current one; nor meanwhile, if none may now."""
        names = [name]
        if self._may_be_paused():
            with contextlib.suppress(FrozenError):
                names.append(self.name())
        with written(self.path / "paused") as file:
            file.write(" ".join(names).encode())

    def resume(self) -> None:
        (self.path / "paused").unlink(missing_ok=True)
        flush(self.path)

    def trim(self, keep: int) -> None:
        """Removes all releases but the last ones, of which one is the current one."""
        for number in self._numbers()[: -max(keep, 1)]:
            self._remove(number)

    def _clean(self) -> None:
        for left in [*self.path.glob(".new-*"), *self.path.glob(".old-*")]:
            shutil.rmtree(left, ignore_errors=True)
        for left in self.path.glob(".*.part"):  # of `current` and `paused`
            left.unlink(missing_ok=True)
        try:
            name = self.name()
        except FrozenError:  # so nobody knows what has been published
            return
        if not (self.path / name).is_dir():
            return
        if (self.path / "paused").exists() and not self._may_be_paused():
            self.resume()  # before the number that it names is free again
        for number in self._numbers():
            if number > int(name):
                self._remove(number)

    def _remove(self, number: int) -> None:
        # Gone at once: who is opening it must not find some of it.
        gone = self.place(number).rename(self.path / f".old-{secrets.token_hex(8)}")
        shutil.rmtree(gone, ignore_errors=True)

    def _taken(self) -> list[int]:
        """Numbers that no other release gets, also that of one whose folder is lost."""
        with contextlib.suppress(FrozenError):
            return [int(self.name()), *self._numbers()]
        return self._numbers()

    def _numbers(self) -> list[int]:
        return sorted(int(path.name) for path in self.path.iterdir() if is_release_name(path.name))


os.register_at_fork(after_in_child=Folder.forget_threads)


def _is_release(place: Path) -> bool:
    return any((place / name).exists() for name in (FILES, INFO)) or any(place.glob(f"*{SUFFIX}"))


# ---- what is in a release ------------------------------------------------------------------------------------


def file_of(folder: Path, name: str, suffix: str = SUFFIX, op: str = "publish") -> Path:
    """Where a table, or a file, of a name is in the folder of a release.

    Args:
      folder: of the release.
      name: of the table, or the file.
      suffix: of the file of a table; none for another.
      op: for errors.

    Raises:
      ValueError: file systems do not take it.
    """
    encoded = quote(name, safe="")
    if not 0 < len(encoded) <= _LONGEST_NAME or encoded + suffix in (".", ".."):
        raise ValueError(
            f"kvjax: {'table' if suffix else 'file'} {name!r}, {op}: want a name of 1 to {_LONGEST_NAME} bytes, "
            f"percent-encoded, but '.' and '..', got {len(encoded)}; "
            + ("publish it under another one" if op == "publish" else "save the table under another one")
        )
    return folder / (encoded + suffix)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the other files of a release.

    Raises:
      TypeError: one is not bytes.
    """
    for name, data in files.items():
        if not isinstance(cast("object", data), (bytes, bytearray, memoryview)):
            raise TypeError(f"kvjax: file {name!r}, publish: want its bytes, got {type(data).__name__}; encode it")
        with written(file_of(folder / FILES, name, "")) as file:
            file.write(data)
