"""Calls that write, as values: JAX does those whose results are used, once, and knows of no effect.

A program with an effect is off JAX's fast path: Python looks at each of its operands and results in every call, which
takes as long as the rows of a step of many tables. For XLA the call has its side effect, so it is neither merged nor
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir, partial_eval


def as_value(call: Callable[..., Any], *operands: Any) -> Any:
    """call(*operands), whose effects JAX does not see."""
    closed, shape = jax.make_jaxpr(call, return_shape=True)(*operands)
    return jax.tree.unflatten(jax.tree.structure(shape), _value_p.bind(*operands, call=closed))


def _run(*operands: Any, call: Any) -> list[Any]:
    return jaxpr_as_fun(call)(*operands)


def _refuse(*_: Any, call: Any) -> NoReturn:
    raise ValueError(
        "kvjax: apply: want a derivative with respect to what comes after a training step, got one of the step itself; "
        "take it with kvjax.value_and_grad first, and write then"
    )


def _refuse_vmap(*_: Any, call: Any) -> NoReturn:
    raise ValueError(
        "kvjax: apply: want one training step, got one for each example of a vmap; take the gradients under vmap, and "
        "give all of them to one step, with their leading axes"
    )


def _once(_: Any, unknown: Sequence[bool], instantiate: Sequence[bool], equation: Any) -> Any:
    """Under ``jax.checkpoint``: what is done on the way forth is not done again on the way back."""
    late = any(unknown)
    results = [late] * len(equation.outvars)
    residuals = [x for x, made in zip(equation.invars, instantiate, strict=True) if late and not made]
    return None if late else equation, equation if late else None, results, results, residuals


_value_p = Primitive("kvjax_value")
_value_p.multiple_results = True
_value_p.def_impl(_run)
_value_p.def_abstract_eval(lambda *_, call: call.out_avals)
ad.primitive_jvps[_value_p] = _refuse
batching.primitive_batchers[_value_p] = _refuse_vmap
partial_eval.partial_eval_jaxpr_custom_rules[_value_p] = _once
mlir.register_lowering(
    _value_p, lambda ctx, *operands, call: mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *operands)
)
