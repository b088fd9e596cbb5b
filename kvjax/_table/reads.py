"""Reads of a table's rows, as methods of `kvjax.Table`; they change nothing."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvjax._keys.keys import Keys, KeysLike
from kvjax._keys.masks import mask_of
from kvjax._keys.words import integers_of
from kvjax._sharded import reads
from kvjax._table import untaped
from kvjax._table.behind import warn_if_behind, warn_of_lookup
from kvjax._table.checks import check_without_a_view, keys_for, version_to_read
from kvjax._table.handle import Handle, wait
from kvjax._table.prefetched import Prefetched
from kvjax._table.view import CaughtUpView, SlotView
from kvjax._training.rowwise import Transform, as_rowwise
from kvjax._training.transform_errors import of_table
from kvjax._values.arrays import ArrayLike, one_program, reals_of
from kvjax._values.errors import fail, meant, where_of
from kvjax._values.key_width import x64_enabled
from kvjax._values.lookups import Missing, missing_row
from kvjax._values.slot_layout import parse_type

H = TypeVar("H", bound=Handle)


class Reads(Handle):
    """The reads of `kvjax.Table`."""

    __slots__ = ()

    @overload
    def lookup(
        self,
        keys: KeysLike | Prefetched,
        *,
        mask: ArrayLike | None = None,
        pad_id: int | None = None,
        missing: Missing | None = None,
        slot: str | None = None,
        return_found: Literal[False] = False,
    ) -> jax.Array: ...

    @overload
    def lookup(
        self,
        keys: KeysLike | Prefetched,
        *,
        mask: ArrayLike | None = None,
        pad_id: int | None = None,
        missing: Missing | None = None,
        slot: str | None = None,
        return_found: Literal[True],
    ) -> tuple[jax.Array, jax.Array]: ...

    @overload
    def lookup(
        self,
        keys: KeysLike | Prefetched,
        *,
        mask: ArrayLike | None = None,
        pad_id: int | None = None,
        missing: Missing | None = None,
        slot: str | None = None,
        return_found: bool,
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...

    def lookup(
        self,
        keys: KeysLike | Prefetched,
        *,
        mask: ArrayLike | None = None,
        pad_id: int | None = None,
        missing: Missing | None = None,
        slot: str | None = None,
        return_found: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Reads rows; changes nothing.

        Args:
          keys: ``(...)``, or what `kvjax.prefetch` has returned for them.
          mask: ``(...)`` bool, false for padding: those rows are zeros, have no gradient and count nowhere.
          pad_id: a key that marks padding wherever it occurs.
          missing: what a key without a row reads as: "init" (its initial row), "zeros", or a row ``(dim,)``. By
            default its initial row, unless the table's ``admit=`` says otherwise. In a training loss such a key still
            occurs: the write counts it and makes its row, which begins as its initial row, without a gradient but with
            decay. ``mask=table.contains(keys)`` leaves it out.
          slot: name of a slot as wide as a row, which is read instead of the row where the row has slots: "ema" of
            `kvjax.optax.ema_rows`. Through `kvjax.optax.caught_up` it is that of dense training, for all keys. Such a
            read has no gradient.
          return_found: whether to also return which keys have a row.

        Returns:
          Rows ``(..., dim)`` of the table's dtype, or ``(rows, found)`` with found ``(...)`` bool.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`); or
            the mask is not bool, or `missing` a row of something else than real numbers.
          ValueError: the mask has another shape, `missing` is none of these or has numbers that the dtype cannot hold,
            or the keys were prefetched from another table.
          KeyError: the table has no such slot now.
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_lookup", dim=1, initializer=0.5).upsert(np.array([7]), [[1.0]])
          >>> table.lookup(np.array([7, 8, -1]), pad_id=-1)[:, 0].tolist()
          [1.0, 0.5, 0.0]
          >>> kvjax.drop_table("doc_lookup")
        """
        query = query_of(self, "lookup", keys, mask, pad_id)
        rows, found = lookup(self if slot is None else of_slot(self, slot), query, missing, with_found=return_found)
        return (rows, found) if return_found else rows

    def contains(self, keys: KeysLike) -> jax.Array:
        """Whether keys have a row.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` bool.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_contains", dim=1).upsert(np.array([7]), [[1.0]])
          >>> table.contains(np.array([7, 8])).tolist()
          [True, False]
          >>> kvjax.drop_table("doc_contains")
        """
        return _inspect(self, "contains", keys)[0]

    def frequency(self, keys: KeysLike) -> jax.Array:
        """How often keys have occurred in training; for a key that waits for its row, its count so far.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` int64, or int32 (at most 2**31 - 1) while ``jax_enable_x64`` is off; exports are always int64.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_frequency", dim=1)
          >>> grads = kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 1)))
          >>> table, _ = table.apply(optax.sgd(0.1), grads, step=5)
          >>> table.frequency(np.array([7, 8])).tolist()
          [2, 0]
          >>> kvjax.drop_table("doc_frequency")
        """
        return _integers(_inspect(self, "frequency", keys)[1])

    def version_of(self, keys: KeysLike) -> jax.Array:
        """The step that last wrote the row of each key; -1 for keys without a row.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` int64, or int32 (at most 2**31 - 1) while ``jax_enable_x64`` is off; exports are always int64.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_version_of", dim=1)
          >>> grads = kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 1)))
          >>> table, _ = table.apply(optax.sgd(0.1), grads, step=5)
          >>> table.version_of(np.array([7, 8])).tolist()
          [5, -1]
          >>> kvjax.drop_table("doc_version_of")
        """
        return _integers(_inspect(self, "version_of", keys)[2])

    def pinned(self, keys: KeysLike) -> jax.Array:
        """Whether keys have a row that `pin` protects from eviction.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` bool.

        Raises:
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          RuntimeError: the handle is stale, or the table has been dropped (in a compiled function it may be a
            ValueError, see docs/troubleshooting.md).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_pinned", dim=1).upsert(np.array([7, 8]), [[1.0], [2.0]]).pin(7)
          >>> table.pinned(np.array([7, 8, 9])).tolist()
          [True, False, False]
          >>> kvjax.drop_table("doc_pinned")
        """
        return _inspect(self, "pinned", keys)[3]

    def slot(self, name: str, keys: KeysLike, tx: Transform | None = None) -> jax.Array:
        """What the optimizer keeps beside rows.

        Args:
          name: name of the slot, as in `export` and ``stats().slots``: "sum_of_squares" for ``optax.adagrad``.
          keys: ``(...)``.
          tx: the optimizer, needed in a compiled function whose first `apply` makes the slots, behind that `apply`.

        Returns:
          ``(..., *shape)`` of the slot's dtype; zeros where no optimizer has written it yet.

        Raises:
          KeyError: the table has no slot of this name now.
          TypeError: the keys are not integers, or a JAX array that may have been cut to 32 bits (see `kvjax.keys`).
          RuntimeError, ValueError: the handle is stale, or its slots are not those of `tx`.

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_slot", dim=2)
          >>> table, _ = table.apply(optax.trace(0.9), kvjax.SparseRows(np.array([7]), jnp.ones((1, 2))))
          >>> table.slot("trace", 7).tolist()
          [1.0, 1.0]
          >>> kvjax.drop_table("doc_slot")
        """
        whole = isinstance(self.view, CaughtUpView) and self.view.slot is None
        instead = "lookup(keys, slot=name) reads a slot of the row's width through it" if whole else ""
        check_without_a_view(self, "slot", instead)
        version, keys = version_to_read(self, "slot"), keys_for(self, keys, "slot")
        of = _slot_types(self, "slot", name, tx, "slot(name, keys, tx)")[name]
        return reads.read_slot(self.spec, name, version, keys, of.dtype, of.shape)


