"""Any optax transform, applied to each touched row by itself, at the speed of a loop over cache-sized chunks, or on a
GPU of one pass.

The transform is vmapped over rows, so the result for a row does not depend on what else is in the batch. The
leaves of its state are of two kinds: slots, which belong to a row and are kept in the table beside it, and
globals (schedule counts, hyperparameters), which are kept in the optimizer's state.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from kvjax import _copies, _ops, _rounding, _spread
from kvjax._calls import settle
from kvjax._deliver import deliver
from kvjax._initial_rows import initial_rows
from kvjax._keys import Keys, x64_enabled
from kvjax._room import prepare
from kvjax._sparse import SparseRows, merge
from kvjax._spec import TableSpec, fail
from kvjax._steps import step_words
from kvjax._varying import varying_like

if TYPE_CHECKING:
    from kvjax._handle import Handle

_GROUP = 64  # rows


@dataclasses.dataclass(frozen=True)
class Rowwise:
    """An optax transform that runs per row; made by `kvjax.optax.rowwise`.

    Attributes:
      tx: the transform.
      count: which scalars of its state are kept per row: "auto", "row" or "global".
    """

    tx: optax.GradientTransformation
    count: str = "auto"

    def __post_init__(self):
        if not (callable(getattr(self.tx, "init", None)) and callable(getattr(self.tx, "update", None))):
            raise TypeError(f"rowwise wants an optax transform, got {self.tx!r}")
        if self.count not in ("auto", "row", "global"):
            raise ValueError(f"rowwise wants count 'auto', 'row' or 'global', got {self.count!r}")

    def init(self, dim: int) -> tuple[Any, ...]:
        """The globals of a new table.

        Args:
          dim: width of the rows.

        Returns:
          Arrays, to be handed to `Table.apply` as ``state``.
        """
        leaves = jax.tree.leaves(self.tx.init(jnp.zeros(dim, jnp.float32)))
        return tuple(jnp.asarray(x) for x, slot in zip(leaves, _layout(self, dim).is_slot, strict=True) if not slot)


def as_rowwise(tx: Any) -> Rowwise:
    return tx if isinstance(tx, Rowwise) else Rowwise(tx)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the leaves of a transform's state are split; `names` and `types` are of the slots alone."""

    treedef: Any
    is_slot: tuple[bool, ...]
    names: tuple[str, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def text(self) -> str:
        """The layout as the C++ side reads it: name|type|bytes;..."""
        return ";".join(
            f"{name}|{t.dtype}[{','.join(map(str, t.shape))}]|{t.dtype.itemsize * int(np.prod(t.shape))}"
            for name, t in zip(self.names, self.types, strict=True)
        )

    @property
    def row_bytes(self) -> int:
        return sum(t.dtype.itemsize * int(np.prod(t.shape)) for t in self.types)

    @property
    def axes(self) -> Any:
        """vmap axes of the state: 0 for slots, None for globals."""
        return jax.tree.unflatten(self.treedef, [0 if slot else None for slot in self.is_slot])

    def join(self, slots: Any, globals_: Any) -> Any:
        s, g = iter(slots), iter(globals_)
        return jax.tree.unflatten(self.treedef, [next(s) if slot else next(g) for slot in self.is_slot])

    def split(self, state: Any) -> tuple[list[Any], list[Any]]:
        leaves = jax.tree.leaves(state)
        slots = [x for x, slot in zip(leaves, self.is_slot, strict=True) if slot]
        return slots, [x for x, slot in zip(leaves, self.is_slot, strict=True) if not slot]


def slot_types(tx: Any, dim: int) -> dict[str, str]:
    """Dtype and shape of each slot of a transform, "float32[64]", by name."""
    layout = _layout(as_rowwise(tx), dim)
    return dict(item.split("|")[:2] for item in layout.text.split(";") if item)


def _layout(rowwise: Rowwise, dim: int) -> _Layout:
    return _layout_of(rowwise, dim, x64_enabled())  # on which the types of some states depend


@functools.lru_cache(maxsize=256)
def _layout_of(rowwise: Rowwise, dim: int, x64: bool) -> _Layout:
    tx = optax.with_extra_args_support(rowwise.tx)
    row = jax.ShapeDtypeStruct((dim,), jnp.float32)
    wider = jax.ShapeDtypeStruct((dim + 3,), jnp.float32)
    flat, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, row))
    leaves = [x for _, x in flat]
    widths = zip(leaves, jax.tree.leaves(jax.eval_shape(tx.init, wider)), strict=True)
    grows = [a.shape != b.shape for a, b in widths]
    # A scalar beside row-shaped moments corrects their bias, so it counts the steps of that row.
    moments = {path[:-1] for (path, _), g in zip(flat, grows, strict=True) if g}
    per_row = {"auto": lambda path: path[:-1] in moments, "row": lambda _: True, "global": lambda _: False}
    is_slot = [g or x.ndim > 0 or per_row[rowwise.count](p) for (p, x), g in zip(flat, grows, strict=True)]
    for path, leaf in flat:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"rowwise wants a transform without random keys in its state, got "
                f"{jax.tree_util.keystr(path)}: every row would draw the same noise"
            )
    _promote(tx, row, leaves, treedef, is_slot)
    slots = [i for i, slot in enumerate(is_slot) if slot]
    names = _short_names([flat[i][0] for i in slots])
    types = tuple(jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in slots)
    return _Layout(treedef, tuple(is_slot), names, types)


