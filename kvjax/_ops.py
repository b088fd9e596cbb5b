"""One function per FFI target: shapes of the results, and nothing else.

Reads have no side effect, so that JAX may repeat, merge or drop them; writes are kept even if their result is not
used. Neither is ordered by that: what orders calls is the version operand. Under vmap a lookup takes its extra axes as
they are; ops on a whole batch run once per example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys import Keys
from kvjax._spec import TableSpec

if TYPE_CHECKING:
    from kvjax._sparse import SparseRows

_VERSION = jax.ShapeDtypeStruct((), jnp.uint32)


def _array(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def _read(target: str, results: Any, *operands: Any, vmap: str = "sequential", **attributes: Any) -> Any:
    return jax.ffi.ffi_call(target, results, vmap_method=vmap)(*operands, **attributes)


def _write(target: str, results: Any, *operands: Any, **attributes: Any) -> Any:
    return jax.ffi.ffi_call(target, results, has_side_effect=True)(*operands, **attributes)


def _flag(value: bool) -> np.bool_:
    return np.bool_(value)


# Operands that are left out go as arrays without elements, made by NumPy: an eager call has none to spare.


def _mask(mask: jax.Array | None) -> Any:
    return np.zeros(0, bool) if mask is None else mask


def _initial(spec: TableSpec, initial: jax.Array | None) -> Any:
    return np.zeros((0, spec.dim), spec.row_dtype) if initial is None else initial


def lookup(
    spec: TableSpec,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    initial: jax.Array | None,
    initial_rows: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows ``(..., dim)``, found ``(...)`` bool, and 1.0, which exists only once the rows have been read."""
    results = (
        _array((*keys.shape, spec.dim), spec.row_dtype),
        _array(keys.shape, jnp.bool_),
        _array((), jnp.float32),
    )
    attributes = {"table": spec.name, "narrow": _flag(keys.narrow), "initial_rows": _flag(initial_rows)}
    # Rows that come with the call belong to its keys as a whole.
    vmap = "sequential" if spec.generated else "broadcast_all"
    operands = (version, keys.words, _mask(mask), _initial(spec, initial))
    return _read("kvjax_lookup", results, *operands, vmap=vmap, **attributes)


