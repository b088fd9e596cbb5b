"""Bytes from memory to the disk past the system's cache, where the file system can do that.

A copy in the cache costs more of the processor than the rest of a save, and memory of others: nobody reads a
checkpoint soon.
"""

from __future__ import annotations

import errno
import mmap
import os

import numpy as np

BLOCK = 4096
"""Bytes of which whole ones go past the cache, from memory at multiples of it."""

_LEAST, _MOST = 1 << 22, 8  # bytes of memory at least, of which untouched ones take none; and pieces that are kept
_FREE: list[np.ndarray] = []
_NONE = np.zeros(0, np.uint8)
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux


def aligned(size: int) -> np.ndarray:
    """Memory ``(size,)`` uint8 that goes to the disk as it is; `give_back` takes it for the next.

    It is not malloc's, which would keep such memory of every thread that a save has had.
    """
    try:
        whole = _FREE.pop()
    except IndexError:
        whole = _NONE
    if len(whole) < size:
        own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # from a page on, which is a block at least
        whole = np.frombuffer(mmap.mmap(-1, max(size, _LEAST), flags=own), np.uint8)
    return whole[:size]


def give_back(memory: np.ndarray) -> None:
    """What `aligned` gave, once nobody reads or writes it."""
    if len(_FREE) < _MOST:
        _FREE.append(memory.base if isinstance(memory.base, np.ndarray) else memory)


def write_all(fd: int, data: np.ndarray) -> None:
    """Writes all bytes ``(n,)`` uint8 to a file; those that are not `aligned` go through the cache."""
    rest = data.data
    past = len(data) >= BLOCK and data.ctypes.data % BLOCK == 0 and _past_cache(fd, True)
    while len(rest) > 0:  # the system may take less than all
        if past and len(rest) < BLOCK:
            past = _past_cache(fd, False)
        try:
            rest = rest[os.write(fd, rest[: len(rest) // BLOCK * BLOCK] if past else rest) :]
        except OSError as error:
            if not past or error.errno != errno.EINVAL:
                raise
            past = _past_cache(fd, False)


def _past_cache(fd: int, on: bool) -> bool:
    """Has what follows go past the cache, or through it; gives whether it goes past it."""
    if not _DIRECT:
        return False
    import fcntl

    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
    except OSError:  # the file system has no such way
        return False
    return on
