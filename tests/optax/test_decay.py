"""Decay that catches up: of what is gone, and of more than its clock holds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kvjax.optax import catch_up
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("promotion")
DIM = 3


@slow
def test_what_has_decayed_to_nothing_is_zero():
    """And not what 0 times more than float32 can hold is."""
    late, rows = catch_up(optax.adamw(1.0, b1=0.1, weight_decay=0.8)), jnp.ones((1, DIM))
    step = jax.jit(late.step)
    value, state = step(rows, late.tx.init(rows), rows)
    now = state
    for _ in range(60):
        now = step(rows, now, rows)[1]
    behind = state._replace(steps=now.steps, clock=now.clock)
    np.testing.assert_allclose(jax.jit(late.catch_up)(behind, value)[1], 0, atol=1e-6)


@slow
def test_decay_that_adds_up_to_more_than_its_clock_holds():
    """The clock goes round behind 32,768: trained rows decay as before, and a new one has nothing left."""
    late, rows = catch_up(optax.adamw(0.5, weight_decay=0.1)), jnp.ones((1, DIM))
    step, now = jax.jit(late.step), jax.jit(late.catch_up)
    first = step(rows, late.tx.init(rows), rows)[1]
    last = first.clock | {"decay_whole": jnp.int32(2**31 - 5000)}
    states = [first, first._replace(clock=last)]
    got = []
    for state in states:  # a step is 3361 units of this clock
        value, state = step(rows, state, rows)
        for _ in range(9):
            behind, other = state, state
            for _ in range(7):
                other = step(rows, other, rows)[1]
            state = behind._replace(steps=other.steps, clock=other.clock)
            value, state = step(rows, state, value)
        got.append(value)
    assert 2**30 <= state.clock["decay_whole"] < 2**31 - 5000
    np.testing.assert_allclose(got[1], got[0], rtol=1e-6)
    new = late.tx.init(rows)
    np.testing.assert_allclose(now(new._replace(steps=state.steps, clock=state.clock), rows)[1], 0, atol=1e-6)
