"""Where the rows of a table live in this process.

What a table is does not depend on it: `Host` and `Mmap` give the same bits, a checkpoint of a table in one storage is
restored into any other, and `kvjax.Table.to` moves a live one. Memory and disk are given back when rows are cleared and
when the table is dropped.

Example:
  >>> import kvjax, numpy as np, tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     table = kvjax.get_table("doc_storage", dim=2, storage=kvjax.storage.Mmap(folder))
  ...     table.upsert(np.array([7]), [[1.0, 2.0]]).lookup(7).tolist()
  [1.0, 2.0]
  >>> kvjax.drop_table("doc_storage")
"""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

from kvjax.ffi import DEVICE, HOST, on_device

__all__ = ["Device", "Host", "Mmap"]

# A storage says of itself which of `kvjax.backends` holds its tables, and on whose platform their programs run; and how
# many bytes of rows and slots a training write takes at once, None for all.

# Rows and slots of one chunk of a training write together: little enough to stay in the caches between reading the
# rows, computing and writing them back, and enough for threads to share. benchmarks/NOTES.md has the figures.
_CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Host:
    """Rows, slots and index in the memory of the host.

    Attributes:
      huge_pages: "auto" takes huge pages of 2 MiB once a table has 32 MiB of rows, which makes calls on large tables
        faster and small tables no larger. True takes them from the first row on, False never does. They are
        Linux's transparent huge pages: where an administrator has switched those off, nothing changes.

    Example:
      >>> import kvjax
      >>> kvjax.storage.Host()
      Host(huge_pages='auto')
    """

    backend: ClassVar[str] = HOST
    chunk_bytes: ClassVar[int | None] = _CHUNK_BYTES
    huge_pages: bool | str = "auto"

    def __post_init__(self):
        if self.huge_pages not in (True, False, "auto"):
            raise ValueError(f"kvjax: storage.Host: want huge_pages 'auto', True or False, got {self.huge_pages!r}")

    @property
    def text(self) -> str:
        """What the C++ side makes it from."""
        return {"auto": "host", True: "host:huge", False: "host:small"}[self.huge_pages]


@dataclasses.dataclass(frozen=True)
class Mmap:
    """Rows in a file on disk, of which the system keeps in memory what is used; for tables larger than memory.

    Values, optimizer slots and row headers go to the file; the index, 26 to 52 bytes a key, stays in memory. Disk is
    reserved as the table grows, so that a full disk is an error of the write that met it, which leaves the table as
    it was. A table in a file is as fast as in memory while the rows in use fit there.

    The file is no checkpoint: it has no name and goes with the process, however that ends. What lasts is what
    `kvjax.orbax` saves.

    Attributes:
      path: an existing folder on the disk to use, and a fast one (``/tmp`` is in memory on some systems). Kept as an
        absolute path.

    Raises:
      ValueError: the path cannot be one; or, in `kvjax.get_table`, no file can be made there.
      MemoryError: in `kvjax.get_table`: the disk is full.

    Example:
      >>> import kvjax
      >>> kvjax.storage.Mmap("/data/tables")
      Mmap(path='/data/tables')
    """

    backend: ClassVar[str] = HOST
    chunk_bytes: ClassVar[int | None] = _CHUNK_BYTES
    path: str | os.PathLike[str]

    def __post_init__(self):
        path = os.path.abspath(os.fsdecode(self.path))
        if "\0" in path or path.encode("utf-8", "ignore").decode() != path:
            raise ValueError(f"kvjax: storage.Mmap: want a path in UTF-8 without NUL, got {self.path!r}")
        object.__setattr__(self, "path", path)

    @property
    def text(self) -> str:
        return f"mmap:{self.path}"


@dataclasses.dataclass(frozen=True)
class Device:
    """Rows, slots and index in the memory of the GPU that the program runs on: what a new table gets there by itself.

    Raises:
      RuntimeError: in `kvjax.get_table`: `kvjax.backends` does not have it for CUDA.
      ValueError: in `kvjax.get_table`: an argument is not on CUDA yet.

    Example:
      >>> import kvjax
      >>> kvjax.storage.Device()
      Device()
    """

    backend: ClassVar[str] = DEVICE
    chunk_bytes: ClassVar[int | None] = None

    @property
    def text(self) -> str:
        return "device"


Storage = Host | Mmap | Device
"""What `kvjax.get_table` takes as ``storage``."""


def default() -> Storage:
    """Where a new table is, unless it is said."""
    return Device() if on_device() else Host()
