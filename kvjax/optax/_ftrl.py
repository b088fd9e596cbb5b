"""FTRL and Adam with sparse groups: parameters in closed form of what was summed, so that some are exactly zero."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kvjax.optax._rows import number, per_leaf


class FtrlState(NamedTuple):
    """State of `ftrl`, of the parameters' shapes.

    Attributes:
      z: gradients less what the parameters have made of them; the parameters follow from it.
      sum_of_squares: of gradients.
    """

    z: Any
    sum_of_squares: Any


class GroupAdamState(NamedTuple):
    """State of `group_adam`.

    Attributes:
      count: ``()`` int32, steps; of a row, in tables.
      mu, nu: moments.
      z: what the parameters follow from.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  (the name every optax state gives it)
    mu: Any
    nu: Any
    z: Any


def ftrl(
    learning_rate: float | jax.Array,
    l1: float | jax.Array = 0.0,
    l2: float | jax.Array = 0.0,
    l2_shrinkage: float | jax.Array = 0.0,
    beta: float | jax.Array = 0.0,
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformationExtraArgs:
    """FTRL-Proximal (McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches"), with sparse parameters.

    With n the sum of squared gradients, ``z += g + 2 l2_shrinkage w - (sqrt(n_new) - sqrt(n)) / lr w``, and
    ``w = (sign(z) l1 - z) / ((beta + sqrt(n)) / lr + 2 l2)``, or 0 where ``|z| <= l1``. z starts such that w is what
    the parameters are, so the first gradient moves them from there (where z starts at 0, it throws initial rows away),
    and without `l1` and `l2` this is Adagrad. In tables it is equal to dense training, whichever rows a batch touches,
    unless there is `l2_shrinkage`.

    Args:
      learning_rate: number.
      l1: makes parameters exactly 0.
      l2: keeps them small.
      l2_shrinkage: the same as part of the gradient.
      beta: is added to the root of the sum.
      initial_accumulator_value: where sums begin.

    Returns:
      An optax transform; its update needs ``params``.

    Raises:
      TypeError: the learning rate is a schedule.
      ValueError: in ``update``, without params.

    Example:
      >>> import kvjax, jax.numpy as jnp, optax
      >>> tx = kvjax.optax.ftrl(0.5, l1=1.0)
      >>> params = jnp.array([0.1, 0.1, 3.0])
      >>> updates, _ = tx.update(jnp.array([0.0, 0.5, 0.5]), tx.init(params), params)
      >>> [round(x, 4) for x in optax.apply_updates(params, updates).tolist()]
      [0.1, 0.0, 2.5774]
    """
    number("ftrl", "learning_rate", learning_rate)
    start = float(initial_accumulator_value)

    def root(sums: Any) -> Any:
        return (beta + jnp.sqrt(sums)) / learning_rate

    def init(params: Any) -> FtrlState:
        def first(p: jax.Array) -> jax.Array:
            return (-p * (root(jnp.full_like(p, start)) + 2 * l2) - jnp.sign(p) * l1).astype(p.dtype)

        return FtrlState(jax.tree.map(first, params), jax.tree.map(lambda p: jnp.full_like(p, start), params))

    def one(grad: jax.Array, p: jax.Array, z: jax.Array, sums: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        new_sums = sums + jnp.square(grad)
        z = (z + grad + 2 * l2_shrinkage * p - (root(new_sums) - root(sums)) * p).astype(z.dtype)
        scale = root(new_sums) + 2 * l2
        new = jnp.where(jnp.abs(z) <= l1, 0.0, (jnp.sign(z) * l1 - z) / jnp.where(scale > 0, scale, 1.0))
        return jnp.where(scale > 0, new - p, 0.0).astype(p.dtype), z, new_sums

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, FtrlState]:
        _check_params("ftrl", params)
        updates, z, sums = per_leaf(3, one, updates, params, state.z, state.sum_of_squares)
        return updates, FtrlState(z, sums)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def group_adam(
    learning_rate: float | jax.Array,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    l1: float | jax.Array = 0.0,
    l2: float | jax.Array = 0.0,
    l21: float | jax.Array = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Adam with sparse groups (Yue et al. 2021, arXiv:2107.14432): rows that do not earn their place become zeros.

    A group is a row, what the last axis of a parameter has; a vector is one row. With the moments m and v of Adam,
    corrected, and ``q = (sqrt(v) + eps) / lr``: ``z += m - (q_new - q) w``; s is z, each element l1 nearer to 0; and
    ``w = -s max(0, 1 - sqrt(dim) l21 / |s|) / (q_new + 2 l2)``. z starts such that w is what the parameters are, and
    without `l1`, `l2` and `l21` this is Adam. In tables a row counts its own steps, as with Adam, and is lazy like it.

    Args:
      learning_rate: number.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: is added to the root of the second moment.
      l1: makes elements exactly 0.
      l2: keeps them small.
      l21: makes rows exactly 0.

    Returns:
      An optax transform; its update needs ``params``.

    Raises:
      TypeError: the learning rate is a schedule.
      ValueError: in ``update``, without params.

    Example:
      >>> import kvjax, jax.numpy as jnp, optax
      >>> tx = kvjax.optax.group_adam(0.1, l21=2.0)
      >>> params = jnp.array([[0.05, 0.05], [3.0, 3.0]])
      >>> updates, _ = tx.update(jnp.ones((2, 2)), tx.init(params), params)
      >>> (optax.apply_updates(params, updates) == 0).all(1).tolist()
      [True, False]
    """
    number("group_adam", "learning_rate", learning_rate)

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.square(x), -1, keepdims=True)) if x.ndim else jnp.abs(x)

    def threshold(p: jax.Array) -> Any:
        return l21 * math.sqrt(p.shape[-1] if p.ndim else 1)

    def init(params: Any) -> GroupAdamState:
        def first(p: jax.Array) -> jax.Array:
            s = -p * (eps / learning_rate + 2 * l2)
            size = norm(s)
            grown = s * (1 + threshold(p) / jnp.where(size > 0, size, 1.0))
            return (grown - jnp.sign(p) * l1).astype(p.dtype)

        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return GroupAdamState(jnp.zeros((), jnp.int32), mu, nu, jax.tree.map(first, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, GroupAdamState]:
        _check_params("group_adam", params)
        count = state.count + 1

        def one(grad: jax.Array, p: jax.Array, mu: jax.Array, nu: jax.Array, z: jax.Array) -> tuple[jax.Array, ...]:
            def corrected(moment: jax.Array, b: float, steps: jax.Array) -> jax.Array:
                bias = 1 - jnp.asarray(b, jnp.promote_types(grad.dtype, jnp.float32)) ** steps
                return moment / jnp.where(steps > 0, bias, 1.0).astype(grad.dtype)

            def root(nu: jax.Array, steps: jax.Array) -> Any:
                return (jnp.sqrt(corrected(nu, b2, steps)) + eps) / learning_rate

            mu, new_nu = b1 * mu + (1 - b1) * grad, b2 * nu + (1 - b2) * jnp.square(grad)
            now = root(new_nu, count)
            z = (z + corrected(mu, b1, count) - (now - root(nu, state.count)) * p).astype(z.dtype)
            s = jnp.sign(z) * jnp.maximum(jnp.abs(z) - l1, 0.0)
            size = norm(s)
            kept = jnp.maximum(1 - threshold(p) / jnp.where(size > 0, size, 1.0), 0.0)
            return (-s * kept / (now + 2 * l2) - p).astype(p.dtype), mu, new_nu, z

        updates, mu, nu, z = per_leaf(4, one, updates, params, state.mu, state.nu, state.z)
        return updates, GroupAdamState(count, mu, nu, z)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def _check_params(op: str, params: Any) -> None:
    if params is None:
        raise ValueError(f"kvjax: {op}: want update(grads, state, params), got no params; the update follows from them")