class Query(NamedTuple):
    """What a lookup is asked, checked.

    Attributes:
      keys: ``(...)``.
      mask: ``(...)`` bool, false for padding, or None.
      prefetched: what of it has been read ahead, or None.
    """

    keys: Keys
    mask: jax.Array | None = None
    prefetched: Prefetched | None = None


def query_of(table: Handle, op: str, keys: Any, mask: Any, pad_id: Any) -> Query:
    """The arguments of a lookup, checked once.

    Args:
      table: that is asked.
      op: for errors.
      keys: what users give as keys, or `Prefetched`.
      mask: ``(...)`` bool or None.
      pad_id: a 64-bit id or None.
    """
    if not isinstance(keys, Prefetched):
        keys = keys_for(table, keys, op)
        return Query(keys, mask_of(keys, mask, pad_id, table.name, table.spec.key_dtype, op))
    prefetched, mask = keys, _mask_of_prefetched(table, op, keys, mask)
    if prefetched.table != table.name:
        raise fail(
            ValueError, table.name, op, "keys that were prefetched from this table",
            f"some from table {prefetched.table!r}", "kvjax.prefetch(table, keys) of the table that is read",
        )  # fmt: skip
    keys = keys_for(table, prefetched.keys, op)
    if pad_id is None or pad_id == prefetched.pad_id:
        return Query(keys, mask, prefetched)
    # With another mask the rows are read again.
    return Query(keys, mask_of(keys, mask, pad_id, table.name, table.spec.key_dtype, op))


