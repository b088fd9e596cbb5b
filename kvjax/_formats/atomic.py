"""Atomic files and folders: complete and flushed to the disk, or not there at all; in a store, complete and listed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvjax._formats.errors import FileError, of_file
from kvjax._formats.paths import AnyPath, PathLike, anywhere

if TYPE_CHECKING:
    from kvjax._formats.stores import StorePath


def flush(path: AnyPath) -> None:
    """Has the system write a file, or the names in a folder, to the disk; a store does so itself."""
    if not isinstance(path, Path):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unlock(fd: int) -> None:
    """Gives the lock of a file back, and closes it. To close it is not enough: a child that was forked meanwhile has it
    open, too."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def beside(path: Path, end: str) -> Path:
    """A hidden path in the same folder, whose name is not longer than file systems take."""
    name = os.fsdecode(os.fsencode(path.name)[:200])
    return path.with_name(f".{name}.{end}")


@contextlib.contextmanager
def saying(what: str, path: str | os.PathLike[str] | None = None, reads: bool = False) -> Generator[None]:
    """Has errors of the system in the body say what they are of, and the mend; the outermost one says what.

    Args:
      what: "table 'user', save".
      path: of the file, which an error on a full disk does not say.
      reads: whether the body reads, and writes nothing.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None and path is not None:
            error.filename = os.fspath(path)
        plain = getattr(error, "said_by_system", error.strerror)
        if error.errno is not None and not str(plain).startswith("kvjax: "):
            error.said_by_system = plain  # pyright: ignore[reportAttributeAccessIssue]
            mends, other = (
                (_READING, "see to that disk") if reads else (_MENDS, "see to that disk, or write to another")
            )
            error.strerror = f"kvjax: {what}: {plain}; {mends.get(error.errno, other)}"
        raise


_OF_PROCESS = dict.fromkeys(
    (errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n), or close some"
) | dict.fromkeys((errno.ENOMEM,), "free memory, or raise the limit of this process")
_READING = _OF_PROCESS | dict.fromkeys((errno.EACCES, errno.EPERM), "let this process read it")
_MENDS = (
    _OF_PROCESS
    | dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make space there, or write to another disk")
    | dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "let this process write there, or write elsewhere")
    | dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is where that path wants a folder: give another path")
)

_TEMPORARY = ", in a temporary file (TMPDIR says where)"
"""What errors say of a file that is meant for a store, or comes from one: else the store would seem to be full."""


# ---- files ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(path: PathLike) -> Generator[Path]:
    """Another path beside this one; what is written there takes its place when the body has ended well, and is gone
    when it has not. What a process has left there that was killed, the next one to write this file removes.

    The file of a store is written among the system's temporary files, and then sent.

    Raises:
      OSError: there can be no file, which is said before anything is written.
      ValueError, ImportError: as `anywhere`.
    """
    whole = anywhere(path, "write")
    if not isinstance(whole, Path):
        with saying("write" + _TEMPORARY), tempfile.TemporaryDirectory(prefix="kvjax-") as folder:
            yield Path(folder) / whole.name
            whole.upload(Path(folder) / whole.name)
        return
    if whole.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "kvjax: write: want a file to write, got a folder; name one in it", str(path)
        )
    if whole.exists() and not whole.is_file():
        raise OSError(
            errno.EINVAL, "kvjax: write: want a file to write, got a device or a pipe, whose place it would take; give "
            "another path", str(path),
        )  # fmt: skip
    whole = whole.resolve()  # of a link the file that it names
    if not whole.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT, "kvjax: write: want a folder to write the file in, got none; make it first", str(path)
        )
    with saying("write", whole):
        part, lock = _new_part(whole)
        try:
            yield part
            flush(part)
            os.replace(part, whole)
            flush(whole.parent)
        finally:
            part.unlink(missing_ok=True)
            unlock(lock)


def _new_part(whole: Path) -> tuple[Path, int]:
    """A new file beside one, locked until it is closed, or the process ends; those whose writers are gone go."""
    for left in whole.parent.glob(glob.escape(beside(whole, "").name) + "?" * 16 + ".part"):
        with contextlib.suppress(OSError):  # its writer is there, or has just gone
            fd = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
            finally:
                unlock(fd)
    while True:
        part = beside(whole, f"{secrets.token_hex(8)}.part")
        fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # a file system without locks, where none is taken for left
            fcntl.flock(fd, fcntl.LOCK_EX)
        if part.exists():
            return part, fd
        unlock(fd)  # another has taken it for left, before it was locked


@contextlib.contextmanager
def written(path: PathLike) -> Generator[IO[bytes]]:
    """A file to write, which takes the place of `path` when the body has ended well."""
    with replaced(path) as part, open(part, "wb") as file:
        yield file


@contextlib.contextmanager
def fetched(path: PathLike, op: str) -> Generator[Path]:
    """A file to read from its middle: itself, or of a store a copy among the system's temporary files.

    Args:
      path: of the file.
      op: what it is read for, which errors name.

    Raises:
      OSError: the store has no such file.
      ValueError, ImportError: as `anywhere`.
    """
    whole = anywhere(path, op)
    if isinstance(whole, Path):
        yield whole
        return
    with contextlib.ExitStack() as until_read:
        with saying(op + _TEMPORARY):
            folder = until_read.enter_context(tempfile.TemporaryDirectory(prefix="kvjax-"))
            copy = Path(folder) / whole.name
            whole.download(copy)
        try:
            yield copy
        except FileError as error:
            raise of_file(error, copy, whole) from error.__cause__


# ---- folders -------------------------------------------------------------------------------------------------


def scratch_of(target: AnyPath) -> Path | None:
    """Where there is space for what a path is made of: next to it, or in the system's temporary folder."""
    if not isinstance(target, Path):
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    return target.parent


