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

from kvjax import _spread
from kvjax._keys import Keys
from kvjax._spec import TableSpec
from kvjax._varying import varying_like

if TYPE_CHECKING:
    from kvjax._sparse import SparseRows

_VERSION = jax.ShapeDtypeStruct((), jnp.uint32)


def array(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def read(target: str, results: Any, *operands: Any, vmap: str = "sequential", **attributes: Any) -> Any:
    call = jax.ffi.ffi_call(target, results, vmap_method=vmap)
    return varying_like(call(*operands, **attributes), *operands)


def _write(target: str, results: Any, *operands: Any, **attributes: Any) -> Any:
    call = jax.ffi.ffi_call(target, results, has_side_effect=True)
    return varying_like(call(*operands, **attributes), *operands)


def _flag(value: bool) -> np.bool_:
    return np.bool_(value)


def nothing(spec: TableSpec, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array without elements, for an operand that is left out."""
    # By NumPy, an eager call has no time to spare; but as a constant it would enter the shard_map of a spread table as
    # an operand, and XLA of jax 0.11 crashes on those without elements.
    return np.zeros(shape, dtype) if spec.placement is None else jnp.zeros(shape, dtype)


def _mask(spec: TableSpec, mask: jax.Array | None) -> Any:
    return nothing(spec, (0,), bool) if mask is None else mask


def _initial(spec: TableSpec, initial: jax.Array | None) -> Any:
    return nothing(spec, (0, spec.dim), spec.row_dtype) if initial is None else initial


# The last result of every read, `status` () uint32, is 0, or on a spread table the number of its failure.


def _about(spec: TableSpec, keys: Keys) -> dict[str, Any]:
    return {"table": spec.name, "narrow": _flag(keys.narrow), "sharded": _flag(spec.placement is not None)}


def lookup(
    spec: TableSpec,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    initial: jax.Array | None,
    initial_rows: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows ``(..., dim)``, found ``(...)`` bool, 1.0, which exists only once the rows have been read, and status."""
    results = (
        array((*keys.shape, spec.dim), spec.row_dtype),
        array(keys.shape, jnp.bool_),
        array((), jnp.float32),
        _VERSION,
    )
    attributes = _about(spec, keys) | {"initial_rows": _flag(initial_rows)}
    # Rows that come with the call belong to its keys as a whole.
    vmap = "sequential" if spec.generated else "broadcast_all"
    operands = (version, keys.words, _mask(spec, mask), _initial(spec, initial))
    return read("kvjax_lookup", results, *operands, vmap=vmap, **attributes)


def find_missing(
    spec: TableSpec, version: jax.Array, keys: Keys, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Words ``(n + 1, 2)`` of the distinct keys without a row, and how many of them are meant."""
    results = (array((keys.size + 1, 2), jnp.uint32), array((), jnp.int32), _VERSION)
    operands = (version, keys.words, _mask(spec, mask))
    words, count, status = read("kvjax_find_missing", results, *operands, **_about(spec, keys))
    # After a failure the count means nothing; the op that wants the rows fails too, and says so.
    return words, jnp.where(status == 0, count, 0) if spec.placement else count


def inspect(
    spec: TableSpec, op: str, version: jax.Array, keys: Keys
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Found ``(...)`` bool, frequency and version ``(..., 2)`` uint32, the words of int64, and status."""
    words = array((*keys.shape, 2), jnp.uint32)
    results = (array(keys.shape, jnp.bool_), words, words, _VERSION)
    attributes = _about(spec, keys) | {"op": op}
    return read("kvjax_inspect", results, version, keys.words, vmap="expand_dims", **attributes)


def read_slot(
    spec: TableSpec, slot: str, version: jax.Array, keys: Keys, dtype: Any, shape: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """The slot ``(..., *shape)``, and status."""
    results = (array((*keys.shape, *shape), dtype), _VERSION)
    attributes = _about(spec, keys) | {"slot": slot}
    return read("kvjax_read_slot", results, version, keys.words, vmap="expand_dims", **attributes)


def changed(spec: TableSpec, version: jax.Array, since: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array]:
    """Whether keys may read otherwise than at the version `since`, ``(...)`` bool; and status."""
    results = (array(keys.shape, jnp.bool_), _VERSION)
    return read("kvjax_changed", results, version, since, keys.words, vmap="expand_dims", **_about(spec, keys))


# Writes return the next version; with phase "plan" they change nothing and return 0 or the number of a failure, with
# "commit" they do what has been planned. What is only proposed has to be prepared first (`kvjax._room`). Where the
# mask is false, keys are passed over.


def write_keys(
    spec: TableSpec,
    op: str,
    phase: str,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    initial: jax.Array | None = None,
) -> jax.Array:
    attributes = {"table": spec.name, "op": op, "phase": phase, "narrow": _flag(keys.narrow)}
    operands = (version, keys.words, _mask(spec, mask), _initial(spec, initial))
    return _write("kvjax_write_keys", _VERSION, *operands, **attributes)


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
    attributes = {"table": spec.name, "op": op, "phase": phase, "narrow": _flag(keys.narrow)}
    operands = (version, keys.words, _mask(spec, mask), rows, _initial(spec, initial))
    return _write("kvjax_write_rows", _VERSION, *operands, **attributes)


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
    attributes = {"table": spec.name, "phase": phase, "narrow": _flag(keys.narrow)}
    return _write("kvjax_accum", _VERSION, version, keys.words, _mask(spec, mask), old, new, exists, **attributes)


def evict(spec: TableSpec, op: str, phase: str, version: jax.Array, policy: str, step: jax.Array) -> jax.Array:
    return _write("kvjax_evict", _VERSION, version, step, table=spec.name, op=op, phase=phase, policy=policy)


def clear(spec: TableSpec, phase: str, version: jax.Array, slots_only: bool) -> jax.Array:
    return _write("kvjax_clear", _VERSION, version, table=spec.name, phase=phase, slots_only=_flag(slots_only))


# A call over several devices would get each operand whole, on all of them, so on a spread table these two wait for one
# element of each. That is all devices' doing: rows that were read exist nowhere before all shards have answered.


def after(spec: TableSpec, version: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    return read("kvjax_after", _VERSION, version, *_spread.elements(spec, values), table=spec.name)


def seal(spec: TableSpec, used: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    # The same on all devices, whatever it waits for.
    call = jax.ffi.ffi_call("kvjax_seal", _VERSION, vmap_method="sequential")
    return call(used, *_spread.elements(spec, values), table=spec.name)


def merge(keys: Keys, rows: jax.Array, counts: jax.Array, seals: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Key words ``(n, 2)``, rows ``(n, dim)`` float32 and counts ``(n,)`` int32, distinct keys first."""
    results = (
        array(keys.words.shape, jnp.uint32),
        array(rows.shape, jnp.float32),
        array(counts.shape, jnp.int32),
    )
    return read("kvjax_merge", results, keys.words, rows, counts, seals)


@dataclasses.dataclass(frozen=True)
class Begun:
    """A training step that has made its rows. On a shard of a spread table all but the first two are empty.

    Attributes:
      version: ``()`` uint32, the next version.
      active: ``()`` int32, the rows of the step.
      step: ``(2,)`` uint32, the words of the step that was counted.
      targets: ``(n, 2)`` uint32, for each row of the step its id and which gradient it gets.
      keys: ``(n, 2)`` uint32 of the gradients.
      rows: ``(n, dim)`` float32, the gradients.
      pooled: ``(dim,)`` float32, the gradient of the row that unadmitted keys share.
    """

    version: jax.Array
    active: jax.Array
    step: jax.Array
    targets: Any
    keys: Any
    rows: Any
    pooled: Any


def begin_apply(
    spec: TableSpec, version: jax.Array, grads: SparseRows, step: jax.Array, initial: jax.Array | None, slots: str
) -> Begun:
    n = grads.counts.shape[0]
    results = (
        _VERSION,
        array((n, 2), jnp.uint32),
        array((), jnp.int32),
        array((2,), jnp.uint32),
        array((spec.dim,), jnp.float32),
    )
    operands = (version, grads.keys.words, grads.counts, grads.seal, grads.rows, step, _initial(spec, initial))
    attributes = {"table": spec.name, "slots": slots, "narrow": _flag(grads.keys.narrow)}
    version, targets, active, used, pooled = _write("kvjax_begin_apply", results, *operands, **attributes)
    return Begun(version, active, used, targets, grads.keys.words, grads.rows, pooled)


def gather(
    spec: TableSpec,
    version: jax.Array,
    begun: Begun,
    start: jax.Array,
    chunk: int,
    slots: str,
    slot_types: Sequence[jax.ShapeDtypeStruct],
    gradients: bool = True,
) -> tuple[jax.Array, ...]:
    """Values and gradients ``(chunk, dim)``, fresh ``(chunk,)`` bool, keys ``(chunk, 2)``, then one array per slot.

    Without `gradients` these are ``(0, dim)``.
    """
    results = (
        array((chunk, spec.dim), spec.row_dtype),
        array((chunk if gradients else 0, spec.dim), jnp.float32),
        array((chunk,), jnp.bool_),
        array((chunk, 2), jnp.uint32),
        *(array((chunk, *slot.shape), slot.dtype) for slot in slot_types),
    )
    operands = (version, begun.targets, begun.keys, begun.rows, begun.pooled, start, begun.active)
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


# ---- tables that are spread over devices: one device's part ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Routed:
    """A batch of one device, sorted by the shards that own its keys.

    Attributes:
      words: ``(n, 2)`` uint32, the distinct keys by owner.
      order: ``(n,)`` int32, where each of them first occurs in the batch.
      starts: ``(num_shards + 1,)`` int32, where the keys of each owner begin.
      slot: ``(n,)`` int32, for each key of the batch owner * room + its place in the round.
      round: ``(n,)`` int32, the round in which it travels; -1 where the mask is false.
      status: ``()`` uint32.
    """

    words: jax.Array
    order: jax.Array
    starts: jax.Array
    slot: jax.Array
    round: jax.Array
    status: jax.Array


def route(
    spec: TableSpec, shards: int, room: int, keys: Keys, mask: jax.Array | None, owners: Any, shard: jax.Array
) -> Routed:
    n = keys.size
    ints = array((n,), jnp.int32)
    results = (array((n, 2), jnp.uint32), ints, array((shards + 1,), jnp.int32), ints, ints, _VERSION)
    operands = (keys.words, _mask(spec, mask), owners, shard)
    attributes = {"table": spec.name, "shards": np.int64(shards), "round_capacity": np.int64(room)}
    return Routed(*read("kvjax_route", results, *operands, **attributes))


def owned(spec: TableSpec, shards: int, keys: Keys, owners: Any, shard: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which keys the shard owns ``(n,)`` bool, and status."""
    results = (array((keys.size,), jnp.bool_), _VERSION)
    return read("kvjax_owned", results, keys.words, owners, shard, table=spec.name, shards=np.int64(shards))


def alike(spec: TableSpec, op: str, low: jax.Array, high: jax.Array) -> jax.Array:
    """Status: that of a failure unless the smallest and the largest sum are one."""
    return read("kvjax_check_same", _VERSION, low, high, table=spec.name, op=op)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a call moves between devices, to be counted.

    Attributes:
      rounds: ``()`` int32.
      starts: of `Routed`; or ``(0,)``, and nothing is counted.
      to_owners: bytes that a device sends to others in a round, to the owners of its keys.
      from_owners: the same of the answers.
      usual_rounds: that such a batch takes if its keys are evenly spread.
    """

    rounds: Any
    starts: Any
    to_owners: int
    from_owners: int
    usual_rounds: int


def agree(
    spec: TableSpec,
    op: str,
    number: jax.Array,
    values: Sequence[jax.Array],
    writes: bool,
    traffic: Traffic | None = None,
) -> tuple[jax.Array, ...]:
    """The values, unless the number is that of a failure, which is raised; one of a write forgets what was planned."""
    traffic = traffic or Traffic(np.int32(0), nothing(spec, (0,), np.int32), 0, 0, 0)
    results = tuple(array(x.shape, x.dtype) for x in values)
    aliases = {i + 3: i for i in range(len(values))}
    call = jax.ffi.ffi_call("kvjax_agree", results, input_output_aliases=aliases, vmap_method="sequential")
    amounts = ("to_owners", "from_owners", "usual_rounds")
    attributes: dict[str, Any] = {"table": spec.name, "op": op, "writes": _flag(writes)}
    attributes |= {name: np.int64(getattr(traffic, name)) for name in amounts}
    # What all devices agree on varies no more than it did before.
    agreed = call(number, traffic.rounds, traffic.starts, *values, **attributes)
    return tuple(varying_like(new, old) for new, old in zip(agreed, values, strict=True))


def receive(
    spec: TableSpec,
    version: jax.Array,
    turn: tuple[Any, Any],
    keys: Keys,
    counts: jax.Array,
    seal: jax.Array,
    rows: jax.Array,
    initial: jax.Array | None,
) -> jax.Array:
    """Status. turn: the round and their number; keys ``(senders, n)`` and what belongs to them."""
    attributes = {"table": spec.name, "senders": np.int64(keys.shape[0]), "narrow": _flag(keys.narrow)}
    operands = (version, *turn, keys.words, counts, seal, rows, _initial(spec, initial))
    return _write("kvjax_receive", _VERSION, *operands, **attributes)


def plan_step(spec: TableSpec, version: jax.Array, step: jax.Array, delivered: jax.Array, slots: str) -> jax.Array:
    """Facts ``(f, 2)`` uint32 that the shards tell each other. delivered: the status of what was received."""
    result = array((spec.num_facts, 2), jnp.uint32)
    return _write("kvjax_plan_step", result, version, step, delivered, table=spec.name, slots=slots)


def commit_step(spec: TableSpec, version: jax.Array) -> Begun:
    results = (_VERSION, array((), jnp.int32), array((2,), jnp.uint32))
    version, active, step = _write("kvjax_commit_step", results, version, table=spec.name)
    words, rows = nothing(spec, (0, 2), np.uint32), nothing(spec, (0, spec.dim), np.float32)
    return Begun(version, active, step, words, words, rows, nothing(spec, (0,), np.float32))
