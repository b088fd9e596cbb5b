"""Coupling: whether the rows of a dense array depend on each other in a transform's update, found in its jaxpr.

Every number of a jaxpr gets the set of what it depends on: of each of two rows, of the loss. Nothing is computed, so
the answer holds for all numbers, and takes about as long as the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.dependence import DRAWN, KEPT, LOSS, OF_ALL, ROW, ROWS, dependence, meet, settled
from kvjax._training.transform_errors import check_update, other_shape, other_state
from kvjax._values.facts import ROW_FACTS, fact_types

_MANY = 1 << 20


class Coupling(NamedTuple):
    """Attributes:
    updates: the update of a row depends on other rows.
    where: the functions in which rows come to depend on each other, as far as JAX tells.
    loss: a number of the update is made of the loss (``value=``) and all rows together.
    drawn: a number of the update is random, and not by what belongs to its row.
    leaves: of each leaf of the state, whether a number in it depends on several rows.
    of_rows: of each leaf, whether it depends on a row, or on what each row keeps for itself.
    starts: of each leaf, whether it starts from the values of the parameters.
    """

    updates: bool
    where: tuple[str, ...]
    loss: bool
    drawn: bool
    leaves: tuple[bool, ...]
    of_rows: tuple[bool, ...]
    starts: tuple[bool, ...]


def coupling_of(tx: Any, dim: int, kept: Sequence[bool], extra: dict[str, Any] | None = None) -> Coupling | None:
    """The coupling of the rows of a dense array, or None if the transform cannot be traced with these arguments.

    Args:
      tx: an optax transform.
      dim: width of the rows.
      kept: of each leaf of its state, whether each row keeps it for itself.
      extra: extra arguments of its update; by default none, or a loss if it wants one.
    """
    tx = optax.with_extra_args_support(tx)
    rows, many = (jax.ShapeDtypeStruct((n, dim), jnp.float32) for n in (len(ROW), _MANY))
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(tx.init, rows)
    # Facts about rows belong to each of them, as their numbers do. What takes none is asked without.
    facts = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(ROW),), x.dtype), fact_types())
    wanted = ({}, {"value": loss}) if extra is None else (extra,)
    for given in (some for each in wanted for some in (each | {ROW_FACTS: facts}, each)):
        try:
            init = jax.make_jaxpr(tx.init)(rows)
            update, out = jax.make_jaxpr(lambda g, s, p, e: tx.update(g, s, p, **e), return_shape=True)(
                rows, state, rows, given
            )
        except (AttributeError, TypeError, ValueError):
            continue
        check_update(out)
        if not _spreads(np.shape(out[0]), rows.shape):
            raise other_shape(rows.shape, np.shape(out[0]))
        if jax.tree.structure(out[1]) != jax.tree.structure(state):
            raise other_state(jax.tree.structure(state), jax.tree.structure(out[1]))
        if (before := jax.tree.map(jnp.shape, state)) != (after := jax.tree.map(jnp.shape, out[1])):
            raise other_state(before, after)
        if cut := [(x, y) for x, y in zip(*map(_dtypes, (state, out[1])), strict=True) if _cuts(x, y)]:
            raise other_state(*(", ".join(map(str, dtypes)) for dtypes in zip(*cut, strict=True)))
        found = {}
        if not _grows_by_rows(state, jax.eval_shape(tx.init, many)):
            found["the shapes of its state"] = None
        extras = [
            np.array(ROW) if name == ROW_FACTS else np.full(np.shape(x), LOSS)
            for name in sorted(given)
            for x in jax.tree.leaves(given[name])
        ]
        return _coupling(init, update, dim, kept, extras, found)
    return None


def _dtypes(state: Any) -> list[Any]:
    return [x.dtype for x in jax.tree.leaves(state)]


def _cuts(kept: Any, given: Any) -> bool:
    """Whether a slot of the first dtype would cut what an update gives, of which dense training keeps all."""
    return jnp.issubdtype(kept, jnp.integer) and jnp.issubdtype(given, jnp.inexact)


def _spreads(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether an array of this shape can be added to one of the other, whose shape stays."""
    try:
        return np.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def _grows_by_rows(two: Any, many: Any) -> bool:
    """Whether all leaves of a state are as large for any number of rows, or as many times larger."""
    pairs = zip(jax.tree.leaves(two), jax.tree.leaves(many), strict=True)
    return all(x.ndim == y.ndim and y.size in (x.size, x.size * _MANY // len(ROW)) for x, y in pairs)


def _coupling(
    init: Any, update: Any, dim: int, kept: Sequence[bool], extra: list[np.ndarray], found: dict[str, None]
) -> Coupling:
    rows = np.broadcast_to(np.array(ROW)[:, None], (len(ROW), dim))
    several = bool(found)
    first = dependence(init, [rows], found)
    state = [x | KEPT if own else x for x, own in zip(first, kept, strict=True)]
    state = settled(lambda state: dependence(update, [rows, *state, rows, *extra], found)[1:], state)
    updates = dependence(update, [rows, *state, rows, *extra], found)[0]
    others = bool((updates & ROWS & ~rows).any())  # also where rows only change places
    if others and not found:
        found["its update"] = None
    return Coupling(
        updates=several or others,
        where=tuple(found),
        loss=bool((updates & OF_ALL).any()),
        drawn=bool((updates & DRAWN).any()),
        leaves=tuple(map(meet, state)),
        of_rows=tuple(bool((x & (ROWS | KEPT)).any()) for x in state),
        starts=tuple(bool((x & ROWS).any()) for x in first),
    )
