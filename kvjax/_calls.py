"""The reads and writes of a table, wherever its rows are: in one place, or spread over the devices of a mesh.

A read of a spread table goes to the owners of its keys (`kvjax._exchange`). A write is told to all shards, each of
which does its own keys, in the order in which they stand in the whole batch; training has a way of its own
(`kvjax._rowwise`). No shard does anything before all have planned it, so that a failure of one is one of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax import _copies, _ops, _spread
from kvjax._exchange import ask, owners
from kvjax._initial_rows import initial_rows
from kvjax._keys import Keys
from kvjax._room import prepare_proposed
from kvjax._spec import TableSpec
from kvjax._varying import varies, varying_like


def lookup(
    spec: TableSpec,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    as_initial: bool,
    few: bool = False,
    with_found: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows ``(..., dim)``, found ``(...)`` bool, and 1.0, which exists only once the rows have been read.

    `few` says that the mask leaves out most keys, `with_found` false that nobody asks for it: then it is nothing.
    """
    if spec.placement is None:
        initial = initial_rows(spec, version, keys, mask)
        return _ops.lookup(spec, version, keys, mask, initial, as_initial)[:3]
    options = {"as_initial": as_initial, "few": few, "with_found": with_found}
    (rows, *found), (used,) = _spread.over_keys(_lookup_part, spec, "lookup", version, keys, mask, **options)
    return rows, found[0] if found else jnp.zeros(0, bool), used


def _lookup_part(
    spec: TableSpec, version: Any, keys: Keys, mask: Any, as_initial: bool, few: bool, with_found: bool
) -> Any:
    wire = spec.placement.wire if spec.placement else None

    shares = spec.shares_row and not as_initial and spec.num_shards > 1

    def answer(keys: Keys, mask: Any) -> Any:
        initial = initial_rows(spec, version, keys, mask)
        rows, found, _, status = _ops.lookup(spec, version, keys, mask, initial, as_initial)
        rows = rows if wire is None else rows.astype(wire)
        return (rows, found) if with_found or shares else (rows,), status

    if shares:  # the owner of a key need not be that of the row that stands for it
        keys, mask = _with_shared(spec, keys, mask)
    (rows, *found), used = ask(spec, "lookup", keys, mask, answer, few)
    if shares:
        (own,) = found
        stands_in = ~own[:-1] if mask is None else mask[:-1] & ~own[:-1]
        rows, found = jnp.where(stands_in[:, None], rows[-1:], rows[:-1]), [own[:-1]] if with_found else []
    return (rows.astype(spec.row_dtype), *found), (used,)


def _with_shared(spec: TableSpec, keys: Keys, mask: Any) -> tuple[Keys, Any]:
    """Keys and mask ``(n + 1,)``, the last of which is that of the row that unadmitted keys share."""
    words = jnp.concatenate([keys.words, jnp.asarray(spec.shared_words)[None]])
    return Keys(words, keys.narrow), None if mask is None else jnp.concatenate([mask, jnp.ones(1, bool)])


def changed(spec: TableSpec, version: jax.Array, since: jax.Array, keys: Keys, mask: jax.Array | None) -> jax.Array:
    """Whether keys may read otherwise than at the version `since`, ``(...)`` bool; false where the mask is."""
    if spec.placement is None:
        found = _ops.changed(spec, version, since, keys)[0]
        return found if mask is None else found & mask
    versions = jnp.stack([version, since])
    return _spread.over_keys(_changed_part, spec, "prefetch", versions, keys, mask)[0][0]


def _changed_part(spec: TableSpec, versions: Any, keys: Keys, mask: Any) -> Any:
    def answer(keys: Keys, mask: Any) -> Any:
        found, status = _ops.changed(spec, versions[0], versions[1], keys)
        return (found,), status

    answers, used = ask(spec, "prefetch", keys, mask, answer)
    return answers, (used,)


