"""Pace: how much of the machine saves take while training goes on."""

from __future__ import annotations

import os
import threading
import time

import numpy as np

from kvjax._formats.paths import AnyPath
from kvjax.checkpoint._disk.files import FileEntry, write_file

_SHARE = 1 / 80
_LONGEST = 300.0
"""Seconds that a save waits in all: Orbax gives it 600 by default."""


class Spent:
    """Seconds of the processor that writing takes, by all threads."""

    def __init__(self) -> None:
        self._lock, self._seconds = threading.Lock(), 0.0

    def write(self, path: AnyPath, data: bytes | np.ndarray) -> FileEntry:
        """`write_file`, counted."""
        begun = time.thread_time()
        try:
            return write_file(path, data)
        finally:
            with self._lock:
                self._seconds += time.thread_time() - begun

    def take(self) -> float:
        """What was spent since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds


class Pace:
    """Has a save wait between parts of rows, so that all saves of the process together take an eightieth of its
    processors. They may take longer then, but not for ever.

    Args:
      spent: what the save's other threads count; its own is counted here.
    """

    _lock, _until = threading.Lock(), 0.0  # when what all have spent is an eightieth

    def __init__(self, spent: Spent) -> None:
        self._spent, self._here, self._rest = spent, time.thread_time(), _LONGEST

    def pause(self, seconds: float) -> None:
        """Waits before the next part, for so long at least: the table's writes want their time, too."""
        if self._rest <= 0:
            return
        took, now = self._spent.take() + time.thread_time() - self._here, time.monotonic()
        with Pace._lock:
            Pace._until = max(Pace._until, now) + took / (_SHARE * (os.cpu_count() or 1))
            seconds = min(max(seconds, Pace._until - now), self._rest)
        time.sleep(seconds)
        self._rest -= seconds
        self._here = time.thread_time()

    @classmethod
    def forget(cls) -> None:
        """In a child: a thread that is not there may have had the lock."""
        cls._lock = threading.Lock()


os.register_at_fork(after_in_child=Pace.forget)
