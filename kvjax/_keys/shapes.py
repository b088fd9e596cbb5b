"""Shapes of keys, and what goes with them."""

from __future__ import annotations

import jax.numpy as jnp


def shape_of(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """What shapes broadcast to, some of which may be symbolic.

    Raises:
      ValueError: they do not.
    """
    try:
        return jnp.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"kvjax: Keys: want shapes that broadcast, got {', '.join(map(str, shapes))}; reshape or index one of "
            "them, as keys[:, None]"
        ) from None
