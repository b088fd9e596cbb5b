"""Writes to a table, one function per target; each returns the next version.

With phase "plan" a write changes nothing and returns 0 or the number of a failure, with "commit" it does what has been
planned. What is only proposed has to be prepared first (`kvjax._sharded.space`). Where the mask is false, keys are
passed over.
"""

from __future__ import annotations

import jax

from kvjax._keys.keys import Keys
from kvjax._ops.call import WORD, flag, initial_operand, mask_operand, write
from kvjax._spec.spec import TableSpec


def write_keys(
    spec: TableSpec,
    op: str,
    phase: str,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    initial: jax.Array | None = None,
) -> jax.Array:
    attributes = {"table": spec.name, "op": op, "phase": phase, "narrow": flag(keys.narrow)}
    operands = (version, keys.words, mask_operand(spec, mask), initial_operand(spec, initial))
    return write("kvjax_write_keys", WORD, *operands, **attributes)


def write_rows(
    spec: TableSpec,
    op: str,
    phase: str,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    rows: jax.Array,
    initial: jax.Array | None = None,
) -> jax.Array:
    attributes = {"table": spec.name, "op": op, "phase": phase, "narrow": flag(keys.narrow)}
    operands = (version, keys.words, mask_operand(spec, mask), rows, initial_operand(spec, initial))
    return write("kvjax_write_rows", WORD, *operands, **attributes)


def accum(
    spec: TableSpec,
    phase: str,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    old: jax.Array,
    new: jax.Array,
    exists: jax.Array,
) -> jax.Array:
    attributes = {"table": spec.name, "phase": phase, "narrow": flag(keys.narrow)}
    return write("kvjax_accum", WORD, version, keys.words, mask_operand(spec, mask), old, new, exists, **attributes)


def evict(spec: TableSpec, op: str, phase: str, version: jax.Array, policy: str, step: jax.Array) -> jax.Array:
    return write("kvjax_evict", WORD, version, step, table=spec.name, op=op, phase=phase, policy=policy)


def clear(spec: TableSpec, phase: str, version: jax.Array, slots_only: bool) -> jax.Array:
    return write("kvjax_clear", WORD, version, table=spec.name, phase=phase, slots_only=flag(slots_only))
