"""Initial rows that JAX makes: a table with a function as its initializer behaves like any other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._values.function_rows import rng_of
from tests.support.marks import few, slow, wide_is_slow

JAX = jax.nn.initializers
KEYS = np.concatenate([np.array([0, -1, 2**40 + 7, -(2**63), 2**63 - 1]), np.arange(400) * 2**33 + 1])
DIM = 6
SGD = optax.sgd(1.0)


def expected(table, keys):
    """The function, key by key, without any table."""
    with jax.enable_x64(False), jax.threefry_partitionable(True):
        rngs = jax.vmap(lambda words: rng_of(table.spec.seed, words))(kvjax.keys(keys).words)
        return jax.vmap(lambda rng: JAX.normal(1.0)(rng, (1, DIM), jnp.float32)[0])(rngs)


@pytest.fixture
def table(make):
    return make(DIM, initializer=JAX.normal(1.0), seed=2**40)


@wide_is_slow
def test_one_row_for_ever(table, x64):
    want = np.asarray(table.lookup(KEYS))
    np.testing.assert_allclose(want, expected(table, KEYS), rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(table.lookup(KEYS[::-1]), want[::-1])
    rows, table = table.lookup_or_insert(KEYS[::3])
    np.testing.assert_array_equal(rows, want[::3])
    np.testing.assert_array_equal(table.lookup(KEYS), want)
    table, _ = table.apply(optax.sgd(0.0), kvjax.SparseRows(KEYS[1:300], jnp.ones((299, DIM))))
    np.testing.assert_array_equal(table.lookup(KEYS), want)
    np.testing.assert_array_equal(table.upsert(KEYS, np.zeros((len(KEYS), DIM))).remove(KEYS).lookup(KEYS), want)


@slow
@wide_is_slow
def test_one_row_in_every_form_of_call(table, x64):
    want = np.asarray(table.lookup(KEYS))
    lookup = jax.jit(lambda t, k: t.lookup(k))
    np.testing.assert_array_equal(lookup(table, kvjax.keys(KEYS)), want)
    np.testing.assert_array_equal(table.lookup(KEYS[3]), want[3])
    np.testing.assert_array_equal(table.lookup(KEYS[:400].reshape(4, 100)).reshape(400, DIM), want[:400])
    np.testing.assert_array_equal(jax.vmap(table.lookup)(kvjax.keys(KEYS[:6].reshape(2, 3))).reshape(6, DIM), want[:6])
    with jax.threefry_partitionable(False):
        np.testing.assert_array_equal(table.lookup(KEYS), want)


def test_repeated_known_and_masked_keys_in_one_call(table):
    want = np.array(expected(table, KEYS[:4]))
    table = table.upsert(KEYS[1], np.full(DIM, 9.0))
    order = np.array([2, 1, 0, 2, 3, 0, 1, 3])
    mask = np.array([True, True, False, True, True, True, True, False])
    want[1] = 9.0
    got = table.lookup(KEYS[order], mask=mask)
    np.testing.assert_allclose(got, np.where(mask[:, None], want[order], 0), rtol=1e-6, atol=1e-7)
    added = table.add(KEYS[order], np.ones((8, DIM)))
    np.testing.assert_allclose(added.lookup(KEYS[:4]), want + 2, rtol=1e-6)


def test_training_starts_from_them(table):
    want = np.asarray(expected(table, KEYS[:8]))

    @jax.jit
    def step(table, keys):
        grads = kvjax.grad(lambda t: 0.5 * jnp.sum(t.lookup(keys) ** 2))(table)
        return table.apply(optax.sgd(0.5), grads)[0]

    table = step(table, kvjax.keys(KEYS[:8]))
    np.testing.assert_allclose(table.lookup(KEYS[:8]), want / 2, rtol=1e-6, atol=1e-7)
    assert len(table) == 8


@pytest.mark.parametrize("unadmitted", few(["zeros", "init", -5]))
def test_unadmitted_keys(unadmitted, make):
    """A generated and a native table of equal rows agree on what keys without a row read and train."""
    options = dict(admit=kvjax.admit.MinCount(2, unadmitted=unadmitted), seed=3)
    native = make(2, initializer=0.5, **options)
    generated = make(2, initializer=JAX.constant(0.5), **options)
    tx = optax.sgd(0.1)
    for keys in ([1, 2, 3], [3, 4], [4, 5, 1], [9]):
        grads = kvjax.SparseRows(np.array(keys), jnp.arange(2.0 * len(keys)).reshape(-1, 2))
        native, _ = native.apply(tx, grads)
        generated, _ = generated.apply(tx, grads)
        np.testing.assert_array_equal(generated.lookup(np.arange(10)), native.lookup(np.arange(10)))
    np.testing.assert_array_equal(generated.export().values, native.export().values)


@slow
def test_the_row_that_unadmitted_keys_share(make):
    """It is the initial row of its key, which comes last of those that are missing."""
    table = make(DIM, initializer=JAX.normal(1.0), seed=7, admit=kvjax.admit.MinCount(2, unadmitted=-5))
    want = np.asarray(expected(table, np.array([-5])))[0]
    for keys in ([1, 2, 3, 2], [1], [-5, 1], [1, -5], [-5]):
        np.testing.assert_allclose(table.lookup(np.array(keys)), np.tile(want, (len(keys), 1)), rtol=1e-6)
    grads = kvjax.SparseRows(np.array([1, 2]), jnp.zeros((2, DIM)))
    table, _ = table.apply(SGD, grads)
    own = expected(table, np.array([1, 2]))  # as one more occurrence would admit them
    np.testing.assert_allclose(table.lookup(np.arange(3)), [want, *own], rtol=1e-6)
    table, _ = table.apply(SGD, grads)
    np.testing.assert_allclose(table.lookup(np.array([1, 2])), expected(table, np.array([1, 2])), rtol=1e-6)


@slow
def test_stochastic_rounding_counts_the_steps_itself(make):
    tables = [make(8, dtype="bfloat16", initializer=JAX.normal(1.0), seed=1, rounding="stochastic") for _ in range(2)]
    grads = kvjax.SparseRows(np.arange(50), jnp.full((50, 8), 1e-3))
    for step in (1, 2, 3):
        tables[0], _ = tables[0].apply(SGD, grads)
        tables[1], _ = tables[1].apply(SGD, grads, step=step)
    np.testing.assert_array_equal(*(t.export().values for t in tables))
