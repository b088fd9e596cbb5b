"""Steps that are left out: neither dense parameters nor tables change, as with optax's wrappers on dense tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few

pytestmark = pytest.mark.usefixtures("promotion")
DIM = 2
INNER = optax.adagrad(0.5)
PARTITION = kvjax.optax.partition(dense=INNER, tables=INNER)


def gradients(steps, bad):
    """Of a table and a dense parameter; a duplicate and, in the steps that are bad, a number that is not finite."""
    rng = np.random.default_rng(0)
    for n in range(steps):
        rows, w = (rng.normal(size=(3, DIM)).astype(np.float32) for _ in range(2))
        if n in bad:
            (rows if n % 2 else w)[1, 0] = (np.nan, np.inf, -np.inf)[n % 3]
        yield np.array([7, 9, 7]), rows, w[0], w[1]


def train(tx, make, steps, bad=(), place=None):
    params = {"t": make(DIM, initializer=1.0, **(place or {})), "w": jnp.ones(DIM), "v": jnp.ones(DIM)}
    state, update = tx.init(params), jax.jit(tx.update)
    for keys, rows, w, v in gradients(steps, bad):
        grads = {"t": kvjax.SparseRows(keys, jnp.asarray(rows)), "w": w, "v": v}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        yield params, state


@pytest.mark.parametrize("place", few(["one place", "1", "4"], "one place"))
@pytest.mark.parametrize("most", few([0, 1, 5], 1))
def test_equals_apply_if_finite_on_a_dense_table(most, place, make, places):
    bad, steps = (1, 3, 4), 6
    want_tx = optax.apply_if_finite(INNER, most)
    want = {"t": jnp.ones((2, DIM)), "w": jnp.ones(DIM), "v": jnp.ones(DIM)}
    want_state, want_update, touched = want_tx.init(want), jax.jit(want_tx.update), 0
    runs = train(kvjax.optax.apply_if_finite(PARTITION, most), make, steps, bad, places[place])
    for (params, state), (_, rows, w, v) in zip(runs, gradients(steps, bad), strict=True):
        summed = jnp.stack([rows[0] + rows[2], rows[1]])
        updates, want_state = want_update({"t": summed, "w": w, "v": v}, want_state, want)
        want = optax.apply_updates(want, updates)
        np.testing.assert_allclose(params["t"].lookup(np.array([7, 9])), want["t"], rtol=1e-5)
        np.testing.assert_allclose(params["w"], want["w"], rtol=1e-5)
        for name in ("notfinite_count", "last_finite", "total_notfinite"):
            assert getattr(state, name) == getattr(want_state, name)
        touched += bool(state.last_finite) or int(state.notfinite_count) > most
        assert params["t"].frequency(np.array([7, 9])).tolist() == [2 * touched, touched]
        assert params["t"].stats().last_step == touched


def test_a_condition_on_the_merged_gradients(make):
    """Of equal keys the sum counts, as in a dense table."""
    seen = []

    def small(grads):
        seen.append(jax.tree.map(jnp.shape, grads))
        return jnp.max(jnp.abs(grads["t"])) < 1.5

    tx = kvjax.optax.apply_if(kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0)), small)
    params = {"t": make(1)}
    state = tx.init(params)
    for keys, skipped in (([7, 8], 0), ([7, 7], 1), ([8], 1)):
        grads = {"t": kvjax.SparseRows(np.array(keys), jnp.ones((len(keys), 1)))}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert int(state.skipped) == skipped
    assert params["t"].lookup(np.array([7, 8]))[:, 0].tolist() == [-1.0, -2.0]
    assert seen[0] == {"t": (2, 1)} and int(state.inner_state.count) == 2


def test_scaled_losses_train_as_those_that_are_not(make):
    """To the bit: the scale is a power of two."""

    def run(tx):
        params = {"t": make(DIM, initializer=1.0), "w": jnp.ones(DIM)}
        state = tx.init(params)

        @jax.jit
        def step(params, state, keys):
            scale = optax.tree_utils.tree_get(state, "loss_scale", default=1.0)
            loss = lambda p: scale * jnp.sum((p["t"].lookup(keys) * p["w"] - 2.0) ** 2)  # noqa: E731
            updates, state = tx.update(kvjax.grad(loss)(params), state, params)
            return optax.apply_updates(params, updates), state

        for n in range(3):
            params, state = step(params, state, kvjax.keys(np.array([n, n, 5])))
        return params["t"].lookup(np.arange(6)), params["w"], state

    tx = kvjax.optax.partition(dense=optax.sgd(0.125), tables=optax.sgd(0.125))
    *want, _ = run(tx)
    *got, state = run(kvjax.optax.scale_loss(tx, 2.0**10, period=2))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert float(state.loss_scale) == 2.0**11 and int(state.finite_steps) == 1


def test_a_scale_that_is_too_great_falls(make):
    tx = kvjax.optax.scale_loss(PARTITION, 4.0, period=2, factor=2.0)
    scales = [(float(s.loss_scale), int(p["t"].stats().last_step)) for p, s in train(tx, make, 6, (1, 2))]
    assert scales == [(4.0, 1), (2.0, 1), (1.0, 1), (1.0, 2), (2.0, 3), (2.0, 4)]


def test_what_does_not_fit_is_refused():
    of = kvjax.optax
    for call in (of.apply_if_finite, of.scale_loss):
        with pytest.raises(TypeError, match="want an optax transform"):
            call("adam", 2)
    with pytest.raises(TypeError, match="want a function of the gradients"):
        of.apply_if(PARTITION, True)
    for count in (-1, 0.5):
        with pytest.raises(ValueError, match="want an integer of 0 or more as max_consecutive_errors"):
            of.apply_if_finite(PARTITION, count)
    for wrong in ({"initial": 0.0}, {"period": 0}, {"factor": 1.0}):
        with pytest.raises(ValueError, match="scale_loss: want .* as {}, got".format(*wrong)):
            of.scale_loss(PARTITION, **wrong)


def test_accumulation_goes_around(make):
    params = {"t": make(2)}
    tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1)), 2)
    for op, wrap in (
        ("scale_loss", kvjax.optax.scale_loss),
        ("apply_if", lambda tx: kvjax.optax.apply_if(tx, lambda grads: True)),
        ("apply_if_finite", lambda tx: kvjax.optax.apply_if_finite(tx, 2)),
    ):
        with pytest.raises(
            ValueError, match=rf"{op}: want a transform .*; put it around, .*accumulate\(kvjax.optax.{op}"
        ):
            wrap(optax.chain(optax.clip(1.0), tx)).init(params)
    with pytest.raises(ValueError, match="product of both"):
        kvjax.optax.accumulate(tx, 2).init(params)


def test_the_scale_of_a_loss_stays_finite(make):
    """Half of an infinite one would be infinite, and no step would be taken any more."""
    tx = kvjax.optax.scale_loss(kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1)), 2.0**126, period=1)
    params = {"t": make(1), "w": jnp.ones(1)}
    state = tx.init(params)
    for _ in range(3):
        grads = {"t": kvjax.SparseRows([7], jnp.zeros((1, 1))), "w": jnp.zeros(1)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert float(state.loss_scale) == 2.0**127 and params["t"].frequency([7]).tolist() == [3]
