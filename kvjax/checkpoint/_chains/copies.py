"""Copies: the files of a table that lie in several places, of which each is read where it is whole."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from kvjax.checkpoint._disk.files import Files
from kvjax.checkpoint._disk.format import Damaged

T = TypeVar("T")


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
