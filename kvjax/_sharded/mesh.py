"""One device's part of an operation, run on all devices of a table's mesh, whatever the program around it is.

Inside ``shard_map`` and ``pmap`` the program is one device's already, and the part is called as it is. Everywhere else
it is put into a ``shard_map`` of our own: a bare FFI call would run the whole batch on every device. Explicit axes
become Auto ones for that; the results take the sharding of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax._keys.keys import Keys
from kvjax._ops import routing
from kvjax._ops.programs import program_outside
from kvjax._sharded.collectives import repeated
from kvjax._sharded.equality import check_equal
from kvjax._spec.placement import Placement
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto, explicit_mesh, on_some_mesh, sharding_of
from kvjax._values.arrays import one_program
from kvjax._values.errors import fail


def inside(spec: TableSpec, op: str) -> bool:
    """Whether the program here is that of one device of the table's mesh.

    Raises:
      ValueError: it is on another mesh, or on one device in some axes only.
    """
    mesh = jax.sharding.get_abstract_mesh()
    manual = set(getattr(mesh, "manual_axes", ()))
    if not mesh.empty:
        _check_mesh(spec, op, mesh)
    if not manual or manual == set(mesh.axis_names):
        return bool(manual)
    raise fail(
        ValueError, spec.name, op, f"a shard_map over all axes of the mesh, {mesh.axis_names}",
        f"one over {tuple(sorted(manual))} alone", "leave its axis_names= out, or call it outside, where kvjax makes a "
        "shard_map of its own",
    )  # fmt: skip


def _check_mesh(spec: TableSpec, op: str, mesh: Any) -> None:
    """That the mesh around is the table's, by its axes; that they stand for the same devices is checked on these."""
    want, got = dict(spec.mesh_placement.mesh.shape), dict(mesh.shape)
    if want != got:
        raise fail(
            ValueError, spec.name, op, f"a program on the table's mesh, {want}", f"one on a mesh {got}",
            "use that mesh in jax.set_mesh and shard_map, and the name of its axis as axis_name= of pmap, or make the "
            "table on the other one",
        )  # fmt: skip


def over_keys(
    part: Callable[..., tuple[Any, ...]],
    spec: TableSpec,
    op: str,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    **options: Any,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Runs a read in which each device has a piece of the keys.

    Args:
      part: ``(spec, op, version, keys (n,), mask (n,) or None, **options)`` to a tuple of arrays ``(n, ...)`` and a
        tuple of values that all devices agree on; a function of a module.
      spec: of the table.
      op: for errors.
      version: ``()`` uint32.
      keys: ``(...)``.
      mask: ``(...)`` bool or None.
      **options: hashable.

    Returns:
      The same, ``(..., ...)`` in the order of the keys.
    """
    if not inside(spec, op):
        everywhere, (keys, mask) = _anywhere(keys), on_explicit(spec, keys, mask)
        static = part, spec, op, tuple(sorted(options.items())), everywhere
        by_key, (*common, _) = _over_keys(*static, version, keys, mask)
        return by_key, tuple(common)
    placement, shape = spec.mesh_placement, keys.shape
    words, mask = keys.words.reshape(-1, 2), None if mask is None else mask.reshape(-1)
    # What several devices all ask for is asked for once: each of them asks for a piece.
    axes = () if placement.replicated else repeated(placement, (words, mask))
    words, mask, n = pieces(_num_devices(placement, axes), words, mask)
    if axes:
        words, mask = _own_piece(placement, axes, words, mask)
    by_key, common = part(spec, op, version, Keys(words, keys.narrow), mask, **options)
    if axes:
        by_key = [jax.lax.all_gather(x, axes, axis=0, tiled=True, to="invarying") for x in by_key]
    return tuple(x[:n].reshape(*shape, *x.shape[1:]) for x in by_key), common


def _num_devices(placement: Placement, axes: tuple[str, ...]) -> int:
    return math.prod(placement.mesh.shape[axis] for axis in axes)


def _own_piece(placement: Placement, axes: tuple[str, ...], words: jax.Array, mask: jax.Array | None) -> Any:
    """A device's own piece of rows and their mask ``(n, ...)``, which go into pieces along these axes."""
    size = words.shape[0] // _num_devices(placement, axes)
    start = jax.lax.axis_index(axes) * jnp.int32(size)
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), (words, mask))


def on_explicit(spec: TableSpec, keys: Keys, mask: jax.Array | None) -> tuple[Keys, jax.Array | None]:
    """Keys and their mask; where they are on no mesh, whole on the table's, if that has Explicit axes: beside
    parameters on that mesh, JAX takes no rows of one with Auto axes."""
    mesh = None if spec.placement is None else spec.placement.explicit
    if mesh is None or not jax.sharding.get_abstract_mesh().empty or on_some_mesh((keys, mask)):
        return keys, mask
    return _put((keys, mask), NamedSharding(mesh, P()))


@one_program(1)  # by which processes need not ask each other whether they have the same
def _put(values: Any, sharding: NamedSharding) -> Any:
    return jax.device_put(values, sharding)


