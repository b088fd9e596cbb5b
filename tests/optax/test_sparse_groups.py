"""Sparse groups: the formulas of FTRL and of the proximal step, in float64, and rows that become exactly zero."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.optax import caught_up, check_compatibility, ftrl, group_lasso, sparse_group_ftrl, sweep
from tests.support.marks import slow

pytestmark = [pytest.mark.usefixtures("promotion"), slow]
ROWS, DIM = 8, 3
LR, L1, L2, L21, BETA, START = 0.3, 0.05, 0.01, 1.5, 0.5, 0.1


def gradients(steps, seed=0):
    """Of some rows in each step, the first of them small; the last row has none."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        grads = rng.normal(size=(ROWS, DIM)) * np.linspace(0.05, 1.5, ROWS)[:, None]
        grads[rng.random(ROWS) < 0.5] = 0
        grads[-1] = 0
        yield grads.astype(np.float32)


def groups(s, size):
    norm = np.linalg.norm(s, axis=1, keepdims=True)
    return s * np.maximum(1 - size / np.where(norm > 0, norm, 1), 0)


def soft(x, size):
    return np.sign(x) * np.maximum(np.abs(x) - size, 0)


def by_formula(start, steps):
    """FTRL with z in the place of the parameters."""
    n, w = np.full((ROWS, DIM), START), start.astype(np.float64)
    s = -w * ((BETA + np.sqrt(n)) / LR + 2 * L2)
    z = s + s / np.linalg.norm(s, axis=1, keepdims=True) * np.sqrt(DIM) * L21 - np.sign(w) * L1
    for grads in steps:
        grads = grads.astype(np.float64)
        new = n + grads**2
        touched = (grads != 0).any(1, keepdims=True)
        z = z + np.where(touched, grads - (np.sqrt(new) - np.sqrt(n)) / LR * w, 0)
        n = new
        w = -groups(soft(z, L1), np.sqrt(DIM) * L21) / ((BETA + np.sqrt(n)) / LR + 2 * L2)
    return w


def test_ftrl_with_groups_is_its_formula(make):
    tx = sparse_group_ftrl(LR, l1=L1, l2=L2, l21=L21, beta=BETA, initial_accumulator_value=START)
    table = make(DIM, initializer=kvjax.initializers.normal(0.05), seed=1)
    start = np.asarray(table.lookup(np.arange(ROWS)))
    step = jax.jit(lambda table, keys, rows: table.apply(tx, kvjax.SparseRows(keys, rows))[0])
    want, params, state = by_formula(start, gradients(25, 10)), jnp.asarray(start), tx.init(jnp.asarray(start))
    for grads in gradients(25, 10):
        keys = np.flatnonzero(grads.any(1))
        table = step(table, kvjax.keys(keys), grads[keys])
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(table.lookup(np.arange(ROWS)), want, atol=2e-6)
    np.testing.assert_allclose(params, want, atol=2e-6)
    zeros = (np.asarray(table.lookup(np.arange(ROWS))) == 0).all(1)
    np.testing.assert_array_equal(zeros, (want == 0).all(1))
    assert 1 <= zeros.sum() < ROWS - 1
    assert len(table.export(kvjax.Prune(zero_rows=True))) == len(table) - zeros.sum()
    assert check_compatibility(tx, 4).verdict == "equal"


def test_without_groups_it_is_ftrl():
    params = one = two = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, DIM)), jnp.float32)
    txs = ftrl(LR, l1=L1, l2=L2), sparse_group_ftrl(LR, l1=L1, l2=L2)
    states = [tx.init(params) for tx in txs]
    for grads in gradients(5):
        (u, v), states = zip(
            *(tx.update(grads, s, p) for tx, s, p in zip(txs, states, (one, two), strict=True)), strict=True
        )
        one, two = one + u, two + v
    np.testing.assert_allclose(one, two, rtol=1e-6)


@pytest.mark.parametrize(
    "strength, inner",
    [
        ({"l1": 2e-3}, optax.sgd(0.02)),
        ({"l2": 2e-3}, optax.sgd(0.02)),
        ({"l21": 4e-3}, optax.adagrad(0.05)),
        pytest.param({"l1": 2e-3, "l2": 5e-3}, optax.sgd(0.02), marks=slow),
        pytest.param({"l2": 5e-3, "l21": 2e-3}, optax.sgd(0.02), marks=slow),
    ],
    ids=["l1", "l2", "l21", "l1 l2", "l2 l21"],
)
def test_group_lasso_equals_dense_training(strength, inner, make):
    """Rows that no batch has shrink as those of a dense array do."""
    tx = group_lasso(inner, **strength)
    table = make(DIM, initializer=kvjax.initializers.normal(0.2), seed=1)
    w = np.asarray(table.lookup(np.arange(ROWS)), np.float64)
    step = jax.jit(lambda table, state, keys, rows: table.apply(tx, kvjax.SparseRows(keys, rows), state))
    state = tx.init(DIM)
    with jax.enable_x64(True):
        dense = inner.init(jnp.asarray(w))
    for grads in gradients(80):
        keys = np.flatnonzero(grads.any(1))
        table, state = step(table, state, kvjax.keys(keys), grads[keys])
        with jax.enable_x64(True):
            updates, dense = inner.update(jnp.asarray(grads, jnp.float64), dense, jnp.asarray(w))
        w = groups(soft(w + np.asarray(updates), strength.get("l1", 0)), np.sqrt(DIM) * strength.get("l21", 0))
        w = w / (1 + 2 * strength.get("l2", 0))
    now = caught_up(table, state, tx)
    np.testing.assert_allclose(now.lookup(np.arange(ROWS)), w, atol=3e-6)
    zeros = (w[:-1] == 0).all(1)  # the last has no row
    assert len(now.export(kvjax.Prune(zero_rows=True))) == len(table) - zeros.sum()
    if list(strength) == ["l21"]:
        assert 1 <= zeros.sum() < ROWS - 1 and not w[-1].any()
        swept = sweep(table, state, tx)
        assert (np.asarray(swept.export().values) == 0).all(1).sum() == zeros.sum()
    assert check_compatibility(tx, 4).verdict == "equal"


