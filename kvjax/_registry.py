"""The tables of this process by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._initializers import native, resolve
from kvjax._rounding import ROUNDINGS
from kvjax._spec import KEY_DTYPES, ROW_DTYPES, TableSpec, fail
from kvjax._table import Table, live
from kvjax.ffi import host

_specs: dict[str, TableSpec] = {}
_lock = threading.RLock()


def get_table(
    name: str,
    *,
    dim: int | None = None,
    key_dtype: str = "int64",
    dtype: Any = "float32",
    initializer: Any = 0.0,
    seed: int | None = None,
    trainable: bool = True,
    checkpoint: bool = True,
    rounding: str = "nearest",
    constraint: Callable[[Any], Any] | None = None,
) -> Table:
    """Gets the table of this name, or creates it. With the name alone it only gets.

    Args:
      name: unique in the process; compiled programs and checkpoints find the table by it.
      dim: width of a row, at least 1.
      key_dtype: "int64", "uint64", "int32" or "uint32": how exported keys are typed (signed or unsigned, always
        64 bits). Every table takes any 64-bit key.
      dtype: of the rows, "float32", "bfloat16" or "float16". Gradients and slots are float32.
      initializer: a number; an array, one row ``(dim,)`` or a pool of rows ``(p, dim)`` of which each key chooses one;
        one of `kvjax.initializers`; or a function ``(rng, shape, dtype)``, such as any of ``jax.nn.initializers``,
        called for each key by itself with shape ``(1, dim)``.
      seed: 64-bit integer for the initial rows; by default a hash of the name.
      trainable: whether `kvjax.value_and_grad` and `kvjax.optax.partition` train it.
      checkpoint: whether `kvjax.orbax.split` hands it out to be saved.
      rounding: how training rounds rows to bfloat16 or float16: to the "nearest" value, or "stochastic", which keeps
        updates that are smaller than the spacing of the type, in the mean.
      constraint: function of a row ``(dim,)`` float32 that returns one, applied after each update and before
        rounding; one of `kvjax.constraints`, or your own.

    Returns:
      The live handle.

    Raises:
      ValueError: a table of this name exists with other arguments, or an argument is out of range.
      TypeError: the initializer is none of these, or its function wants or gives something else.
      KeyError: only the name was given and there is no such table.

    Example:
      >>> import kvjax
      >>> kvjax.get_table("doc_get", dim=4, initializer=kvjax.initializers.normal(0.1))
      Table('doc_get', dim=4, dtype=float32, version=0)
      >>> kvjax.get_table("doc_get").dim
      4
      >>> kvjax.drop_table("doc_get")
    """
    others = (key_dtype, dtype, seed, trainable, checkpoint, rounding, constraint) != (
        "int64", "float32", None, True, True, "nearest", None,
    )  # fmt: skip
    if dim is None and (others or not (isinstance(initializer, float) and initializer == 0.0)):
        raise fail(
            ValueError, name, "get_table", "dim= beside the other arguments", "none", "give all or only the name"
        )
    with _lock:
        if dim is None:
            if name not in _specs:
                raise KeyError(
                    f"kvjax: table {name!r}, get_table: want a table of this name, got none; give dim= to create it"
                )
            return live(_specs[name])
        spec = _resolve(name, dim, key_dtype, dtype, initializer, seed, trainable, checkpoint, rounding, constraint)
        known = _specs.get(name)
        if known is None:
            kind, a, b, pool = native(spec.initializer)
            host.create(name, dim, spec.dtype, kind, a, b, spec.seed, pool)
            _specs[name] = spec
        elif known != spec:
            raise fail(
                ValueError, name, "get_table", "the arguments it was made with", spec.differences(known),
                "give the same arguments, another name, or kvjax.drop_table(name) first",
            )  # fmt: skip
        return live(_specs[name])


def _resolve(name, dim, key_dtype, dtype, initializer, seed, trainable, checkpoint, rounding, constraint) -> TableSpec:
    def want(ok: Any, what: str, got: Any) -> None:
        if not ok:
            raise fail(ValueError, name, "get_table", what, repr(got), "see kvjax.get_table")

    def integer(x: Any) -> bool:
        return isinstance(x, (int, np.integer)) and not isinstance(x, bool)

    want(isinstance(name, str) and name != "", "a name", name)
    want(integer(dim) and 1 <= dim <= host.MAX_DIM, f"an integer dim in 1..{host.MAX_DIM}", dim)
    want(seed is None or integer(seed), "an integer seed", seed)
    key_dtype, dtype = jnp.dtype(key_dtype).name, jnp.dtype(dtype).name
    want(key_dtype in KEY_DTYPES, f"key_dtype in {KEY_DTYPES}", key_dtype)
    want(dtype in ROW_DTYPES, f"dtype in {ROW_DTYPES}", dtype)
    want(rounding in ROUNDINGS, f"rounding in {ROUNDINGS}", rounding)
    want(rounding == "nearest" or dtype != "float32", "rounding='nearest' for rows of float32", rounding)
    if constraint is not None:
        got, row = _shape_of(constraint, dim), f"float32[{dim}]"
        want(got == row, f"constraint: a function {row} -> {row}", got)
    try:
        initializer = resolve(initializer, int(dim))
    except (TypeError, ValueError) as error:
        raise type(error)(f"kvjax: table {name!r}, get_table: {error}") from error
    seed = int(host.hash_strings([name.encode()], 0)[0]) if seed is None else int(seed)
    return TableSpec(
        name,
        int(dim),
        key_dtype,
        dtype,
        initializer,
        seed % 2**64,
        bool(trainable),
        bool(checkpoint),
        rounding,
        constraint,
    )


def _shape_of(constraint: Any, dim: int) -> str:
    """What a constraint makes of a row: "float32[8]", or the error it raises."""
    row = jax.ShapeDtypeStruct((dim,), jnp.float32)
    try:
        out = jax.eval_shape(constraint, row)
        return f"{out.dtype}[{','.join(map(str, out.shape))}]"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def tables() -> dict[str, Table]:
    """The live handles of all tables of this process, by name."""
    with _lock:
        return {name: live(spec) for name, spec in _specs.items()}


def drop_table(name: str) -> None:
    """Forgets a table and gives its memory back. Its handles stay stale, even if the name is used again.

    Args:
      name: of a table of this process.

    Raises:
      KeyError: there is no table of this name.
    """
    with _lock:
        host.drop(name)
        _specs.pop(name, None)