def _promote(tx, row, leaves, treedef, is_slot) -> None:
    """Makes slots of the scalars that the update computes from data of the row: they cannot be shared by all rows."""

    def updated(grad, state, value):
        return tuple(jax.tree.leaves(tx.update(grad, state, value)[1]))

    def batched(x, slot):
        return jax.ShapeDtypeStruct((2, *x.shape) if slot else x.shape, x.dtype)

    try:
        jax.eval_shape(updated, row, jax.tree.unflatten(treedef, leaves), row)
    except TypeError:
        return  # it wants extra arguments, which only `apply` has; its scalars are taken to be shared
    changed = True
    while changed:  # a scalar may depend on another that has just become a slot
        changed = False
        axes = jax.tree.unflatten(treedef, [0 if slot else None for slot in is_slot])
        state = jax.tree.unflatten(treedef, [batched(x, s) for x, s in zip(leaves, is_slot, strict=True)])
        rows = batched(row, True)
        for i in [i for i, slot in enumerate(is_slot) if not slot]:
            out_axes = tuple(None if j == i else 0 for j in range(len(leaves)))
            try:
                jax.eval_shape(jax.vmap(updated, in_axes=(0, axes, 0), out_axes=out_axes), rows, state, rows)
            except ValueError:
                is_slot[i] = changed = True


def _short_names(paths: list[Any]) -> tuple[str, ...]:
    """The shortest unambiguous ends of the paths: "mu", or "0.mu" and "1.mu" if there are two."""
    parts = [[str(getattr(p, "name", getattr(p, "key", getattr(p, "idx", p)))) for p in path] for path in paths]

    def end(i: int, k: int) -> str:
        return ".".join(parts[i][-k:]) or "state"

    def short(i: int) -> str:
        lengths = range(1, max(len(parts[i]), 1) + 1)
        alone = (end(i, k) for k in lengths if all(end(i, k) != end(j, k) for j in range(len(parts)) if j != i))
        return next(alone, end(i, len(parts[i]))).replace("|", "_").replace(";", "_")

    return tuple(short(i) for i in range(len(parts)))


def check(table: Handle, tx: Any, grads: Any, state: Any) -> None:
    """Raises what `apply` would, before anything is written."""
    spec, shared = table.spec, _layout(as_rowwise(tx), table.dim).is_slot.count(False)
    if not isinstance(grads, SparseRows):
        raise fail(
            TypeError, spec.name, "apply", "SparseRows", type(grads).__name__,
            "differentiate with kvjax.value_and_grad instead of jax.value_and_grad",
        )  # fmt: skip
    if grads.rows.shape[-1] != spec.dim:
        raise fail(
            ValueError, spec.name, "apply", f"gradient rows (..., {spec.dim})", f"{grads.rows.shape}",
            "these gradients belong to another table",
        )  # fmt: skip
    if len(tuple(state)) != shared:
        raise fail(
            ValueError, spec.name, "apply", f"a state of {shared} arrays", f"{len(tuple(state))}",
            "start from kvjax.optax.rowwise(tx).init(dim) and keep what apply returns",
        )  # fmt: skip


