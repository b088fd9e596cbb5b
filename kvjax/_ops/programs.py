"""Programs of calls outside of jit that have a user's numbers in them: the last few stay in memory.

JAX keeps each program as long as its function, and the numbers of a policy may be others in every call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

KEPT = 64
"""Programs, of 1.4 MiB each on the CPU."""


def recent_programs(run: Callable[..., Any], kept: int = KEPT) -> Callable[..., Any]:
    """As ``jax.jit(run, static_argnums=0)``, but a program goes when that many others have been called after it."""

    @functools.lru_cache(maxsize=kept)
    def program(static: Hashable) -> Any:
        return jax.jit(functools.partial(run, static))

    def call(static: Hashable, *operands: Any) -> Any:
        return program(static)(*operands)

    return call