def inspect(spec: TableSpec, op: str, version: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Found ``(...)`` bool, frequency and version ``(..., 2)`` uint32, the words of int64."""
    if spec.placement is None:
        return _ops.inspect(spec, op, version, keys)[:3]
    (found, freq, written), _ = _spread.over_keys(_inspect_part, spec, op, version, keys, None, asked=op)
    return found, freq, written


def _inspect_part(spec: TableSpec, version: Any, keys: Keys, mask: Any, asked: str) -> Any:
    def answer(keys: Keys, mask: Any) -> Any:
        *answers, status = _ops.inspect(spec, asked, version, keys)
        return tuple(answers), status

    answers, used = ask(spec, asked, keys, mask, answer)
    return answers, (used,)


def read_slot(
    spec: TableSpec, slot: str, version: jax.Array, keys: Keys, dtype: Any, shape: Sequence[int]
) -> jax.Array:
    """The slot ``(..., *shape)``."""
    if spec.placement is None:
        return _ops.read_slot(spec, slot, version, keys, dtype, shape)[0]
    kind = {"slot": slot, "dtype": jnp.dtype(dtype), "shape": tuple(shape)}
    return _spread.over_keys(_slot_part, spec, "slot", version, keys, None, **kind)[0][0]


def _slot_part(spec: TableSpec, version: Any, keys: Keys, mask: Any, slot: str, dtype: Any, shape: Any) -> Any:
    def answer(keys: Keys, mask: Any) -> Any:
        values, status = _ops.read_slot(spec, slot, version, keys, dtype, shape)
        return (values,), status

    answers, used = ask(spec, "slot", keys, mask, answer)
    return answers, (used,)


# ---- writes: each returns the next version ---------------------------------------------------------------------
#
# A writer is a function (spec, op, phase, version, keys, mask, values, **options) of this module.


def write_keys(spec: TableSpec, op: str, version: jax.Array, keys: Keys, makes_rows: bool) -> jax.Array:
    """`makes_rows` says that keys without a row get their initial one."""
    return _write(_keys_writer, spec, op, version, keys, (), makes_rows=makes_rows)


def _keys_writer(spec, op, phase, version, keys, mask, values, makes_rows):
    initial = initial_rows(spec, version, keys, mask) if makes_rows else None
    return _ops.write_keys(spec, op, phase, version, keys, mask, initial)


def write_rows(
    spec: TableSpec, op: str, version: jax.Array, keys: Keys, rows: jax.Array, makes_rows: bool
) -> jax.Array:
    """rows: ``(..., dim)``."""
    return _write(_rows_writer, spec, op, version, keys, (rows,), makes_rows=makes_rows)


def _rows_writer(spec, op, phase, version, keys, mask, values, makes_rows):
    initial = initial_rows(spec, version, keys, mask) if makes_rows else None
    return _ops.write_rows(spec, op, phase, version, keys, mask, values[0], initial)


def accum(spec: TableSpec, version: jax.Array, keys: Keys, old: Any, new: Any, exists: Any) -> jax.Array:
    """old, new: ``(..., dim)``; exists: ``(...)`` bool."""
    return _write(_accum_writer, spec, "accum", version, keys, (old, new, exists))


def _accum_writer(spec, op, phase, version, keys, mask, values):
    return _ops.accum(spec, phase, version, keys, mask, *values)


def evict(spec: TableSpec, op: str, version: jax.Array, policy: str, step: jax.Array) -> jax.Array:
    """policy: its text; step: ``(2,)`` uint32."""
    return _write(_evict_writer, spec, op, version, None, (step,), policy=policy)


def _evict_writer(spec, op, phase, version, keys, mask, values, policy):
    return _ops.evict(spec, op, phase, version, policy, values[0])


def clear(spec: TableSpec, version: jax.Array, slots_only: bool) -> jax.Array:
    return _write(_clear_writer, spec, "clear_slots" if slots_only else "clear", version, None, ())


def _clear_writer(spec, op, phase, version, keys, mask, values):
    return _ops.clear(spec, phase, version, op == "clear_slots")


def _write(
    writer: Callable[..., jax.Array],
    spec: TableSpec,
    op: str,
    version: jax.Array,
    keys: Keys | None,
    values: Sequence[Any],
    **options: Any,
) -> jax.Array:
    """Runs a writer on the table, or on every shard with the keys it owns.

    values: arrays ``(..., ...)`` of the keys; without keys, arrays that all shards are told.
    """
    placement = spec.placement
    if placement is None:
        return writer(spec, op, "whole", version, keys, None, values, **options)
    if not _spread.inside(spec, op):
        return _write_everywhere(writer, spec, op, tuple(sorted(options.items())), version, keys, tuple(values))
    if keys is not None:
        keys, values = _flat(keys, values)
        keys, *values = _copies.gathered(placement, [keys, *values])
    alike = _copies.told_alike(spec, op, [keys, values])
    return _write_part(writer, spec, op, options, version, keys, values, alike)


def _flat(keys: Keys, values: Sequence[Any]) -> tuple[Keys, list[Any]]:
    """Keys ``(n,)`` and values ``(n, ...)`` of keys ``(...)`` and values ``(..., ...)``."""
    values = [jnp.asarray(x).reshape(keys.size, *x.shape[keys.ndim :]) for x in values]
    return Keys(keys.words.reshape(-1, 2), keys.narrow), values


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _write_everywhere(writer: Any, spec: TableSpec, op: str, options: Any, version: Any, keys: Any, values: Any) -> Any:
    narrow, placement = keys is not None and keys.narrow, spec.spread

    def run(version: Any, words: Any, *values: Any) -> Any:
        told: Sequence[Any] = values
        if words is not None:
            keys, told = _flat(Keys(words), values)
            words = keys.words

        def local(version: Any, sum_: Any, words: Any, *values: Any) -> Any:
            part = None if words is None else Keys(words, narrow)
            status = _copies.same_checksum(spec, op, sum_)
            return _write_part(writer, spec, op, dict(options), version, part, values, status)

        whole = PartitionSpec()
        operands = (version, _copies.checksum(placement, [words, *told]), words, *told)
        return (), (_spread.on_mesh(placement, local, [whole] * len(operands), whole, operands),)

    words = None if keys is None else keys.words
    return _spread.auto(spec, op, run, (), version, words, *values)[1][0]


def _write_part(
    writer: Any, spec: TableSpec, op: str, options: Any, version: Any, keys: Keys | None, values: Any, status: Any
) -> jax.Array:
    """status: ``()`` uint32, of what came before."""
    placement, mask = spec.spread, None
    if keys is not None and not placement.replicated:
        to = owners(placement, keys)
        mask, routed = _ops.owned(spec, placement.num_shards, keys, to, _spread.position(placement))
        status = jnp.maximum(status, routed)
    together = _needs_room(spec, op)
    planned = writer(spec, op, "propose" if together else "plan", version, keys, mask, values, **options)
    status = jnp.maximum(status, planned)
    number = prepare_proposed(spec, op, version, status) if together else _spread.agreed(status)
    (version,) = _ops.agree(spec, op, number, [varying_like(version, planned)], True)
    return settle(writer(spec, op, "commit", version, keys, mask, values, **options))


def _needs_room(spec: TableSpec, op: str) -> bool:
    """Whether what a shard does depends on how many rows the others have."""
    if spec.num_shards == 1:
        return False
    makes_rows = op in ("lookup_or_insert", "pin", "upsert", "add", "accum")
    return op in ("evict", "restrict") or (makes_rows and spec.max_capacity is not None)


def settle(version: jax.Array) -> jax.Array:
    """The next version, which is the same on all devices, as a value that JAX knows to be so."""
    return _spread.agreed(version) if varies(version) else version
