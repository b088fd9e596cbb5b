"""Updates that are taken only where a condition holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.optax._choice import Choice


@jax.jit
def average(old, new):
    moved = old + 0.5 * (new - old)
    return moved, 2 * moved


def update(grads, state):
    """A state that is made in a function of its own, given back as it was, a constant, the updates, and one twice."""
    moved, twice = average(state["moved"], grads)
    one = moved + 1
    return twice, {"moved": moved, "same": state["same"], "none": jnp.zeros(2), "grads": grads, "a": one, "b": one}


@pytest.mark.parametrize("taken", [True, False])
def test_all_or_none_is_taken(taken):
    grads = jnp.float32([1, 2])
    state = {name: jnp.float32([i, -0.0]) for i, name in enumerate(["moved", "same", "none", "grads", "a", "b"])}
    updates, after = Choice(update, grads, state).made_if(jnp.bool_(taken))
    want = update(grads, state) if taken else (jnp.float32([-0.0, -0.0]), state)
    for got, one in zip(*map(jax.tree.leaves, ((updates, after), want)), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(one).tobytes()
