"""Conditional steps: wrappers of a whole transform that write dense parameters and tables, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._keys.opaque import is_opaque, opaque
from kvjax._keys.sparse_rows import is_sparse
from kvjax._spmd.varying import varying_like
from kvjax._training.rowwise import check_transform
from kvjax._values.arrays import ArrayLike, PyTree
from kvjax.optax._checks import ABOVE_0, ABOVE_1, COUNT, COUNT_FROM_1, check_known
from kvjax.optax._joint import as_arrays
from kvjax.optax._whole_batch import all_agree, merged, merged_of_all


class ApplyIfState(NamedTuple):
    """State of `apply_if`.

    Attributes:
      skipped: ``()`` int32, steps that were left out so far.
      inner_state: state of the transform.
    """

    skipped: jax.Array
    inner_state: PyTree


class ApplyIfFiniteState(NamedTuple):
    """State of `apply_if_finite`, with the names that optax gives it.

    Attributes:
      notfinite_count: ``()`` int32, consecutive steps that were not finite.
      last_finite: ``()`` bool, whether the last step was finite.
      total_notfinite: ``()`` int32, steps that were not finite so far.
      inner_state: state of the transform.
    """

    notfinite_count: jax.Array
    last_finite: jax.Array
    total_notfinite: jax.Array
    inner_state: PyTree


class LossScaleState(NamedTuple):
    """State of `scale_loss`.

    Attributes:
      loss_scale: ``()`` float32, what the next loss is to be multiplied by.
      finite_steps: ``()`` int32, finite steps since the scale last changed.
      inner_state: state of the transform.
    """

    loss_scale: jax.Array
    finite_steps: jax.Array
    inner_state: PyTree


def init_within(tx: Any, params: Any, op: str) -> Any:
    """The first state of a transform whose steps may be left out.

    Raises:
      ValueError: it accumulates, and so changes its state in each step.
    """
    state = tx.init(params)
    for part in jax.tree.leaves(state, is_leaf=_accumulates):
        if _accumulates(part):
            mend = f"put it around, kvjax.optax.accumulate(kvjax.optax.{op}(tx), k)"
            raise ValueError(
                f"kvjax: {op}: want a transform that updates in each step, got kvjax.optax.accumulate inside; "
                + (mend if op != "accumulate" else "give one of them the product of both")
            )
    return state


def _accumulates(part: Any) -> bool:
    return type(part).__name__ == "AccumulateState"  # whose file stands on this one


def update_if(condition: jax.Array, write: Callable[[Any, Any], Any], grads: Any, inner: Any) -> Any:
    """Updates and state as ``write(grads, inner)`` makes them, or, where the condition is false, updates of nothing and
    the state as it was."""

    updates_like, inner_like = jax.eval_shape(write, grads, inner)

    # In a `shard_map`, JAX wants both branches to give values that vary over the same axes.
    def write_all(grads: Any, inner: Any) -> Any:
        updates, new_inner = write(grads, inner)
        return updates, jax.tree.map(varying_like, new_inner, inner)

    def wait(grads: Any, inner: Any) -> Any:
        return jax.tree.map(_nothing, updates_like), jax.tree.map(varying_like, inner, inner_like)

    return jax.lax.cond(condition, write_all, wait, grads, inner)


def _nothing(like: jax.ShapeDtypeStruct) -> Any:
    if like.dtype == jax.dtypes.float0:
        return np.zeros(like.shape, like.dtype)
    dtype = jnp.uint32 if is_opaque(like) else like.dtype
    zeros = varying_like(jnp.zeros(like.shape, dtype, device=like.sharding), like)
    return opaque(zeros) if is_opaque(like) else zeros


def is_finite(grads: Any) -> jax.Array:
    """``()`` bool: all numbers of merged gradients are finite, on all devices."""
    finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(as_arrays(grads))]
    return all_agree(grads, jnp.all(jnp.stack(finite or [jnp.bool_(True)])))


def apply_if(
    tx: optax.GradientTransformation, condition: Callable[[PyTree], ArrayLike]
) -> optax.GradientTransformationExtraArgs:
    """Updates only in steps whose gradients meet a condition; other steps write nothing.

    In a step that is left out, neither dense parameters nor tables change: no row is made, no frequency is counted, and
    the states of optimizers stay as they are.

    Args:
      tx: a transform of the whole tree of parameters, such as `partition`.
      condition: function of the gradients that returns a ``()`` bool. For a table it gets the merged gradient rows
        ``(n, dim)``: those of equal keys summed, then rows of zeros. Inside ``shard_map`` and ``pmap`` those are the
        rows of all devices, and a step is left out on all of them or on none.

    Returns:
      An optax transform.

    Raises:
      TypeError: the arguments are none of these.

    Example:
      >>> import kvjax, optax, jax.numpy as jnp, numpy as np
      >>> params = kvjax.get_table("doc_apply_if", dim=1)
      >>> tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
      >>> tx = kvjax.optax.apply_if(tx, lambda grads: optax.tree.norm(grads) < 10)
      >>> state = tx.init(params)
      >>> for size in (1.0, 100.0):
      ...     grads = kvjax.SparseRows(np.array([7]), jnp.full((1, 1), size))
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> params.lookup(7).tolist(), int(params.frequency(7)), int(state.skipped)
      ([-1.0], 1, 1)
      >>> kvjax.drop_table("doc_apply_if")
    """
    check_transform(tx, "apply_if")
    if not callable(condition):
        raise TypeError(f"kvjax: apply_if: want a function of the gradients, got {condition!r}; it gives a bool")
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> ApplyIfState:
        return ApplyIfState(jnp.zeros((), jnp.int32), init_within(tx, params, "apply_if"))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, ApplyIfState]:
        holds = all_agree(updates, jnp.asarray(condition(as_arrays(merged_of_all(updates))), bool))
        grads = merged(updates)
        new_updates, inner = update_if(holds, lambda g, s: tx.update(g, s, params, **extra), grads, state.inner_state)
        return new_updates, ApplyIfState(state.skipped + jnp.where(holds, 0, 1), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_if_finite(
    tx: optax.GradientTransformation, max_consecutive_errors: int
) -> optax.GradientTransformationExtraArgs:
    """``optax.apply_if_finite`` for dense parameters and tables together: leaves out steps that are not finite.

    Optax's own cannot go around `partition`, because `partition` writes rows in its update; inside `partition` it would
    skip single rows.

    Args:
      tx: a transform of the whole tree of parameters, such as `partition`.
      max_consecutive_errors: at most this many consecutive steps are left out; the next one is taken as it is.

    Returns:
      An optax transform.

    Raises:
      TypeError, ValueError: the arguments are none of these.

    Example:
      >>> import kvjax, optax, jax.numpy as jnp, numpy as np
      >>> params = kvjax.get_table("doc_finite", dim=1)
      >>> tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
      >>> tx = kvjax.optax.apply_if_finite(tx, 5)
      >>> grads = kvjax.SparseRows(np.array([7, 8]), jnp.array([[1.0], [jnp.nan]]))
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> len(optax.apply_updates(params, updates)), int(state.total_notfinite)
      (0, 1)
      >>> kvjax.drop_table("doc_finite")
    """
    check_transform(tx, "apply_if_finite")
    check_known("apply_if_finite", COUNT, max_consecutive_errors=max_consecutive_errors)
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> ApplyIfFiniteState:
        inner = init_within(tx, params, "apply_if_finite")
        return ApplyIfFiniteState(jnp.zeros((), jnp.int32), jnp.bool_(True), jnp.zeros((), jnp.int32), inner)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, ApplyIfFiniteState]:
        grads = merged(updates)
        finite = is_finite(grads)
        count = jnp.where(finite, 0, state.notfinite_count + 1)
        new_updates, inner = update_if(
            finite | (count > max_consecutive_errors),
            lambda g, s: tx.update(g, s, params, **extra),
            grads,
            state.inner_state,
        )
        return new_updates, ApplyIfFiniteState(count, finite, state.total_notfinite + jnp.where(finite, 0, 1), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_loss(
    tx: optax.GradientTransformation, initial: float = 2.0**15, period: int = 2000, factor: float = 2.0
) -> optax.GradientTransformationExtraArgs:
    """Dynamic loss scaling (Micikevicius et al. 2018, arXiv:1710.03740) of dense parameters and tables together.

    You multiply the loss by ``loss_scale`` of the state, so that 16-bit gradients do not vanish; ``update`` divides
    gradients by it. A step whose gradients are not finite writes nothing and divides the scale by `factor`. After
    `period` consecutive finite steps the scale is multiplied by `factor`, as far as float32 can hold it.

    Args:
      tx: a transform of the whole tree of parameters, such as `partition`.
      initial: first scale.
      period: finite steps until the scale grows.
      factor: by which the scale grows and shrinks, more than 1. Powers of two cause no rounding.

    Returns:
      An optax transform. ``optax.tree_utils.tree_get(state, "loss_scale")`` is the scale for the next loss.

    Raises:
      TypeError, ValueError: the arguments are none of these.

    Example:
      >>> import kvjax, optax, jax.numpy as jnp
      >>> params = {"t": kvjax.get_table("doc_scale", dim=1), "w": jnp.ones(1)}
      >>> tx = kvjax.optax.scale_loss(kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0)))
      >>> state = tx.init(params)
      >>> scale = optax.tree_utils.tree_get(state, "loss_scale")
      >>> grads = kvjax.grad(lambda p: scale * jnp.sum(p["t"].lookup(7) + p["w"]))(params)
      >>> updates, state = tx.update(grads, state, params)
      >>> float(scale), updates["w"].tolist()
      (32768.0, [-1.0])
      >>> kvjax.drop_table("doc_scale")
    """
    check_transform(tx, "scale_loss")
    check_known("scale_loss", ABOVE_0, initial=initial)
    check_known("scale_loss", ABOVE_1, factor=factor)
    check_known("scale_loss", COUNT_FROM_1, period=period)
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(jnp.float32(initial), jnp.zeros((), jnp.int32), init_within(tx, params, "scale_loss"))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LossScaleState]:
        grads = merged(updates)
        finite = is_finite(grads)

        def scaled(grad: Any) -> Any:
            if is_sparse(grad):
                return grad.replace(rows=grad.rows / state.loss_scale)
            wide = jnp.promote_types(grad.dtype, jnp.float32)  # a scale may be more than float16 can hold
            return (grad.astype(wide) / state.loss_scale.astype(wide)).astype(grad.dtype)

        grads = jax.tree.map(scaled, grads, is_leaf=is_sparse)
        new_updates, inner = update_if(finite, lambda g, s: tx.update(g, s, params, **extra), grads, state.inner_state)
        steps = jnp.where(finite, state.finite_steps + 1, 0)
        more = state.loss_scale * factor
        grown = jnp.where((steps >= period) & jnp.isfinite(more), more, state.loss_scale)  # half of inf would be inf
        scale = jnp.where(finite, grown, jnp.maximum(state.loss_scale / factor, jnp.finfo(jnp.float32).tiny))
        return new_updates, LossScaleState(scale, jnp.where(steps >= period, 0, steps), inner)

    return optax.GradientTransformationExtraArgs(init, update)