def new_folder(target: AnyPath) -> NewFolder | NewInStore:
    """A folder that is there as a whole or not at all: `begin`, fill its `path`, `install`; `discard` if one fails."""
    return NewFolder(target) if isinstance(target, Path) else NewInStore(target)


class NewFolder:
    """A folder that is filled beside its place, and then takes that as a whole.

    Only one is made for a place at a time, by whichever process. What a process leaves behind that is killed, the next
    one for this place removes.

    Args:
      target: the place, which is no link.

    Attributes:
      path: where to fill it, between `begin` and `install`.
    """

    def __init__(self, target: Path) -> None:
        self.target, self.path = target, beside(target, "kvjax-new")
        self._lock: int | None = None

    def begin(self) -> None:
        """Makes an empty folder.

        Raises:
          BlockingIOError: another one is made for this place.
          OSError: there can be no folder.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._lock is None:
            try:
                self.path.mkdir(exist_ok=True)
            except FileExistsError:  # another one has just put it into its place
                if os.path.lexists(self.path) and not self.path.is_dir():
                    raise
            with contextlib.suppress(FileNotFoundError):  # likewise
                self._lock = _lock(self.path)
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def install(self) -> None:
        """Puts it into its place. What was there is gone then: there is always the one or the other."""
        if not self.target.exists():
            self.path.rename(self.target)
        elif not _exchange(self.path, self.target):
            _replace(self.path, self.target)
        flush(self.target.parent)
        self._unlock()
        with contextlib.suppress(OSError):  # who has it is another, who will remove it
            self._lock = _lock(self.path)
        self.discard()

    def discard(self) -> None:
        """Removes what is left, if it is ours."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            unlock(self._lock)
        self._lock = None


class NewInStore:
    """The same in a store, where nothing can be moved: it is filled in its place, and has a mark until it is whole.

    Whoever lists folders passes over those with a mark. What a process leaves behind that is killed
    stays, with the mark.

    Args:
      target: the place, where nothing is.
    """

    def __init__(self, target: StorePath) -> None:
        self._written: list[StorePath] = []
        self.target, self.path = target, target.logged(self._written)

    def begin(self) -> None:
        """Puts the mark there.

        Raises:
          BlockingIOError: another one is made for this place, or has been made since somebody looked.
        """
        mark = self.path / UNFINISHED
        try:
            mark.create(secrets.token_hex(8).encode())
        except FileExistsError as error:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process fills it", str(self.path)) from error
        if any(path != mark for path in self.path.below()):
            mark.remove()
            self._written.clear()
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has filled it", str(self.path))

    def install(self) -> None:
        """Takes the mark away, where that is allowed: beside a manifest it means nothing."""
        with contextlib.suppress(OSError):
            (self.path / UNFINISHED).remove()

    def discard(self) -> None:
        """Removes what this process has written, the last first, and nothing else that is there.

        It ends with the first file that stays, as of a store that cannot be reached, which is what the save has met. So
        there is always a whole checkpoint, or one with a mark and without a manifest, which readers pass over.
        """
        with contextlib.suppress(OSError):
            for path in reversed(self._written):
                with contextlib.suppress(FileNotFoundError):  # of one whose writing has failed
                    path.remove()


UNFINISHED = ".kvjax-new"
"""The name of the mark."""


def recovered(path: AnyPath) -> AnyPath:
    """Where a folder is that a process was replacing when it was killed, where folders cannot be exchanged."""
    if not isinstance(path, Path) or path.exists():  # "." too, which has no name beside which another could be
        return path
    old = _old(path)
    return old if old.exists() else path


def _lock(folder: Path) -> int:
    """Locks a folder until what this gives is closed, or the process ends."""
    while True:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise BlockingIOError(errno.EWOULDBLOCK, "another process fills it", str(folder)) from error
                # A file system without locks: whoever saves there sees to it that there is one.
            found = os.stat(folder)
            if os.path.samestat(os.fstat(fd), found):
                return fd
        except BaseException:
            unlock(fd)
            raise
        unlock(fd)  # it was put into its place meanwhile, and this is another


def _old(path: Path) -> Path:
    return beside(path, "kvjax-old")


def _exchange(one: Path, other: Path) -> bool:
    """Has two folders change their places in one step; false where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _replace(new: Path, target: Path) -> None:
    """The same in two steps; between them `recovered` finds the old one."""
    old = _old(target)
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    try:
        new.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