def test_group_lasso_is_the_proximal_step(make):
    """Of 5 it is the least of (w - 5)^2 / 2 + |w| + w^2 / 2."""
    table, tx = make(1), group_lasso(optax.sgd(1.0), l2=0.5, l21=1.0)
    table, state = table.apply(tx, kvjax.SparseRows(np.array([0]), jnp.full((1, 1), -5.0)), tx.init(1))
    np.testing.assert_allclose(caught_up(table, state, tx).lookup(0), [2.0], rtol=1e-6)


def test_group_lasso_around_adam(make):
    """By replay: each missed step is one of Adam and of all three strengths."""
    inner, strength = optax.adam(0.02), {"l1": 1e-3, "l2": 1e-3, "l21": 2e-3}
    tx, table = (
        group_lasso(inner, **strength, replay=200),
        make(DIM, initializer=kvjax.initializers.normal(0.2), seed=1),
    )
    w, state = np.asarray(table.lookup(np.arange(ROWS)), np.float64), tx.init(DIM)
    # All rows are given, and those without a gradient are padding, so that one program does.
    step, keys = jax.jit(lambda t, s, k, g, n: t.apply(tx, kvjax.SparseRows(k, g, n), s)), kvjax.keys(np.arange(ROWS))
    with jax.enable_x64(True):
        dense = inner.init(jnp.asarray(w))
    for grads in gradients(12):
        with jax.enable_x64(True):
            updates, dense = inner.update(jnp.asarray(grads, jnp.float64), dense, jnp.asarray(w))
        w = groups(soft(w + np.asarray(updates), 1e-3), np.sqrt(DIM) * 2e-3) / (1 + 2e-3)
        table, state = step(table, state, keys, grads, jnp.asarray(grads.any(1), jnp.int32))
    np.testing.assert_allclose(caught_up(table, state, tx).lookup(np.arange(ROWS)), w, atol=1e-5)


@pytest.mark.parametrize("strength", [-1.0, np.nan, np.inf])
def test_strengths_are_numbers(strength):
    with pytest.raises(ValueError, match="group_lasso: want a finite number of 0 or more as l21"):
        group_lasso(optax.sgd(0.1), l21=strength)


def test_both_penalties_catch_up_nearly_and_with_replay_exactly():
    """What is said to help does, and nobody is told that rows stay behind."""
    found, replayed = (
        check_compatibility(group_lasso(optax.sgd(0.1), l1=0.01, l21=0.01, replay=replay), 4) for replay in (0, 200)
    )
    assert (found.verdict, replayed.verdict) == ("lazy", "equal")
    assert "catch up to nearly that" in found.reason and "group_lasso(..., replay=200)" in found.mend
    assert "catch_up" not in found.mend


def test_several_strengths_at_once(make):
    tx = group_lasso(optax.sgd(0.1), l1=0.01, l2=0.01, l21=0.05)
    table, state = make(DIM, initializer=1.0), tx.init(DIM)
    table, state = table.apply(tx, kvjax.SparseRows(np.array([1]), jnp.zeros((1, DIM))), state)
    want = groups(np.full((1, DIM), 0.99), 0.05 * np.sqrt(DIM)) / 1.02
    np.testing.assert_allclose(caught_up(table, state, tx).lookup(np.array([1])), want, rtol=1e-6)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="group_lasso: want a finite number of 0 or more as l21"):
        group_lasso(optax.sgd(0.1), l21=-1.0)
    with pytest.raises(ValueError, match="group_lasso: want a transform that leaves rows where they are"):
        group_lasso(optax.adam(0.1), l21=1.0)
    with pytest.raises(TypeError, match="group_lasso: want an optax transform"):
        group_lasso("sgd")
    with pytest.raises(TypeError, match="sparse_group_ftrl: want a number as learning_rate"):
        sparse_group_ftrl(optax.linear_schedule(0.1, 0.0, 9))
    with pytest.raises(ValueError, match="sparse_group_ftrl: want update"):
        sparse_group_ftrl(0.1).update(jnp.ones((1, 2)), sparse_group_ftrl(0.1).init(jnp.ones((1, 2))))
