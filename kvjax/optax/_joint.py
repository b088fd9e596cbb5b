"""Transforms that must see dense and sparse gradients together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._keys.sparse_rows import is_sparse
from kvjax._table.table import is_table
from kvjax._training.rowwise import check_transform
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail
from kvjax._values.tracing import computed_now
from kvjax.optax._whole_batch import as_before, merged_of_all, own_part


def as_arrays(grads: Any) -> Any:
    """Gradients with the rows ``(n, dim)`` of tables' in the place of these."""
    return jax.tree.map(lambda g: g.rows if is_sparse(g) else g, grads, is_leaf=is_sparse)


def global_norm(grads: PyTree) -> jax.Array:
    """``optax.tree.norm`` of dense and sparse gradients together, equal to that of dense arrays.

    Inside ``shard_map`` and ``pmap``, rows are those of all devices, and dense gradients what they are on each: take
    their mean or sum over the devices first.

    Args:
      grads: as `kvjax.value_and_grad` returns them. (Optax's function would sum over keys and counts, too.)

    Returns:
      ``()`` float32.

    Raises:
      TypeError: there are tables in the tree, so it holds parameters or updates. For the norm of a table's rows, use
        `Table.export`.

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np
      >>> grads = {"t": kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 2))), "w": jnp.ones(1)}
      >>> float(kvjax.optax.global_norm(grads))
      3.0
    """
    if any(is_table(part) for part in jax.tree.leaves(grads, is_leaf=is_table)):
        raise TypeError(
            "kvjax: global_norm: want gradients, got a tree with tables, so parameters or updates; "
            "kvjax.orbax.split(params)[0] has the dense ones alone"
        )
    norm = optax.tree.norm(as_arrays(merged_of_all(grads)))
    dense = [g for g in jax.tree.leaves(grads, is_leaf=is_sparse) if not is_sparse(g)]
    return as_before(norm, optax.tree.norm(dense))