def lookup(table: Handle, query: Query, missing: Any = None, with_found: bool = False) -> tuple[jax.Array, jax.Array]:
    """`Table.lookup` of a query: rows ``(..., dim)``, and found ``(...)`` bool, which means something only if it is
    asked for."""
    version, spec, mask = version_to_read(table, "lookup"), table.spec, query.mask
    warn_of_lookup(table)
    as_initial = isinstance(missing, str) and missing == "init"
    substitute = None if missing is None or as_initial else _missing_row(table, missing)
    if query.prefetched is not None and not as_initial and not table.follows:
        rows, found, used = query.prefetched.read(spec, version)
    else:
        asks = with_found or substitute is not None
        rows, found, used = reads.lookup(spec, version, query.keys, mask, as_initial, with_found=asks)
    if table.view is not None:
        rows = table.view.rows(spec, version, query.keys, rows)
        rows = rows if mask is None else jnp.where(mask[..., None], rows, jnp.zeros((), rows.dtype))
    if table.tape is not None:
        rows = table.tape.attach(rows, query.keys, mask, used)
    elif spec.trainable and not table.follows and (table.view is None or table.view.trains):
        untaped.note(table.name)
    if substitute is not None:
        as_read = found if mask is None else found | ~mask
        rows = jnp.where(as_read[..., None], rows, substitute)
    return rows, found


def of_slot(table: H, slot: str, tx: Transform | None = None, op: str = "lookup", b1: float | None = None) -> H:
    """The handle by which a table reads as one of its slots.

    Args:
      table: the handle.
      slot: its name.
      tx: the optimizer, or None: that whose slots the table has now.
      op: for errors.
      b1: see `SlotView`.
    """
    now = table.view if isinstance(table.view, CaughtUpView) and table.view.slot is None and b1 is None else None
    if now is None:
        check_without_a_view(table, op)
        if not table.follows:  # which has been said
            warn_if_behind(table, op)
    types = _slot_types(table, op, slot, tx if now is None else now.rowwise, "kvjax.optax.averaged(params, tx)")
    if types[slot].shape != (table.dim,):
        raise fail(
            ValueError, table.name, op, f"a slot of rows ({table.dim},)", f"{slot!r}, {types[slot].shape}",
            "table.slot(name, keys) reads any" if now is None else "export(slots=True) has them all",
        )  # fmt: skip
    if table.spec.shares_row:
        raise fail(
            ValueError, table.name, op, "a table whose keys read their own rows", "one with a shared row",
            "admit= with unadmitted='init' or 'zeros'; table.slot(name, keys) reads any slot",
        )  # fmt: skip
    made_by = "averaged" if op == "lookup" else op
    if now is not None:
        view = dataclasses.replace(now, slot=slot, made_by=made_by)
        return type(table)(table.given, table.spec, view=view)
    return type(table)(table.given, table.spec, view=SlotView(slot, tuple(types.items()), b1, made_by))


def _slot_types(
    table: Handle, op: str, name: str, tx: Transform | None, before: str
) -> dict[str, jax.ShapeDtypeStruct]:
    """The slots of a table, of which one has this name; `before` says what to do before there are any."""
    if tx is not None:
        with of_table(table.name, op):
            layout = as_rowwise(tx, where_of(table.name, op)).layout(table.dim)
        types = dict(zip(layout.names, layout.types, strict=True))
    else:
        if not isinstance(version_to_read(table, op), Tracer):
            wait(table)
        held = {of: parse_type(text) for of, text in table.spec.host.slots(table.name, 0)}
        types = {of: jax.ShapeDtypeStruct(shape, dtype) for of, (dtype, shape) in held.items()}
    if name not in types:
        raise fail(
            KeyError, table.name, op, f"one of its slots {list(types)}", repr(name),
            f"{meant(name, types)}slots appear with the first `apply` of an optimizer that has them; before it, "
            f"{before}",
        )  # fmt: skip
    return types


def _mask_of_prefetched(table: Handle, op: str, prefetched: Prefetched, mask: Any) -> Any:
    if mask is None or mask is prefetched.mask:
        return prefetched.mask
    raise fail(
        ValueError, table.name, op, "the mask that the keys were prefetched with", "another",
        "give it to kvjax.prefetch",
    )  # fmt: skip


def _missing_row(table: Handle, missing: Any) -> jax.Array:
    dtype = table.spec.row_dtype
    zeros = jnp.zeros((), dtype)

    def row_of(given: Any) -> jax.Array:
        want = "missing= 'init', 'zeros' or a row of real values"
        return reals_of(given, dtype, table.name, "lookup", want)

    return missing_row(missing, table.dim, zeros, row_of, table.name, "lookup")


def _inspect(table: Handle, op: str, keys: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    return reads.inspect(table.spec, op, version_to_read(table, op), keys_for(table, keys, op))


@one_program()
def _integers(words: jax.Array) -> jax.Array:
    """``(..., 2)`` words of int64 as integers of the widest type that JAX has now."""
    if x64_enabled():
        return integers_of(words, jnp.int64)
    low, high = (jax.lax.bitcast_convert_type(words[..., i], jnp.int32) for i in (0, 1))
    return jnp.where(high == low >> 31, low, jnp.int32(2**31 - 1))
