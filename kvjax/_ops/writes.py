"""Writes to a table, one function per target; each returns the next version.

With phase "plan" a write changes nothing and returns 0 or the number of a failure, with "commit" it does what has been
planned. What is only proposed has to be prepared first (`kvjax._sharded.space`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax._keys.keys import Keys
from kvjax._ops.call import WORD, array, flag, initial_operand, mask_operand, write, write_numbered
from kvjax._spec.spec import TableSpec


class Batch(NamedTuple):
    """What a write brings.

    Attributes:
      keys: ``(...)``, or None for a write that is about all rows.
      mask: ``(...)`` bool, false for keys that are passed over, or None.
      values: arrays ``(..., ...)`` of the keys; without keys, of any shape.
      initial: ``(m, dim)`` initial rows of new keys, where the call has to bring them, or None.
    """

    keys: Keys | None
    mask: jax.Array | None
    values: Sequence[Any]
    initial: jax.Array | None

    def operands(self, spec: TableSpec) -> tuple[Any, Any]:
        """Key words and mask."""
        assert self.keys is not None
        return self.keys.words, mask_operand(spec, self.mask)

    def attributes(self, spec: TableSpec, phase: str) -> dict[str, Any]:
        assert self.keys is not None
        return {"table": spec.name, "phase": phase, "narrow": flag(self.keys.narrow)}


def write_keys(spec: TableSpec, op: str, phase: str, version: jax.Array, batch: Batch) -> jax.Array:
    operands = (version, *batch.operands(spec), initial_operand(spec, batch.initial))
    return write(op, "kvjax_write_keys", WORD, *operands, op=op, **batch.attributes(spec, phase))


def write_rows(spec: TableSpec, op: str, phase: str, version: jax.Array, batch: Batch) -> jax.Array:
    """values: rows ``(..., dim)``."""
    operands = (version, *batch.operands(spec), *batch.values, initial_operand(spec, batch.initial))
    return write(op, "kvjax_write_rows", WORD, *operands, op=op, **batch.attributes(spec, phase))


def accum(spec: TableSpec, op: str, phase: str, version: jax.Array, batch: Batch) -> jax.Array:
    """values: old and new rows ``(..., dim)``, and exists ``(...)`` bool."""
    operands = (version, *batch.operands(spec), *batch.values)
    return write(op, "kvjax_accum", WORD, *operands, **batch.attributes(spec, phase))


def evict(spec: TableSpec, op: str, phase: str, version: jax.Array, batch: Batch, policy: str) -> jax.Array:
    """values: the step ``(2,)`` uint32. policy: its text."""
    return _evict(spec, op, phase, version, batch, policy, WORD, dry_run=False)


def count_victims(
    spec: TableSpec, op: str, phase: str, version: jax.Array, batch: Batch, policy: str, parts: int
) -> jax.Array:
    """A dry run of `evict`, which makes no version.

    Returns:
      How many rows each part of the policy chooses, ``(parts,)`` uint32.
    """
    if phase in ("plan", "propose"):
        return _evict(spec, op, phase, version, batch, policy, WORD, dry_run=True)
    results = WORD, array((parts,), jnp.uint32)
    return _evict(spec, op, phase, version, batch, policy, results, dry_run=True)[1]


def _evict(
    spec: TableSpec, op: str, phase: str, version: jax.Array, batch: Batch, policy: str, results: Any, dry_run: bool
) -> Any:
    attributes = {"table": spec.name, "op": op, "phase": phase, "policy": policy, "dry_run": flag(dry_run)}
    return write_numbered(op, "kvjax_evict", results, version, *batch.values, **attributes)


def clear(spec: TableSpec, op: str, phase: str, version: jax.Array, batch: Batch) -> jax.Array:
    """op: "clear" or "clear_slots"."""
    slots_only = flag(op == "clear_slots")
    return write(op, "kvjax_clear", WORD, version, table=spec.name, phase=phase, slots_only=slots_only)