def joint(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs a transform over dense gradients and the merged rows of tables as if all were dense arrays.

    It is for transforms like ``optax.clip_by_global_norm``, chained before `partition`. The rows of equal keys are
    summed first, so a norm is that of a dense array. A mean is not: a dense array has a row of zeros for each id that a
    batch leaves out, and a merged gradient has one for each duplicate. Two kinds of transforms belong in `partition`
    instead: those that keep state per element, because each step has other rows, and those that read parameters (weight
    decay).

    Inside ``shard_map`` and ``pmap`` each device gathers the merged rows of all, so the result equals that under
    ``jit`` if dense gradients are also those of the whole batch (``jax.lax.pmean``).

    Args:
      tx: a transform of gradients without state per element.

    Returns:
      An optax transform.

    Raises:
      ValueError: in ``init``: the transform keeps arrays per element, or reads parameters, or its result for a row
        depends on the number of rows of zeros (``optax.clip_by_block_rms``) or on the order of rows.

    Example:
      >>> import kvjax, optax
      >>> tx = optax.chain(
      ...     kvjax.optax.joint(optax.clip_by_global_norm(1.0)),
      ...     kvjax.optax.partition(dense=optax.adam(1e-3), tables=optax.adagrad(0.1)),
      ... )
    """
    check_transform(tx, "joint")
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return _begun(tx, *jax.tree.flatten(params, is_leaf=is_table))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        whole = merged_of_all(updates)
        if params is not None:
            params = jax.tree.map(lambda p: None if is_table(p) else p, params, is_leaf=is_table)
        new_rows, new_state = tx.update(as_arrays(whole), state, params, **extra)

        def put_back(whole: Any, new: Any, grad: Any) -> Any:
            return own_part(whole.replace(rows=new), grad) if is_sparse(grad) else as_before(new, grad)

        return jax.tree.map(put_back, whole, new_rows, updates, is_leaf=is_sparse), as_before(new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def takes_joint(tx: Any) -> bool:
    """Whether `joint` takes it for tables, and can run it without more than gradients."""
    tx, rows = optax.with_extra_args_support(tx), jax.ShapeDtypeStruct((2, 2), jnp.float32)
    try:
        state = _begun(tx, [_Place(2)], jax.tree.structure(0))
        jax.eval_shape(tx.update, rows, state)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    return True


class _Place(NamedTuple):
    """What a transform is tried with in the place of a leaf: rows of a table, or an array of so many axes."""

    dim: int | None
    ndim: int = 2

    @classmethod
    def of(cls, x: Any) -> _Place:
        return cls(x.dim) if is_table(x) else cls(None, jnp.ndim(x))

    def drawn(self, rng: np.random.Generator) -> np.ndarray:
        """Three rows, or a small array: what becomes of rows does not depend on how large that is."""
        return rng.normal(size=(2,) * self.ndim if self.dim is None else (3, self.dim)).astype(np.float32)


def _begun(tx: optax.GradientTransformationExtraArgs, leaves: Sequence[Any], treedef: Any) -> Any:
    """The state of a transform of a tree in which some leaves are tables, or their places, once it has been tried.

    Raises:
      ValueError: it is none for `joint`.
    """
    places = tuple(x if isinstance(x, _Place) else _Place.of(x) for x in leaves)
    rows = [x if at.dim is None else jnp.zeros((2, at.dim), jnp.float32) for x, at in zip(leaves, places, strict=True)]
    state = tx.init(treedef.unflatten(rows))
    if any(getattr(leaf, "ndim", 0) > 0 for leaf in jax.tree.leaves(state)):
        raise fail(
            ValueError, None, "joint", "a transform without state per element (clipping, scaling)",
            "one with arrays in its state", "rows differ from step to step, so put it into kvjax.optax.partition, "
            "whose tables take kvjax.optax.add_row_noise for noise",
        )  # fmt: skip
    _check_rows(tx, treedef, places)
    return state


@functools.lru_cache(maxsize=64)
def _check_rows(tx: optax.GradientTransformationExtraArgs, treedef: Any, places: tuple[_Place, ...]) -> None:
    """Whether rows come out the same beside rows of zeros and in another order, small ones and great ones.

    Raises:
      ValueError: they do not, or the transform reads those of tables as parameters.
    """
    rng = np.random.default_rng(0)
    drawn = [at.drawn(rng) for at in places]
    tables = [at.dim is not None for at in places]
    dense = treedef.unflatten([None if is_rows else x for x, is_rows in zip(drawn, tables, strict=True)])

    @jax.jit
    def run(given: list[Any], params: Any) -> list[Any]:
        updates = treedef.unflatten(given)
        return _with_nones(tx.update(updates, tx.init(updates), params)[0])

    marks = _with_nones(treedef.unflatten(tables))
    for scale in (1e-3, 1.0, 1e6):
        scaled = [x * np.float32(scale) for x in drawn]
        ways = (lambda x: x), (lambda x: np.pad(x, ((0, 2), (0, 0)))), (lambda x: x[::-1])
        try:
            with computed_now():
                alone, beside, turned = (
                    jax.tree.map(
                        np.asarray, run([way(x) if at else x for x, at in zip(scaled, tables, strict=True)], dense)
                    )
                    for way in ways
                )
        except Exception:  # of whatever type the user's are
            _check_parameters(lambda: jax.eval_shape(run, drawn, treedef.unflatten(drawn)))
            return  # it asks for what only a step has, and says so there
        mend = "give a transform whose updates have the form of its gradients"
        if len(alone) != len(marks):
            raise fail(ValueError, None, "joint", f"updates of {len(marks)} arrays", f"{len(alone)}", mend)
        of_rows = (itertools.compress(new, marks) for new in (alone, beside, turned))
        for x, one, padded, back in zip(itertools.compress(drawn, tables), *of_rows, strict=True):
            if np.shape(one) != x.shape:
                raise fail(ValueError, None, "joint", f"updates {x.shape} of such rows", f"{np.shape(one)}", mend)
            least = 1e-5 * np.abs(one).max(initial=0)  # of sums that nearly cancel, in another order
            if not all(np.allclose(got, one, rtol=1e-4, atol=least) for got in (padded[:3], back[::-1])):
                raise ValueError(
                    "kvjax: joint: want a transform that makes the same of a row beside rows of zeros, in any order, "
                    "got one by which rows depend on how many there are; take a norm (optax.clip_by_global_norm), or "
                    "put it into kvjax.optax.partition, where it sees one row at a time"
                )


def _with_nones(tree: Any) -> list[Any]:
    """The leaves of a tree, and what is None in it."""
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)


def _check_parameters(with_parameters: Callable[[], Any]) -> None:
    """Raises if what fails without the rows of tables as parameters does not fail with them."""
    try:
        with_parameters()
    except Exception:
        return
    raise ValueError(
        "kvjax: joint: want a transform of gradients alone, got one that reads the parameters (weight decay, clipping "
        "by their norm); put it into kvjax.optax.partition"
    )
