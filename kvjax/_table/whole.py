"""Calls on a whole table, made by the host between steps, as methods of `kvjax.Table`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NoReturn, Self, overload

import jax
import numpy as np
from jax.core import Tracer

from kvjax._sharded.processes import together
from kvjax._sharded.writes import clear
from kvjax._table import contents, loads
from kvjax._table.behind import check_none_behind, may_be_behind, warn_if_found_behind
from kvjax._table.checks import check_on_host, version_on_host, version_to_write
from kvjax._table.handle import Handle, wait
from kvjax._table.merges import merged
from kvjax._table.sinks import Sink, set_sink
from kvjax._table.sizes import num_rows, rows_by_shard, total_rows
from kvjax._table.stats import Stats, stats_of
from kvjax._table.switch import same_slots, switched
from kvjax._training.rowwise import Rowwise, Transform, as_rowwise
from kvjax._training.transform_errors import of_table
from kvjax._values.arguments import is_integer
from kvjax._values.errors import fail, where_of
from kvjax._values.exported import Exported
from kvjax._values.prune import PruneLike, rule_for
from kvjax._values.snapshot import Snapshot


class Whole(Handle):
    """The calls of `kvjax.Table` that are about all of it."""

    __slots__ = ()

    @overload
    def size(self, all_processes: bool = False, by: None = None) -> int: ...
    @overload
    def size(self, all_processes: bool = False, *, by: Literal["shard"]) -> dict[int, int]: ...
    def size(self, all_processes: bool = False, by: Literal["shard"] | None = None) -> int | dict[int, int]:
        """The number of rows, once all writes up to this handle are done.

        Like all host values (``len``, `shape`, `export`, `stats`), it covers the shards of this process only. It waits
        for no other process, so one process may ask alone.

        Args:
          all_processes: count the rows of the whole table instead. All processes of its mesh must ask together.
          by: "shard" for the number of rows of each shard, which shows how evenly a partitioner distributes keys. To
            count rows of some kind, use `evict` with a policy and dry_run, or `export` with a `kvjax.Prune` and
            dry_run, which copies the table; `kvjax.checkpoint.prune` counts those of a checkpoint, and `stats` keys
            that wait for a row.

        Returns:
          The number of rows; with ``by="shard"`` a dict of such numbers by the number of the shard.

        Raises:
          ValueError: `by` is something else, or the call is inside a loss.
          TypeError: the call is inside ``jit``.
          RuntimeError: the handle is stale, or a write that leads to it has failed.
          KeyError: the table has been dropped.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_size", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> table.size(), table.size(by="shard")
          (3, {0: 3})
          >>> kvjax.drop_table("doc_size")
        """
        if by == "shard":
            return rows_by_shard(self, all_processes)
        if by is not None:
            mend = "count rows of some kind by table.evict(kvjax.evict.MinFrequency(2), dry_run=True)"
            raise fail(ValueError, self.name, "size", "by='shard' or None", repr(by), mend)
        return total_rows(self) if all_processes else num_rows(self, self.spec.kept)

    def __len__(self) -> int:
        return self.size()

    def __bool__(self) -> bool:
        return True  # an empty table is a table

    @property
    def shape(self) -> tuple[int, int]:
        """``(size, dim)``, the number of rows of this process and their width. It waits and raises as `size` does."""
        return self.size(), self.dim

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """NumPy's dtype of rows, and of what `lookup` returns: float32, bfloat16 or float16."""
        return np.dtype(self.spec.row_dtype)

    def __contains__(self, key: object) -> NoReturn:
        mend = "table.contains(keys) says of many keys at once whether they have a row"
        raise fail(TypeError, self.name, "in", "a call on many keys", f"{key!r} in table", mend)

    def __getitem__(self, key: object) -> Self:
        if key is Ellipsis:  # so NNX reads what is in a Param
            return self
        mend = "table.lookup(keys) reads rows of many keys at once, and table.export() all"
        raise fail(TypeError, self.name, "[...]", "a call on many keys", f"table[{key!r}]", mend)

    def __setitem__(self, key: object, value: object) -> NoReturn:
        mend = "table.assign(keys, rows) returns the next handle, and layer.table = table puts it into a layer of NNX"
        raise fail(TypeError, self.name, "[...] =", "a write that returns a handle", f"table[{key!r}] = ...", mend)

    @overload
    def export(
        self, prune: PruneLike | None = None, dry_run: Literal[False] = False, slots: bool = False
    ) -> Exported: ...

    @overload
    def export(
        self, prune: PruneLike | None = None, *, dry_run: Literal[True], slots: bool = False
    ) -> tuple[int, int]: ...

    @overload
    def export(
        self, prune: PruneLike | None = None, dry_run: bool = False, slots: bool = False
    ) -> Exported | tuple[int, int]: ...

    def export(
        self, prune: PruneLike | None = None, dry_run: bool = False, slots: bool = False
    ) -> Exported | tuple[int, int]:
        """Copies the table out as NumPy arrays, sorted by (bucket, key). The table itself is not changed.

        In several processes, each exports the rows of its own shards.

        Args:
          prune: `kvjax.Prune`, or a function from the export to ``(n,)`` bool, true for rows to keep. The row that
            unadmitted keys share is always kept.
          dry_run: only count. The table is copied for that, too; `kvjax.checkpoint.prune` with ``out=None`` counts the
            rows of a checkpoint, a few at a time.
          slots: whether to export the optimizer's slots too.

        Returns:
          `Exported` with ``.keys (n,)`` int64, ``.values (n, dim)``, ``.freqs (n,)`` int64, ``.versions (n,)`` int64
          and ``.slots``; with dry_run the tuple (rows kept, rows in the table).

        Raises:
          TypeError: the call is inside ``jit``, or `prune` is neither a rule nor a function.
          ValueError: the function in `prune` does not return ``(n,)`` bool, or the call is inside a loss.
          RuntimeError: the handle is stale, or a write that leads to it has failed.
          KeyError: the table has been dropped.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_export", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> table.export().values.shape, table.export(kvjax.Prune(min_frequency=1), dry_run=True)
          ((3, 1), (0, 3))
          >>> kvjax.drop_table("doc_export")
        """
        snapshot = contents.copied(self, "export", slots or may_be_behind(self))
        warn_if_found_behind(self, "export", snapshot.rows)
        rows = snapshot.rows if slots else dataclasses.replace(snapshot.rows, slots={})
        spec = self.spec
        keep = None if prune is None else rule_for(prune, self.name, spec.key_dtype, spec.shared_key).mask(rows)
        if dry_run:  # without a copy of those that are kept
            return len(rows) if keep is None else int(keep.sum()), rows.total
        return rows if keep is None else rows.take(keep)

    def snapshot(self, slots: bool = True, once: bool = False) -> Snapshot:
        """What a checkpoint stores.

        Args:
          slots: whether to include the optimizer's slots.
          once: leave out shards of which another process has the first copy, so that each row is in the snapshot of
            exactly one process.

        Returns:
          The rows, and what belongs to the table as a whole.
        """
        return contents.copied(self, "snapshot", slots, once)

    def load(self, rows: Exported | Snapshot, slot_types: dict[str, str] | None = None, *, merge: bool = False) -> Self:
        """Replaces the rows of the table, or with ``merge`` adds rows to them; it is unchanged if this fails.

        Args:
          rows: arrays as `export` returns them, in any order, with distinct keys; keys that wait for admission keep
            their counts, and frequencies stop at 2**62 - 1, as they do in training. Or the result of `snapshot`, which
            has its own counts. If a table is sharded over several processes, they must call this together, and each
            gives the rows of its own shards, or all give all rows.
          slot_types: dtype and shape of each slot in ``rows.slots`` ("float32[64]"); by default those of the
            snapshot or of the arrays.
          merge: keep the rows of the table whose keys are not in `rows`. Unlike `upsert`, this takes frequencies, row
            versions, pins and slots from `rows`, too. Rows without slots get fresh ones when they are next trained.
            The greater last step becomes that of the table, from which ages are counted. The rows of the table are
            copied meanwhile, and count as changed, so that the next delta has all of them.
            Not for tables over several processes: there, ``kvjax.checkpoint.restore(merge=True)`` does this.

        Returns:
          The next handle.

        Raises:
          ValueError: the arrays do not fit the table or each other, or a key occurs twice; with ``merge``, the table
            has other slots, or is sharded over several processes.
          MemoryError: there are more rows than ``max_capacity``, unless ``on_full="grow"``; or there is no memory for
            them.
          TypeError: `rows` is something else, or the call is inside ``jit``.
          RuntimeError: the handle is stale, or a write that leads to it has failed.
          KeyError: the table has been dropped.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_load", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> rows = table.export()
          >>> table = table.clear().load(rows.take(rows.keys > 0))
          >>> sorted(table.export().keys.tolist())
          [1, 2]
          >>> table = table.load(rows.take(rows.keys == 0), merge=True)
          >>> sorted(table.export().keys.tolist())
          [0, 1, 2]
          >>> kvjax.drop_table("doc_load")
        """

        def given() -> loads.Loading:
            loading = loads.checked(self.spec, rows, slot_types)
            if not merge:
                return loading
            return loads.checked(self.spec, merged(self.spec, "load", contents.copied(self, "load"), loading))

        if merge and self.spec.num_processes > 1:
            raise fail(
                ValueError, self.name, "load", "merge=True of a table of one process",
                f"one of {self.spec.num_processes}", "kvjax.checkpoint.restore(path, merge=True)",
            )  # fmt: skip
        return loads.load(self, given)

    def switch_optimizer(self, tx: Transform) -> Self:
        """Prepares the table for another optimizer, which trains it from then on. Not inside ``jit``.

        Slots that both optimizers have, by name, dtype and shape, are kept: adamw keeps those of adam,
        `kvjax.optax.ftrl` the sums of squares of adagrad. A state that counts the steps of a row is kept as a whole or
        not at all, because its moments are corrected by the count. The other slots begin as those of a new row. A
        warning says which are kept, fresh and dropped, unless all are kept. The same name may mean different things:
        ``nu`` of adamax is not ``nu`` of adam; use `clear_slots` in such cases. What an optimizer keeps for all rows is
        not in the table: begin with ``tx.init(params)``, or keep of the old state what fits (docs/restarts.md, In a
        live process). Also call this after restoring a checkpoint that another
        optimizer has trained. If slots are kept, the table is copied; counts of admission, frequencies and the like
        stay. In several processes, all call this together.

        Args:
          tx: an optax transform, or `kvjax.optax.rowwise` of one.

        Returns:
          The next handle.

        Raises:
          RuntimeError: the handle is stale; as for all errors, the table is as it was.
          ValueError: the transform cannot train tables, the handle is a following one (`live`), or the call is inside
            a loss.
          TypeError: `tx` is not a transform, or the call is inside ``jit``.
          KeyError: the table has been dropped.

        Example:
          >>> import jax.numpy as jnp, kvjax, numpy as np, optax
          >>> table = kvjax.get_table("doc_switch", dim=1)
          >>> grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 1)))
          >>> table, _ = table.apply(optax.adam(0.1), grads)
          >>> table, _ = table.switch_optimizer(optax.adamw(0.1)).apply(optax.adamw(0.1), grads)
          >>> table.slot("count", 7).tolist()
          2
          >>> kvjax.drop_table("doc_switch")
        """
        check_on_host(self, "switch_optimizer")
        op, placement = "switch_optimizer", self.spec.placement

        def begin() -> tuple[Rowwise, jax.Array, dict[str, str], Snapshot]:
            rowwise, version = as_rowwise(tx, where_of(self.name, op)), version_to_write(self, op)
            with of_table(self.name, op):
                slots = rowwise.layout(self.dim).type_texts
            before = contents.snapshot(self.spec, op, version_on_host(self, op), True, self.spec.originals)
            if not same_slots(before.slot_types, slots):
                check_none_behind(self, op, before.slot_types, before.rows)
            return rowwise, version, slots, before

        def end() -> tuple[bool, Snapshot | None]:
            stays = same_slots(before.slot_types, slots)
            return stays, None if stays else switched(self.name, rowwise, before)

        rowwise, version, slots, before = together(placement, self.name, op, begin)
        stays, after = together(placement, self.name, op, end, {"slots": slots})
        if stays:
            return self
        return self.at(clear(self.spec, version, "clear_slots")) if after is None else self.load(after)

    def reserve(self, n: int) -> Self:
        """Reserves memory for n rows in all, so that the table need not grow before it has that many.

        Args:
          n: rows.

        Returns:
          This handle: what the table holds does not change.

        Raises:
          ValueError: n is not an integer from 0 to 2**32 - 2, the handle is a following one (`live`), or the call is
            inside a loss.
          MemoryError: there is no memory for so many.
          TypeError: the call is inside ``jit``.
          RuntimeError: the handle is stale, or a write that leads to it has failed.
          KeyError: the table has been dropped.

        Example:
          >>> import kvjax
          >>> kvjax.get_table("doc_reserve", dim=4).reserve(10_000).stats().capacity >= 10_000
          True
          >>> kvjax.drop_table("doc_reserve")
        """
        version = version_on_host(self, "reserve")
        if not is_integer(n) or not 0 <= n < 2**32 - 1:
            raise fail(ValueError, self.name, "reserve", "a number of rows below 2**32 - 1", repr(n), "see reserve")
        for shard in self.spec.shards:
            self.spec.host.reserve(self.name, shard, version, -(-int(n) // self.spec.num_shards))
        return self

    def stats(self) -> Stats:
        """What the table holds and what it has done since it was made, cheap enough to log at each step.

        Returns:
          `kvjax.Stats` of the live table, even if this handle is older, once all writes up to this handle are done. In
          several processes, of the shards of this process.

        Raises:
          TypeError: the call is inside ``jit``.
          ValueError: the call is inside a loss.
          RuntimeError, MemoryError: a table on a GPU has refused an earlier write, and no call has raised that yet.
          KeyError: the table has been dropped.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_stats", dim=4).upsert(np.arange(3), np.ones((3, 4)))
          >>> stats = table.stats()
          >>> stats.size, stats.inserted, stats.bytes["values"] > 0
          (3, 3, True)
          >>> kvjax.drop_table("doc_stats")
        """
        check_on_host(self, "stats")
        wait(self)
        return stats_of(self.spec, raises=not self.follows)

    def on_evict(self, sink: Sink | None) -> Self:
        """Sends the rows of every later eviction to a function before they are removed. In several processes, each
        sends those of its own shards.

        Args:
          sink: called as ``sink(keys, values, slots, freqs, versions, reason)`` with the arrays of `Exported`, sorted
            by (bucket, key), and the policy that chose the rows (or "restrict", or "capacity"). The slots of a row that
            no optimizer has trained are zeros. It runs inside the write, on any thread, in batches of at most 65,536
            rows, and must not call the table. If it raises, the write fails and the table stays as it was; rows that
            the sink has already got may be sent again. None removes the sink. For a sharded table it is called for each
            shard that loses rows, in the process of the shard, and gets each row once, however many copies there are;
            if another shard refuses the write, the rows stay. Shards wait for each other, and on the CPU, XLA ends a
            process in which they wait for a minute: a slow sink should hand its work to a thread.

        Returns:
          This handle.

        Raises:
          TypeError: the call is inside ``jit``, or the sink is not a function of these six arguments.
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, or a write that leads to it has failed.
          KeyError: the table has been dropped.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_sink", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> _ = table.on_evict(lambda keys, values, slots, freqs, versions, reason: print(len(keys), reason))
          >>> table = table.restrict(1)
          2 restrict
          >>> kvjax.drop_table("doc_sink")
        """
        set_sink(self, sink)
        return self

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim}, dtype={self.spec.dtype}, {_state(self)})"


def _state(table: Handle) -> str:
    """What `repr` says of a handle."""
    version: Any = table.version
    if isinstance(version, Tracer):
        return "version=traced"
    if table.donated:
        return "version=donated"
    try:
        wait(table)  # for the write of every shard
        shards = [table.spec.host.rows(table.name, shard) for shard in table.spec.kept]
        rows, live = sum(n for n, _ in shards), shards[0][1]
        if table.follows:
            return f"rows={rows:,}, live"
        return f"rows={rows:,}, version={version}" if live == int(version) else f"version={version} (stale)"
    except KeyError:
        return f"version={'none' if table.follows else version} (dropped)"
    except RuntimeError:  # asked by the table's own sink
        return f"version={version}"
    except (TypeError, ValueError):  # something else stands in the leaf, as in trees of shapes
        return f"version={version}"
