"""Averages of rows over steps: the formula, on tables and on arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._training.update import lowered
from kvjax.optax import ema_rows, lookup_average

pytestmark = pytest.mark.usefixtures("promotion")
TX = optax.chain(optax.adam(0.1), ema_rows(0.8))


def test_rows_follow_the_formula(make):
    """Of what a batch touches; duplicates are one step."""
    table, rng = make(3, initializer=kvjax.initializers.normal(1.0), seed=2), np.random.default_rng(0)
    keys = np.arange(8)
    average = np.asarray(table.lookup(keys), np.float64)
    step = jax.jit(lambda table, grads: table.apply(TX, grads)[0])
    with pytest.raises(KeyError, match="average_lag"):
        lookup_average(table, keys)  # before the first step there is none
    for _ in range(6):
        touched = rng.integers(0, 7, 6)  # never the last
        table = step(table, kvjax.SparseRows(touched, jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)))
        now = np.asarray(table.lookup(keys), np.float64)
        some = np.unique(touched)
        average[some] = 0.8 * average[some] + 0.2 * now[some]
        np.testing.assert_allclose(lookup_average(table, keys), average, atol=1e-6)
    table = table.upsert(100, np.ones(3))  # a row without slots
    np.testing.assert_array_equal(lookup_average(table, np.array([100, 7])), table.lookup(np.array([100, 7])))
    np.testing.assert_array_equal(jax.jit(lookup_average)(table, kvjax.keys(keys)), lookup_average(table, keys))


def test_arrays_have_the_average_too():
    params = average = jnp.arange(4.0)
    state = TX.init(params)
    for _ in range(3):
        updates, state = TX.update(jnp.ones(4), state, params)
        params = optax.apply_updates(params, updates)
        average = 0.8 * average + 0.2 * params
    np.testing.assert_allclose(params + state[1].average_lag, average, rtol=1e-6)


@pytest.mark.cpu_table
def test_it_is_a_row_program_and_keeps_rows_apart(make):
    rowwise = kvjax.optax.rowwise(TX)
    assert lowered(make(4).spec, rowwise, tuple(jax.tree.leaves(rowwise.init(4))), {}) is not None
    assert kvjax.optax.check_compatibility(ema_rows(0.9), 4).every_step == 0


def test_what_is_wrong_is_said(make):
    with pytest.raises(ValueError, match=r"ema_rows: want a decay in 0\.\.1, got 1.5"):
        ema_rows(1.5)
    table, _ = make(2).apply(optax.sgd(0.1), kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))))
    with pytest.raises(KeyError, match="average_lag"):
        lookup_average(table, 1)