def apply(
    table: Handle, tx: Any, grads: SparseRows, state: Any, step: Any, extra: dict[str, Any]
) -> tuple[jax.Array, Any]:
    """The training write; see `Table.apply`. Returns the next version and the next globals."""
    rowwise, spec = as_rowwise(tx), table.spec
    check(table, rowwise, grads, state)
    words = step_words(step, spec.name, "apply")
    # Compiled as a whole, so that a call outside jit compiles once; extra arguments may be what jit cannot take.
    write = _write if extra else _write_compiled
    if spec.placement is not None:
        if _spread.inside(spec, "apply"):
            grads = _flat(grads)
            alike = _copies.told_alike(spec, "apply", (grads.keys, grads.rows, grads.counts))
            grads = _copies.piece(spec.placement, grads)
            return _write_part(spec, rowwise, table.version, grads, tuple(state), words, extra, alike)
        write = _write_spread if extra else _write_spread_compiled
        return write(spec, rowwise, table.version, grads, tuple(state), words, extra)
    return write(spec, rowwise, table.version, merge(grads), tuple(state), words, extra)


def _write(
    spec: TableSpec,
    rowwise: Rowwise,
    version: jax.Array,
    merged: SparseRows,
    state: tuple[jax.Array, ...],
    step: jax.Array,
    extra: dict[str, Any],
) -> tuple[jax.Array, Any]:
    layout = _layout(rowwise, spec.dim)
    initial = initial_rows(spec, version, merged.keys, merged.counts > 0)
    begun = _ops.begin_apply(spec, version, merged, step, initial, layout.text)
    return _update_rows(spec, rowwise, layout, begun, merged.rows.shape[0], state, extra)


def _flat(grads: SparseRows) -> SparseRows:
    """Gradients ``(n,)``, float32, with the leading axes in one."""
    rows = grads.rows.reshape(-1, grads.rows.shape[-1]).astype(jnp.float32)
    keys = Keys(grads.keys.words.reshape(-1, 2), grads.keys.narrow)
    return grads.replace(keys=keys, rows=rows, counts=grads.counts.reshape(-1))


def _write_spread(spec, rowwise, version, grads, state, step, extra) -> tuple[jax.Array, Any]:
    """`_write` on a table that is spread over devices."""
    placement = spec.placement
    narrow = grads.keys.narrow

    def run(version, words, rows, counts, seal, state, step):
        def local(version, words, rows, counts, seal, state, step):
            part = SparseRows(Keys(words, narrow), rows, counts).replace(seal=seal)
            return _write_part(spec, rowwise, version, part, state, step, extra, jnp.uint32(0))

        flat = _flat(SparseRows(Keys(words), rows, counts))
        words, rows, counts = (  # a count of 0 for padding
            _spread.pieces(placement.num_devices, x, None)[0] for x in (flat.keys.words, flat.rows, flat.counts)
        )
        split, whole = PartitionSpec(placement.axes), PartitionSpec()
        in_specs = (whole, split, split, split, whole, whole, whole)
        operands = (version, words, rows, counts, seal, state, step)
        version, state = _spread.on_mesh(placement, local, in_specs, whole, operands)
        return (), (version, *state)

    operands = (version, grads.keys.words, grads.rows, grads.counts, grads.seal, state, step)
    version, *state = _spread.auto(spec, "apply", run, (), *operands)[1]
    return version, tuple(state)


_write_spread_compiled = jax.jit(_write_spread, static_argnums=(0, 1))


def _write_part(
    spec: TableSpec,
    rowwise: Rowwise,
    version: jax.Array,
    grads: SparseRows,
    state: tuple[jax.Array, ...],
    step: jax.Array,
    extra: dict[str, Any],
    status: jax.Array,
) -> tuple[jax.Array, Any]:
    """One device's part: its gradients ``(n,)`` go to their owners, and the rows that it owns change.

    status: ``()`` uint32, of what came before.
    """
    layout = _layout(rowwise, spec.dim)
    facts, delivered, traffic = deliver(spec, version, merge(grads), step, layout.text)
    number = prepare(spec, "apply", version, facts, jnp.maximum(status, delivered))
    (version,) = _ops.agree(spec, "apply", number, [varying_like(version, delivered)], True, traffic)
    begun = _ops.commit_step(spec, version)
    n = max(1, grads.counts.shape[0])
    version, state = _update_rows(spec, rowwise, layout, begun, n, state, extra)
    return settle(version), state


