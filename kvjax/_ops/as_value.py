"""Calls that write, as values: JAX does those whose results are used, once, and knows of no effect.

A program with an effect is off JAX's fast path: Python looks at each of its operands and results in every call, for
0.15 ms with one table, and with many for as long as the rows of a step take. For XLA the call has its side effect, so
it is neither merged nor repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval

from kvjax._values.errors import fail


def as_value(table: str, op: str, call: Callable[..., Any], *operands: Any) -> Any:
    """call(*operands), an operation of a table, whose effects JAX does not see."""
    closed, shape = jax.make_jaxpr(call, return_shape=True)(*operands)
    return jax.tree.unflatten(jax.tree.structure(shape), _value_p.bind(*operands, call=closed, table=table, op=op))


def without_derivative(table: str, op: str, x: Any) -> Any:
    """A number that a write gets as bits, of which JAX would take every derivative for zero."""
    return _given_p.bind(x, table=table, op=op)


def _run(*operands: Any, call: Any, **_: str) -> list[Any]:
    return jaxpr_as_fun(call)(*operands)


def _refuse(*_: Any, table: str, op: str, **__: Any) -> NoReturn:
    raise fail(
        ValueError, table, op, "a derivative with respect to what comes after the write", "one through the write",
        "take it with kvjax.value_and_grad first, and write then",
    )  # fmt: skip


def _refuse_vmap(*_: Any, table: str, op: str, call: Any) -> NoReturn:
    raise fail(
        ValueError, table, op, "one write of a whole batch", "one for each example of a vmap",
        "give all examples to one call, with their leading axes; gradients may be taken under vmap, and applied behind",
    )  # fmt: skip


def _once(_: Any, unknown: Sequence[bool], instantiate: Sequence[bool], equation: Any) -> Any:
    """Under ``jax.checkpoint``: what is done on the way forth is not done again on the way back."""
    late = any(unknown)
    results = [late] * len(equation.outvars)
    residuals = [x for x, made in zip(equation.invars, instantiate, strict=True) if late and not made]
    return None if late else equation, equation if late else None, results, results, residuals


def _lower(context: Any, *operands: Any, call: Any, table: str, op: str) -> Any:
    devices = _split_over(context.module_context.axis_context)
    if devices > 1:  # which XLA's partitioner refuses in words about its own instructions
        raise fail(
            ValueError, table, op, "a table with mesh= where a program over several devices writes it",
            f"a table in one place in a program over {devices} devices",
            "kvjax.reshard(table, mesh), or mesh= where the table is made; or write in a program on one device",
        )  # fmt: skip
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(context, *operands)


def _split_over(context: Any) -> int:
    """Over how many devices XLA will split what is lowered now; 1 where a ``shard_map`` has split it already."""
    if (mesh := getattr(context, "mesh", None)) is None:
        return getattr(context, "num_devices", None) or 1
    return mesh.size if set(mesh.axis_names) - context.manual_axes else 1


_value_p = Primitive("kvjax_value")
_value_p.multiple_results = True
_value_p.def_impl(_run)
_value_p.def_abstract_eval(lambda *_, call, **__: call.out_avals)
ad.primitive_jvps[_value_p] = _refuse
batching.primitive_batchers[_value_p] = _refuse_vmap
partial_eval.partial_eval_jaxpr_custom_rules[_value_p] = _once
mlir.register_lowering(_value_p, _lower)

_given_p = Primitive("kvjax_given")
_given_p.def_impl(lambda x, **_: x)
_given_p.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_given_p] = _refuse
batching.primitive_batchers[_given_p] = lambda operands, axes, **names: (_given_p.bind(*operands, **names), axes[0])
mlir.register_lowering(_given_p, lambda context, x, **_: [x])
