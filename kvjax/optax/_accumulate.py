"""Accumulation: one update for the gradients of several steps, of dense parameters and of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kvjax._keys.keys import Keys
from kvjax._keys.opaque import opaque_canary, words_in
from kvjax._keys.sparse_rows import is_sparse
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._training.merge import merge
from kvjax._training.rowwise import check_transform
from kvjax._training.whole_batch import as_before
from kvjax._values.arrays import PyTree
from kvjax.optax._checks import COUNT_FROM_1, check_known
from kvjax.optax._conditional import init_within, update_if


class AccumulateState(NamedTuple):
    """State of `accumulate`.

    Attributes:
      steps: ``()`` int32, gradients since the last update.
      grads: the gradients of these steps by number, each array ``(every, ...)``, in a form that any saver and a stock
        ``nnx.Optimizer`` take; of a table the words of the keys, the rows, the counts, and the words of the canary of a
        `kvjax.SparseRows`. Arrays of no elements are left out. Empty before the first step.
      inner: state of the transform.
    """

    steps: jax.Array
    grads: Mapping[str, jax.Array]
    inner: PyTree


def accumulate(tx: optax.GradientTransformation, every: int) -> optax.GradientTransformationExtraArgs:
    """Updates once for several steps, by the mean of their gradients, as ``optax.MultiSteps`` does for dense
    parameters.

    The gradients of tables are summed by key over all of these steps (`kvjax.merge`), so a key that occurs in one of
    them is trained like one that occurs in each. The steps in between write nothing. The state keeps the gradients, and
    gets their structure in the first step. So the first step is compiled separately, and cannot be the body of a
    ``lax.scan``; and the template for a restore is a state after a step (``jax.eval_shape`` of a step gives it), not
    the state of ``init``. If all microbatches are there at once, ``lax.scan`` over them and `kvjax.merge` need no such
    memory. If a table refuses an update, the gradients of its steps are lost, even with ``partition(...,
    on_refused="keep")``: after `kvjax.commit`, training continues with the next batches.

    Args:
      tx: a transform of the whole tree of parameters, such as `partition`.
      every: steps for each update, 1 or more. Their batches must have the same shape. To change it, go on with
        ``tx.init(params)._replace(inner=state.inner)`` after an update.

    Returns:
      An optax transform.

    Raises:
      TypeError, ValueError: the arguments are none of these; or, in ``update``, the shape of the batch has changed, or
        the state is of another `every`.

    Example:
      >>> import kvjax, optax, jax.numpy as jnp, numpy as np
      >>> params = {"t": kvjax.get_table("doc_accumulate", dim=1)}
      >>> tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0)), 2)
      >>> state = tx.init(params)
      >>> for key in (7, 8):
      ...     grads = {"t": kvjax.SparseRows(np.array([key]), jnp.ones((1, 1)))}
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(len(params["t"]))
      0
      2
      >>> params["t"].lookup(np.array([7, 8]))[:, 0].tolist()
      [-0.5, -0.5]
      >>> kvjax.drop_table("doc_accumulate")
    """
    check_transform(tx, "accumulate")
    check_known("accumulate", COUNT_FROM_1, every=every)
    tx = optax.with_extra_args_support(tx)
    every = int(every)

    def init(params: Any) -> AccumulateState:
        return AccumulateState(jnp.zeros((), jnp.int32), {}, init_within(tx, params, "accumulate"))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, AccumulateState]:
        plain, form = jax.tree.flatten(jax.tree.map(_plain, updates, is_leaf=is_sparse))
        arrays = {f"{i:05}": array for i, array in enumerate(plain)}
        some = {name: array for name, array in arrays.items() if array.size}  # Orbax saves no others
        _check_every(state.grads, every)
        kept = _put(state.grads if len(state.grads) else _room(some, every), some, state.steps)

        last = state.steps == every - 1

        def write(kept: Any, inner: Any) -> Any:
            whole = _room(arrays, every) | dict(kept)
            grads = jax.tree.unflatten(form, [whole[name] for name in sorted(whole)])
            return tx.update(jax.tree.map(_mean, updates, grads, is_leaf=is_sparse), inner, params, **extra)

        new_updates, inner = update_if(last, write, kept, state.inner)
        return new_updates, AccumulateState(jnp.where(last, 0, state.steps + 1), kept, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _room(grads: Mapping[str, jax.Array], every: int) -> dict[str, jax.Array]:
    return {name: jnp.broadcast_to(x, (every, *x.shape)) for name, x in grads.items()}


def _check_every(kept: Mapping[str, jax.Array], every: int) -> None:
    """Whether there is one place for the gradients of each step: in others would be those of an earlier update."""
    others = {x.shape[0] for x in kept.values()} - {every}
    if others:
        raise ValueError(
            f"kvjax: accumulate: want a state that keeps the gradients of every={every} steps, got one of "
            f"{min(others)}; to go on with another number of steps or devices, give "
            "tx.init(params)._replace(inner=state.inner) after an update, when state.steps is 0"
        )


def _put(kept: Mapping[str, jax.Array], grads: Mapping[str, jax.Array], step: jax.Array) -> dict[str, jax.Array]:
    """The gradients that are kept, with those of a step in their place."""
    want, got = [kept[name].shape[1:] for name in sorted(kept)], [x.shape for x in grads.values()]
    if want != got:
        raise ValueError(
            f"kvjax: accumulate: want the gradients of batches of one shape, got arrays {got}, and {want} in the step "
            "before; pad the batch (pad_id= or mask=), or leave the last one out"
        )
    return {name: _with(kept[name], one, step) for name, one in grads.items()}


def _with(kept: jax.Array, one: jax.Array, step: jax.Array) -> jax.Array:
    """Also where only some of them are on a mesh with Explicit axes; it is spread as the step's own is."""

    def run(kept: jax.Array, one: jax.Array, step: jax.Array) -> tuple[Any, Any]:
        return (jax.lax.dynamic_update_index_in_dim(kept, one, step, 0),), ()

    put: jax.Array = as_auto(run, (None, *sharding_of(one, one.ndim)), kept, one, step)[0][0]
    return put


def _plain(grad: Any) -> Any:
    return (grad.keys.words, grad.rows, grad.counts, words_in(grad.canary)) if is_sparse(grad) else grad


def _mean(grad: Any, kept: Any) -> Any:
    """Of the gradients that are kept, which are like this one."""
    if not is_sparse(grad):
        return as_before(jnp.mean(kept, 0), grad)  # the state has one spec for all, by which each device has its own
    words, rows, counts, canary = kept
    whole = grad.replace(keys=Keys(words, grad.keys.narrow), rows=rows, counts=counts, canary=opaque_canary(canary))
    return merge(whole, scale=1 / rows.shape[0])
