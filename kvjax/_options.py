"""The arguments of `kvjax.get_table`, checked."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax._admit import Admission
from kvjax._device import check_backend
from kvjax._evict import Every, Policy
from kvjax._initializers import resolve
from kvjax._keys import Keys
from kvjax._numbers import is_integer
from kvjax._placement import Placement
from kvjax._rounding import ROUNDINGS
from kvjax._spec import COUNTS, KEY_DTYPES, ON_FULL, ROW_DTYPES, TableSpec, fail
from kvjax._storage import Storage
from kvjax.ffi import host


def resolve_spec(name: str, dim: Any, *, key_dtype: Any, dtype: Any, seed: Any, **options: Any) -> TableSpec:
    """What `kvjax.get_table` is asked for.

    Raises:
      ValueError, TypeError: an argument is out of range.
      RuntimeError: there is no backend for the storage.
    """

    def want(ok: Any, what: str, got: Any) -> None:
        if not ok:
            raise fail(ValueError, name, "get_table", what, repr(got), "see kvjax.get_table")

    def rows(option: str) -> int | None:
        n = options[option]
        want(n is None or (is_integer(n) and 0 <= n < 2**32 - 1), f"{option} below 2**32 - 1 or None", n)
        return None if n is None else int(n)

    want(isinstance(name, str) and name != "", "a name", name)
    want(is_integer(dim) and 1 <= dim <= host.MAX_DIM, f"an integer dim in 1..{host.MAX_DIM}", dim)
    want(seed is None or is_integer(seed), "an integer seed", seed)
    key_dtype, dtype = _name(key_dtype), _name(dtype)
    want(key_dtype in KEY_DTYPES, f"key_dtype in {KEY_DTYPES} (strings become keys by kvjax.hash_keys)", key_dtype)
    want(dtype in ROW_DTYPES, f"dtype in {ROW_DTYPES}", dtype)
    on_full, admit, evict, count = (options[key] for key in ("on_full", "admit", "evict", "count"))
    max_capacity = rows("max_capacity")
    want(max_capacity != 0, "max_capacity of 1 or more, or None", max_capacity)
    want(on_full in ON_FULL, f"on_full in {ON_FULL}", on_full)
    want(on_full == "grow" or max_capacity, f"max_capacity beside on_full={on_full!r}", max_capacity)
    want(admit is None or isinstance(admit, Admission), "an admission of kvjax.admit or None", admit)
    want(evict is None or isinstance(evict, (Policy, Every)), "a policy of kvjax.evict or None", evict)
    runs = evict is None or isinstance(evict, Every) or on_full == "evict"
    want(runs, "evict=policy.every(steps), or on_full='evict': else it would never run", evict)
    timed = isinstance(evict, Every) and on_full != "evict" and evict.policy.needs_number()
    want(not timed, "a number of rows for what is evicted every so many steps", evict)
    want(count in COUNTS, f"count in {COUNTS}", count)
    storage = options["storage"]
    want(isinstance(storage, Storage), "one of kvjax.storage (Device(), Host(), Hybrid(bytes), Mmap(path))", storage)
    placement = options.get("placement") or placement_of(name, options)
    rounding, constraint = options["rounding"], options["constraint"]
    want(rounding in ROUNDINGS, f"rounding in {ROUNDINGS}", rounding)
    want(rounding == "nearest" or dtype != "float32", "rounding='nearest' for rows of float32", rounding)
    if constraint is not None:
        got, row = _shape_of(constraint, dim), f"float32[{dim}]"
        want(got == row, f"constraint: a function {row} -> {row}", got)
    try:
        initializer = resolve(options["initializer"], int(dim))
    except (TypeError, ValueError) as error:
        raise type(error)(f"kvjax: table {name!r}, get_table: {error}") from error
    spec = TableSpec(
        name=name,
        dim=int(dim),
        key_dtype=key_dtype,
        dtype=dtype,
        initializer=initializer,
        seed=(int(host.hash_strings([name.encode()], 0)[0]) if seed is None else int(seed)) % 2**64,
        trainable=bool(options["trainable"]),
        checkpoint=bool(options["checkpoint"]),
        capacity=rows("capacity") or 0,
        max_capacity=max_capacity,
        on_full=on_full,
        admit=admit,
        evict=evict,
        count=count,
        storage=storage,
        rounding=rounding,
        constraint=constraint,
        placement=placement,
    )
    check_backend(spec, "get_table")
    return spec


def placement_of(name: str, options: dict[str, Any], op: str = "get_table") -> Placement | None:
    """Where ``mesh=`` and what goes with it put a table; None if there is no mesh. `op` is for errors."""
    mesh, axis, partitioner, replicated, wire = (
        options[key] for key in ("mesh", "axis", "partitioner", "replicated", "wire")
    )

    def want(ok: Any, what: str, got: Any) -> None:
        if not ok:
            raise fail(ValueError, name, op, what, repr(got), "see kvjax.get_table")

    if mesh is None:
        for key in ("axis", "partitioner", "replicated", "wire"):
            want(not options[key], f"mesh= beside {key}=", options[key])
        return None
    want(isinstance(mesh, Mesh), "a jax.sharding.Mesh", mesh)
    want(mesh.local_devices, "a mesh with devices of this process", mesh)
    axes = tuple(mesh.axis_names) if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    want(
        axes and len(set(axes)) == len(axes) and set(axes) <= set(mesh.axis_names),
        f"axis of the mesh's {tuple(mesh.axis_names)}", axis,
    )  # fmt: skip
    want(partitioner is None or callable(partitioner), "a function (keys, num_shards)", partitioner)
    want(partitioner is None or not replicated, "no partitioner beside replicated=True", partitioner)
    if partitioner is not None:
        got = _owners_of(partitioner, math.prod(mesh.shape[axis] for axis in axes))
        want(got in ("int32[3]", "int64[3]", "uint32[3]"), "partitioner(keys (3,), num_shards) -> int32[3]", got)
    wire = None if wire is None else _name(wire)
    want(wire is None or wire in ROW_DTYPES, f"wire in {ROW_DTYPES}", wire)
    return Placement.of(mesh, axes, partitioner=partitioner, replicated=bool(replicated), wire=wire)


def _name(dtype: Any) -> Any:
    """The name of a dtype, or what was given if it is none."""
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return dtype


def _owners_of(partitioner: Any, num_shards: int) -> str:
    """What a partitioner makes of three keys, or the error it raises."""
    try:
        hash(partitioner)
        out = jax.eval_shape(lambda words: partitioner(Keys(words), num_shards), jnp.zeros((3, 2), jnp.uint32))
        return f"{out.dtype}[{','.join(map(str, out.shape))}]"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _shape_of(constraint: Any, dim: int) -> str:
    """What a constraint makes of a row: "float32[8]", or the error it raises."""
    row = jax.ShapeDtypeStruct((dim,), jnp.float32)
    try:
        hash(constraint)  # it is part of what compiled programs are found by
        out = jax.eval_shape(constraint, row)
        return f"{out.dtype}[{','.join(map(str, out.shape))}]"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
