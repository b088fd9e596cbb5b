"""Slots: which leaves of a transform's state belong to a row, and which to all rows together.

Slots are kept in the table beside their row. Globals (schedule counts, hyperparameters) are kept in the optimizer's
state: that of the transform with None for slots, so that optax's own tools find them by name.

A transform sees a row as the array ``(1, dim)``, which is what a dense table of one row would be, so that what asks for
the number of axes (a mask of weight decay, ``optax.centralize``) is answered as it is there. The table keeps slots
without that axis.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax

from kvjax._formats.source import row_bytes
from kvjax._training.coupling import coupling_of
from kvjax._training.transform_errors import check_state, loss_of_all_rows, no_state, other_state, same_noise
from kvjax._values.errors import warn
from kvjax._values.key_width import x64_enabled
from kvjax._values.segments import ColumnsError
from kvjax._values.slot_layout import clean_name, layout_text, type_text

SlotCount: TypeAlias = Literal["auto", "row", "global"]
COUNTS = get_args(SlotCount)


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """How the leaves of a transform's state are split.

    Attributes:
      treedef: of the state.
      is_slot: of each leaf of it.
      names, types: of the slots, as the table keeps them.
      shapes: of the slots, as the transform sees them.
      parts: of the slots, the part of the state that each is in.
      coupled: by what rows depend on each other in dense training.
    """

    treedef: Any
    is_slot: tuple[bool, ...]
    names: tuple[str, ...]
    types: tuple[jax.ShapeDtypeStruct, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: tuple[Any, ...]
    coupled: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[Any, list[str]]:
        """Names of the slots by the part of the state that they are in."""
        groups: dict[Any, list[str]] = {}
        for name, part in zip(self.names, self.parts, strict=True):
            groups.setdefault(part, []).append(name)
        return groups

    @property
    def shared(self) -> list[tuple[str, str]]:
        """Of each leaf that all rows share the part of the state that it is in, and its name there."""
        flat, _ = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(self.treedef, self.is_slot))
        shared = [path for path, slot in flat if path and not slot]
        return [(jax.tree_util.keystr(path[:-1]), _short_names([path[-1:]])[0]) for path in shared]

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
        return sum(row_bytes((t.dtype, t.shape)) for t in self.types)

    def join(self, slots: Any, globals_: Any) -> Any:
        """The state of one row."""
        shaped = (x.reshape(shape) for x, shape in zip(slots, self.shapes, strict=True))
        return join_leaves(self.treedef, self.is_slot, shaped, globals_)

    def slots_of(self, state: Any) -> list[jax.Array]:
        """Of the state of one row, as the table keeps them."""
        slots, _ = split_leaves(state, self.is_slot)
        return [jnp.reshape(x, t.shape).astype(t.dtype) for x, t in zip(slots, self.types, strict=True)]

    def state_of(self, globals_: Any) -> Any:
        """The state of the transform with None for slots."""
        return join_leaves(self.treedef, self.is_slot, itertools.repeat(None), globals_)

    def globals_of(self, state: Any) -> list[Any]:
        return split_leaves(state, self.is_slot)[1]


def split_leaves(state: Any, is_slot: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """The leaves of a state that are slots, and the others."""
    leaves = list(zip(jax.tree.leaves(state), is_slot, strict=True))
    return [x for x, slot in leaves if slot], [x for x, slot in leaves if not slot]


def join_leaves(treedef: Any, is_slot: Sequence[bool], slots: Iterable[Any], others: Iterable[Any]) -> Any:
    """The state of which `split_leaves` gives these."""
    s, o = iter(slots), iter(others)
    return jax.tree.unflatten(treedef, [next(s) if slot else next(o) for slot in is_slot])


def layout_of(tx: Any, count: str, dim: int) -> SlotLayout:
    """The layout of a transform's state for rows of width `dim`; `count` is that of `kvjax.optax.rowwise`."""
    return _layout_of(tx, count, dim, x64_enabled())  # on which the types of some states depend


