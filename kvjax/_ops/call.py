"""The `ffi_call` that all operations go through, and the operands that they share.

Reads have no side effect, so that JAX may repeat, merge or drop them; a write is done once, if its result is used
(`as_value`). Neither is ordered by that: what orders calls is the version operand. Under vmap a lookup takes its extra
axes as they are; ops on a whole batch run once per example.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._ops.as_value import as_value
from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import varying_like

WORD = jax.ShapeDtypeStruct((), jnp.uint32)
"""A version, a status or a canary."""


def array(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def read(target: str, results: Any, *operands: Any, vmap: str = "sequential", **attributes: Any) -> Any:
    _note(attributes)
    call = jax.ffi.ffi_call(target, results, vmap_method=vmap)
    return varying_like(call(*operands, **attributes), *operands)


def write(op: str, target: str, results: Any, /, *operands: Any, **attributes: Any) -> Any:
    """Part of an operation that writes, which is done once if its result is used, and else not at all."""
    _note(attributes)
    call = jax.ffi.ffi_call(target, results, has_side_effect=True)
    done = as_value(attributes["table"], op, functools.partial(call, **attributes), *operands)
    return varying_like(done, *operands)


def _note(attributes: dict[str, Any]) -> None:
    if attributes.get("table"):
        PROCESS.traced.add(attributes["table"])


def flag(value: bool) -> np.bool_:
    return np.bool_(value)


def nothing(spec: TableSpec, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array without elements, for an operand that is left out."""
    # By NumPy, an eager call has no time to spare; but as a constant it would enter the shard_map of a sharded table as
    # an operand, and XLA of jax 0.11 crashes on those without elements.
    return np.zeros(shape, dtype) if spec.placement is None else jnp.zeros(shape, dtype)


def mask_operand(spec: TableSpec, mask: jax.Array | None) -> Any:
    return nothing(spec, (0,), bool) if mask is None else mask


def initial_operand(spec: TableSpec, initial: jax.Array | None) -> Any:
    return nothing(spec, (0, spec.dim), spec.row_dtype) if initial is None else initial
