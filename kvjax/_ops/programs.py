"""Programs of calls outside of jit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.interpreters.partial_eval import DynamicJaxprTracer

KEPT = 64
"""Programs, of 1.4 MiB each on the CPU."""


def recent_programs(run: Callable[..., Any], kept: int = KEPT) -> Callable[..., Any]:
    """As ``jax.jit(run, static_argnums=0)``, but a program goes when that many others have been called after it: JAX
    keeps each as long as its function, and the numbers of a policy may be others in every call."""

    @functools.lru_cache(maxsize=kept)
    def program(static: Hashable) -> Any:
        return jax.jit(functools.partial(run, static))

    def call(static: Hashable, *operands: Any) -> Any:
        return program(static)(*operands)

    return call


def program_outside(*static: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator like ``jax.jit(static_argnums=static)``, but in a program it is as if it were not there.

    JAX finds what it has traced by a hash that leaves out static arguments, and then compares these with those of every
    call before: in the trace of a step, for each of a thousand tables with those of a thousand others.
    """

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        program = jax.jit(run, static_argnums=static)

        @functools.wraps(run)
        def call(*args: Any) -> Any:
            operands = jax.tree.leaves([x for i, x in enumerate(args) if i not in static])
            return (run if any(isinstance(x, DynamicJaxprTracer) for x in operands) else program)(*args)

        vars(call)["program"] = program  # for tests
        return call

    return decorate