@functools.lru_cache(maxsize=256)
def _layout_of(made: optax.GradientTransformation, count: str, dim: int, x64: bool) -> SlotLayout:
    tx = optax.with_extra_args_support(made)
    state = _state(tx, dim)
    check_state(state)
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves = [x for _, x in flat]
    is_slot, more = _split(tx, flat, treedef, count, dim)
    coupling = coupling_of(tx, dim, is_slot)
    if coupling is not None:  # otherwise it wants extra arguments, which only `apply` has
        if coupling.updates and coupling.loss:
            raise loss_of_all_rows()
        if coupling.drawn:
            raise same_noise()
        # Scalars that are computed from data of a row cannot be shared by all rows.
        is_slot = [slot or of_rows for slot, of_rows in zip(is_slot, coupling.of_rows, strict=True)]
    slots = [i for i, slot in enumerate(is_slot) if slot]
    names = _short_names([flat[i][0] for i in slots])
    types = tuple(jax.ShapeDtypeStruct(_of_one_row(leaves[i].shape, more[i]), leaves[i].dtype) for i in slots)
    parts = tuple(jax.tree_util.keystr(flat[i][0][:-1]) for i in slots)
    coupled = coupling.where if coupling is not None and coupling.updates else ()
    return SlotLayout(treedef, tuple(is_slot), names, types, tuple(leaves[i].shape for i in slots), parts, coupled)


def leaves_by_shape(made: Any, count: str, dim: int) -> list[tuple[str, jax.ShapeDtypeStruct, bool]]:
    """Of each leaf of a transform's state its path, what it is for one row, and whether it would be a slot: of any
    transform, also one that is refused. None of a state that cannot be made of rows."""
    tx = optax.with_extra_args_support(made)
    try:
        flat, treedef = jax.tree_util.tree_flatten_with_path(_state(tx, dim))
        is_slot, more = _split(tx, flat, treedef, count, dim)
    except ValueError:
        return []
    return [
        (
            jax.tree_util.keystr(path),
            jax.ShapeDtypeStruct(_of_one_row(x.shape, shape) if slot else x.shape, x.dtype),
            slot,
        )
        for (path, x), shape, slot in zip(flat, more, is_slot, strict=True)
    ]


def _state(tx: Any, dim: int) -> Any:
    """The state of one row, as shapes and dtypes.

    Raises:
      ValueError: there is none.
    """
    try:
        return jax.eval_shape(tx.init, jax.ShapeDtypeStruct((1, dim), jnp.float32))
    except ColumnsError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise no_state(error) from error


def _split(tx: Any, flat: Any, treedef: Any, count: str, dim: int) -> tuple[list[bool], list[tuple[int, ...]]]:
    """Which leaves of a state are slots, as far as shapes tell; and their shapes for two rows."""
    wider, more = (_shapes(tx, shape, treedef) for shape in ((1, dim + 3), (2, dim)))
    grows = [x.shape != shape for (_, x), shape in zip(flat, wider, strict=True)]
    # A scalar beside row-shaped moments corrects their bias, so it counts the steps of that row.
    shapes = zip(flat, grows, more, strict=True)
    moments = {path[:-1] for (path, x), g, shape in shapes if g or (x.ndim > 0 and x.shape != shape)}
    per_row = {"auto": lambda path: path[:-1] in moments, "row": lambda _: True, "global": lambda _: False}
    return [g or x.ndim > 0 or per_row[count](path) for (path, x), g in zip(flat, grows, strict=True)], more


def _shapes(tx: Any, shape: tuple[int, int], treedef: Any) -> list[tuple[int, ...]]:
    """Shapes of the leaves of the state for parameters of this shape.

    Raises:
      ValueError: the state has other leaves then.
    """
    leaves, found = jax.tree.flatten(jax.eval_shape(tx.init, jax.ShapeDtypeStruct(shape, jnp.float32)))
    if found != treedef:
        raise other_state(treedef, found)
    return [x.shape for x in leaves]


def _of_one_row(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a leaf without the axis of rows: the one that is longer where there are two rows."""
    if len(one) != len(two):
        return one
    return tuple(n for n, m in zip(one, two, strict=True) if (n, m) != (1, 2))


@functools.lru_cache(maxsize=256)
def warn_once(tx: Any, where: tuple[str, ...]) -> None:
    """Says that a transform changes its meaning row by row, of each once."""
    warn(
        f"kvjax: rows depend on each other in dense training by {', '.join(where)}; tables run it on each row by "
        "itself, so a norm is that of a row. kvjax.optax.check_compatibility(tx, dim) tells by how much that differs; "
        "kvjax.optax.joint(tx) before partition runs what keeps no arrays and reads no parameters on whole gradients; "
        "warnings.filterwarnings('ignore', 'kvjax: rows depend') if it is meant"
    )


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
