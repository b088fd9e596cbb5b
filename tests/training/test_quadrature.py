"""Quadrature by three nodes: sums of w / (x + e) for any x, in float32, however few and close the e are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax._training.quadrature import rational
from tests.support.marks import slow


@slow
@pytest.mark.parametrize("powers", [range(-3, 3), range(-5, 1)])
def test_sums_of_any_width(powers):
    """Of 1 to 40 terms, from all the same to e that differ 10 times, whose weights fall as those of Adam do."""
    x, number = np.logspace(-12, 12, 49), np.array([1, 2, 3, 10, 40])[:, None, None]
    wide, i = np.array([1.0, 1.001, 1.1, 3.0, 10.0])[:, None], np.arange(40)
    e = np.broadcast_to(0.03 * wide ** (i / 39), (5, 5, 40))
    w = np.where(i < number, 0.9**i, 0)
    sums = {p: jnp.asarray((w * e ** (p / 2)).sum(-1), jnp.float32)[..., None] for p in powers}
    at = jnp.asarray(x, jnp.float32).reshape(1, 1, -1)
    c, n0, n1, d0, d1, d2 = jax.jit(lambda sums: rational(sums, 0.02, 2.0))(sums)
    y = c / (at + c)
    got = sums[0] / (at + c) * (1 + y * (n0 + y * n1)) / (1 + y * (d0 + y * (d1 + y * d2)))
    want = (w[..., None] / (x + e[..., None])).sum(-2)
    off = np.abs(np.asarray(got, np.float64) / want - 1).max((0, 2))
    assert (off <= [3e-6, 3e-6, 3e-6, 1e-5, 1e-4]).all(), off


@slow
def test_sums_of_nothing_are_finite():
    """Those of rows that have missed no steps: rounding, zeros and what is not even positive."""
    sums = {p: jnp.asarray([0.0, 1e-9, -1e-9, 1.0]) * (-1) ** p for p in range(-3, 3)}
    found = jax.jit(lambda sums: rational(sums, 0.02, 2.0))(sums)
    assert all(np.isfinite(x).all() and (np.asarray(x) >= 0).all() for x in found)
