"""Accumulation: one update for the gradients of several steps, of dense parameters and of tables."""

from __future__ import annotations

import dataclasses
import functools
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
from kvjax._values.arrays import PyTree
from kvjax.optax._checks import COUNT_FROM_1, check_known
from kvjax.optax._conditional import init_within, update_if
from kvjax.optax._whole_batch import as_before


class AccumulateState(NamedTuple):
    """State of `accumulate`.

    Attributes:
      steps: ``()`` int32, gradients since the last update.
      grads: the gradients of these steps by number, in a form that any saver and a stock ``nnx.Optimizer`` take. Of a
        dense parameter ``(1, ...)``, the mean so far, float32 at least. Of a table ``(every, ...)``, for each step the
        words of the keys, the rows, the counts, and the words of the canary of a `kvjax.SparseRows`. Arrays of no
        elements are left out. Empty before the first step.
      inner: state of the transform.
    """

    steps: jax.Array
    grads: Mapping[str, jax.Array]
    inner: PyTree


def accumulate(tx: optax.GradientTransformation, every: int) -> optax.GradientTransformationExtraArgs:
    """Updates once for several steps, by the mean of their gradients, as ``optax.MultiSteps`` does for dense
    parameters.

    The gradients of tables are summed by key over all of these steps (`kvjax.merge`), so a key that occurs in one of
    them is trained like one that occurs in each. The steps in between write nothing. The state keeps the gradients of
    tables and the mean of the others, and gets their structure in the first step. So the first step is compiled
    separately, and cannot be the body of a ``lax.scan``; and the template for a restore is a state after a step
    (``jax.eval_shape`` of a step gives it), not the state of ``init``. If all microbatches are there at once,
    ``lax.scan`` over them and `kvjax.merge` need no such memory. If a table refuses an update, the gradients of its
    steps are lost, even with ``partition(..., on_refused="keep")``: after `kvjax.commit`, training continues with the
    next batches.

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
        arrays, form = jax.tree.flatten(
            jax.tree.map(functools.partial(_parts, every=every), updates, is_leaf=is_sparse)
        )
        parts: dict[str, _Part] = {f"{i:05}": part for i, part in enumerate(arrays)}
        some = {name: part for name, part in parts.items() if part.array.size}  # Orbax saves no others
        kept = dict(state.grads) or {name: part.room() for name, part in some.items()}
        _check_kept(kept, some, every)
        kept = {name: _with(kept[name], part, state.steps) for name, part in some.items()}
        last = state.steps >= every - 1

        def write(kept: Any, inner: Any) -> Any:
            whole = {name: part.room() for name, part in parts.items()} | dict(kept)
            grads = jax.tree.unflatten(form, [whole[name] for name in sorted(whole)])
            return tx.update(jax.tree.map(_mean, updates, grads, is_leaf=is_sparse), inner, params, **extra)

        new_updates, inner = update_if(last, write, kept, state.inner)
        return new_updates, AccumulateState(jnp.where(last, 0, state.steps + 1), kept, inner)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class _Part:
    """An array of a step's gradients.

    Args:
      array: of any shape and dtype.
      steps: how many of them are kept; None if their mean is.
    """

    array: jax.Array
    steps: int | None

    @property
    def places(self) -> int:
        return self.steps or 1

    def room(self) -> jax.Array:
        dtype = self.array.dtype
        if self.steps is None and not (jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32):
            dtype = jnp.dtype("float32")  # in the mean of 16 bits the later steps would be lost
        return jnp.broadcast_to(self.array.astype(dtype), (self.places, *self.array.shape))


def _parts(grad: Any, every: int) -> Any:
    if not is_sparse(grad):
        return _Part(grad, None)
    arrays = (grad.keys.words, grad.rows, grad.counts, words_in(grad.canary))
    return tuple(_Part(array, every) for array in arrays)


def _check_kept(kept: Mapping[str, jax.Array], parts: Mapping[str, _Part], every: int) -> None:
    """Whether there is one place for the gradients of each step, in others would be those of an earlier update; and
    whether they are like these."""
    want, got = [kept[name].shape[1:] for name in sorted(kept)], [part.array.shape for part in parts.values()]
    others = {
        kept[name].shape[0] for name, part in parts.items() if name in kept and kept[name].shape[0] != part.places
    }
    if others:
        raise ValueError(
            f"kvjax: accumulate: want a state that keeps the gradients of every={every} steps, got one of "
            f"{min(others)}; to go on with another number of steps or devices, give "
            "tx.init(params)._replace(inner=state.inner) after an update, when state.steps is 0"
        )
    if want != got:
        raise ValueError(
            f"kvjax: accumulate: want the gradients of batches of one shape, got arrays {got}, and {want} in the step "
            "before; pad the batch (pad_id= or mask=), or leave the last one out"
        )


def _with(kept: jax.Array, part: _Part, step: jax.Array) -> jax.Array:
    """What is kept, with the array of this step. Also where only some of them are on a mesh with Explicit axes; it is
    spread as the step's own is."""

    def run(kept: jax.Array, one: jax.Array, step: jax.Array) -> tuple[Any, Any]:
        if part.steps is not None:
            return (jax.lax.dynamic_update_index_in_dim(kept, one, step, 0),), ()
        one = one.astype(kept.dtype)[None]
        return (jnp.where(step == 0, one, kept + (one - kept) / (step + 1).astype(kept.dtype)),), ()

    one = part.array
    put: jax.Array = as_auto(run, (None, *sharding_of(one, one.ndim)), kept, one, step)[0][0]
    return put


def _mean(grad: Any, kept: Any) -> Any:
    """Of the gradients that are kept, which are like this one."""
    if not is_sparse(grad):
        mean = kept[0].astype(grad.dtype) if jnp.issubdtype(grad.dtype, jnp.inexact) else kept[0]
        return as_before(mean, grad)  # the state has one spec for all, by which each device has its own
    words, rows, counts, canary = kept
    whole = grad.replace(keys=Keys(words, grad.keys.narrow), rows=rows, counts=counts, canary=opaque_canary(canary))
    return merge(whole, scale=1 / rows.shape[0])