def find_missing(
    spec: TableSpec, version: jax.Array, keys: Keys, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Words ``(n + 1, 2)`` of the distinct keys without a row, and how many of them are meant."""
    results = (_array((keys.size + 1, 2), jnp.uint32), _array((), jnp.int32))
    attributes = {"table": spec.name, "narrow": _flag(keys.narrow)}
    return _read("kvjax_find_missing", results, version, keys.words, _mask(mask), **attributes)


def inspect(spec: TableSpec, op: str, version: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Found ``(...)`` bool, frequency and version ``(..., 2)`` uint32, the words of int64."""
    words = _array((*keys.shape, 2), jnp.uint32)
    results = (_array(keys.shape, jnp.bool_), words, words)
    attributes = {"table": spec.name, "op": op, "narrow": _flag(keys.narrow)}
    return _read("kvjax_inspect", results, version, keys.words, vmap="expand_dims", **attributes)


def read_slot(
    spec: TableSpec, slot: str, version: jax.Array, keys: Keys, dtype: Any, shape: Sequence[int]
) -> jax.Array:
    result = _array((*keys.shape, *shape), dtype)
    attributes = {"table": spec.name, "slot": slot, "narrow": _flag(keys.narrow)}
    return _read("kvjax_read_slot", result, version, keys.words, vmap="expand_dims", **attributes)


def write_keys(spec: TableSpec, op: str, version: jax.Array, keys: Keys, initial: jax.Array | None = None) -> jax.Array:
    attributes = {"table": spec.name, "op": op, "narrow": _flag(keys.narrow)}
    return _write("kvjax_write_keys", _VERSION, version, keys.words, _initial(spec, initial), **attributes)


def write_rows(
    spec: TableSpec, op: str, version: jax.Array, keys: Keys, rows: jax.Array, initial: jax.Array | None = None
) -> jax.Array:
    attributes = {"table": spec.name, "op": op, "narrow": _flag(keys.narrow)}
    return _write("kvjax_write_rows", _VERSION, version, keys.words, rows, _initial(spec, initial), **attributes)


def accum(
    spec: TableSpec, version: jax.Array, keys: Keys, old: jax.Array, new: jax.Array, exists: jax.Array
) -> jax.Array:
    attributes = {"table": spec.name, "narrow": _flag(keys.narrow)}
    return _write("kvjax_accum", _VERSION, version, keys.words, old, new, exists, **attributes)


def evict(spec: TableSpec, op: str, version: jax.Array, policy: str, step: jax.Array) -> jax.Array:
    return _write("kvjax_evict", _VERSION, version, step, table=spec.name, op=op, policy=policy)


def clear(spec: TableSpec, version: jax.Array, slots_only: bool) -> jax.Array:
    return _write("kvjax_clear", _VERSION, version, table=spec.name, slots_only=_flag(slots_only))


def after(spec: TableSpec, version: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    return _read("kvjax_after", _VERSION, version, *values, table=spec.name)


def seal(spec: TableSpec, used: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    return _read("kvjax_seal", _VERSION, used, *values, table=spec.name)


def merge(keys: Keys, rows: jax.Array, counts: jax.Array, seals: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Key words ``(n, 2)``, rows ``(n, dim)`` float32 and counts ``(n,)`` int32, distinct keys first."""
    results = (
        _array(keys.words.shape, jnp.uint32),
        _array(rows.shape, jnp.float32),
        _array(counts.shape, jnp.int32),
    )
    return _read("kvjax_merge", results, keys.words, rows, counts, seals)


@dataclasses.dataclass(frozen=True)
class Begun:
    """What `begin_apply` has prepared.

    Attributes:
      version: ``()`` uint32, the next version.
      targets: ``(n, 2)`` uint32, for each row of the step its id and which gradient it gets.
      active: ``()`` int32, how many of them are meant.
      step: ``(2,)`` uint32, the words of the step that was counted.
      pooled: ``(dim,)`` float32, the gradient of the row that unadmitted keys share.
    """

    version: jax.Array
    targets: jax.Array
    active: jax.Array
    step: jax.Array
    pooled: jax.Array


def begin_apply(
    spec: TableSpec, version: jax.Array, grads: SparseRows, step: jax.Array, initial: jax.Array | None, slots: str
) -> Begun:
    n = grads.counts.shape[0]
    results = (
        _VERSION,
        _array((n, 2), jnp.uint32),
        _array((), jnp.int32),
        _array((2,), jnp.uint32),
        _array((spec.dim,), jnp.float32),
    )
    operands = (version, grads.keys.words, grads.counts, grads.seal, grads.rows, step, _initial(spec, initial))
    attributes = {"table": spec.name, "slots": slots, "narrow": _flag(grads.keys.narrow)}
    return Begun(*_write("kvjax_begin_apply", results, *operands, **attributes))


def gather(
    spec: TableSpec,
    version: jax.Array,
    begun: Begun,
    rows: jax.Array,
    start: jax.Array,
    chunk: int,
    slots: str,
    slot_types: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, ...]:
    """Values and gradients ``(chunk, dim)``, fresh ``(chunk,)`` bool, then one array per slot."""
    results = (
        _array((chunk, spec.dim), spec.row_dtype),
        _array((chunk, spec.dim), jnp.float32),
        _array((chunk,), jnp.bool_),
        *(_array((chunk, *slot.shape), slot.dtype) for slot in slot_types),
    )
    operands = (version, begun.targets, rows, begun.pooled, start, begun.active)
    return _write("kvjax_gather", results, *operands, table=spec.name, slots=slots)


def scatter(
    spec: TableSpec,
    version: jax.Array,
    begun: Begun,
    start: jax.Array,
    values: jax.Array,
    slots: str,
    slot_arrays: Sequence[jax.Array],
) -> jax.Array:
    """Writes the chunk back and hands the version through."""
    operands = (version, begun.targets, start, begun.active, values, *slot_arrays)
    return _write("kvjax_scatter", _VERSION, *operands, table=spec.name, slots=slots)


def bag_sum(bags: int, ids: jax.Array, weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Bags ``(bags, dim)``: weighted sums of rows ``(n, dim)``; ids ``(n,)`` int32 outside the bags are padding."""
    return _read("kvjax_bag_sum", _array((bags, rows.shape[1]), jnp.float32), ids, weights, rows)


def bag_spread(ids: jax.Array, weights: jax.Array, bags: jax.Array) -> jax.Array:
    """Rows ``(n, dim)``: the bag of each, times its weight."""
    return _read("kvjax_bag_spread", _array((ids.shape[0], bags.shape[1]), jnp.float32), ids, weights, bags)


def bag_dot(ids: jax.Array, rows: jax.Array, bags: jax.Array) -> jax.Array:
    """Weights ``(n,)``: the inner product of each row and its bag."""
    return _read("kvjax_bag_dot", _array(ids.shape, jnp.float32), ids, rows, bags)


def bag_max(bags: int, ids: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bags ``(bags, dim)``, the largest of each column, and the positions ``(bags, dim)`` int32 they come from."""
    shape = (bags, rows.shape[1])
    return _read("kvjax_bag_max", (_array(shape, jnp.float32), _array(shape, jnp.int32)), ids, rows)


def bag_place(ids: jax.Array, positions: jax.Array, bags: jax.Array) -> jax.Array:
    """Rows ``(n, dim)``: the elements of the bags at their positions, 0 elsewhere."""
    return _read("kvjax_bag_place", _array((ids.shape[0], bags.shape[1]), jnp.float32), ids, positions, bags)


def bag_ids(name: str, lengths: jax.Array, n: int) -> jax.Array:
    """Ids ``(n,)`` int32 of bags that stand one after the other, then -1; refuses lengths that do not fit."""
    return _read("kvjax_bag_ids", _array((n,), jnp.int32), lengths, table=name)
