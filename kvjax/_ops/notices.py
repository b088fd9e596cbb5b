"""Notices: warnings about what JAX does with a handle, said while it compiles the program that makes it."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval

from kvjax._values.errors import warn


def if_unused(version: jax.Array, text: str) -> jax.Array:
    """The version, whose use is looked for when a program is compiled."""
    return _version_p.bind(version, unused=text, compiled="") if isinstance(version, Tracer) else version


def if_compiled(version: Any, text: str) -> jax.Array:
    """The version as one of the program that is being traced, which is not compiled for its shapes alone."""
    return _version_p.bind(version, unused="", compiled=text)


def _where_used(used: list[bool], *rest: Any) -> Any:
    """Which operands are in use, and what is left of an equation, as JAX asks of each before it compiles a program.

    Of one that is not in use a mark is left: JAX asks several times about the body of a scan, and then throws away what
    was answered before it knew which results the next turn wants. So the warning waits until the mark is compiled.
    """
    equation = rest[-1]  # jax 0.12 also says which operands are live
    text = equation.params["unused"]
    if used[0] or not text:
        return [used[0]], equation if used[0] else None
    return [False], equation.replace(primitive=_unused_p, invars=[], outvars=[], params={"text": text})


def _lowered(_: Any, version: Any, *, compiled: str, **__: Any) -> list[Any]:
    _warn(compiled)
    return [version]


def _said(*_: Any, text: str) -> list[Any]:
    _warn(text)
    return []


def _warn(text: str) -> None:
    if text:
        warn(text)


_version_p = Primitive("kvjax_version")
_version_p.def_impl(lambda version, **_: version)
_version_p.def_abstract_eval(lambda version, **_: version)
mlir.register_lowering(_version_p, _lowered)
partial_eval.dce_rules[_version_p] = _where_used

_unused_p = Primitive("kvjax_unused")
_unused_p.multiple_results = True
_unused_p.def_impl(_said)
_unused_p.def_abstract_eval(lambda **_: [])
mlir.register_lowering(_unused_p, _said)
partial_eval.dce_rules[_unused_p] = lambda used, *rest: ([], rest[-1])
