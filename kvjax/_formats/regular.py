"""Regular files: opened, and told from pipes and devices, and from others that take their place."""

from __future__ import annotations

import errno
import os
from typing import TypeAlias

from kvjax._formats.errors import FileError

Identity: TypeAlias = tuple[int, int, int, int]
"""What tells a file from another that has taken its place, as far as can be said without reading it."""


def identity_of(found: os.stat_result) -> Identity:
    """Of the file of which the system says this."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def opened(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """A descriptor to read from, and what the system says of it: it may be no regular file. It waits for nobody, as the
    opening of a pipe would for who writes it.

    Raises:
      OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return fd, os.fstat(fd)
    except BaseException:
        os.close(fd)
        raise


def check_regular(path: str | os.PathLike[str], want: str) -> None:
    """Whether there is a file, and no pipe or device, of which reading would wait or never end.

    Raises:
      FileError: there is none.
      PermissionError: this process may not read it.
    """
    if not os.path.exists(path):
        raise FileError(path, want, "nothing at that path", "give the path of one")
    if not os.path.isfile(path):
        raise FileError(path, want, "something that is no regular file")
    if not os.access(path, os.R_OK, effective_ids=True):
        said = f"kvjax: want {want}, got {os.strerror(errno.EACCES)}; let this process read it"
        raise PermissionError(errno.EACCES, said, os.fspath(path))
