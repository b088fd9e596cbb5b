"""Segments: different transforms for parts of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.refusals import ColumnsError
from kvjax._training.rowwise import check_transform
from kvjax._values.arrays import PyTree
from kvjax._values.numbers import is_integer

Columns: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | np.ndarray


class SegmentsState(NamedTuple):
    """State of `segments`.

    Attributes:
      segments: by name, the states of the transforms, for their columns of the parameters.
    """

    segments: dict[str, PyTree]


def segments(
    transforms: Mapping[str, tuple[Columns, optax.GradientTransformation]], rest: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Trains segments of a row by different transforms, for example a bias beside the factors of a factorisation.

    A segment is a set of columns. Each transform sees its columns as a separate array ``(..., columns)``: its slots are
    as wide as the segment, and a norm is that of the segment. In dense parameters, columns are along the last axis. If
    slots of two segments would have the same name, the table puts the name of the segment before it ("bias.0.mu").

    Args:
      transforms: the columns and the transform of each segment, by name. Columns are an integer, a slice, several
        integers (negative ones count from the end), or bools, a mask of the first columns.
      rest: transform of all other columns. ``optax.set_to_zero()`` keeps them as they are.

    Returns:
      An optax transform.

    Raises:
      TypeError: an argument is not a transform, or not columns.
      ValueError: a column is in two segments, or not in the row; a segment has no columns; or a name is "rest".

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> tx = kvjax.optax.segments({"bias": (0, optax.sgd(1.0))}, rest=optax.adagrad(0.1))
      >>> table = kvjax.get_table("doc_segments", dim=3)
      >>> table, _ = table.apply(tx, kvjax.SparseRows(np.array([7]), jnp.ones((1, 3))))
      >>> [round(x, 3) for x in table.lookup(7).tolist()], table.slot("sum_of_squares", 7).shape
      ([-1.0, -0.095, -0.095], (2,))
      >>> kvjax.drop_table("doc_segments")
    """
    pairs = getattr(transforms, "values", lambda: [None])()
    if any(not isinstance(x, tuple) or len(x) != 2 or hasattr(x, "update") for x in pairs):
        raise TypeError(
            f"kvjax: segments: want a mapping from names to columns and a transform, got {transforms!r}; for instance "
            '{"bias": (0, optax.sgd(0.1))}'
        )
    if "rest" in transforms:
        raise ValueError("kvjax: segments: want names other than 'rest', which is that of all other columns; rename it")
    parts = {name: (_columns_of(name, columns), tx) for name, (columns, tx) in transforms.items()}
    for _, tx in (*parts.values(), (None, rest)):
        check_transform(tx, "segments")
    inner = {name: optax.with_extra_args_support(tx) for name, (_, tx) in parts.items()}
    inner["rest"] = optax.with_extra_args_support(rest)

    def runs_of(x: jax.Array) -> dict[str, list[tuple[int, int]]]:
        return _runs({name: of for name, (of, _) in parts.items()}, jnp.shape(x))

    def part(name: str, tree: Any) -> Any:
        return jax.tree.map(lambda x: _take(x, runs_of(x)[name]), tree)

    def init(params: Any) -> SegmentsState:
        return SegmentsState({name: tx.init(part(name, params)) for name, tx in inner.items()})

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SegmentsState]:
        done, states = {}, {}
        for name, tx in inner.items():
            own = None if params is None else part(name, params)
            done[name], states[name] = tx.update(part(name, updates), state.segments[name], own, **extra)
        names = list(done)
        whole = jax.tree.map(
            lambda x, *each: _put_together(runs_of(x), dict(zip(names, each, strict=True))), updates, *done.values()
        )
        return whole, SegmentsState(states)

    return optax.GradientTransformationExtraArgs(init, update)


def _columns_of(name: str, columns: Any) -> Callable[[int], list[int]]:
    """The columns of a part, from 0 on, by how many there are."""
    if isinstance(columns, slice):
        return lambda dim: list(range(dim)[columns])
    given = [columns] if is_integer(columns) else list(columns) if isinstance(columns, (Sequence, np.ndarray)) else []
    bools = [isinstance(x, (bool, np.bool_)) for x in given]
    if not given or not (all(bools) or all(is_integer(x) for x in given)):
        raise TypeError(
            f"kvjax: segments: want the columns of {name!r} as an integer, a slice, integers or bools, got "
            f"{columns!r}; for instance slice(0, 2)"
        )
    if all(bools):
        return lambda dim: [i for i, chosen in enumerate(given) if chosen]
    return lambda dim: sorted({int(i) + dim if i < 0 else int(i) for i in given})


def _runs(parts: dict[str, Callable[[int], list[int]]], shape: tuple[int, ...]) -> dict[str, list[tuple[int, int]]]:
    """The columns of each part as [begin, end), in their order."""
    dim = shape[-1] if shape else 1
    owner = dict.fromkeys(range(dim), "rest")
    for name, of in parts.items():
        for column in of(dim):
            if not 0 <= column < dim:
                raise ColumnsError(
                    f"kvjax: segments: want columns of a row of {dim}, from 0 to {dim - 1}, for {name!r}, got column "
                    f"{column}; leave it out, or count from the end by negative ones"
                )
            if owner[column] != "rest":
                raise ColumnsError(
                    f"kvjax: segments: want each column in one part, got column {column} in {owner[column]!r} and "
                    f"{name!r}; take it out of one of them"
                )
            owner[column] = name
    runs: dict[str, list[tuple[int, int]]] = {name: [] for name in (*parts, "rest")}
    for column, name in owner.items():
        if column and owner[column - 1] == name:
            runs[name][-1] = (runs[name][-1][0], column + 1)
        else:
            runs[name].append((column, column + 1))
    for name, own in runs.items():
        if not own:
            raise ColumnsError(
                f"kvjax: segments: want columns for each part, got none of {dim} for {name!r}; "
                + ("leave it some" if name == "rest" else "leave the part out")
            )
    return runs


def _take(x: Any, runs: list[tuple[int, int]]) -> jax.Array:
    # Slices and not a gather, by which rows would depend on each other as far as their jaxpr tells.
    return jnp.concatenate([jax.lax.slice_in_dim(x, begin, end, axis=-1) for begin, end in runs], -1)


def _put_together(runs: dict[str, list[tuple[int, int]]], parts: dict[str, jax.Array]) -> jax.Array:
    pieces, used = [], dict.fromkeys(parts, 0)
    for begin, end, name in sorted((begin, end, name) for name, own in runs.items() for begin, end in own):
        at = used[name]
        pieces.append(jax.lax.slice_in_dim(parts[name], at, at + end - begin, axis=-1))
        used[name] = at + end - begin
    return jnp.concatenate(pieces, -1)
