"""Whole batches: in a ``shard_map`` or ``pmap``, the gradient that a table gets from all devices, on each of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax._keys.keys import Keys
from kvjax._keys.sparse_rows import SparseRows, is_sparse
from kvjax._process import PROCESS
from kvjax._sharded.collectives import agreed, from_all
from kvjax._spmd.varying import axis_index, known, manual_axes, varying
from kvjax._training.merge import merge


def merged(grads: Any) -> Any:
    """A tree of gradients with those of tables merged: of this device alone."""
    return jax.tree.map(lambda g: merge(g) if is_sparse(g) else g, grads, is_leaf=is_sparse)


def merged_of_all(grads: Any) -> Any:
    """The same with the merged gradients of all devices, so that rows are those that a table will get."""
    return jax.tree.map(lambda g: merge(_gathered(merge(g))) if is_sparse(g) else g, grads, is_leaf=is_sparse)


def own_part(whole: SparseRows, grads: SparseRows) -> SparseRows:
    """Of the merged gradient of all devices the piece that this one brings to the table, in the place of `grads`."""
    axes = _axes(grads)
    if not axes:
        return whole
    n = whole.rows.shape[0] // jax.lax.axis_size(axes)

    def piece(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, axis_index(axes) * n, n)

    keys = Keys(piece(whole.keys.words), whole.keys.narrow)
    return whole.replace(keys=keys, rows=piece(whole.rows), counts=piece(whole.counts), merged=True)


def all_agree(grads: Any, condition: jax.Array) -> jax.Array:
    """Whether a condition ``()`` holds on all devices that bring a gradient to a table: they write together, or wait
    for each other for ever."""
    if not any(map(is_sparse, jax.tree.leaves(grads, is_leaf=is_sparse))):
        return condition
    return agreed(jnp.logical_not(condition).astype(jnp.uint32)) == 0


def as_before(results: Any, before: Any) -> Any:
    """Results that are equal on all devices where `before`, a tree of the same structure, was: JAX does not know it of
    what was made from all devices' gradients."""

    def equal(x: Any, like: Any) -> Any:
        axes = tuple(sorted(varying(x) - varying(like)))
        if not axes:
            return x
        # The first device's; a maximum would lose what is not a number.
        first = jnp.where(axis_index(axes) == 0, x, jnp.zeros_like(x))
        return jax.lax.psum(first.astype(jnp.int32), axes) > 0 if x.dtype == bool else jax.lax.psum(first, axes)

    return jax.tree.map(equal, results, before)


def _axes(grads: SparseRows) -> tuple[str, ...]:
    """The axes over which devices have other gradients, as far as JAX knows: those of its table, as its copies along
    other axes all get the same."""
    if 0 in grads.rows.shape[:-1]:
        return ()
    spec = None if grads.table is None else PROCESS.spec_of(grads.table)
    of_table = None if spec is None or spec.placement is None else spec.placement.axes
    axes = [axis for axis in manual_axes() if of_table is None or axis in of_table]
    return tuple(axis for axis in axes if not known([axis]) or axis in varying(grads))


def _gathered(grads: SparseRows) -> SparseRows:
    axes = _axes(grads)
    if not axes:
        return grads
    keys, rows, counts = from_all(axes, (grads.keys, grads.rows, grads.counts))
    return grads.replace(keys=keys, rows=rows, counts=counts)
