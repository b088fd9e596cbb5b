"""FTRL and Adam with sparse groups: parameters in closed form of what was summed, so that some are exactly zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kvjax._training.rowwise import check_params
from kvjax._values.arrays import PyTree
from kvjax.optax._checks import AT_LEAST_0, DECAY, check
from kvjax.optax._rows import at_least, nearer, norm, per_leaf, soft


class FtrlState(NamedTuple):
    """State of `ftrl`, of the parameters' shapes.

    Attributes:
      z: the sum of gradients minus the part that is in the parameters; needed where parameters are 0.
      sum_of_squares: sums of squared gradients.
    """

    z: PyTree
    sum_of_squares: PyTree


class GroupAdamState(NamedTuple):
    """State of `group_adam`.

    Attributes:
      count: ``()`` int32, steps; in tables, the steps of a row.
      mu, nu: moments.
      z: the value from which parameters are computed; needed where they are 0.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  (the name every optax state gives it)
    mu: PyTree
    nu: PyTree
    z: PyTree


def ftrl(
    learning_rate: float | jax.Array,
    l1: float | jax.Array = 0.0,
    l2: float | jax.Array = 0.0,
    l2_shrinkage: float | jax.Array = 0.0,
    beta: float | jax.Array = 0.0,
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    """FTRL-Proximal (McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches"), with sparse parameters.

    With n the sum of squared gradients, ``z += g + 2 l2_shrinkage w - (sqrt(n_new) - sqrt(n)) / lr w``, and ``w =
    (sign(z) l1 - z) / ((beta + sqrt(n)) / lr + 2 l2)``, or 0 where ``|z| <= l1``. z is computed from w wherever w is
    not 0. So the first gradient moves parameters from their initial values (if z started at 0, initial rows would be
    thrown away). A change of the rate, even to 0, does not move what has been learnt. Without `l1` and `l2` this is
    Adagrad. In tables it is equal to dense training, whichever rows a batch touches, unless there is `l2_shrinkage`.

    Args:
      learning_rate: number.
      l1: makes parameters exactly 0.
      l2: keeps them small.
      l2_shrinkage: keeps them small, as part of the gradient.
      beta: added to the root of the sum.
      initial_accumulator_value: where sums begin.

    Returns:
      An optax transform; its update needs ``params``.

    Raises:
      TypeError: the learning rate is a schedule.
      ValueError: a number is negative or not finite; or, in ``update``, without params.

    Example:
      >>> import kvjax, jax.numpy as jnp, optax
      >>> tx = kvjax.optax.ftrl(0.5, l1=1.0)
      >>> params = jnp.array([0.1, 0.1, 3.0])
      >>> updates, _ = tx.update(jnp.array([0.0, 0.5, 0.5]), tx.init(params), params)
      >>> [round(x, 4) for x in optax.apply_updates(params, updates).tolist()]
      [0.1, 0.0, 2.5774]
    """
    return follow_leader("ftrl", learning_rate, l1, l2, l2_shrinkage, beta, initial_accumulator_value)


def follow_leader(
    name: str,
    learning_rate: float | jax.Array,
    l1: Any,
    l2: Any,
    l2_shrinkage: Any,
    beta: Any,
    start: Any,
    group: Callable[[jax.Array], float | jax.Array] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """FTRL, with a penalty on the length of rows if `group` gives it, times the learning rate, for parameters."""
    check(name, AT_LEAST_0, learning_rate=learning_rate, l1=l1, l2=l2, l2_shrinkage=l2_shrinkage, beta=beta)
    check(name, AT_LEAST_0, initial_accumulator_value=start)

    def init(params: Any) -> FtrlState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return FtrlState(zeros, jax.tree.map(lambda p: jnp.full_like(p, start), params))

    def one(grad: jax.Array, p: jax.Array, z: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        new_sums = sums + jnp.square(grad)
        root, new_root = beta + jnp.sqrt(sums), beta + jnp.sqrt(new_sums)  # all is lr times the formula's
        length = None if group is None else group(p)
        s = -p * (root + 2 * l2 * learning_rate)
        if length is not None:
            s = s * (1 + length / at_least(norm(s)))
        before = jnp.where(p == 0, learning_rate * z, s - jnp.sign(p) * (learning_rate * l1))
        after = before + learning_rate * (grad + 2 * l2_shrinkage * p) - (new_root - root) * p
        scale = new_root + 2 * l2 * learning_rate
        left = soft(after, learning_rate * l1)
        new = -(left if length is None else nearer(left, length)) / jnp.where(scale == 0, 1.0, scale)
        return jnp.where(scale == 0, 0.0, new - p).astype(p.dtype), unscaled(after, learning_rate, z, grad, p), new_sums

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FtrlState]:
        check_params(params, name)
        updates, z, sums = per_leaf(3, one, updates, params, state.z, state.sum_of_squares)
        return updates, FtrlState(z, sums)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def unscaled(after: jax.Array, learning_rate: Any, z: jax.Array, grad: jax.Array, p: jax.Array) -> jax.Array:
    """z of the next step, which needs it only where parameters are 0."""
    return jnp.where(p == 0, z + grad, after / jnp.where(learning_rate > 0, learning_rate, 1.0)).astype(z.dtype)


def group_adam(
    learning_rate: float | jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    l1: float | jax.Array = 0.0,
    l2: float | jax.Array = 0.0,
    l21: float | jax.Array = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Adam with sparse groups (Yue et al. 2021, arXiv:2107.14432): rows whose gradients are too small become zeros.

    A group is a row along the last axis of a parameter; a vector is one row. With the bias-corrected moments m and v of
    Adam, and ``q = (sqrt(v) + eps) / lr``: ``z += m - (q_new - q) w``; s is z with each element l1 nearer to 0; and ``w
    = -s max(0, 1 - sqrt(dim) l21 / |s|) / (q_new + 2 l2)``. z is computed from w wherever w is not 0, as in `ftrl`, and
    without `l1`, `l2` and `l21` this is Adam. In tables it is lazy like Adam, and a row counts its own steps.

    Args:
      learning_rate: number.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      l1: makes elements exactly 0.
      l2: keeps them small.
      l21: makes rows exactly 0.

    Returns:
      An optax transform; its update needs ``params``.

    Raises:
      TypeError: the learning rate is a schedule.
      ValueError: a number is negative or not finite, or `b1` or `b2` is not below 1; or, in ``update``, without params.

    Example:
      >>> import kvjax, jax.numpy as jnp, optax
      >>> tx = kvjax.optax.group_adam(0.1, l21=2.0)
      >>> params = jnp.array([[0.05, 0.05], [3.0, 3.0]])
      >>> updates, _ = tx.update(jnp.ones((2, 2)), tx.init(params), params)
      >>> (optax.apply_updates(params, updates) == 0).all(1).tolist()
      [True, False]
    """
    check("group_adam", AT_LEAST_0, learning_rate=learning_rate, eps=eps, l1=l1, l2=l2, l21=l21)
    check("group_adam", DECAY, b1=b1, b2=b2)

    def threshold(p: jax.Array) -> Any:
        return learning_rate * (l21 * math.sqrt(p.shape[-1] if p.ndim else 1))

    def init(params: Any) -> GroupAdamState:
        mu, nu, z = (jax.tree.map(jnp.zeros_like, params) for _ in range(3))
        return GroupAdamState(jnp.zeros((), jnp.int32), mu, nu, z)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, GroupAdamState]:
        check_params(params, "group_adam")
        count = state.count + 1

        def one(grad: jax.Array, p: jax.Array, mu: jax.Array, nu: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
            def corrected(moment: jax.Array, b: float, steps: jax.Array) -> jax.Array:
                wide = jnp.promote_types(grad.dtype, jnp.float32)
                bias = 1 - jnp.asarray(b, wide) ** steps.astype(wide)
                return moment / jnp.where(steps > 0, bias, 1.0).astype(grad.dtype)

            mu, new_nu = b1 * mu + (1 - b1) * grad, b2 * nu + (1 - b2) * jnp.square(grad)
            moment = corrected(mu, b1, count)
            # All is lr times the formula's.
            root, now = (jnp.sqrt(corrected(v, b2, n)) + eps for v, n in ((nu, state.count), (new_nu, count)))
            s = -p * (root + 2 * l2 * learning_rate)
            s = s * (1 + threshold(p) / at_least(norm(s)))
            before = jnp.where(p == 0, learning_rate * z, s - jnp.sign(p) * (learning_rate * l1))
            after = before + learning_rate * moment - (now - root) * p
            left = nearer(soft(after, learning_rate * l1), threshold(p))
            moved = (-left / (now + 2 * l2 * learning_rate) - p).astype(p.dtype)
            # A row without any gradient yet is so small beside the threshold that its last bits would move it.
            same = jnp.all(after == before, -1, keepdims=True) if p.ndim else after == before
            moved = jnp.where(same, jnp.zeros_like(moved), moved)
            return moved, mu, new_nu, unscaled(after, learning_rate, z, moment, p)

        updates, mu, nu, z = per_leaf(4, one, updates, params, state.mu, state.nu, state.z)
        return updates, GroupAdamState(count, mu, nu, z)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))
