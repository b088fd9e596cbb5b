"""The transforms that sparse rows want, against the formulas of their papers in float64, on arrays and on tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._training.update import lowered
from kvjax.optax import adagrad_decay, ftrl, gap_adam, group_adam, rowwise_adagrad
from tests.support.marks import few, slow

pytestmark = pytest.mark.usefixtures("promotion")
ROWS, DIM, STEPS = 4, 3, 7


def ftrl_of_paper(lr, l1, l2, shrinkage, beta, start):
    """Of one row, gradients in, rows out."""

    def run(w, grads):
        n = np.full(DIM, start)
        z = -w * ((beta + np.sqrt(n)) / lr + 2 * l2) - np.sign(w) * l1
        for g in grads:
            sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / lr
            z, n = z + g + 2 * shrinkage * w - sigma * w, n + g**2
            w = np.where(np.abs(z) <= l1, 0.0, (np.sign(z) * l1 - z) / ((beta + np.sqrt(n)) / lr + 2 * l2))
            yield w

    return run


def group_adam_of_paper(lr, b1, b2, eps, l1, l2, l21):
    """Algorithm 1, but for where z starts."""

    def run(w, grads):
        m, v, q = np.zeros(DIM), np.zeros(DIM), eps / lr
        s = w * (q + 2 * l2)
        z = -s * (1 + l21 * np.sqrt(DIM) / max(np.linalg.norm(s), 1e-300)) - np.sign(w) * l1
        for t, g in enumerate(grads, 1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            new = (np.sqrt(v / (1 - b2**t)) + eps) / lr
            z, q = z + m / (1 - b1**t) - (new - q) * w, new
            s = np.where(np.abs(z) <= l1, 0.0, np.sign(z) * l1 - z)
            size = np.linalg.norm(s)
            w = s / (q + 2 * l2) * max(1 - np.sqrt(DIM) * l21 / size, 0) if size else np.zeros(DIM)
            yield w

    return run


def adam_of_paper(lr, b1, b2, eps):
    def run(w, grads):
        m = v = np.zeros(DIM)
        for t, g in enumerate(grads, 1):
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            w = w - lr * m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
            yield w

    return run


def adam_moves(grads, b1, b2):
    """How each gradient moves a number, at a rate of 1."""
    m = v = 0.0
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        yield -m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + 1e-8)


def rowwise_adagrad_of_paper(lr, start):
    def run(w, grads):
        n = start
        for g in grads:
            n += np.mean(g**2)
            w = w - lr * g / np.sqrt(n + 1e-7)
            yield w

    return run


def adagrad_decay_of_paper(lr, every, decay, start):
    """The sums fade when their time has come, touched or not."""

    def run(w, grads):
        n = np.full(DIM, start)
        for step, g in enumerate(grads):
            if step and step % every == 0:
                n = np.maximum(n * decay, start)
            n = n + g**2
            w = w - lr * g / np.sqrt(n + 1e-7)
            yield w

    return run


CASES = {
    "ftrl": (ftrl(0.3), ftrl_of_paper(0.3, 0, 0, 0, 0, 0.1)),
    "ftrl sparse": (ftrl(0.3, l1=0.6, l2=0.1, beta=1.0), ftrl_of_paper(0.3, 0.6, 0.1, 0, 1.0, 0.1)),
    "ftrl shrinkage": (ftrl(0.3, 0.1, l2_shrinkage=0.05), ftrl_of_paper(0.3, 0.1, 0, 0.05, 0, 0.1)),
    "group_adam": (group_adam(0.1), group_adam_of_paper(0.1, 0.9, 0.999, 1e-8, 0, 0, 0)),
    "group_adam sparse": (
        group_adam(0.1, l1=0.5, l2=0.1, l21=1.5),
        group_adam_of_paper(0.1, 0.9, 0.999, 1e-8, 0.5, 0.1, 1.5),
    ),
    "gap_adam": (gap_adam(0.1), adam_of_paper(0.1, 0.9, 0.999, 1e-8)),
    "rowwise_adagrad": (rowwise_adagrad(0.3), rowwise_adagrad_of_paper(0.3, 0.1)),
    "adagrad_decay": (adagrad_decay(0.3, 2, 0.3), adagrad_decay_of_paper(0.3, 2, 0.3, 0.1)),
}


def start_and_gradients(missing=False):
    """Initial rows, one of them zero, and gradients of some steps; if missing, rows miss some of the steps."""
    rng = np.random.default_rng(3)
    rows, grads = rng.normal(size=(ROWS, DIM)) * 0.3, rng.normal(size=(STEPS, ROWS, DIM))
    rows[1] = 0
    if missing:
        grads *= (rng.random((STEPS, ROWS)) < 0.4)[:, :, None]
    return rows.astype(np.float32), grads.astype(np.float32)


@pytest.mark.parametrize("name", CASES)
def test_dense_rows_follow_the_formula(name):
    tx, paper = CASES[name]
    rows, grads = start_and_gradients()
    want = zip(*(paper(rows[i].astype(np.float64), grads[:, i].astype(np.float64)) for i in range(ROWS)), strict=True)
    values, state, update, zeros = jnp.asarray(rows), tx.init(rows), jax.jit(tx.update), []
    for grad, expected in zip(grads, want, strict=True):
        updates, state = update(grad, state, values)
        values = optax.apply_updates(values, updates)
        np.testing.assert_allclose(values, np.stack(expected), rtol=2e-5, atol=2e-6)
        zeros += [np.asarray(values) == 0]
    if "sparse" in name:
        assert (np.all(zeros, 2) if "group" in name else np.array(zeros)).any()


@pytest.mark.parametrize("name", few(CASES, "ftrl sparse", "adagrad_decay"))
def test_tables_follow_dense_training(name, make):
    """Those that are equal, also where rows miss steps; as row programs."""
    tx, _ = CASES[name]
    rows, grads = start_and_gradients(missing="adam" not in name and name != "ftrl shrinkage")
    table = make(DIM).upsert(np.arange(ROWS), rows)
    state = kvjax.optax.rowwise(tx).init(DIM)
    leaves = tuple(jax.tree.leaves(state))
    assert lowered(table.spec, kvjax.optax.rowwise(tx), leaves, {}) is not None
    values, dense, update = jnp.asarray(rows), tx.init(rows), jax.jit(tx.update)
    step = jax.jit(lambda table, grads, state: table.apply(tx, grads, state))
    for grad in grads:
        touched = (grad != 0).any(1)
        sparse = kvjax.SparseRows(kvjax.keys(np.arange(ROWS)), jnp.asarray(grad), jnp.asarray(touched, jnp.int32))
        table, state = step(table, sparse, state)
        updates, dense = update(grad, dense, values)
        values = optax.apply_updates(values, updates)
        np.testing.assert_allclose(table.lookup(np.arange(ROWS)), values, rtol=2e-5, atol=2e-6)


@slow
def test_rare_rows_go_as_far_as_in_dense_adam(make):
    """Rows that come in each step, in each third, at random, and twice, late: where they are in the end, by the rate of
    dense training. Plain lazy Adam leaves them behind."""
    steps, rng, keys = 240, np.random.default_rng(0), np.arange(ROWS)
    at = np.arange(steps)
    touched = np.stack([at >= 0, at % 3 == 0, rng.random(steps) < 0.1, np.isin(at, (100, 150))], 1)
    grads = (1 + 0.3 * rng.normal(size=(steps, ROWS, DIM))).astype(np.float32) * touched[..., None]
    ways = {}
    for name, tx in (("dense", optax.adam(1e-3)), ("lazy", gap_adam(1e-3)), ("plain", optax.adam(1e-3))):
        if name == "dense":
            first = jnp.zeros((ROWS, DIM))
            ways[name] = -jax.lax.scan(
                lambda s, g, tx=tx: (lambda u, s: (s, u))(*tx.update(g, s)), tx.init(first), grads
            )[1].sum(0)
            continue
        step = jax.jit(
            lambda table, state, grads, counts, tx=tx: table.apply(tx, kvjax.SparseRows(keys, grads, counts), state)
        )
        table, state = make(DIM), kvjax.optax.rowwise(tx).init(DIM)
        for grad, now in zip(grads, touched.astype(np.int32), strict=True):
            table, state = step(table, state, grad, now)
        ways[name] = -table.lookup(keys)
    np.testing.assert_allclose(ways["lazy"][0], ways["dense"][0], rtol=1e-4)
    np.testing.assert_allclose(ways["lazy"], ways["dense"], rtol=0.05)
    assert (ways["plain"][1:] < 0.8 * ways["dense"][1:]).all()


def test_what_is_left_of_a_gradient_goes_no_farther_than_in_dense_adam():
    """Over gaps that end without a new gradient to speak of, and by other betas; and a count that begins anew."""
    first = jnp.zeros((1, 1))

    @jax.jit
    def ways(b2, steps, grads):
        tx = gap_adam(1.0, b2=b2)

        def touch(carry, x):
            value, state = carry
            state = (state[0]._replace(count=x[0] - 1), *state[1:])  # as the touches of other rows make it
            update, state = tx.update(jnp.reshape(x[1], (1, 1)), state)
            return (value + update, state), value + update

        return jax.lax.scan(touch, (first, tx.init(first)), (steps, grads))[1][:, 0, 0]

    every = np.arange(1, 61)
    late, alone = np.append(every[:-1], 10_059), np.append(np.ones(59), 1e-3)
    for b2, steps, grads in ((0.999, late, alone), (0.95, late, alone), (0.9, 20 * every, np.ones(60))):
        given = np.zeros(steps[-1])
        given[steps - 1] = grads
        want = -sum(adam_moves(given, 0.9, b2))
        np.testing.assert_allclose(-ways(b2, np.int32(steps), np.float32(grads))[-1], want, rtol=0.08)
    moved = ways(0.999, np.int32(np.append(1000 + every[:-1], 1)), np.float32(np.ones(60)))
    assert 0 < moved[-2] - moved[-1] < 2


def test_without_regularization_they_are_those_of_optax():
    rows, grads = start_and_gradients()
    for mine, optaxs in ((ftrl(0.3), optax.adagrad(0.3, eps=0.0)), (group_adam(0.1), optax.adam(0.1))):
        results = []
        for tx in (mine, optaxs):
            values, state, update = jnp.asarray(rows), tx.init(rows), jax.jit(tx.update)
            for grad in grads:
                updates, state = update(grad, state, values)
                values = optax.apply_updates(values, updates)
            results.append(values)
        np.testing.assert_allclose(*results, rtol=2e-5, atol=2e-6)


def test_slots_and_globals():
    types = {name: kvjax.optax.rowwise(tx).layout(8).type_texts for name, (tx, _) in CASES.items()}
    assert types["rowwise_adagrad"] == {"sum_of_squares": "float32[]"}
    assert types["adagrad_decay"] == {"sum_of_squares": "float32[8]", "fades": "int32[]"}
    assert types["ftrl"] == {"z": "float32[8]", "sum_of_squares": "float32[8]"}
    assert int(optax.tree_utils.tree_get(kvjax.optax.rowwise(adagrad_decay(0.1)).init(8), "count")) == 0


@pytest.mark.parametrize("name", few([name for name in CASES if " " not in name], "group_adam"))
def test_parameters_of_any_shape_and_kind(name):
    """Scalars and vectors, in 16 bits, and nothing at all; zero gradients leave parameters where they are."""
    tx, _ = CASES[name]
    params = {
        "a": jnp.ones(()),
        "b": jnp.ones(3, jnp.bfloat16),
        "c": jnp.zeros((2, 0)),
        "d": None,
        "e": jnp.ones((2, 2, 2)),
    }
    updates, state = jax.jit(lambda p: tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p))(params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), updates) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(tx.init, params))
    for x in jax.tree.leaves(updates):
        np.testing.assert_allclose(np.asarray(x, np.float32), 0, atol=2e-2 if x.dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.parametrize("name", few(CASES, "ftrl sparse", "group_adam sparse"))
def test_zeros_and_what_is_not_finite(name):
    """Gradients of zeros leave rows where they are, and NaN is seen in them: none just stands still."""
    tx, _ = CASES[name]
    rows = jnp.asarray(start_and_gradients()[0]) + 1
    grads = jnp.zeros_like(rows).at[1:3].set(1.0).at[2, 1].set(jnp.nan)
    updates, _ = jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(grads, rows)
    assert jnp.isnan(updates[2, 1]) and jnp.isfinite(updates[1]).all()
    if name != "ftrl shrinkage":
        np.testing.assert_allclose(updates[0], 0, atol=3e-7)


def test_rates_may_be_injected_and_what_does_not_fit_is_refused():
    injected = optax.inject_hyperparams(ftrl)(learning_rate=lambda count: 0.3 / (1 + count))
    rows, grads = start_and_gradients()
    updates, _ = injected.update(grads[0], injected.init(rows), rows)
    want, _ = ftrl(0.3).update(grads[0], ftrl(0.3).init(rows), rows)
    np.testing.assert_allclose(updates, want, rtol=1e-6)
    for make_tx in (ftrl, group_adam):
        with pytest.raises(TypeError, match="want a number as learning_rate, got a schedule"):
            make_tx(optax.linear_schedule(0.1, 0.0, 5))
        with pytest.raises(ValueError, match=r"want update\(grads, state, params\)"):
            make_tx(0.1).update(grads[0], make_tx(0.1).init(rows))
    with pytest.raises(ValueError, match=r"gap_adam: want b1 below the root of b2 .*got 0.9 and 0.8"):
        gap_adam(0.1, b2=0.8)


@pytest.mark.parametrize("make_tx", few([ftrl, group_adam, rowwise_adagrad, adagrad_decay, gap_adam]))
def test_rates_that_change(make_tx, make):
    """Also to 0, as a warm-up begins, and from outside: what has been learnt stays where it is."""
    injected = optax.inject_hyperparams(make_tx)(learning_rate=optax.linear_schedule(0.0, 0.5, 3))
    params = {"w": jnp.asarray([[1.0, -2.0, 0.0]])}
    state = jax.jit(injected.init)(params)
    grads = {"w": jnp.asarray([[1.0, 1.0, 0.0]])}
    updates, state = injected.update(grads, state, params)
    np.testing.assert_array_equal(updates["w"], 0)
    for _ in range(3):
        updates, state = injected.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert (params["w"][0, :2] < jnp.asarray([1.0, -2.0])).all() and params["w"][0, 2] == 0
    nothing = {"w": jnp.zeros((1, 3))}
    if make_tx not in (group_adam, gap_adam):  # whose momentum goes on
        np.testing.assert_allclose(injected.update(nothing, state, params)[0]["w"], 0, atol=1e-6)
    table = make(3, initializer=1.0)
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.inject_hyperparams(make_tx)(learning_rate=0.0))
    state = tx.init({"t": table})
    rows = kvjax.SparseRows(np.array([4]), jnp.ones((1, 3)))
    updates, _ = tx.update({"t": rows}, state, {"t": table})
    np.testing.assert_array_equal(optax.apply_updates({"t": table}, updates)["t"].lookup(4), 1)


def test_rowwise_adagrad_as_in_fbgemm():
    """By the arguments in docs/migration.md. Small gradients, as a mean over a large batch makes them, count."""
    grads, sums, moved = np.random.default_rng(0).normal(size=(STEPS, 1, DIM)).astype(np.float32) * 1e-5, 0.0, 0.0
    for g in grads.astype(np.float64):
        sums += np.mean(g**2)
        moved -= 0.3 * g / (np.sqrt(sums) + 1e-8)

    def trained(tx):
        w, state = jnp.zeros((1, DIM)), tx.init(jnp.zeros((1, DIM)))
        for g in grads:
            updates, state = tx.update(jnp.asarray(g), state)
            w = optax.apply_updates(w, updates)
        return w

    np.testing.assert_allclose(trained(rowwise_adagrad(0.3, 0.0, 1e-16)), moved, atol=2e-3)
    assert np.abs(trained(rowwise_adagrad(0.3))).max() < 1e-3 * np.abs(moved).max()  # SGD, and hardly any
    by_sum = trained(optax.chain(optax.scale(1e5), rowwise_adagrad(0.3)))
    assert np.abs(by_sum).max() > 0.3 * np.abs(moved).max()