def _update_rows(
    spec: TableSpec, rowwise: Rowwise, layout: _Layout, begun: _ops.Begun, n: int, state: Any, extra: dict[str, Any]
) -> tuple[jax.Array, Any]:
    """The rows of a step, chunk by chunk; n of them are to be expected."""
    # Whole groups of rows: in what is left over behind the last full vector, XLA may round otherwise, and a row would
    # depend on its place in the batch.
    limit, groups = spec.storage.chunk_bytes, -(-n // _GROUP)
    if limit is not None:
        groups = min(groups, limit // (4 * spec.dim + layout.row_bytes) // _GROUP)
    chunk = _GROUP * max(1, groups)
    at_once = limit is None and spec.placement is None  # a shard may have got more rows than its device had
    # The rows of a step at once stand where their gradients do, unless one of them gets the sum of several.
    in_place = at_once and not spec.shares_row

    def body(carry):
        start, version, _ = carry
        values, grads, fresh, words, *slots = _ops.gather(
            spec, version, begun, start, chunk, layout.text, layout.types, gradients=not in_place
        )
        if in_place:
            # As they are in memory: what made them shall not be made again, rounded otherwise, as part of the update.
            grads = jnp.pad(jax.lax.optimization_barrier(begun.rows), ((0, chunk - n), (0, 0)))
        rows, slots, globals_ = _update(rowwise, layout, grads, values, fresh, slots, state, extra)
        values = _stored(spec, rows, words, begun.step)
        version = _ops.scatter(spec, version, begun, start, values, layout.text, slots)
        globals_ = tuple(new.astype(old.dtype) for new, old in zip(globals_, state, strict=True))
        return start + jnp.int32(chunk), version, globals_

    first = (jnp.int32(0), begun.version, state)
    if at_once:
        _, version, state = body(first)
        return version, state
    # The first chunk runs even if no row is touched: the globals count the step all the same.
    _, version, state = jax.lax.while_loop(lambda carry: carry[0] < jnp.maximum(begun.active, 1), body, first)
    return version, state


_write_compiled = jax.jit(_write, static_argnums=(0, 1))


def _update(rowwise: Rowwise, layout: _Layout, grads, values, fresh, stored, globals_, extra) -> Any:
    """One chunk: gradients and values ``(chunk, dim)`` to new values in float32, and slots."""
    tx = optax.with_extra_args_support(rowwise.tx)
    rows = values.astype(jnp.float32)
    initial, _ = layout.split(jax.vmap(tx.init)(rows))
    slots = [
        jnp.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), first.astype(old.dtype), old)
        for first, old in zip(initial, stored, strict=True)
    ]

    def update(grad, state, row) -> Any:
        updates, state = tx.update(grad, state, row, **extra)
        return optax.apply_updates(row, updates), state

    rows, state = jax.vmap(update, in_axes=(0, layout.axes, 0), out_axes=(0, layout.axes))(
        grads, layout.join(slots, globals_), rows
    )
    new_slots, new_globals = layout.split(state)
    new_slots = [new.astype(old.dtype) for new, old in zip(new_slots, slots, strict=True)]
    return rows, new_slots, new_globals


def _stored(spec: TableSpec, rows: jax.Array, words: jax.Array, step: jax.Array) -> jax.Array:
    """Updated rows ``(chunk, dim)`` float32 of keys ``(chunk, 2)`` as the table keeps them: constrained and rounded."""
    if spec.constraint is not None:
        rows = jax.vmap(spec.constraint)(rows)
    if spec.rounding == "nearest":
        return rows.astype(spec.row_dtype)
    return _rounding.stochastic(rows, spec.row_dtype, _rounding.random_bits(rows, words, step, spec.seed))
