"""Adagrad for sparse rows: one accumulator a row, and accumulators that fade."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kvjax._values.arrays import PyTree
from kvjax.optax._checks import AT_LEAST_0, COUNT_FROM_1, FRACTION, check
from kvjax.optax._rows import per_leaf


class RowwiseAdagradState(NamedTuple):
    """State of `rowwise_adagrad`.

    Attributes:
      sum_of_squares: ``(...)`` for a parameter ``(..., dim)``: the sum over steps of the mean of a row's squared
        gradient.
    """

    sum_of_squares: PyTree


class FadingSquares(NamedTuple):
    """What `adagrad_decay` keeps beside parameters.

    Attributes:
      sum_of_squares: of the parameter's shape.
      fades: ``(...)`` int32 for a parameter ``(..., dim)``: how often the sums of a row have faded.

    Example:
      >>> import jax.numpy as jnp, kvjax
      >>> rows = kvjax.optax.adagrad_decay(0.1).init(jnp.zeros((4, 2)))[0].rows
      >>> rows.sum_of_squares.shape, rows.fades.shape
      ((4, 2), (4,))
    """

    sum_of_squares: PyTree
    fades: PyTree


class AdagradDecayState(NamedTuple):
    """State of `adagrad_decay`.

    Attributes:
      count: ``()`` int32, steps; all rows of a table share it.
      rows: `FadingSquares`.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  (the name every optax state gives it)
    rows: FadingSquares


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule, initial_accumulator_value: float = 0.1, eps: float = 1e-7
) -> optax.GradientTransformationExtraArgs:
    """Adagrad with one accumulator for each row, the mean of its squared gradients (FBGEMM's exact row-wise Adagrad).

    It needs four bytes a row beside the values. A row is along the last axis of a parameter; a vector is one row. In
    tables it is equal to dense training, whichever rows a batch touches.

    Args:
      learning_rate: number or schedule.
      initial_accumulator_value: where sums begin, as in `optax.adagrad`; FBGEMM's begin at 0. A mean over a large batch
        makes gradients whose squares are nothing beside 0.1: see docs/optimizers.md.
      eps: added to the sum, under the root; FBGEMM adds its own to the root.

    Returns:
      An optax transform. Its slot in tables is "sum_of_squares", ``()`` float32.

    Raises:
      ValueError: `initial_accumulator_value` or `eps` is not a finite number of 0 or more.

    Example:
      >>> import kvjax, jax.numpy as jnp, optax
      >>> tx = kvjax.optax.rowwise_adagrad(1.0, initial_accumulator_value=0.0)
      >>> params = jnp.zeros((2, 2))
      >>> updates, state = tx.update(jnp.array([[1.0, 7.0], [0.0, 0.0]]), tx.init(params))
      >>> (updates * 5).round().tolist(), state[0].sum_of_squares.tolist()
      ([[-1.0, -7.0], [-0.0, -0.0]], [25.0, 0.0])
    """
    check("rowwise_adagrad", AT_LEAST_0, initial_accumulator_value=initial_accumulator_value, eps=eps)

    def init(params: Any) -> RowwiseAdagradState:
        start = initial_accumulator_value
        return RowwiseAdagradState(jax.tree.map(lambda p: jnp.full(p.shape[:-1], start, p.dtype), params))

    def one(grad: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array]:
        squares = jnp.square(grad)
        sums = sums + (jnp.mean(squares, -1) if grad.ndim else squares)
        root = jnp.where(sums > 0, jax.lax.rsqrt(sums + eps), 0.0).astype(grad.dtype)
        return grad * (root[..., None] if grad.ndim else root), sums

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, RowwiseAdagradState]:
        updates, sums = per_leaf(2, one, updates, state.sum_of_squares)
        return updates, RowwiseAdagradState(sums)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate))


def adagrad_decay(
    learning_rate: optax.ScalarOrSchedule,
    every: int | jax.Array = 100_000,
    decay: float | jax.Array = 0.9,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad whose accumulators fade, so that training on a stream does not come to rest (DeepRec's AdagradDecay).

    Every `every` steps the sums are multiplied by `decay`, but never fall below their initial value. A row remembers
    how often its sums have faded, and catches up when it is touched. So in tables this is equal to dense training,
    whichever rows a batch touches.

    Args:
      learning_rate: number or schedule.
      every: steps, of all rows together.
      decay: factor from 0 to 1.
      initial_accumulator_value: where sums begin, and their least value.
      eps: added to the sum, under the root.

    Returns:
      An optax transform. Its slots in tables are "sum_of_squares" ``(dim,)`` and "fades" ``()`` int32.

    Raises:
      ValueError: `every`, `decay`, `initial_accumulator_value` or `eps` is out of range.

    Example:
      >>> import kvjax, jax.numpy as jnp
      >>> tx = kvjax.optax.adagrad_decay(0.1, every=2, decay=0.5, initial_accumulator_value=0.0)
      >>> params = jnp.zeros((1, 1))
      >>> state = tx.init(params)
      >>> for grad in (4.0, 0.0, 0.0):
      ...     _, state = tx.update(jnp.full((1, 1), grad), state)
      ...     print(state[0].rows.sum_of_squares.tolist())
      [[16.0]]
      [[16.0]]
      [[8.0]]
    """
    check("adagrad_decay", COUNT_FROM_1, every=every)
    check("adagrad_decay", FRACTION, decay=decay)
    check("adagrad_decay", AT_LEAST_0, initial_accumulator_value=initial_accumulator_value, eps=eps)
    start = initial_accumulator_value

    def init(params: Any) -> AdagradDecayState:
        sums = jax.tree.map(lambda p: jnp.full_like(p, start), params)
        fades = jax.tree.map(lambda p: jnp.zeros(p.shape[:-1], jnp.int32), params)
        return AdagradDecayState(jnp.zeros((), jnp.int32), FadingSquares(sums, fades))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AdagradDecayState]:
        due = state.count // every

        def one(grad: jax.Array, sums: jax.Array, fades: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            wide = jnp.promote_types(grad.dtype, jnp.float32)
            factor = jnp.power(jnp.asarray(decay, wide), (due - fades).astype(wide)).astype(grad.dtype)
            faded = jnp.maximum(sums * (factor[..., None] if grad.ndim else factor), start)
            # What is not due stays as it is, to the bit.
            missed = due > fades
            sums = jnp.where(missed[..., None] if grad.ndim else missed, faded, sums) + jnp.square(grad)
            root = jnp.where(sums > 0, jax.lax.rsqrt(sums + eps), 0.0).astype(grad.dtype)
            return grad * root, sums, jnp.maximum(fades, due)

        updates, sums, fades = per_leaf(3, one, updates, state.rows.sum_of_squares, state.rows.fades)
        return updates, AdagradDecayState(state.count + 1, FadingSquares(sums, fades))

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate))
