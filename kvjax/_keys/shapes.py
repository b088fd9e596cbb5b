"""Shapes of keys, and what goes with them."""

from __future__ import annotations

from kvjax._values.errors import fail


def shape_of(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """What shapes broadcast to, some of which may be symbolic.

    Raises:
      ValueError: they do not.
    """
    import jax.numpy as jnp  # a server that hashes its ids has none

    try:
        return jnp.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"kvjax: Keys: want shapes that broadcast, got {', '.join(map(str, shapes))}; reshape or index one of "
            "them, as keys[:, None]"
        ) from None


def check_salts(salts: tuple[int, ...], shape: tuple[int, ...], where: str) -> None:
    """Whether an array has a salt for each key of a shape.

    Raises:
      ValueError: it does not broadcast to them.
    """
    pairs = zip(salts[::-1], shape[::-1], strict=False)
    if len(salts) > len(shape) or not all(n in (1, want) for n, want in pairs):
        mend = "give one salt, or an array that broadcasts to the keys"
        raise fail(ValueError, None, where, f"a salt for each key {shape}", f"salts {tuple(salts)}", mend)
