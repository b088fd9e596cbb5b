"""Sparse groups: rows whose gradients are too small become exactly zero, whichever optimizer trains them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.catch_up import catching_up_of
from kvjax._training.rowwise import CatchUp, HasUpdate
from kvjax.optax._checks import AT_LEAST_0, check, check_known
from kvjax.optax._ftrl import follow_leader
from kvjax.optax._rows import nearer, soft


def sparse_group_ftrl(
    learning_rate: float | jax.Array,
    l1: float | jax.Array = 0.0,
    l2: float | jax.Array = 0.0,
    l21: float | jax.Array = 0.0,
    l2_shrinkage: float | jax.Array = 0.0,
    beta: float | jax.Array = 0.0,
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    """FTRL-Proximal with sparse groups: as `ftrl`, but whole rows are exactly 0 while their gradients are too small.

    A group is a row along the last axis of a parameter; a vector is one row. With z and n as in `ftrl`, and s being z
    with each element l1 nearer to 0, ``w = -s max(0, 1 - sqrt(dim) l21 / |s|) / ((beta + sqrt(n)) / lr + 2 l2)``. z is
    computed from w wherever w is not 0. A row without a gradient keeps its z, so in tables this is equal to dense
    training, whichever rows a batch touches, unless there is `l2_shrinkage`. `kvjax.Prune` with ``zero_rows=True``
    leaves rows of zeros out of exports and checkpoints.

    Args:
      learning_rate: number.
      l1: makes elements exactly 0.
      l2: keeps them small.
      l21: makes rows exactly 0.
      l2_shrinkage: keeps them small, as part of the gradient.
      beta: is added to the root of the sum.
      initial_accumulator_value: where sums begin.

    Returns:
      An optax transform; its update needs ``params``.

    Raises:
      TypeError: the learning rate is a schedule.
      ValueError: a number is negative or not finite; or, in ``update``, without params.

    Source: Ni et al., Feature Selection for Facebook Feed Ranking System via a Group-Sparsity-Regularized
      Training Algorithm (2019); the same form for Adam is Yue et al. 2021, arXiv:2107.14432, see `group_adam`. TFPlus
      has it as SparseGroupFtrl.

    Example:
      >>> import kvjax, jax.numpy as jnp, optax
      >>> tx = kvjax.optax.sparse_group_ftrl(0.5, l21=1.0)
      >>> params = jnp.array([[0.05, 0.05], [3.0, 3.0]])
      >>> updates, _ = tx.update(jnp.full((2, 2), 0.1), tx.init(params), params)
      >>> (optax.apply_updates(params, updates) == 0).all(1).tolist()
      [True, False]
    """
    check("sparse_group_ftrl", AT_LEAST_0, l21=l21)

    def length(p: jax.Array) -> float | jax.Array:
        return learning_rate * l21 * math.sqrt(p.shape[-1] if p.ndim else 1)

    start = initial_accumulator_value
    return follow_leader("sparse_group_ftrl", learning_rate, l1, l2, l2_shrinkage, beta, start, length)


def group_lasso(tx: HasUpdate, l1: float = 0.0, l2: float = 0.0, l21: float = 0.0, replay: int = 0) -> CatchUp:
    """Group lasso after an optimizer: rows whose gradients are weaker than the penalty shrink to exactly 0.

    After each update of `tx`, the proximal step of the penalty moves a row (the last axis) nearer to 0: each element by
    `l1`, then the length of the row by ``sqrt(dim) l21``, and then all by the factor ``1 / (1 + 2 l2)``. These are
    strengths per step: learning rate times penalty.

    In dense training, rows without a gradient shrink, too. In a table they catch up as with `catch_up`: when they are
    touched next, and when they are read through `caught_up`, through which losses must be differentiated. With `l1` or
    `l21`, with or without `l2`, that equals dense training. With both `l1` and `l21`, the steps that a row has missed
    count as one step of their total strength. ``caught_up(...).export(kvjax.Prune(zero_rows=True))``, and a checkpoint
    saved in this way, leave out rows that have become 0. `sweep` writes them, and takes as long as to export and load
    the table.

    Args:
      tx: a transform that does not move rows without a gradient: ``optax.sgd``, ``adagrad``, ``rmsprop``, ``adadelta``,
        with any schedule. With `replay` also Adam and others that do move them.
      l1: how much each element shrinks in a step.
      l2: shrinks all elements in proportion.
      l21: how much the length of a row shrinks in a step, times the root of its width.
      replay: as for `catch_up`. Each missed step is then a step of `tx` and of the penalty, so `l1` and `l21` together
        equal dense training, too, for this many steps. If the steps beyond make a difference, as with weak penalties,
        it is refused: give only one of `l1` and `l21`.

    Returns:
      A transform of rows, as from `catch_up`. Beside the slots of `tx`, a row has "last_step", four bytes.

    Raises:
      TypeError: `tx` is not an optax transform.
      ValueError: a strength is not a finite number of 0 or more, or `tx` moves rows without a gradient. From a write:
        as for `catch_up`.

    Source: Yuan and Lin, Model selection and estimation in regression with grouped variables (2006); the proximal step
      of both penalties together is that of Simon, Friedman, Hastie and Tibshirani, A sparse-group lasso (2013).

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> tx = kvjax.optax.group_lasso(optax.sgd(1.0), l21=0.5)
      >>> table = kvjax.get_table("doc_group_lasso", dim=1)
      >>> state = tx.init(1)
      >>> for key in (7, 8, 8, 8):
      ...     table, state = table.apply(tx, kvjax.SparseRows(np.array([key]), jnp.full((1, 1), -1.0)), state)
      >>> now = kvjax.optax.caught_up(table, state, tx)
      >>> now.lookup(np.array([7, 8]))[:, 0].tolist(), len(now.export(kvjax.Prune(zero_rows=True)))
      ([0.0, 1.5], 1)
      >>> kvjax.drop_table("doc_group_lasso")
    """
    check_known("group_lasso", AT_LEAST_0, l1=l1, l2=l2, l21=l21)

    def shrink(rows: Any, steps: Any) -> Any:
        taken = k = steps[..., None]
        if l2:  # what the others take in each step weighs as much as the rest of the row does in that step
            k = k * np.float32(math.log1p(2 * l2))
            taken = jnp.expm1(k) / np.float32(2 * l2)
        if l1:
            rows = soft(rows, taken * np.float32(l1))
        if l21:
            rows = nearer(rows, taken * np.float32(l21 * math.sqrt(rows.shape[-1])))
        return rows * jnp.exp(-k) if l2 else rows

    return catching_up_of(tx, "group_lasso", replay, shrink)
