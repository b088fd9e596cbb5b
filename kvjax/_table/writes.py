"""Writes to a table's rows, as methods of `kvjax.Table`; each returns the next handle."""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys, KeysLike
from kvjax._keys.sparse_rows import SparseRows
from kvjax._keys.steps import step_words
from kvjax._ops import order
from kvjax._sharded import writes
from kvjax._sharded.mesh import elements
from kvjax._spec.unsupported import check_evict
from kvjax._table.behind import warn_if_behind, warn_of_write
from kvjax._table.checks import check_on_host, keys_for, version_on_host, version_to_write
from kvjax._table.given_rows import given_rows
from kvjax._table.handle import Handle, after_write
from kvjax._table.reads import Query, lookup
from kvjax._table.training import check_gradient, train
from kvjax._training.rowwise import Transform, as_rowwise
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import ArrayLike, PyTree, array_of
from kvjax._values.errors import fail
from kvjax.evict import RANKINGS, Policy, all_but
from kvjax.ffi import DEVICE

H = TypeVar("H", bound=Handle)


class Writes(Handle):
    """The writes of `kvjax.Table`."""

    __slots__ = ()

    def lookup_or_insert(self, keys: KeysLike) -> tuple[jax.Array, Self]:
        """Reads rows, and inserts the initial row of every key that has none.

        Training needs no such call: `apply` inserts what it updates.

        Args:
          keys: ``(...)``.

        Returns:
          Rows ``(..., dim)`` and the next handle.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, the table has been dropped, or it is full and has ``on_full="error"`` (in a
            compiled function it may be a ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_insert", dim=1, initializer=0.5)
          >>> rows, table = table.lookup_or_insert(np.array([7, 7]))
          >>> rows[:, 0].tolist(), len(table)
          ([0.5, 0.5], 1)
          >>> kvjax.drop_table("doc_insert")
        """
        keys = keys_for(self, keys, "lookup_or_insert")
        table = _write_keys(self, "lookup_or_insert", keys)
        rows = lookup(table, Query(keys))[0]
        if self.spec.storage.backend == DEVICE:  # where the read may be the first to meet the insertion's error
            return rows, table.at(order.after(self.spec, table.version, elements(self.spec, [rows])))
        return rows, table

    def upsert(self, keys: KeysLike, values: ArrayLike) -> Self:
        """Inserts or overwrites rows; of equal keys the last one wins. Slots and frequency stay as they are.

        Args:
          keys: ``(...)``.
          values: ``(..., dim)`` real numbers.

        Returns:
          The next handle.

        Raises:
          ValueError, TypeError: shape or dtype of the values do not fit, or the dtype of the rows cannot hold a value
            (70,000 in float16). Only values on the host are checked; those of a JAX array become infinite.
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, the table has been dropped, or it is full and has ``on_full="error"`` (in a
            compiled function it may be a ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_upsert", dim=1)
          >>> table.upsert(np.array([7, 7]), [[1.0], [2.0]]).lookup(7).tolist()
          [2.0]
          >>> kvjax.drop_table("doc_upsert")
        """
        return _write_rows(self, "upsert", keys, values, self.spec.row_dtype)

    def assign(self, keys: KeysLike, values: ArrayLike) -> Self:
        """Overwrites rows; keys without a row are skipped. Of equal keys the last one wins.

        Args:
          keys: ``(...)``.
          values: ``(..., dim)`` real numbers.

        Returns:
          The next handle.

        Raises:
          ValueError, TypeError: shape or dtype of the values do not fit.
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_assign", dim=1).upsert(np.array([1]), [[1.0]])
          >>> table = table.assign(np.array([1, 2]), [[5.0], [6.0]])
          >>> table.lookup(np.array([1, 2]))[:, 0].tolist(), len(table)
          ([5.0, 0.0], 1)
          >>> kvjax.drop_table("doc_assign")
        """
        return _write_rows(self, "assign", keys, values, self.spec.row_dtype)

    def add(self, keys: KeysLike, deltas: ArrayLike) -> Self:
        """Adds to rows; a key without one starts from its initial row.

        The deltas of equal keys are summed in float32, in the order in which they stand (see `kvjax.merge`), and then
        added once.

        Args:
          keys: ``(...)``.
          deltas: ``(..., dim)`` real numbers.

        Returns:
          The next handle.

        Raises:
          ValueError, TypeError: shape or dtype of the deltas do not fit.
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, the table has been dropped, or it is full and has ``on_full="error"`` (in a
            compiled function it may be a ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_add", dim=1, initializer=1.0)
          >>> table.add(np.array([7, 7]), [[2.0], [3.0]]).lookup(7).tolist()
          [6.0]
          >>> kvjax.drop_table("doc_add")
        """
        return _write_rows(self, "add", keys, deltas, jnp.float32)

    def accum(self, keys: KeysLike, old: ArrayLike, new: ArrayLike, exists: ArrayLike) -> Self:
        """Changes rows from old to new values, without undoing what other writers have done since they were read.

        If `exists` is false and the key has no row, the new value is inserted. If it is true and the key has a row,
        ``new - old`` is added. Otherwise nothing happens. Equal keys are processed one after the other.

        Args:
          keys: ``(...)``.
          old: ``(..., dim)`` values that the caller has read.
          new: ``(..., dim)`` values that the caller wants.
          exists: ``(...)`` bool, whether the key had a row when the caller read it: ``lookup(keys,
            return_found=True)``.

        Returns:
          The next handle.

        Raises:
          ValueError, TypeError: shapes or dtypes do not fit.
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, the table has been dropped, or it is full and has ``on_full="error"`` (in a
            compiled function it may be a ValueError, see docs/troubleshooting.md).

        Source: TFRA's ``accum``, the write behind its ``bp_v2``.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_accum", dim=1).upsert(np.array([1]), [[10.0]])
          >>> table = table.accum(np.array([1, 2]), [[3.0], [0.0]], [[4.0], [7.0]], np.array([True, False]))
          >>> table.lookup(np.array([1, 2]))[:, 0].tolist()
          [11.0, 7.0]
          >>> kvjax.drop_table("doc_accum")
        """
        keys = keys_for(self, keys, "accum")
        old, new = (given_rows(self, "accum", keys, x, jnp.float32) for x in (old, new))
        exists = array_of(exists, self.name, "accum", "exists as bool")
        if exists.shape != keys.shape or exists.dtype != jnp.bool_:
            raise fail(
                ValueError, self.name, "accum", f"exists {keys.shape} bool", f"{exists.shape} {exists.dtype}",
                "give what lookup(keys, return_found=True) found",
            )  # fmt: skip
        version = version_to_write(self, "accum")
        warn_of_write(self, "accum")
        return after_write(self, "accum", writes.accum(self.spec, version, keys, old, new, exists))

    def apply(
        self,
        tx: Transform,
        grads: SparseRows,
        state: PyTree = (),
        step: ArrayLike | None = None,
        **extra_args: PyTree,
    ) -> tuple[Self, PyTree]:
        """The training write: inserts the keys of the gradients and updates their rows.

        Rows of equal keys are merged first. The transform then sees each row by itself and keeps its slots in the
        table; rows that are not in the batch are not touched. The frequency of a key grows by its occurrences, and its
        row version becomes the step. The table's ``admit=`` decides which new keys get a row, and ``max_capacity=``,
        ``on_full=`` and ``evict=`` decide which rows are evicted for them. A compiled program does the write only if it
        uses what this returns.

        Args:
          tx: optax transform, or `kvjax.optax.rowwise(tx)`. Its update is traced, even outside ``jit``: Python values
            that it reads besides its arguments stay what they were at the first call. Make the transform once: a new
            one for each call outside ``jit`` is not compiled again, but takes milliseconds to trace.
          grads: `SparseRows` of this table.
          state: the transform's state for all rows together, with None for what is kept per row:
            ``kvjax.optax.rowwise(tx).init(dim)`` at first, then what the last call returned. It is empty for transforms
            without schedules, for which ``()`` will do.
          step: integer or ``()`` integer array; by default one more than the table's last step. A lower step counts as
            that, too, so an optimizer that begins again at 0 does not make rows older than they are.
          **extra_args: extra arguments of the transform's update.

        Returns:
          The next handle and the next state.

        Raises:
          ValueError: shapes or state do not fit.
          RuntimeError, ValueError: the handle is stale, the table holds slots of another optimizer, the gradients went
            through arithmetic, or the table is full and ``on_full="error"``.

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_apply", dim=2, initializer=1.0)
          >>> grads = kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 2)))
          >>> table, state = table.apply(optax.sgd(0.25), grads)
          >>> table.lookup(7).tolist(), int(table.frequency(7)), int(table.version_of(7))
          ([0.5, 0.5], 2, 1)
          >>> kvjax.drop_table("doc_apply")
        """
        rowwise = as_rowwise(tx, f"table {self.name!r}, apply")
        check_gradient(self, rowwise, grads, state)
        return train(self, rowwise, grads, state, step, extra_args)

    def remove(self, keys: KeysLike) -> Self:
        """Removes rows with their slots, frequency and version, and the counts of keys that wait for a row
        (`kvjax.admit.MinCount`). Other keys are skipped.

        Args:
          keys: ``(...)``.

        Returns:
          The next handle.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_remove", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> table.remove(np.array([0, 1, 99])).export().keys.tolist()
          [2]
          >>> kvjax.drop_table("doc_remove")
        """
        return _write_keys(self, "remove", keys_for(self, keys, "remove"))

    @overload
    def evict(self, policy: Policy, step: ArrayLike | None = None, dry_run: Literal[False] = False) -> Self: ...

    @overload
    def evict(self, policy: Policy, step: ArrayLike | None = None, *, dry_run: Literal[True]) -> dict[str, int]: ...

    @overload
    def evict(self, policy: Policy, step: ArrayLike | None = None, dry_run: bool = False) -> Self | dict[str, int]: ...

    def evict(self, policy: Policy, step: ArrayLike | None = None, dry_run: bool = False) -> Self | dict[str, int]:
        """Removes the rows that a policy chooses, with their slots, frequency and version.

        Args:
          policy: one of `kvjax.evict`, or several combined.
          step: integer or ``()`` integer array, from which ages are counted; by default the table's last step.
          dry_run: only count the rows, outside of ``jit``. The table is not copied, and no sink is called. Of a table
            over several processes, all of them ask together.

        Returns:
          The next handle. `stats` counts the rows, and a sink (`on_evict`) gets them. With dry_run a dict of how many
          rows of the whole table would go, by the part of the policy that chooses them first, as ``stats().evicted``
          would count them; a part that chooses none has 0.

        Raises:
          TypeError, ValueError: it is not a policy, or one that only works for a table that is full.
          TypeError: dry_run inside ``jit``.
          RuntimeError, ValueError: the handle is stale, or a sink or score function has failed; the table is as it was.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_evict", dim=1).upsert(np.arange(4), np.arange(4.0)[:, None])
          >>> table = table.evict(kvjax.evict.MinNorm(1.5) & kvjax.evict.MaxAge(10), step=11)
          >>> sorted(table.export().keys.tolist()), table.stats().evicted
          ([2, 3], {'MinNorm(1.5) & MaxAge(10)': 2})
          >>> table.evict(kvjax.evict.MinFrequency(1) | kvjax.evict.LeastRecent(1), dry_run=True), len(table)
          ({'MinFrequency(1)': 2, 'LeastRecent(1)': 0}, 2)
          >>> kvjax.drop_table("doc_evict")
        """
        if not isinstance(policy, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
            raise fail(
                TypeError, self.name, "evict", "a policy of kvjax.evict", repr(policy),
                "combine them with & | ~; .every(...) is for get_table",
            )  # fmt: skip
        if policy.needs_number():
            raise fail(ValueError, self.name, "evict", "a number of rows", repr(policy), "give n: LeastRecent(100)")
        if policy.reads_rows():
            warn_if_behind(self, "evict")
        return _victims(self, policy, step) if dry_run else _evict(self, "evict", policy.text(), step)

    def restrict(self, n: int, by: Literal["version", "frequency"] = "version") -> Self:
        """Keeps n rows: those that were written last, or whose keys occurred most often. Pinned rows stay.

        Outside of `jit` each other n compiles a program first; the last 64 are kept.

        Args:
          n: rows that stay; all do if there are fewer.
          by: "version" or "frequency".

        Returns:
          The next handle.

        Raises:
          ValueError: n is not a number of rows, or `by` is something else.
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, the table has been dropped, or a sink has failed (in a compiled function it
            may be a ValueError, see docs/troubleshooting.md).

        Source: TFRA's ``restrict`` with TimestampRestrictPolicy and FrequencyRestrictPolicy.

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_restrict", dim=1)
          >>> for key in [5, 6, 7]:
          ...     table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))))
          >>> sorted(table.restrict(2).export().keys.tolist())
          [6, 7]
          >>> kvjax.drop_table("doc_restrict")
        """
        if by not in RANKINGS:
            raise fail(ValueError, self.name, "restrict", f"by in {tuple(RANKINGS)}", repr(by), "choose one")
        if not is_integer(n) or not 0 <= n < 2**63:
            raise fail(ValueError, self.name, "restrict", "a number of rows n >= 0", repr(n), "see Table.restrict")
        return _evict(self, "restrict", all_but(int(n), by), None)

    def pin(self, keys: KeysLike) -> Self:
        """Protects rows from eviction. Keys without a row get their initial row.

        `remove` and `clear` still remove pinned rows. Pins are saved in checkpoints.

        Args:
          keys: ``(...)``.

        Returns:
          The next handle.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, the table has been dropped, or it is full and has ``on_full="error"`` (in a
            compiled function it may be a ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_pin", dim=1).upsert(np.arange(9), np.ones((9, 1))).pin(4)
          >>> table.restrict(0).export().keys.tolist()
          [4]
          >>> kvjax.drop_table("doc_pin")
        """
        return _write_keys(self, "pin", keys_for(self, keys, "pin"))

    def unpin(self, keys: KeysLike) -> Self:
        """Undoes `pin`; keys without a row are skipped.

        Args:
          keys: ``(...)``.

        Returns:
          The next handle.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_unpin", dim=1).pin(np.array([4, 5])).unpin(4)
          >>> table.restrict(0).export().keys.tolist()
          [5]
          >>> kvjax.drop_table("doc_unpin")
        """
        return _write_keys(self, "unpin", keys_for(self, keys, "unpin"))

    def clear(self) -> Self:
        """Removes every row, forgets the counts of keys that wait for a row, and releases the memory. Steps are counted
        from 0 again.

        Returns:
          The next handle.

        Raises:
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_clear", dim=1).upsert(np.arange(3), np.ones((3, 1))).clear()
          >>> len(table), table.stats().bytes["values"]
          (0, 0)
          >>> kvjax.drop_table("doc_clear")
        """
        return after_write(self, "clear", writes.clear(self.spec, version_to_write(self, "clear"), "clear"))

    def clear_slots(self) -> Self:
        """Forgets the optimizer's state of every row, so that another optimizer can take over.

        Returns:
          The next handle.

        Raises:
          ValueError: the handle is a following one (`live`), or the call is inside a loss.
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_clear_slots", dim=1)
          >>> grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 1)))
          >>> table, _ = table.apply(optax.adagrad(0.1), grads)
          >>> table, _ = table.clear_slots().apply(optax.trace(0.9), grads)
          >>> list(table.stats().slots)
          ['trace']
          >>> kvjax.drop_table("doc_clear_slots")
        """
        version = version_to_write(self, "clear_slots")
        warn_if_behind(self, "clear_slots")
        return after_write(self, "clear_slots", writes.clear(self.spec, version, "clear_slots"))


def _write_keys(table: H, op: str, keys: Keys) -> H:
    return after_write(table, op, writes.write_keys(table.spec, op, version_to_write(table, op), keys))


def _write_rows(table: H, op: str, keys: Any, rows: Any, dtype: Any) -> H:
    version, keys = version_to_write(table, op), keys_for(table, keys, op)
    rows = given_rows(table, op, keys, rows, dtype)
    warn_of_write(table, op)
    return after_write(table, op, writes.write_rows(table.spec, op, version, keys, rows))


def _evict(table: H, op: str, policy: str, step: Any) -> H:
    check_evict(table.spec, op)
    version = version_to_write(table, op)
    return after_write(table, op, writes.evict(table.spec, op, version, policy, step_words(step, table.name, op)))


def _victims(table: Handle, policy: Policy, step: Any) -> dict[str, int]:
    check_evict(table.spec, "evict")
    check_on_host(table, "evict", step)
    version_on_host(table, "evict")
    version, reasons = version_to_write(table, "evict"), policy.reasons()
    words = step_words(step, table.name, "evict")
    counts = writes.count_victims(table.spec, "evict", version, policy.text(), len(reasons), words)
    totals = dict.fromkeys(reasons, 0)
    for reason, rows in zip(reasons, np.asarray(counts).tolist(), strict=True):  # some may be the same
        totals[reason] += rows
    return totals