def _anywhere(keys: Keys) -> bool:
    """Whether keys that a call outside jit brings are on no devices in particular: then every device, and so every
    process, gets all results."""
    return not isinstance(keys.words, Tracer) and len(keys.words.sharding.device_set) == 1


@program_outside(0, 1, 2, 3, 4)
def _over_keys(
    part: Any, spec: TableSpec, op: str, options: Any, everywhere: bool, version: Any, keys: Keys, mask: Any
) -> Any:
    placement, shape = spec.mesh_placement, keys.shape

    # Each process has made such keys for itself, so that they come whole, to be compared.
    compared = everywhere and placement.num_processes > 1

    def run(version: Any, words: Any, mask: Any) -> Any:
        words, mask, n = pieces(placement.num_devices, words.reshape(-1, 2), None if mask is None else mask.reshape(-1))

        def local(version: Any, words: Any, mask: Any) -> Any:
            if compared:
                status = check_equal(spec, op, (words, mask), placement.mesh.axis_names)
                words, version = routing.agree(spec, op, status, (words, version))
                words, mask = _own_piece(placement, placement.axes, words, mask)
            by_key, common = part(spec, op, version, Keys(words, keys.narrow), mask, **dict(options))
            return by_key, (*common, version)  # or XLA leaves out all that it takes to read no keys

        split = P(placement.axes)
        given = P() if compared else split
        by_key, common = on_mesh(placement, local, (P(), given, given), (split, P()), (version, words, mask))
        by_key = tuple(x[:n].reshape(*shape, *x.shape[1:]) for x in by_key)
        if everywhere and jax.sharding.get_abstract_mesh().empty:
            by_key = jax.lax.with_sharding_constraint(by_key, placement.everywhere)
        return by_key, common

    return auto(spec, op, run, sharding_of(keys.words, keys.ndim), version, keys.words, mask)


def pieces(number: int, rows: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array | None, int]:
    """Rows ``(n, ...)`` and their mask, padded so that they make that number of pieces of one size; and n."""
    n = rows.shape[0]
    padding = -n % number
    if padding == 0:
        return rows, mask, n
    mask = jnp.ones(n, bool) if mask is None else mask
    return jnp.pad(rows, ((0, padding), *[(0, 0)] * (rows.ndim - 1))), jnp.pad(mask, (0, padding)), n


def on_mesh(placement: Placement, local: Callable[..., Any], in_specs: Any, out_specs: Any, operands: Any) -> Any:
    """``shard_map`` over all axes of the mesh; operands that are None stay None."""
    given = [i for i, x in enumerate(operands) if x is not None]

    def call(*arrays: Any) -> Any:
        full: list[Any] = [None] * len(operands)
        for i, x in zip(given, arrays, strict=True):
            full[i] = x
        return local(*full)

    # In the user's mesh, if there is one: JAX wants it to be that.
    mesh = None if not jax.sharding.get_abstract_mesh().empty else placement.mesh
    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=tuple(in_specs[i] for i in given), out_specs=out_specs, check_vma=False
    )
    return mapped(*(operands[i] for i in given))


def auto(spec: TableSpec | None, op: str, run: Callable[..., Any], leading: tuple[Any, ...], *operands: Any) -> Any:
    """`as_auto` in a program that must be on the table's mesh, if there is one."""
    explicit = explicit_mesh(operands)
    if explicit is not None and spec is not None:
        _check_mesh(spec, op, explicit)
    return as_auto(run, leading, *operands)


def over_batch(spec: TableSpec | None, op: str, part: Callable[..., Any], ndim: int, *operands: Any) -> tuple[Any, ...]:
    """Runs a function in which nothing depends on another example on pieces of the batch.

    Args:
      part: of arrays ``(n, ...)``, or None where the operand is, to a tuple of arrays ``(n, ...)``.
      spec: of the table over whose mesh the batch is, or None for what is in one place.
      op: for errors.
      ndim: how many axes of the operands are those of the batch.
      *operands: arrays ``(..., ...)``, of which the first one is not None, or None.

    Returns:
      Arrays ``(..., ...)``.
    """
    shape = operands[0].shape[:ndim]
    n = math.prod(shape)

    def run(*operands: Any) -> Any:
        flat = [None if x is None else x.reshape(n, *x.shape[ndim:]) for x in operands]
        if spec is None or inside(spec, op):
            results = part(*flat)
        else:
            placement, split = spec.mesh_placement, P(spec.mesh_placement.axes)
            flat = [None if x is None else pieces(placement.num_devices, x, None)[0] for x in flat]
            results = on_mesh(placement, part, [split] * len(flat), split, flat)
        return tuple(x[:n].reshape(*shape, *x.shape[1:]) for x in results), ()

    return auto(spec, op, run, sharding_of(operands[0], ndim), *operands)[0]


def elements(spec: TableSpec, values: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """One element of each array that exists only once the array does; without a mesh the arrays themselves."""
    if spec.placement is None or not values:
        return values

    def run(*values: jax.Array) -> Any:
        # Behind a barrier XLA computes them whole.
        return (), tuple(x[(slice(0, 1),) * x.ndim] for x in jax.lax.optimization_barrier(values))

    return auto(spec, "after", run, (), *values)[1]
