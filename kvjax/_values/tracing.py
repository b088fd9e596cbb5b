"""Tracing: whether a call becomes part of a program, and calls that must not."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state, set_current_trace, take_current_trace

from kvjax._values.errors import fail

with jax.ensure_compile_time_eval():
    _UNTRACED = get_opaque_trace_state(convention="kvjax")


def in_a_trace() -> bool:
    """Whether JAX traces something, as `grad` does outside of `jit`. A program that is called in a trace gets another
    entry in JAX's cache each time, also where no operand is traced."""
    return get_opaque_trace_state(convention="kvjax") != _UNTRACED


def is_traced() -> bool:
    """Whether what is computed here and now becomes part of a program, and of one that is perhaps never run."""
    return in_a_trace() and isinstance(jnp.zeros(()), Tracer)  # which starts JAX's backend


def is_rematerialized() -> bool:
    """Whether ``jax.checkpoint`` alone traces here, which runs what it has traced at once: no program is around it."""
    with take_current_trace() as trace:
        around: Any = trace
    # Names of JAX's own. Where a version has others, this is a trace like any other.
    while getattr(getattr(around, "frame", None), "debug_info", None) and hasattr(around, "parent_trace"):
        if getattr(around.frame.debug_info, "traced_for", None) != "checkpoint / remat":
            return False
        around = around.parent_trace
    with set_current_trace(around):
        return around is not trace and not in_a_trace()


@contextlib.contextmanager
def computed_now() -> Generator[None]:
    """What is computed inside is there when the call returns, whatever is traced around; and it is on no mesh, as JAX
    takes a value of one device's part of a ``shard_map`` in ``jax.set_mesh`` for one of its devices alone."""
    with jax.sharding.use_abstract_mesh(_NO_MESH), jax.ensure_compile_time_eval():
        yield


_NO_MESH = jax.sharding.AbstractMesh((), ())


def check_not_traced(table: str | None, op: str) -> None:
    """Whether a call that acts on tables as a whole stands outside of what is traced.

    Raises:
      TypeError: it would be done once, as the function is traced, and never again.
    """
    if is_traced():
        raise fail(
            TypeError, table, op, "a call outside of jit",
            "one inside, where it would be done once, as the function is traced", "call it between steps",
        )  # fmt: skip
