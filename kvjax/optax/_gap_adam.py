"""Adam over gaps: a touched row moves at once as far as dense Adam would carry it until its next touch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail
from kvjax.optax._checks import AT_LEAST_0, DECAY, FINITE, check, is_known
from kvjax.optax._rows import per_leaf

_LARGEST = 0.999  # of b1 over the root of b2, where they are injected and so not checked


class GapAdamRows(NamedTuple):
    """What `gap_adam` keeps beside parameters.

    Attributes:
      mu: of the parameter's shape: the part of the first moment that is left for later steps.
      nu: of the parameter's shape: the second moment.
      touched: of a parameter ``(..., dim)`` ``(...)`` int32: the step that last updated a row, 0 if none has.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> rows = kvjax.optax.gap_adam(0.1).init(jnp.zeros((4, 2)))[0].rows
      >>> rows.mu.shape, rows.nu.shape, rows.touched.shape
      ((4, 2), (4, 2), (4,))
    """

    mu: PyTree
    nu: PyTree
    touched: PyTree


class GapAdamState(NamedTuple):
    """State of `gap_adam`.

    Attributes:
      count: ``()`` int32, steps; all rows of a table share it.
      rows: `GapAdamRows`.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  (the name every optax state gives it)
    rows: GapAdamRows


def gap_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Adam for rows that batches leave out, at the rate of dense Adam.

    Dense Adam (Kingma and Ba 2015, arXiv:1412.6980) also moves a row in steps whose batch leaves it out, and its second
    moment fades in them. A table that runs ``optax.adam`` does neither (nor does TensorFlow's LazyAdam), so rare rows
    move less, and need a higher rate. Here the second moment fades by the steps that a row has missed. A row that is
    touched k steps after its last touch moves at once as far as the first moment would carry it in k steps. The rest
    stays in the first moment, and is later divided by the root that the second moment had at this touch. So each
    gradient moves its row as far as in dense Adam, only sooner or later, however often the row is touched. `catch_up`
    equals dense training in every step; this does in sum, and needs no `caught_up`.

    If every step touches all rows, as with dense parameters, it equals ``optax.adam``.

    Args:
      learning_rate: number or schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.

    Returns:
      An optax transform. Its slots in tables are "mu" and "nu" ``(dim,)`` float32 and "touched" ``()`` int32.

    Raises:
      ValueError: `b1` or `b2` is not from 0 to below 1, `b1` is not below the root of `b2`, or `eps` is not a finite
        number of 0 or more.

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np
      >>> tx = kvjax.optax.gap_adam(0.1)
      >>> table, state = kvjax.get_table("doc_gap_adam", dim=1), kvjax.optax.rowwise(tx).init(1)
      >>> for key in (7, 8, 8, 7):
      ...     table, state = table.apply(tx, kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))), state)
      >>> [round(float(x), 3) for x in table.lookup(np.array([7, 8]))[:, 0]]
      [-0.312, -0.223]
      >>> kvjax.drop_table("doc_gap_adam")
    """
    check("gap_adam", DECAY, b1=b1, b2=b2)
    check("gap_adam", AT_LEAST_0, eps=eps)
    if not callable(learning_rate):
        check("gap_adam", FINITE, learning_rate=learning_rate)
    if is_known(b1) and is_known(b2) and not (b1 == 0 or b1 < math.sqrt(float(b2))):
        raise fail(
            ValueError, None, "gap_adam", "b1 below the root of b2 (else steps without a gradient would grow)",
            f"{b1!r} and {b2!r}", "0.9 and 0.999 do",
        )  # fmt: skip

    def init(params: Any) -> GapAdamState:
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        touched = jax.tree.map(lambda p: jnp.zeros(p.shape[:-1], jnp.int32), params)
        return GapAdamState(jnp.zeros((), jnp.int32), GapAdamRows(mu, nu, touched))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, GapAdamState]:
        count = state.count + 1

        def one(update: jax.Array, *kept: jax.Array) -> tuple[jax.Array, ...]:
            wide = jnp.promote_types(update.dtype, jnp.float32)
            (grad, mu, nu), touched = (x.astype(wide) for x in (update, *kept[:2])), kept[2]
            first, second = (jnp.asarray(b, wide) for b in (b1, b2))
            # A count that has begun anew is behind rows that are trained: these have missed nothing.
            steps, all_ = jnp.maximum(count - touched, 1).astype(wide), count.astype(wide)
            ratio = jnp.minimum(first / jnp.sqrt(second), _LARGEST)  # between a step without a gradient and the next
            ahead = ratio ** (steps - 1)
            reach = (1 - ratio * ahead) / (1 - ratio) / (1 - first**all_)  # of its way in one step
            then = second / (1 - second ** (touched + 1).astype(wide))
            numbers = (second**steps, first**steps, ahead, reach, then)
            faded, left, ahead, reach, then = (x[..., None] if grad.ndim else x for x in numbers)
            # What the row would have gone since its last touch goes over the root of then, however small that is now.
            before = jnp.maximum(jnp.sqrt(nu * then) + eps, jnp.finfo(wide).tiny)
            nu = faded * nu + (1 - second) * jnp.square(grad)
            root = jnp.sqrt(nu / (1 - second**all_)) + eps
            new = (1 - first) * grad
            step = reach * ((ahead * mu + new) / root + (1 - ahead) * mu / before)
            mu = left * (mu + new)
            now = jnp.broadcast_to(count, touched.shape)
            return step.astype(update.dtype), mu.astype(kept[0].dtype), nu.astype(kept[1].dtype), now

        step, mu, nu, touched = per_leaf(4, one, updates, *state.rows)
        return step, GapAdamState(count, GapAdamRows(mu, nu, touched))

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate))
