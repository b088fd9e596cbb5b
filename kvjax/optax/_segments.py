"""Segments: different transforms for parts of a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kvjax._training.rowwise import check_transform
from kvjax._values.arrays import PyTree
from kvjax._values.segments import ColumnsLike, Run, SegmentColumns, check_names, runs


class SegmentsState(NamedTuple):
    """State of `segments`.

    Attributes:
      segments: by name, the states of the transforms, for their columns of the parameters.
    """

    segments: dict[str, PyTree]


def segments(
    transforms: Mapping[str, tuple[ColumnsLike, optax.GradientTransformation]], rest: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """Trains segments of a row by different transforms, for example a bias beside the factors of a factorisation.

    A segment is a set of columns. Each transform sees its columns as a separate array ``(..., columns)``: its slots are
    as wide as the segment, and a norm is that of the segment. In dense parameters, columns are along the last axis. If
    slots of two segments would have the same name, the table puts the name of the segment before it ("bias.0.mu").

    Args:
      transforms: the columns and the transform of each segment, by name. Columns are an integer, a slice, several
        integers (negative ones count from the end), or bools, a mask of the first columns. So ``(1, 4)`` is two columns
        and ``slice(1, 4)`` three.
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
    check_names(transforms, '{"bias": (0, optax.sgd(0.1))}')
    columns = {name: SegmentColumns.of(given, name) for name, (given, _) in transforms.items()}
    inner = {name: tx for name, (_, tx) in transforms.items()} | {"rest": rest}
    for tx in inner.values():
        check_transform(tx, "segments")
    inner = {name: optax.with_extra_args_support(tx) for name, tx in inner.items()}

    def runs_of(x: jax.Array) -> list[Run]:
        return runs(columns, jnp.shape(x)[-1] if jnp.ndim(x) else 1)

    def part(name: str, tree: Any) -> Any:
        return jax.tree.map(lambda x: _take(x, name, runs_of(x)), tree)

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


def _take(x: Any, name: str, runs: list[Run]) -> jax.Array:
    # Slices and not a gather, by which rows would depend on each other as far as their jaxpr tells.
    own = [jax.lax.slice_in_dim(x, begin, end, axis=-1) for begin, end, its in runs if its == name]
    return jnp.concatenate(own, -1)


def _put_together(runs: list[Run], parts: dict[str, jax.Array]) -> jax.Array:
    pieces, used = [], dict.fromkeys(parts, 0)
    for begin, end, name in runs:
        at = used[name]
        used[name] += end - begin
        pieces.append(jax.lax.slice_in_dim(parts[name], at, used[name], axis=-1))
    return jnp.concatenate(pieces, -1)
