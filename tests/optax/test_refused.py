"""What is left of dense parameters after a step whose write was refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import slow

REFUSED = (ValueError, RuntimeError, jax.errors.JaxRuntimeError)
DENSE, ROWS = optax.sgd(0.5, momentum=0.9), optax.sgd(0.1)


def loss(dense, table, keys):
    return jnp.sum(table.lookup(keys) @ dense["w"])


def write(dense, table, keys):
    grads, rows = kvjax.grad(loss, argnums=(0, 1))(dense, table, keys)
    return grads, table.apply(ROWS, rows)[0]


def update(dense, state, grads):
    updates, state = DENSE.update(grads, state, dense)
    return optax.apply_updates(dense, updates), state


def whole_step(dense, state, table, keys):
    grads, table = write(dense, table, keys)
    return *update(dense, state, grads), table


def begun(make):
    dense = {"w": jnp.ones(2)}
    return dense, DENSE.init(dense), make(2, initializer=1.0, max_capacity=2, on_full="error")


@slow
def test_two_programs_lose_nothing(make):
    """The first writes the rows and donates nothing; the second updates what is dense, once that has succeeded."""
    first, second = jax.jit(write), jax.jit(update, donate_argnums=(0, 1))
    dense, state, table = begun(make)
    for keys in ([1], [1, 2], [1, 2, 3], [2]):
        try:
            grads, table = jax.block_until_ready(first(dense, table, kvjax.keys(keys)))
        except REFUSED as error:
            assert "max_capacity=2" in str(error) and keys == [1, 2, 3]
            continue  # with everything as it was
        dense, state = second(dense, state, grads)
    dense_of_one, state_of_one, other = begun(make)
    for keys in ([1], [1, 2], [2]):
        dense_of_one, state_of_one, other = whole_step(dense_of_one, state_of_one, other, kvjax.keys(keys))
    np.testing.assert_allclose(dense["w"], dense_of_one["w"], rtol=1e-6)
    np.testing.assert_allclose(table.export().values, other.export().values, rtol=1e-6)


@pytest.mark.parametrize("donate", [False, True])
def test_one_program_loses_what_it_was_given(make, donate):
    """So says the README; if a JAX to come keeps it, the README can say so, too."""
    dense, state, table = begun(make)
    step = jax.jit(whole_step, donate_argnums=(0, 1) if donate else ())
    with pytest.raises(REFUSED, match="max_capacity=2"):
        jax.block_until_ready(step(dense, state, table, kvjax.keys([1, 2, 3])))
    assert dense["w"].is_deleted() == donate
    assert len(table) == 0
