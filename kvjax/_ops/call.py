"""The `ffi_call` that all operations go through, and the operands that they share.

Reads have no side effect, so that JAX may repeat, merge or drop them; a write is done once, if its result is used
(`as_value`). Neither is ordered by that: what orders calls is the version operand. Under vmap a lookup takes its extra
axes as they are, sums of bags are one call (`kvjax._lookup.form`), and ops on a whole batch run once per example.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._ops.as_value import as_value
from kvjax._ops.programs import recent_programs
from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import varying_like
from kvjax._values.tracing import in_a_trace


class Result(NamedTuple):
    """An array that a call returns. Each call outside of jit finds its program by a hash of what is static and by
    comparing it, and JAX's own type does both in Python, which took a third of a lookup."""

    shape: tuple[int, ...]
    dtype: Any


WORD = Result((), jnp.uint32)
"""A version, a status or a canary."""


def array(shape: Sequence[int], dtype: Any) -> Result:
    return Result(tuple(shape), dtype)


def types_of(results: Any) -> Any:
    """The results of a call, one or a sequence of them, as JAX has them."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(*x), results, is_leaf=lambda x: isinstance(x, Result))


class _Call(NamedTuple):
    """What a call is beside its operands, by which programs are found: all of it has a hash. op: of a write, else None;
    attributes: what the C++ side gets, by name; numbered: whether they have numbers of the user's in them."""

    target: str
    results: Any
    vmap: str | None
    op: str | None
    attributes: tuple[tuple[str, Any], ...]
    numbered: bool = False


def read(target: str, results: Any, /, *operands: Any, vmap: str = "sequential", **attributes: Any) -> Any:
    return _run(_Call(target, results, vmap, None, tuple(attributes.items())), operands)


def write(op: str, target: str, results: Any, /, *operands: Any, **attributes: Any) -> Any:
    """Part of an operation that writes, which is done once if its result is used, and else not at all."""
    return _run(_Call(target, results, None, op, tuple(attributes.items())), operands)


def write_numbered(op: str, target: str, results: Any, /, *operands: Any, **attributes: Any) -> Any:
    """A `write` with numbers of the user's in its attributes, so that there may be any number of such programs."""
    return _run(_Call(target, results, None, op, tuple(attributes.items()), numbered=True), operands)


def _run(call: _Call, operands: Sequence[Any]) -> Any:
    attributes = dict(call.attributes)
    if attributes.get("table"):
        PROCESS.traced.add(attributes["table"])
    traced = any(isinstance(x, Tracer) for x in operands) or (call.op is None and in_a_trace())
    return varying_like(_within(call, *operands), *operands) if traced else _by_itself(call, *operands)


def _within(call: _Call, *operands: Any) -> Any:
    """A call as part of a program."""
    attributes = dict(call.attributes)
    results = types_of(call.results)
    ffi_call = jax.ffi.ffi_call(call.target, results, has_side_effect=call.op is not None, vmap_method=call.vmap)
    run = functools.partial(ffi_call, **attributes)
    return run(*operands) if call.op is None else as_value(attributes["table"], call.op, run, *operands)


_program, _numbered_program = jax.jit(_within, static_argnums=0), recent_programs(_within)


def _by_itself(call: _Call, *operands: Any) -> Any:
    """A call outside of jit, as a program of its own, which JAX finds by what is static: to bind it each time takes ten
    times as long."""
    try:
        return (_numbered_program if call.numbered else _program)(call, *operands)
    except ValueError as error:
        if not _STATUS.match(str(error)):
            raise
        # So say programs that JAX has run before; the first time it is the other.
        raise jax.errors.JaxRuntimeError(str(error)) from error.__cause__


_STATUS = re.compile("[A-Z_]+: ")


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
