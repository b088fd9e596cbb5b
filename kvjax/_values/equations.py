"""One equation of a jaxpr, evaluated alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.core import eval_jaxpr
from jax.extend import core as jex


def evaluate(eqn: Any, args: Sequence[Any], debug_info: Any) -> list[Any]:
    """The results of an equation for values of its operands, literals included. debug_info: of its jaxpr."""
    values = {v: x for v, x in zip(eqn.invars, args, strict=True) if not isinstance(v, jex.Literal)}
    alone = jex.Jaxpr((), list(values), eqn.outvars, [eqn], debug_info=debug_info)
    return eval_jaxpr(alone, (), *values.values())
