"""Pieces and copies of a batch on the devices of a user's ``shard_map`` or ``pmap``.

With ``check_vma=True`` JAX knows over which axes values vary: over those they are pieces, and over all others one
piece that several devices have. Without it, and under ``pmap``, nobody knows, so each device along the axes of the
table is taken to have a piece of its own, and copies of the table, along the other axes, must get the same values.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax._keys.sparse_rows import SparseRows
from kvjax._sharded.collectives import from_all, repeated
from kvjax._sharded.equality import check_equal
from kvjax._spec.placement import Placement
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import known, varying


def all_pieces(placement: Placement, values: Any) -> Any:
    """A tree of arrays ``(n, ...)``, each joined with the pieces that other devices have, in the order of the axes."""
    own = repeated(placement, values)
    axes = tuple(axis for axis in placement.axes if axis not in own)
    return from_all(axes + tuple(axis for axis in _others(placement) if axis in varying(values)), values)


def piece(placement: Placement, grads: SparseRows) -> SparseRows:
    """Gradients ``(n,)`` that no other device has: with a count of 0 on all but one where several have the same.

    Copies of the table get the pieces of all of them.
    """
    batch = (grads.keys, grads.rows, grads.counts)
    own = repeated(placement, batch)
    axes = tuple(axis for axis in _others(placement) if axis in varying(batch))
    keys, rows, counts = from_all(axes, batch)
    if own:
        counts = jnp.where(jax.lax.axis_index(own) == 0, counts, 0)
    return grads.replace(keys=keys, rows=rows, counts=counts)


def check_copies(spec: TableSpec, op: str, values: Any) -> jax.Array:
    """A status ``()`` uint32: that of a failure where copies of the table get different values."""
    placement = spec.mesh_placement
    axes = _others(placement)
    if not axes or known(axes):
        return jnp.uint32(0)
    return check_equal(spec, op, values, axes)


def _others(placement: Placement) -> tuple[str, ...]:
    """Axes of the mesh over which the table is copied."""
    return tuple(axis for axis in placement.mesh.axis_names if axis not in placement.axes)
