"""Quadrature: a sum over steps of w / (x + e), for any x, from sums of w times powers of the root of e.

Three nodes are enough, in Gauss' way (Golub and Welsch 1969), because e varies little where w is great. In the root of
e, and with powers on both sides of 0, they are exact for x far below e and far above, and best in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_WIDEST = 1e6  # between least and most e that are told apart


class Rational(NamedTuple):
    """The sum as ``w / (x + c) * (1 + n0 y + n1 y^2) / (1 + d0 y + d1 y^2 + d2 y^3)`` with ``y = c / (x + c)``.

    Nothing in it is negative, so no digits are lost, and nothing grows with x.

    Attributes:
      c, n0, n1, d0, d1, d2: ``(...)`` float32.
    """

    c: jax.Array
    n0: jax.Array
    n1: jax.Array
    d0: jax.Array
    d1: jax.Array
    d2: jax.Array


def rational(sums: Mapping[int, jax.Array], least: float, most: float) -> Rational:
    """The quadrature for the sums of w times powers of the root of e.

    Args:
      sums: by power, six that follow each other, with -2 and 0 among them; ``(...)`` float32. Those of no steps are
        anything.
      least: bound of e.
      most: the other one.
    """
    most = min(most, _WIDEST * least)
    lowest, *powers = sorted(sums)
    moments = [_over(sums[p], sums[lowest]) for p in powers]
    # Of the nodes nothing is wanted but the symmetric functions of their squares: their sum, that of their products by
    # twos, and the product.
    one, two, three = _symmetric(moments, least**0.5, most**0.5)
    one, two, three = one * one - 2 * two, two * two - 2 * one * three, three * three
    bounds = ((3 * least, 3 * most), (3 * least**2, 3 * most**2), (least**3, most**3))
    one, two, three = (jnp.clip(x, *map(np.float32, b)) for x, b in zip((one, two, three), bounds, strict=True))
    # (x^2 + b x + a) / (x^3 + one x^2 + two x + three): a follows from x = 0, and b from what is next at one end.
    inverse = _over(sums[-2], sums[0])
    a = three * inverse
    b = one - _over(sums[2], sums[0]) if 2 in sums else two * inverse - three * _over(sums[-4], sums[0])
    c = three / two  # less than each node
    one, two, three, b, a = one / c, two / c / c, three / c / c / c, b / c, a / c / c
    d0, d1, d2 = one - 3, two - 2 * one + 3, three - two + one - 1
    return Rational(c, *(jnp.maximum(x, np.float32(0)) for x in (b - 2, a - b + 1, d0, d1, d2)))


def _symmetric(moments: list[jax.Array], least: float, most: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum, sum of products by twos, and product of three nodes, from the moments 1 to 5 (Chebyshev's algorithm).

    Where there are fewer than three, the last bits of the moments make the others: anywhere within the bounds.
    """

    def within(x: jax.Array) -> jax.Array:
        return jnp.clip(x, low, high)

    def below(x: jax.Array, y: jax.Array, *bounds: jax.Array) -> jax.Array:
        return jnp.maximum(np.float32(0), jnp.minimum(_over(x, y), jnp.minimum(*bounds)))

    low, high = np.float32(least), np.float32(most)
    m1, m2, m3, m4, m5 = moments
    a0 = within(m1)
    s1, s2, s3, s4 = m2 - a0 * m1, m3 - a0 * m2, m4 - a0 * m3, m5 - a0 * m4
    ratio = _over(s2, s1)
    a1 = within(ratio - a0)
    b1 = below(s1, jnp.ones_like(s1), (a0 - low) * (a1 - low), (high - a0) * (high - a1))
    t2, t3 = s3 - a1 * s2 - b1 * m2, s4 - a1 * s3 - b1 * m3
    a2 = within(_over(t3, t2) - ratio)
    left, right = a1 - low - _over(b1, a0 - low), high - a1 - _over(b1, high - a0)
    b2 = below(t2, s1, left * (a2 - low), right * (high - a2))
    product = a0 * a1 - b1
    return a0 + a1 + a2, product + a2 * (a0 + a1) - b2, a2 * product - b2 * a0


def _over(x: jax.Array, y: jax.Array) -> jax.Array:
    return x / jnp.where(y == 0, np.float32(1), y)
