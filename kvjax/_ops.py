"""One function per FFI target: shapes of the results, and nothing else.

Reads have no side effect, so that JAX may repeat, merge or drop them; writes are kept even if their result is not
used. Neither is ordered by that: what orders calls is the version operand. Under vmap a lookup takes its extra axes as
they are; ops on a whole batch run once per example.
"""

from __future__ import annotations

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


def lookup(spec: TableSpec, version: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows ``(..., dim)``, found ``(...)`` bool, and 1.0, which exists only once the rows have been read."""
    results = (
        _array((*keys.shape, spec.dim), spec.row_dtype),
        _array(keys.shape, jnp.bool_),
        _array((), jnp.float32),
    )
    attributes = {"table": spec.name, "narrow": _flag(keys.narrow)}
    return _read("kvjax_lookup", results, version, keys.words, vmap="expand_dims", **attributes)


def inspect(spec: TableSpec, op: str, version: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Found ``(...)`` bool, frequency and version ``(..., 2)`` uint32, the words of int64."""
    words = _array((*keys.shape, 2), jnp.uint32)
    results = (_array(keys.shape, jnp.bool_), words, words)
    attributes = {"table": spec.name, "op": op, "narrow": _flag(keys.narrow)}
    return _read("kvjax_inspect", results, version, keys.words, vmap="expand_dims", **attributes)


def insert(spec: TableSpec, version: jax.Array, keys: Keys) -> jax.Array:
    return _write("kvjax_insert", _VERSION, version, keys.words, table=spec.name, narrow=_flag(keys.narrow))


def remove(spec: TableSpec, version: jax.Array, keys: Keys) -> jax.Array:
    return _write("kvjax_remove", _VERSION, version, keys.words, table=spec.name, narrow=_flag(keys.narrow))


def upsert(spec: TableSpec, version: jax.Array, keys: Keys, values: jax.Array) -> jax.Array:
    return _write("kvjax_upsert", _VERSION, version, keys.words, values, table=spec.name, narrow=_flag(keys.narrow))


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


def begin_apply(
    spec: TableSpec, version: jax.Array, grads: SparseRows, step: jax.Array, slots: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next version, row ids ``(n,)`` uint32, and how many of them are meant."""
    results = (_VERSION, _array(grads.counts.shape, jnp.uint32), _array((), jnp.int32))
    operands = (version, grads.keys.words, grads.counts, grads.seal, step)
    attributes = {"table": spec.name, "slots": slots, "narrow": _flag(grads.keys.narrow)}
    return _write("kvjax_begin_apply", results, *operands, **attributes)


def gather(
    spec: TableSpec,
    version: jax.Array,
    chunk: int,
    row_ids: jax.Array,
    rows: jax.Array,
    start: jax.Array,
    active: jax.Array,
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
    operands = (version, row_ids, rows, start, active)
    return _write("kvjax_gather", results, *operands, table=spec.name, slots=slots)


def scatter(
    spec: TableSpec,
    version: jax.Array,
    row_ids: jax.Array,
    start: jax.Array,
    active: jax.Array,
    values: jax.Array,
    slots: str,
    slot_arrays: Sequence[jax.Array],
) -> jax.Array:
    """Writes the chunk back and hands the version through."""
    operands = (version, row_ids, start, active, values, *slot_arrays)
    return _write("kvjax_scatter", _VERSION, *operands, table=spec.name, slots=slots)
