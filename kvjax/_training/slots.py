"""Slots: which leaves of a transform's state belong to a row, and which to all rows together.

Slots are kept in the table beside their row. Globals (schedule counts, hyperparameters) are kept in the optimizer's
state.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax

from kvjax._keys.keys import x64_enabled
from kvjax._values.slot_layout import clean_name, layout_text, row_bytes, type_text

SlotCount: TypeAlias = Literal["auto", "row", "global"]
COUNTS = get_args(SlotCount)


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """How the leaves of a transform's state are split; `names` and `types` are of the slots alone."""

    treedef: Any
    is_slot: tuple[bool, ...]
    names: tuple[str, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def text(self) -> str:
        """The layout as the C++ side reads it."""
        return layout_text(dict(zip(self.names, self.types, strict=True)))

    @property
    def type_texts(self) -> dict[str, str]:
        """Dtype and shape of each slot, "float32[64]", by name."""
        return {name: type_text(t.dtype, t.shape) for name, t in zip(self.names, self.types, strict=True)}

    @property
    def row_bytes(self) -> int:
        return sum(map(row_bytes, self.types))

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


def layout_of(tx: Any, count: str, dim: int) -> SlotLayout:
    """The layout of a transform's state for rows of width `dim`; `count` is that of `kvjax.optax.rowwise`."""
    return _layout_of(tx, count, dim, x64_enabled())  # on which the types of some states depend


@functools.lru_cache(maxsize=256)
def _layout_of(tx: optax.GradientTransformation, count: str, dim: int, x64: bool) -> SlotLayout:
    tx = optax.with_extra_args_support(tx)
    row = jax.ShapeDtypeStruct((dim,), jnp.float32)
    wider = jax.ShapeDtypeStruct((dim + 3,), jnp.float32)
    state = jax.eval_shape(tx.init, row)
    _check_updates_at_once(state)
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves = [x for _, x in flat]
    widths = zip(leaves, jax.tree.leaves(jax.eval_shape(tx.init, wider)), strict=True)
    grows = [a.shape != b.shape for a, b in widths]
    # A scalar beside row-shaped moments corrects their bias, so it counts the steps of that row.
    moments = {path[:-1] for (path, _), g in zip(flat, grows, strict=True) if g}
    per_row = {"auto": lambda path: path[:-1] in moments, "row": lambda _: True, "global": lambda _: False}
    is_slot = [g or x.ndim > 0 or per_row[count](p) for (p, x), g in zip(flat, grows, strict=True)]
    for path, leaf in flat:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"kvjax: rowwise wants a transform without random keys in its state, got "
                f"{jax.tree_util.keystr(path)}: every row would draw the same noise"
            )
    _promote(tx, row, leaves, treedef, is_slot)
    slots = [i for i, slot in enumerate(is_slot) if slot]
    names = _short_names([flat[i][0] for i in slots])
    types = tuple(jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in slots)
    return SlotLayout(treedef, tuple(is_slot), names, types)


# States of transforms that hold updates back for so many steps. A row would count the steps that touch it.
_HOLD_BACK = (optax.MultiStepsState, optax.ApplyEvery)


def _check_updates_at_once(state: Any) -> None:
    """Whether a transform updates each row in each step that touches it.

    Raises:
      ValueError: it collects gradients over steps, and a row that is rarely touched would never be trained.
    """
    for part in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _HOLD_BACK)):
        if isinstance(part, _HOLD_BACK):
            raise ValueError(
                "kvjax: rowwise: want a transform that updates a row in each step that touches it, got one with "
                f"{type(part).__name__}, which would count the steps of each row by itself; "
                "kvjax.optax.accumulate(kvjax.optax.partition(...), k) sums the gradients of k steps by key"
            )


def _promote(tx: Any, row: Any, leaves: list[Any], treedef: Any, is_slot: list[bool]) -> None:
    """Makes slots of the scalars that the update computes from data of the row: they cannot be shared by all rows."""

    def updated(grad: Any, state: Any, value: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(tx.update(grad, state, value)[1]))

    def batched(x: Any, slot: bool) -> jax.ShapeDtypeStruct:
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
        return clean_name(next(alone, end(i, len(parts[i]))))

    return tuple(short(i) for i in range(len(parts)))
