"""Storage: where the rows of a table live in this process.

Storage changes no result: `Host`, `Mmap` and `External` give the same bits, and so do `Device` and `Hybrid`. A
checkpoint can be restored into any storage, and `kvjax.Table.to` moves a live table to another. Memory and disk are
released when rows are cleared and when the table is dropped.

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
import inspect
import os
import weakref
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np

from kvjax._formats.paths import kept
from kvjax._values.arguments import is_integer, why_not_taken
from kvjax.ffi import DEVICE, HOST, on_device

__all__ = ["Device", "Engine", "External", "Host", "Hybrid", "Mmap"]


def __dir__() -> list[str]:
    return sorted(__all__)


# A storage says of itself which of `kvjax.backends` holds its tables, and on whose platform their programs run.


@dataclasses.dataclass(frozen=True)
class Host:
    """Rows, slots and index in the memory of the host.

    Attributes:
      huge_pages: "auto" uses huge pages of 2 MiB once a table has 32 MiB of rows, and before that if one call fills
        them (for slots, if rows use every slot of the page). That makes calls faster and small tables hardly larger.
        True uses them from the first row on, False never. They are Linux's transparent huge pages: if an administrator
        has switched those off, this has no effect.

    Raises:
      ValueError: `huge_pages` has another value.

    Example:
      >>> import kvjax
      >>> kvjax.storage.Host()
      Host(huge_pages='auto')
    """

    backend: ClassVar[str] = HOST
    huge_pages: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.huge_pages not in (True, False, "auto"):
            raise ValueError(f"kvjax: storage.Host: want huge_pages 'auto', True or False, got {self.huge_pages!r}")

    @property
    def text(self) -> str:
        """What the C++ side makes it from."""
        return {"auto": "host", True: "host:huge", False: "host:small"}[self.huge_pages]


@dataclasses.dataclass(frozen=True)
class Mmap:
    """Rows in a file on disk, for tables larger than memory. The system keeps the parts in memory that are in use.

    Values, optimizer slots and row headers are in the file; the index, 16 to 24 bytes a key, stays in memory. Disk
    space is reserved as the table grows, so if the disk is full, the write that needs space is an error and leaves the
    table as it was. A table in a file is as fast as one in memory as long as the rows in use fit into memory. A row
    that is not in memory costs a page of 4 KiB to read, and one more for its slots; once calls meet such rows, they ask
    the disk for all their pages at once. Saves and moves copy a few rows at a time, unless they prune. `Table.export`,
    and what is written from the table without a checkpoint (`kvjax.serving`), copy all rows into memory.

    The file is not a checkpoint: it has no name and is gone when the process ends, however it ends. To keep the rows,
    save a checkpoint (`kvjax.checkpoint`, `kvjax.orbax`).

    Attributes:
      path: an existing folder on the disk to use, which should be fast (``/tmp`` is in memory on some systems). Kept as
        an absolute path.

    Raises:
      TypeError: `path` is not a string or a ``pathlib.Path``.
      ValueError: the path cannot be one; or, in `kvjax.get_table`, no file can be made there.
      MemoryError: in `kvjax.get_table`: the disk is full.

    Example:
      >>> import kvjax
      >>> kvjax.storage.Mmap("/data/tables")
      Mmap(path='/data/tables')
    """

    backend: ClassVar[str] = HOST
    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        path = str(kept(self.path, "storage.Mmap"))
        if path.encode("utf-8", "ignore").decode() != path:
            raise ValueError(f"kvjax: storage.Mmap: want a path in UTF-8, got {self.path!r}")
        object.__setattr__(self, "path", path)

    @property
    def text(self) -> str:
        return f"mmap:{self.path}"


Column = Literal["values", "slots"]


@runtime_checkable
class Engine(Protocol):
    """Your own object that keeps rows under their keys outside kvjax, such as Redis, RocksDB or a parameter server; see
    `External`.

    A key has up to two rows: its "values" ``(dim,)`` of the table's dtype, and once an optimizer with slots has trained
    it, its "slots" ``(bytes,)`` uint8. The keys of a call are distinct. The table calls these methods one at a time,
    from any thread. They must not call the table or JAX, nor wait for a thread that does. kvjax's errors quote an
    exception that they raise; the error of a write outside of ``jit``, and of `kvjax.commit`, also has it as its
    ``__cause__``.

    Example:
      >>> import kvjax, numpy as np
      >>> class Memory:
      ...     def __init__(self):
      ...         self.rows = {}
      ...     def get(self, column, keys):
      ...         return np.stack([self.rows[column, key] for key in keys.tolist()])
      ...     def put(self, column, keys, rows):
      ...         self.rows.update({(column, key): row.copy() for key, row in zip(keys.tolist(), rows)})
      ...     def delete(self, keys):
      ...         for key in keys.tolist():
      ...             self.rows.pop(("values", key))
      ...             self.rows.pop(("slots", key), None)
      >>> memory = Memory()
      >>> table = kvjax.get_table("doc_engine", dim=2, storage=kvjax.storage.External(memory))
      >>> table = table.upsert(np.array([7]), [[1.0, 2.0]])
      >>> table.lookup(7).tolist(), memory.rows["values", 7].tolist()
      ([1.0, 2.0], [1.0, 2.0])
      >>> kvjax.drop_table("doc_engine")
    """

    def get(self, column: Column, keys: np.ndarray, /) -> np.ndarray:
        """Returns the rows that were put last for these keys.

        Args:
          column: "values" or "slots".
          keys: ``(n,)`` uint64, all of which have been put and not deleted since.

        Returns:
          ``(n, dim)`` of the table's dtype, or ``(n, bytes)`` uint8.

        Raises:
          Exception: whatever it raises makes the call of the table an error, which quotes it; the table stays as it
            was.

        Example:
          >>> import numpy as np
          >>> class Memory:
          ...     rows = {("values", 7): np.array([1.0, 2.0], np.float32)}
          ...     def get(self, column, keys):
          ...         return np.stack([self.rows[column, key] for key in keys.tolist()])
          >>> Memory().get("values", np.array([7], np.uint64)).tolist()
          [[1.0, 2.0]]
        """
        ...

    def put(self, column: Column, keys: np.ndarray, rows: np.ndarray, /) -> object:
        """Stores rows, and replaces those that the keys have.

        Args:
          column: "values" or "slots".
          keys: ``(n,)`` uint64.
          rows: ``(n, dim)`` of the table's dtype, or ``(n, bytes)`` uint8.

        Raises:
          Exception: the rows stay in memory, with a warning, and the next write puts them again.

        Example:
          >>> import numpy as np
          >>> class Memory:
          ...     rows = {}
          ...     def put(self, column, keys, rows):
          ...         self.rows.update({(column, key): row.copy() for key, row in zip(keys.tolist(), rows)})
          >>> Memory().put("values", np.array([7], np.uint64), np.array([[1.0, 2.0]], np.float32))
          >>> Memory.rows["values", 7].tolist()
          [1.0, 2.0]
        """
        ...

    def delete(self, keys: np.ndarray, /) -> object:
        """Deletes the values of keys, and their slots if they have any.

        Args:
          keys: ``(n,)`` uint64. After a delete that failed, some may be deleted already.

        Raises:
          Exception: the table no longer has the keys, and warns; the next write deletes them again.

        Example:
          >>> import numpy as np
          >>> class Memory:
          ...     rows = {("values", 7): np.zeros(2, np.float32), ("slots", 7): np.zeros(8, np.uint8)}
          ...     def delete(self, keys):
          ...         for key in keys.tolist():
          ...             self.rows.pop(("values", key))
          ...             self.rows.pop(("slots", key), None)
          >>> Memory().delete(np.array([7], np.uint64))
          >>> Memory.rows
          {}
        """
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class External:
    """Rows in an engine of your own. The index, frequencies and versions, 28 to 40 bytes a key, stay in memory.

    A call gets the rows of its keys from the engine before it begins, and puts the rows that it has changed when it
    ends. Between calls no row is in memory, only up to 64 MiB of space for those of the next call. So a table may be
    larger than memory, and a server can read the engine directly. Each call waits for the engine. Eviction by
    ``MinNorm`` and by scores, and exports, read all rows. Exports, saves and moves have all rows in memory at once, so
    they are for tables that fit.

    If the engine fails to return rows, the call is an error and changes nothing, but for `Table.lookup_or_insert`: that
    is a write and then a read, so new keys may have their rows, and `Table.refresh` returns them. If it fails to store
    rows, they stay in memory, with a warning; if it fails to delete some, the table no longer has them, but the engine
    may, and another warning says so. The next write first tries again, and is an error if that fails. So a table is
    whole at any time. Rows from `Table.load` or a restore are in memory, all of them, and are put by the next call.

    The engine is not a checkpoint: the index is gone when the process ends, and a new table does not read what another
    one has put. Rows stay in the engine when the table is dropped, moved or replaced, and kvjax lets go of the engine
    then; rows that are removed, evicted or cleared are deleted. An engine is for one table, in one place, on the CPU.

    Attributes:
      engine: an `Engine`.

    Raises:
      TypeError: the engine has no ``get``, ``put`` and ``delete``, or they do not take the arguments of `Engine`.
      ValueError: in `kvjax.get_table`: another table uses the engine, or ``mesh=`` is given too.

    Example:
      >>> import kvjax, numpy as np
      >>> class Memory:
      ...     def __init__(self):
      ...         self.rows = {}
      ...     def get(self, column, keys):
      ...         return np.stack([self.rows[column, key] for key in keys.tolist()])
      ...     def put(self, column, keys, rows):
      ...         self.rows.update({(column, key): row.copy() for key, row in zip(keys.tolist(), rows)})
      ...     def delete(self, keys):
      ...         self.rows = {at: row for at, row in self.rows.items() if at[1] not in keys.tolist()}
      >>> table = kvjax.get_table("doc_external", dim=2, storage=kvjax.storage.External(Memory()))
      >>> table = table.upsert([7], [[1.0, 2.0]])
      >>> table.lookup(7).tolist(), sum(table.stats().bytes[part] for part in ("values", "slots"))
      ([1.0, 2.0], 0)
      >>> kvjax.drop_table("doc_external")
    """

    backend: ClassVar[str] = HOST
    engine: Engine

    def __post_init__(self) -> None:
        if not isinstance(self.engine, Engine):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
            raise TypeError(
                f"kvjax: storage.External: want an engine with get, put and delete, got {self.engine!r}; see "
                "kvjax.storage.Engine"
            )
        for name in ("get", "put", "delete"):
            wanted = list(inspect.signature(getattr(Engine, name)).parameters)[1:]
            if why := why_not_taken(getattr(self.engine, name), wanted):
                raise TypeError(
                    f"kvjax: storage.External: want an engine with {name}({', '.join(wanted)}), got {name}{why}; "
                    "see kvjax.storage.Engine"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, External) and other.engine is self.engine

    def __hash__(self) -> int:
        return hash((External, id(self.engine)))

    @property
    def text(self) -> str:
        return "engine"


class _OfTable(External):
    """An `External` that lives as long as somebody else has it, as the calls of its table do.

    Args:
      given: by the user.
    """

    def __init__(self, given: External) -> None:
        vars(self).update(given=weakref.ref(given), _hash=hash(given))

    @property
    def engine(self) -> Engine | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        storage = given_by_user(self)
        return None if storage is None else storage.engine

    def __eq__(self, other: object) -> bool:
        return self is other or (given_by_user(self) is not None and super().__eq__(other))

    def __hash__(self) -> int:
        return vars(self)["_hash"]

    def __repr__(self) -> str:
        return f"External(engine={self.engine!r})"


def of_table(storage: External) -> External:
    """For the spec of a table, which JAX keeps when the table is gone: it does not keep the engine."""
    return storage if isinstance(storage, _OfTable) else _OfTable(storage)


def given_by_user(storage: External) -> External | None:
    """What the user gave: this itself. Of what `of_table` makes, None once nobody has that."""
    return vars(storage)["given"]() if isinstance(storage, _OfTable) else storage


@dataclasses.dataclass(frozen=True)
class Device:
    """Rows, slots and index in the memory of the GPU that the program runs on; the default of new tables on a GPU.

    Raises:
      RuntimeError: in `kvjax.get_table`: `kvjax.backends` does not say that CUDA is loaded.
      ValueError: in `kvjax.get_table`: an argument is not supported on CUDA yet.

    Example:
      >>> import kvjax
      >>> kvjax.storage.Device()
      Device()
    """

    backend: ClassVar[str] = DEVICE

    @property
    def text(self) -> str:
        return "device"


@dataclasses.dataclass(frozen=True)
class Hybrid:
    """As `Device`, for tables larger than the memory of the GPU: rows beyond a limit are in host memory.

    Values and optimizer slots take at most `device_bytes` of the GPU's memory; those of all other rows are in pinned
    host memory, which the GPU reads over its bus. The GPU keeps the rows of the keys that occur most often in training:
    whenever training has seen as many keys as the table has rows, frequent and rare rows change places, as part of a
    step. The index, frequencies and versions, 40 to 65 bytes a key, are always on the GPU and are not part of
    `device_bytes`, nor is the scratch of calls.

    ``docs/cuda.md`` says what this costs, and how to find a good limit with `kvjax.Stats`. A table that fits into the
    limit is like one in `Device`; with 0 all its rows are in host memory.

    Attributes:
      device_bytes: limit for one table on one GPU; with ``mesh=`` for each shard. Memory is taken in slabs of 2 MiB,
        separately for values and slots. So below 2 MiB (4 MiB with an optimizer that has slots), all rows are in host
        memory.

    Raises:
      ValueError: `device_bytes` is not such a number; or as `Device`.

    Example:
      >>> import kvjax
      >>> kvjax.storage.Hybrid(device_bytes=8 << 30)
      Hybrid(device_bytes=8589934592)
    """

    backend: ClassVar[str] = DEVICE
    device_bytes: int

    def __post_init__(self) -> None:
        if not is_integer(self.device_bytes) or not 0 <= self.device_bytes < 2**64:
            raise ValueError(
                f"kvjax: storage.Hybrid: want device_bytes as an integer from 0 to 2**64 - 1, got {self.device_bytes!r}"
            )
        object.__setattr__(self, "device_bytes", int(self.device_bytes))

    @property
    def text(self) -> str:
        return f"hybrid:{self.device_bytes}"


Storage = Host | Mmap | External | Device | Hybrid
"""What `kvjax.get_table` takes as ``storage``."""


def default() -> Storage:
    """Where a new table is, unless it is said."""
    return Device() if on_device() else Host()
