"""Handles that nothing uses: the warning for a write that JAX leaves out of a program for that."""

from __future__ import annotations

import warnings
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval

from kvjax._values.errors import level_of_user


def noticed(table: str, op: str, version: jax.Array) -> jax.Array:
    """The version that a write gives, whose use is looked for when a program is compiled."""
    return _version_p.bind(version, table=table, op=op) if isinstance(version, Tracer) else version


def _where_used(used: list[bool], *rest: Any) -> Any:
    """Which operands are in use, and what is left of an equation, as JAX asks of each before it compiles a program."""
    equation = rest[-1]  # jax 0.12 also says which operands are live
    if used[0]:
        return [True], equation
    table, op = equation.params["table"], equation.params["op"]
    warnings.warn(
        f"kvjax: table {table!r}, {op}: want a compiled function that returns what this write gives, the table or the "
        "parameters that hold it, got one that does not use it; so the write is not done",
        stacklevel=level_of_user(),
    )
    return [False], None


_version_p = Primitive("kvjax_version")
_version_p.def_impl(lambda version, **_: version)
_version_p.def_abstract_eval(lambda version, **_: version)
mlir.register_lowering(_version_p, lambda _, version, **__: [version])
partial_eval.dce_rules[_version_p] = _where_used
