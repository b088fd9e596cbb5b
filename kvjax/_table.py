"""`Table`: the immutable handle of a table of rows."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, Self

import jax
import numpy as np
from jax.core import Tracer

from kvjax import _export, _live, _shards
from kvjax._handle import handle_version, live_version
from kvjax._move import move
from kvjax._numbers import is_integer
from kvjax._processes import gather, together
from kvjax._spec import TableSpec, fail
from kvjax._stats import Stats, stats_of
from kvjax._storage import Storage
from kvjax._writing import Writing


@jax.tree_util.register_pytree_with_keys_class
class Table(Writing):
    """A table of rows under 64-bit keys: an immutable value that names the live table in the process.

    A table is made by `kvjax.get_table`. It is a pytree with one leaf, the version: reads leave it alone, every
    write returns the next handle, and a handle that is not the latest is refused. So a table can stand in
    ``params``, pass through ``jit``, ``scan`` and donation, and be told apart from a copy that something else made.

    All methods take keys of any shape ``(...)``, also empty: `Keys`, NumPy integers (exact) or JAX integers.

    Attributes:
      version: ``()`` uint32.
      spec: name, dim, dtype and the other arguments of `kvjax.get_table`.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_table", dim=2)
      >>> table = table.upsert(np.array([2**40, -1]), [[1.0, 2.0], [3.0, 4.0]])
      >>> table.lookup(np.array([-1, 5, 2**40]))
      Array([[3., 4.],
             [0., 0.],
             [1., 2.]], dtype=float32)
      >>> table.remove(np.array([-1])).shape
      (1, 2)
      >>> kvjax.drop_table("doc_table")
    """

    __slots__ = ()

    def _settled(self, op: str) -> int:
        """This handle's version, once the writes that lead to it are done."""
        self._on_the_host(op)
        version = self._write(op)
        if isinstance(version, jax.Array) and version.is_deleted():
            raise fail(
                RuntimeError, self.name, op, "a handle that is still there", "one that was donated",
                "use what the call that took it returned, or table.refresh()",
            )  # fmt: skip
        return int(version)

    def _on_the_host(self, op: str) -> None:
        self._outside_a_loss(op)
        if isinstance(self.version, Tracer):
            raise fail(
                TypeError, self.name, op, "a call outside jit", "one inside",
                "whole tables and their numbers are of the host: take them between steps",
            )  # fmt: skip

    def size(self, all_processes: bool = False) -> int:
        """The number of rows, once all writes up to this handle are done.

        Like all host values (``len``, `shape`, `export`, `stats`), it is about the shards that this process has: no
        other is waited for, so one process may ask alone.

        Args:
          all_processes: count the rows of the whole table instead. All processes of its mesh must ask together.
        """
        placement, spec = self.spec.placement, self.spec
        if not all_processes or placement is None:
            version = self._settled("size")
            return sum(spec.host.size(self.name, shard, version) for shard in spec.kept)

        def count() -> int:
            version = self._settled("size")
            return sum(spec.host.size(self.name, shard, version) for shard in spec.originals)

        return int(gather(placement, np.int64(together(placement, self.name, "size", count))).sum())

    def __len__(self) -> int:
        return self.size()

    def __bool__(self) -> bool:
        return True  # an empty table is a table

    @property
    def shape(self) -> tuple[int, int]:
        """``(size, dim)``."""
        return self.size(), self.dim

    def export(self, prune: _export.PruneLike | None = None, dry_run: bool = False, slots: bool = False) -> Any:
        """Copies the table out as NumPy arrays, sorted by (bucket, key). The table itself is not changed.

        In several processes each exports the rows of its own shards.

        Args:
          prune: `kvjax.Prune`, or a function from the export to ``(n,)`` bool, true for rows to keep.
          dry_run: only count.
          slots: whether to export the optimizer's slots too.

        Returns:
          `Exported` with ``.keys (n,)`` int64, ``.values (n, dim)``, ``.freqs (n,)`` int64, ``.versions (n,)`` int64
          and ``.slots``; with dry_run the tuple (rows kept, rows in the table).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_export", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> table.export().values.shape, table.export(kvjax.Prune(min_frequency=1), dry_run=True)
          ((3, 1), (0, 3))
          >>> kvjax.drop_table("doc_export")
        """
        rows = self.snapshot(slots).rows
        if prune is not None:
            rows = rows.take(_export.keep_mask(prune, rows))
        return (len(rows), rows.total) if dry_run else rows

    def snapshot(self, slots: bool = True, once: bool = False) -> _export.Snapshot:
        """What a checkpoint stores.

        Args:
          slots: whether to include the optimizer's slots.
          once: leave out shards of which another process has the first copy, so that all processes together give
            each row once.

        Returns:
          The export, and what belongs to the table as a whole.
        """
        shards = self.spec.originals if once else self.spec.kept
        return _shards.snapshot(self.spec, self._settled("export"), slots, shards)

    def load(self, rows: _export.Exported | _export.Snapshot, slot_types: dict[str, str] | None = None) -> Self:
        """Replaces the rows of the table; it is unchanged if this fails.

        Args:
          rows: arrays as `export` gives them, in any order, keys distinct: keys that wait for admission go on waiting.
            Or what `snapshot` gives, with the counts of its own time. Of a table that is spread over several
            processes, which must call this together, each gives the rows of its own shards, or all give all.
          slot_types: dtype and shape of each slot in ``rows.slots`` ("float32[64]"); by default those of the
            snapshot or of the arrays.

        Returns:
          The next handle.

        Raises:
          ValueError: the arrays do not fit the table or each other, or a key occurs twice.
          MemoryError: there are more rows than ``max_capacity``, unless ``on_full="grow"``.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_load", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> rows = table.export()
          >>> table = table.clear().load(rows.take(rows.keys > 0))
          >>> sorted(table.export().keys.tolist())
          [1, 2]
          >>> kvjax.drop_table("doc_load")
        """
        version = _shards.load(
            self.spec, "load", lambda: self._settled("load"), lambda: self._contents(rows, slot_types)
        )
        return self._next(handle_version(self.spec, version))

    def _contents(self, rows: _export.Exported | _export.Snapshot, slot_types: dict[str, str] | None) -> dict[str, Any]:
        """What `load` is given, checked, as the C++ side takes it."""
        admission = {}
        if isinstance(rows, _export.Snapshot):
            none = {name: np.zeros(0, dtype) for name, dtype in _export.ADMISSION_ARRAYS.items()}
            slot_types, admission, rows = slot_types or rows.slot_types, none | rows.admission, rows.rows
            self._check_admission(admission)
        n = len(rows.keys)
        if np.asarray(rows.keys).dtype not in (np.int64, np.uint64):
            raise fail(
                TypeError, self.name, "load", "keys (n,) int64 or uint64", f"{np.asarray(rows.keys).dtype}",
                "convert them first",
            )  # fmt: skip
        if np.shape(rows.values) != (n, self.dim) or rows.values.dtype != self.spec.row_dtype:
            raise fail(
                ValueError, self.name, "load", f"values ({n}, {self.dim}) {self.spec.dtype}",
                f"{np.shape(rows.values)} {rows.values.dtype}", "load into a table of that dim and dtype",
            )  # fmt: skip
        own_types = {name: f"{a.dtype}[{','.join(map(str, a.shape[1:]))}]" for name, a in rows.slots.items()}
        types = own_types if slot_types is None else dict(slot_types)
        if types.keys() != own_types.keys() or any(
            _export.slot_type(types[name]) != _export.slot_type(own_types[name]) for name in own_types
        ):
            raise fail(
                ValueError, self.name, "load", f"slot_types as the arrays are, {own_types}", f"{types}",
                "leave slot_types out",
            )  # fmt: skip
        return admission | {
            "keys": np.ascontiguousarray(rows.keys).view(np.int64),
            "values": _bytes(rows.values),
            "freqs": np.asarray(rows.freqs, np.int64),
            "versions": np.asarray(rows.versions, np.int64),
            "has_slots": _bytes(np.asarray(rows.has_slots, bool)),
            "pinned": _bytes(np.asarray(rows.pinned, bool)),
            "last_step": int(rows.last_step),
            "slots": [
                (name, types[name], array.dtype.itemsize * math.prod(array.shape[1:]), _bytes(array))
                for name, array in rows.slots.items()
            ],
        }

    def _check_admission(self, counts: dict[str, np.ndarray]) -> None:
        """Says so if counts of keys without a row are about to be lost."""
        kept = {"pending_keys": self.spec.keeps_counts, "sketch": len(counts["sketch"]) == self.spec.sketch_cells}
        lost = [name for name, keeps in kept.items() if len(counts[name]) and not keeps]
        if lost:
            warnings.warn(
                f"kvjax: table {self.name!r}, load: want the admission that the rows were saved with, got "
                f"{self.spec.admit}; the counts of keys without a row ({', '.join(lost)}) are left out",
                stacklevel=8,  # the caller of load
            )

    def to(self, storage: Storage) -> Self:
        """Moves the live table into another storage, with all that belongs to it: rows, slots, frequencies, versions,
        pins, counts of admission and its sink. Not inside ``jit``.

        Handles from before are stale: put the new one where they stood, for instance into ``params``. Programs are
        compiled anew. The counts of `stats` begin anew, room that was reserved beyond ``capacity`` does not come along.
        While it moves, the table is there twice. In several processes all of them call this together.

        Args:
          storage: one of `kvjax.storage`.

        Returns:
          The live handle.

        Raises:
          TypeError: it is none of these.
          RuntimeError: this handle is stale, or there is no backend for the storage; as for all errors, the table is
            as it was.
          ValueError: the storage cannot hold such a table.
          MemoryError: the table does not fit there.

        Example:
          >>> import kvjax, numpy as np, tempfile
          >>> table = kvjax.get_table("doc_to", dim=1).upsert(np.arange(4), np.ones((4, 1)))
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     table = table.to(kvjax.storage.Mmap(folder))
          >>> len(table), table.to(kvjax.storage.Host()).lookup(3).tolist()
          (4, [1.0])
          >>> kvjax.drop_table("doc_to")
        """
        self._on_the_host("to")
        if not isinstance(storage, Storage):
            raise fail(TypeError, self.name, "to", "one of kvjax.storage", repr(storage), "see kvjax.storage")
        spec = dataclasses.replace(self.spec, storage=storage)
        return type(self)(move(self, spec, "to"), spec)

    def reserve(self, n: int) -> Self:
        """Makes room for n rows in all, so that the table need not grow on the way there.

        Args:
          n: rows.

        Returns:
          This handle: what the table holds does not change.

        Raises:
          MemoryError: there is no memory for so many.

        Example:
          >>> import kvjax
          >>> kvjax.get_table("doc_reserve", dim=4).reserve(10_000).stats().capacity
          10240
          >>> kvjax.drop_table("doc_reserve")
        """
        version = self._settled("reserve")
        if not is_integer(n) or not 0 <= n < 2**32 - 1:
            raise fail(ValueError, self.name, "reserve", "a number of rows below 2**32 - 1", repr(n), "see reserve")
        for shard in self.spec.shards:
            self.spec.host.reserve(self.name, shard, version, -(-int(n) // (self.spec.num_shards)))
        return self

    def stats(self) -> Stats:
        """What the table holds and what it has done since it was made, cheap enough to log at each step.

        Returns:
          `kvjax.Stats` of the live table, whatever handle is asked, once all writes up to this handle are done. In
          several processes of the shards of this one.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_stats", dim=4).upsert(np.arange(3), np.ones((3, 4)))
          >>> stats = table.stats()
          >>> stats.size, stats.inserted, stats.bytes["values"] > 0
          (3, 3, True)
          >>> kvjax.drop_table("doc_stats")
        """
        self._on_the_host("stats")
        self._wait()
        return stats_of(self.spec)

    def on_evict(self, sink: Callable[..., None] | None) -> Self:
        """Sends the rows of every later eviction to a function, before they go. In several processes each sends those
        of its own shards.

        Args:
          sink: called as ``sink(keys, values, slots, freqs, versions, reason)`` with the arrays of `Exported`, sorted
            by (bucket, key), and the policy that chose the rows (or "restrict", or "capacity"). It runs inside the
            write, on any thread, in batches of 65,536 rows at most, and must not call the table. If it raises, the
            write fails and the table is as it was; what it was given before, it may be given again. None ends it.
            Of a spread table it is called for each shard that loses rows, in the shard's process, and each row goes to
            it once, however many copies there are; rows stay if another shard refuses the write. The shards wait for
            each other, and XLA ends a process on the CPU in which they do so for a minute: a slow sink hands its
            work to a thread.

        Returns:
          This handle.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_sink", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> _ = table.on_evict(lambda keys, values, slots, freqs, versions, reason: print(len(keys), reason))
          >>> table = table.restrict(1)
          2 restrict
          >>> kvjax.drop_table("doc_sink")
        """
        self.spec.host.size(self.name, 0, self._settled("on_evict"))  # a stale handle says so
        if sink is not None and not callable(sink):
            raise fail(TypeError, self.name, "on_evict", "a function or None", repr(sink), "see Table.on_evict")
        spec = self.spec

        def call(arrays: dict[str, Any], reason: str) -> None:
            rows = _export.from_host(arrays, spec.dim, spec.row_dtype, spec.key_dtype).rows
            sink(rows.keys, rows.values, rows.slots, rows.freqs, rows.versions, reason)  # pyright: ignore[reportOptionalCall]

        given = None if sink is None else call
        for shard in self.spec.originals:
            spec.host.set_sink(self.name, shard, given)
        _live.sinks[self.name] = given
        return self

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim}, dtype={self.spec.dtype}, {self._state()})"

    def _state(self) -> str:
        version = self.version
        if isinstance(version, Tracer):
            return "version=traced"
        if isinstance(version, jax.Array) and version.is_deleted():
            return "version=donated"
        try:
            self._wait()  # for the write of every shard
            shards = [self.spec.host.rows(self.name, shard) for shard in self.spec.kept]
            rows, live = sum(n for n, _ in shards), shards[0][1]
            return f"rows={rows:,}, version={version}" if live == int(version) else f"version={version} (stale)"
        except KeyError:
            return f"version={version} (dropped)"
        except RuntimeError:  # asked by the table's own sink
            return f"version={version}"
        except (TypeError, ValueError):  # something else stands in the leaf, as in trees of shapes
            return f"version={version}"


def is_table(x: Any) -> bool:
    return isinstance(x, Table)


def live(spec: TableSpec) -> Table:
    """The live handle of the table that `spec` names."""
    return Table(live_version(spec), spec)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
