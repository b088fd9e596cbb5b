"""Writes to a table, wherever its rows are: in one place, or sharded over the devices of a mesh. Each returns the next
version.

A write goes to all shards, each of which does its own keys, in the order in which they stand in the whole batch;
training has a way of its own (`kvjax._training.apply`). No shard does anything before all have planned it, so that a
failure of one is one of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax._keys.keys import Keys
from kvjax._ops import routing, writes
from kvjax._ops.initial_rows import initial_rows
from kvjax._ops.operations import OPERATIONS
from kvjax._sharded import copies, mesh
from kvjax._sharded.exchange import owners
from kvjax._sharded.space import prepare_proposed
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import varies, varying_like

# A writer is a function (spec, op, phase, version, keys, mask, values, **options) of this module.


def write_keys(spec: TableSpec, op: str, version: jax.Array, keys: Keys) -> jax.Array:
    return _write(_keys_writer, spec, op, version, keys, ())


def _keys_writer(
    spec: TableSpec, op: str, phase: str, version: jax.Array, keys: Any, mask: Any, values: Sequence[Any]
) -> jax.Array:
    initial = initial_rows(spec, version, keys, mask) if OPERATIONS[op].needs_initial else None
    return writes.write_keys(spec, op, phase, version, keys, mask, initial)


def write_rows(spec: TableSpec, op: str, version: jax.Array, keys: Keys, rows: jax.Array) -> jax.Array:
    """rows: ``(..., dim)``."""
    return _write(_rows_writer, spec, op, version, keys, (rows,))


def _rows_writer(
    spec: TableSpec, op: str, phase: str, version: jax.Array, keys: Any, mask: Any, values: Sequence[Any]
) -> jax.Array:
    initial = initial_rows(spec, version, keys, mask) if OPERATIONS[op].needs_initial else None
    return writes.write_rows(spec, op, phase, version, keys, mask, values[0], initial)


def accum(spec: TableSpec, version: jax.Array, keys: Keys, old: Any, new: Any, exists: Any) -> jax.Array:
    """old, new: ``(..., dim)``; exists: ``(...)`` bool."""
    return _write(_accum_writer, spec, "accum", version, keys, (old, new, exists))


def _accum_writer(
    spec: TableSpec, op: str, phase: str, version: jax.Array, keys: Any, mask: Any, values: Sequence[Any]
) -> jax.Array:
    return writes.accum(spec, phase, version, keys, mask, *values)


def evict(spec: TableSpec, op: str, version: jax.Array, policy: str, step: jax.Array) -> jax.Array:
    """policy: its text; step: ``(2,)`` uint32."""
    return _write(_evict_writer, spec, op, version, None, (step,), policy=policy)


def _evict_writer(
    spec: TableSpec, op: str, phase: str, version: jax.Array, keys: Any, mask: Any, values: Sequence[Any], policy: str
) -> jax.Array:
    return writes.evict(spec, op, phase, version, policy, values[0])


def clear(spec: TableSpec, version: jax.Array, slots_only: bool) -> jax.Array:
    return _write(_clear_writer, spec, "clear_slots" if slots_only else "clear", version, None, ())


def _clear_writer(
    spec: TableSpec, op: str, phase: str, version: jax.Array, keys: Any, mask: Any, values: Sequence[Any]
) -> jax.Array:
    return writes.clear(spec, phase, version, op == "clear_slots")


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

    values: arrays ``(..., ...)`` of the keys; without keys, arrays that all shards get.
    """
    placement = spec.placement
    if placement is None:
        return writer(spec, op, "whole", version, keys, None, values, **options)
    if not mesh.inside(spec, op):
        return _write_everywhere(writer, spec, op, tuple(sorted(options.items())), version, keys, tuple(values))
    if keys is not None:
        keys, values = _flat(keys, values)
        keys, *values = copies.all_pieces(placement, [keys, *values])
    status = copies.check_copies(spec, op, [keys, values])
    return _write_part(writer, spec, op, options, version, keys, values, status)


def _flat(keys: Keys, values: Sequence[Any]) -> tuple[Keys, list[Any]]:
    """Keys ``(n,)`` and values ``(n, ...)`` of keys ``(...)`` and values ``(..., ...)``."""
    values = [jnp.asarray(x).reshape(keys.size, *x.shape[keys.ndim :]) for x in values]
    return Keys(keys.words.reshape(-1, 2), keys.narrow), values


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _write_everywhere(writer: Any, spec: TableSpec, op: str, options: Any, version: Any, keys: Any, values: Any) -> Any:
    narrow, placement = keys is not None and keys.narrow, spec.sharded

    def run(version: Any, words: Any, *values: Any) -> Any:
        flat: Sequence[Any] = values
        if words is not None:
            keys, flat = _flat(Keys(words), values)
            words = keys.words

        def local(version: Any, sum_: Any, words: Any, *values: Any) -> Any:
            part = None if words is None else Keys(words, narrow)
            status = copies.check_processes(spec, op, sum_)
            return _write_part(writer, spec, op, dict(options), version, part, values, status)

        whole = PartitionSpec()
        operands = (version, copies.checksum(placement, [words, *flat]), words, *flat)
        return (), (mesh.on_mesh(placement, local, [whole] * len(operands), whole, operands),)

    words = None if keys is None else keys.words
    return mesh.auto(spec, op, run, (), version, words, *values)[1][0]


def _write_part(
    writer: Any, spec: TableSpec, op: str, options: Any, version: Any, keys: Keys | None, values: Any, status: Any
) -> jax.Array:
    """status: ``()`` uint32, of what came before."""
    placement, mask = spec.sharded, None
    if keys is not None and not placement.replicated:
        to = owners(placement, keys)
        mask, routed = routing.owned(spec, placement.num_shards, keys, to, mesh.position(placement))
        status = jnp.maximum(status, routed)
    together = _makes_space(spec, op)
    planned = writer(spec, op, "propose" if together else "plan", version, keys, mask, values, **options)
    status = jnp.maximum(status, planned)
    number = prepare_proposed(spec, op, version, status) if together else mesh.agreed(status)
    (version,) = routing.agree(spec, op, number, [varying_like(version, planned)], True)
    return settle(writer(spec, op, "commit", version, keys, mask, values, **options))


def _makes_space(spec: TableSpec, op: str) -> bool:
    """Whether what a shard does depends on how many rows the others have."""
    if spec.num_shards == 1:
        return False
    operation = OPERATIONS[op]
    return operation.evicts or (operation.makes_rows and spec.max_capacity is not None)


def settle(version: jax.Array) -> jax.Array:
    """The next version, which is the same on all devices, as a value that JAX knows to be so."""
    return mesh.agreed(version) if varies(version) else version
