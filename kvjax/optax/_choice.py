"""Conditional updates: taken only where a condition holds, without a copy of the old values.

Who chooses between old and new results behind an update keeps the old state until the last result has been made from
it: XLA copies a state that was donated, and reads it once more. So each new leaf of the state is chosen where it is
made, and the rest of the update goes on from what was chosen. Where the condition holds that is the same, and where it
does not, nobody sees what comes of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core as jex

from kvjax._values.equations import evaluate


class Choice:
    """An update that is traced, so that what is wrong with it is known, and not yet made.

    Outside of programs it is made at once: a trace in each step would cost more than it spares.

    Args:
      update: function of gradients and state to updates and state, as an optax transform has it.
      grads: tree of arrays.
      state: tree of arrays.
    """

    def __init__(self, update: Callable[[Any, Any], tuple[Any, Any]], grads: Any, state: Any) -> None:
        self.state = state
        self.operands, self.old = jax.tree.leaves((grads, state)), jax.tree.leaves(state)
        self.made = None if any(isinstance(x, Tracer) for x in self.operands) else update(grads, state)
        if self.made is None:
            self.closed, self.shapes = jax.make_jaxpr(update, return_shape=True)(grads, state)

    def made_if(self, condition: jax.Array) -> tuple[Any, Any]:
        """The updates and the state; or, where the condition ``()`` is false, updates that leave the bits of
        parameters, and the state as it was."""
        if self.made is not None:
            return _either(condition, self.made, self.state)
        updates, tree = jax.tree.flatten(self.shapes[0])
        made = _made(condition, self.closed, self.operands, [None] * len(updates) + self.old)
        new, state = made[: len(updates)], made[len(updates) :]
        new = [_or_nothing(condition, x) for x in new]
        return jax.tree.unflatten(tree, new), jax.tree.unflatten(jax.tree.structure(self.shapes[1]), state)


@jax.jit
def _either(condition: jax.Array, made: tuple[Any, Any], state: Any) -> tuple[Any, Any]:
    updates, new = made
    updates = jax.tree.map(functools.partial(_or_nothing, condition), updates)
    return updates, jax.tree.map(functools.partial(_chosen, condition), new, state)


def _made(condition: jax.Array, closed: Any, operands: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """What a jaxpr gives; results that have an old one are chosen."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *operands], strict=True))
    kept = {v: x for v, x in zip(jaxpr.outvars, old, strict=True) if not isinstance(v, jex.Literal) and v not in values}

    def value(v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else values[v]

    for eqn in jaxpr.eqns:
        args, before = [value(v) for v in eqn.invars], [kept.get(v) for v in eqn.outvars]
        if eqn.primitive.name in ("jit", "pjit") and any(x is not None for x in before):
            results = _made(condition, eqn.params["jaxpr"], args, before)
        else:
            results = evaluate(eqn, args, jaxpr.debug_info)
            results = [_chosen(condition, *pair) for pair in zip(results, before, strict=True)]
        values |= zip(eqn.outvars, results, strict=True)
    results = [value(v) for v in jaxpr.outvars]
    # What no equation makes, or is the new one of several, is still to be chosen.
    done = [not isinstance(v, jex.Literal) and kept.get(v) is x for v, x in zip(jaxpr.outvars, old, strict=True)]
    return [x if d else _chosen(condition, x, o) for x, o, d in zip(results, old, done, strict=True)]


def _or_nothing(condition: jax.Array, update: Any) -> Any:
    return _chosen(condition, update, -jnp.zeros((), update.dtype))  # 0.0 would change a parameter that is -0.0


def _chosen(condition: jax.Array, new: Any, old: Any) -> Any:
    return new if old is None else jnp.where(condition, new, old)
