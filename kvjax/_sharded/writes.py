"""Writes to a table, wherever its rows are: in one place, or sharded over the devices of a mesh. Each returns the next
version.

A write goes to all shards, each of which does its own keys, in the order in which they stand in the whole batch;
training has a way of its own (`kvjax._training.apply`). No shard does anything before all have planned it, so that a
failure of one is one of all. On a mesh of one device a write is one call, as in one place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kvjax._keys.keys import Keys
from kvjax._ops import routing, writes
from kvjax._ops.initial_rows import initial_rows
from kvjax._ops.operations import OPERATIONS
from kvjax._ops.programs import recent_programs
from kvjax._ops.writes import Batch
from kvjax._process import PROCESS
from kvjax._sharded import copies, equality, mesh
from kvjax._sharded.collectives import agreed, position
from kvjax._sharded.exchange import owners
from kvjax._sharded.space import prepare_proposed
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import varies, varying_like
from kvjax.ffi import host

Writer = Callable[..., jax.Array]
"""A function of `kvjax._ops.writes`: (spec, op, phase, version, batch, **options)."""


def write_keys(spec: TableSpec, op: str, version: jax.Array, keys: Keys) -> jax.Array:
    return _write(writes.write_keys, spec, op, version, keys, ())


def write_rows(spec: TableSpec, op: str, version: jax.Array, keys: Keys, rows: jax.Array) -> jax.Array:
    """rows: ``(..., dim)``."""
    return _write(writes.write_rows, spec, op, version, keys, (rows,))


def accum(spec: TableSpec, version: jax.Array, keys: Keys, old: Any, new: Any, exists: Any) -> jax.Array:
    """old, new: ``(..., dim)``; exists: ``(...)`` bool."""
    return _write(writes.accum, spec, "accum", version, keys, (old, new, exists))


def evict(spec: TableSpec, op: str, version: jax.Array, policy: str, step: jax.Array) -> jax.Array:
    """policy: its text; step: ``(2,)`` uint32."""
    return _write(writes.evict, spec, op, version, None, (step,), policy=policy)


def count_victims(spec: TableSpec, op: str, version: jax.Array, policy: str, parts: int, step: jax.Array) -> jax.Array:
    """How many rows of all shards each part of the policy would choose, ``(parts,)`` uint32; the version stays."""
    return _write(_count_victims, spec, op, version, None, (step,), policy=policy, parts=parts)


def _count_victims(spec: TableSpec, op: str, phase: str, version: jax.Array, batch: Batch, **options: Any) -> jax.Array:
    counts = writes.count_victims(spec, op, phase, version, batch, **options)
    return jax.lax.psum(counts, spec.mesh_placement.axes) if phase == "commit" and spec.num_shards > 1 else counts


def clear(spec: TableSpec, version: jax.Array, op: str) -> jax.Array:
    """op: "clear" or "clear_slots"."""
    return _write(writes.clear, spec, op, version, None, ())


def _batch(
    spec: TableSpec, op: str, version: jax.Array, keys: Keys | None, mask: jax.Array | None, values: Sequence[Any]
) -> Batch:
    if keys is None or not OPERATIONS[op].needs_initial:
        return Batch(keys, mask, values, None)
    return Batch(keys, mask, values, initial_rows(spec, version, keys, mask))


@PROCESS.blaming()
def _write(
    writer: Writer,
    spec: TableSpec,
    op: str,
    version: jax.Array,
    keys: Keys | None,
    values: Sequence[Any],
    **options: Any,
) -> jax.Array:
    """Runs a writer on the table, or on every shard with the keys it owns.

    values: arrays ``(..., ...)`` of the keys; without keys, arrays that all shards get. options: of the writer, with
    numbers of the user's in them.
    """
    placement = spec.placement
    if placement is None:
        return writer(spec, op, "whole", version, _batch(spec, op, version, keys, None, values), **options)
    if not mesh.inside(spec, op):
        everywhere = _numbered_everywhere if options else _everywhere
        return everywhere((writer, spec, op, tuple(options.items())), version, keys, tuple(values))
    if keys is not None:
        keys, values = _flat(keys, values)
        keys, *values = copies.all_pieces(placement, [keys, *values])
    status = copies.check_copies(spec, op, [keys, values])
    return _write_part(writer, spec, op, options, version, keys, values, status)


def _flat(keys: Keys, values: Sequence[Any]) -> tuple[Keys, list[Any]]:
    """Keys ``(n,)`` and values ``(n, ...)`` of keys ``(...)`` and values ``(..., ...)``."""
    values = [jnp.asarray(x).reshape(keys.size, *x.shape[keys.ndim :]) for x in values]
    return Keys(keys.words.reshape(-1, 2), keys.narrow), values


def _write_everywhere(static: Any, version: Any, keys: Any, values: Any) -> Any:
    """static: writer, spec, op, and options of the writer by name."""
    writer, spec, op, options = static
    narrow, placement = keys is not None and keys.narrow, spec.mesh_placement

    def run(version: Any, words: Any, *values: Any) -> Any:
        flat: Sequence[Any] = values
        if words is not None:
            keys, flat = _flat(Keys(words), values)
            words = keys.words

        def local(version: Any, sum_: Any, words: Any, *values: Any) -> Any:
            part = None if words is None else Keys(words, narrow)
            status = equality.check_processes(spec, op, sum_)
            return _write_part(writer, spec, op, dict(options), version, part, values, status)

        whole = PartitionSpec()
        sum_ = equality.checksum(placement, [words, *flat, _number_of(spec, op, options)])
        operands = (version, sum_, words, *flat)
        return (), (mesh.on_mesh(placement, local, [whole] * len(operands), whole, operands),)

    words = None if keys is None else keys.words
    return mesh.auto(spec, op, run, (), version, words, *values)[1][0]


def _number_of(spec: TableSpec, op: str, options: Any) -> np.uint32:
    """A number of a call without its arrays, ``()`` uint32, the same in all processes that make the same call."""
    said = _OF_PROCESS.sub("", json.dumps([spec.name, op, options]))
    return np.uint32(host.digest(np.frombuffer(said.encode(), np.uint8)) & 0xFFFFFFFF)


_OF_PROCESS = re.compile(r" at 0x[0-9a-f]+|#[0-9]+")
"""What a policy's text says of a function of the user's by which it differs between processes."""

_everywhere, _numbered_everywhere = jax.jit(_write_everywhere, static_argnums=0), recent_programs(_write_everywhere)


def _write_part(
    writer: Any, spec: TableSpec, op: str, options: Any, version: Any, keys: Keys | None, values: Any, status: Any
) -> jax.Array:
    """status: ``()`` uint32, of what came before."""
    placement, mask = spec.mesh_placement, None
    if keys is not None and not placement.replicated:
        to = owners(placement, keys)
        mask, routed = routing.owned(spec, placement.num_shards, keys, to, position(placement))
        status = jnp.maximum(status, routed)
    batch = _batch(spec, op, version, keys, mask, values)
    if placement.alone:
        (version,) = routing.agree(spec, op, agreed(status), [varying_like(version, status)])
        return settle(writer(spec, op, "whole", version, batch, **options))
    together = _makes_space(spec, op)
    planned = writer(spec, op, "propose" if together else "plan", version, batch, **options)
    status = jnp.maximum(status, planned)
    number = prepare_proposed(spec, op, version, status) if together else agreed(status)
    (version,) = routing.agree(spec, op, number, [varying_like(version, planned)])
    return settle(writer(spec, op, "commit", version, _batch(spec, op, version, keys, mask, values), **options))


def _makes_space(spec: TableSpec, op: str) -> bool:
    """Whether what a shard does depends on how many rows the others have."""
    if spec.num_shards == 1:
        return False
    operation = OPERATIONS[op]
    return operation.evicts or (operation.makes_rows and spec.max_capacity is not None)


def settle(result: jax.Array) -> jax.Array:
    """What a write gives, as the next version, which is the same on all devices, as a value that JAX knows to be so."""
    return agreed(result) if varies(result) else result
