"""Averages of rows over steps: the formula, on tables and on arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
import kvjax.flax
from kvjax._training.update import lowered
from kvjax.optax import averaged, ema_rows
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("promotion")
TX = optax.chain(optax.adam(0.1), ema_rows(0.8))


def test_rows_follow_the_formula(make):
    """Of what a batch touches; duplicates are one step."""
    table, rng = make(3, initializer=kvjax.initializers.normal(1.0), seed=2), np.random.default_rng(0)
    keys = np.arange(8)
    average = np.asarray(table.lookup(keys), np.float64)
    step = jax.jit(lambda table, grads: table.apply(TX, grads)[0])
    with pytest.raises(KeyError, match="'ema'"):
        table.lookup(keys, slot="ema")  # before the first step there is none
    np.testing.assert_array_equal(averaged(table, TX).lookup(keys), table.lookup(keys))
    for _ in range(6):
        touched = rng.integers(0, 7, 6)  # never the last
        table = step(table, kvjax.SparseRows(touched, jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)))
        now = np.asarray(table.lookup(keys), np.float64)
        some = np.unique(touched)
        average[some] = 0.8 * average[some] + 0.2 * now[some]
        np.testing.assert_allclose(table.lookup(keys, slot="ema"), average, atol=1e-6)
    table = table.upsert(100, np.ones(3))  # a row without slots
    some = np.array([100, 7, 3, 5])
    read = jax.jit(lambda table, keys, **options: averaged(table, TX).lookup(keys, **options))
    got = table.lookup(some, slot="ema", mask=np.array([True, True, True, False]))
    np.testing.assert_array_equal(got[:2], table.lookup(some[:2]))
    assert not got[3].any() and np.abs(average[3] - np.asarray(got[2])).max() < 1e-6
    np.testing.assert_array_equal(read(table, kvjax.keys(some)), table.lookup(some, slot="ema"))
    np.testing.assert_array_equal(read(table, kvjax.keys([10**9]), missing=jnp.zeros(3)), jnp.zeros((1, 3)))
    exported = averaged(table, TX).export()
    np.testing.assert_array_equal(exported.values, table.lookup(exported.keys, slot="ema"))


@slow
def test_models_read_averages(make, mesh):
    """Of layers and bags, over a mesh; and of a dense tree beside them."""
    table = make(2, mesh=mesh(2), dtype="bfloat16", initializer=1.0)
    params = {"t": table, "other": make(2, mesh=mesh(2), replicated=True, initializer=3.0), "w": jnp.ones(2)}
    rows = {table.name: optax.chain(optax.sgd(1.0), ema_rows(0.5)), params["other"].name: optax.sgd(1.0)}
    tx = kvjax.optax.partition(dense=optax.chain(optax.sgd(1.0), ema_rows(0.5)), tables=rows)
    state, keys = tx.init(params), kvjax.keys(np.array([7, 8]))
    both = np.array([[7, 8], [7, 99]])
    for _ in range(2):
        grads = {"t": kvjax.SparseRows(keys, jnp.ones((2, 2))), "other": kvjax.SparseRows(keys, jnp.ones((2, 2)))}
        updates, state = tx.update(grads | {"w": jnp.ones(2)}, state, params)
        params = optax.apply_updates(params, updates)
    seen = averaged(params, rows)
    assert seen["t"].lookup(both)[..., 0].tolist() == [[-0.25, -0.25], [-0.25, 1.0]]
    assert params["t"].lookup(both, slot="ema")[..., 0].tolist() == [[-0.25, -0.25], [-0.25, 1.0]]
    assert kvjax.lookup_bag(seen["t"], both, combiner="sum")[:, 0].tolist() == [-0.5, 0.75]
    assert kvjax.flax.Embed(table.name).apply({"params": {"table": seen["t"]}}, both[0])[:, 0].tolist() == [-0.25] * 2
    assert seen["other"].lookup(7).tolist() == [1.0, 1.0] and seen["w"].tolist() == [-1.0, -1.0]
    assert optax.tree_utils.tree_get(state.dense, "ema")["w"].tolist() == [-0.25, -0.25]


@slow
def test_averages_only_read(make):
    """They are no rows to train; but a loss may read them beside those that it trains."""
    table, _ = make(1, initializer=1.0).apply(TX, kvjax.SparseRows(np.array([7]), jnp.ones((1, 1))))
    with pytest.raises(ValueError, match=r"value_and_grad: .*, got what kvjax\.optax\.averaged gives"):
        kvjax.grad(lambda t: jnp.sum(t.lookup(7)))(averaged(table, TX))
    with pytest.raises(ValueError, match=r"got what kvjax\.optax\.averaged gives"):
        averaged(table, TX).upsert(7, [1.0])
    grads = kvjax.grad(lambda t: jnp.sum((t.lookup(7) - t.lookup(7, slot="ema")) ** 2))(table)
    assert grads.keys.size == 1
    np.testing.assert_allclose(grads.rows, 2 * (table.lookup(7) - table.lookup(7, slot="ema")), rtol=1e-6)
    assert table.live().lookup(7, slot="ema").tolist() == table.lookup(7, slot="ema").tolist()


@slow
def test_padding_is_zeros_through_any_view(make):
    """Also where the key that stands there has a row, which goes on by its momentum."""
    late = kvjax.optax.catch_up(optax.sgd(1.0, momentum=0.5))
    table, state = make(1), late.init(1)
    for key in (7, 8):
        table, state = table.apply(late, kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))), state)
    rows = kvjax.optax.caught_up(table, state, late).lookup(np.array([7, 7, 8]), mask=np.array([True, False, True]))
    assert rows[:, 0].tolist() == [-1.5, 0.0, -1.0]


def test_arrays_have_the_average_too():
    params = average = jnp.arange(4.0)
    state = TX.init(params)
    for _ in range(3):
        updates, state = TX.update(jnp.ones(4), state, params)
        params = optax.apply_updates(params, updates)
        average = 0.8 * average + 0.2 * params
    np.testing.assert_allclose(state[1].ema, average, rtol=1e-6)


@pytest.mark.cpu_table
def test_it_is_a_row_program_and_keeps_rows_apart(make):
    rowwise = kvjax.optax.rowwise(TX)
    assert lowered(make(4).spec, rowwise, tuple(jax.tree.leaves(rowwise.init(4))), {}) is not None
    assert kvjax.optax.check_compatibility(ema_rows(0.9), 4).every_step == 0


def test_what_is_wrong_is_said(make):
    with pytest.raises(ValueError, match=r"ema_rows: want a number in 0\.\.1 as decay, got 1.5"):
        ema_rows(1.5)
    table, _ = make(2).apply(optax.adam(0.1), kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))))
    for name, error in (("ema", KeyError), ("count", ValueError)):
        with pytest.raises(error, match=f"lookup: want .*{name}"):
            table.lookup(1, slot=name)
    with pytest.raises(KeyError, match="averaged: want tables with the slot 'ema'"):
        averaged(table, optax.adam(0.1))
    shared = make(2, admit=kvjax.admit.MinCount(2, unadmitted=-1))
    with pytest.raises(ValueError, match="averaged: want a table whose keys read their own rows"):
        averaged(shared, TX)
    with pytest.raises(ValueError, match="ema_rows: want update"):
        ema_rows(0.5).update(jnp.ones(1), ema_rows(0.5).init(jnp.ones(1)))


@slow
def test_averages_of_rows_that_are_behind_are_those_of_dense_training(make):
    """A momentum encoder: read in a loss, by a whole model, and exported."""
    made = optax.chain(optax.sgd(0.1, momentum=0.5), ema_rows(0.5))
    params = {"t": make(2, initializer=1.0), "d": jnp.ones((4, 2))}
    rows = {params["t"].name: kvjax.optax.catch_up(made, replay=40)}
    tx, keys = kvjax.optax.partition(dense=made, tables=rows), np.arange(4)
    state = tx.init(params)

    def loss(params, keys):
        table = params["t"]
        return jnp.sum((table.lookup(keys) - 0.5 * table.lookup(keys, slot="ema")) ** 2)

    @jax.jit
    def step(params, state, keys, at):
        grads = kvjax.grad(loss)(kvjax.optax.caught_up(params, state, rows), keys)
        grads["d"] = grads["d"].at[at].add(grads["t"].rows)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for at in ([0, 1], [2, 3], [0, 2], [3, 1], [0, 1], [1, 2]):
        params, state = step(params, state, kvjax.keys(np.array(at)), jnp.array(at))
    now = kvjax.optax.caught_up(params, state, rows)
    want = np.asarray(optax.tree_utils.tree_get(state.dense, "ema")["d"])
    assert np.abs(want - 1.0).min() > 0.05
    np.testing.assert_allclose(now["t"].lookup(keys), params["d"], atol=1e-6)
    seen = averaged(now, rows)["t"]
    np.testing.assert_allclose(seen.lookup(keys), want, atol=1e-6)
    np.testing.assert_array_equal(now["t"].lookup(keys, slot="ema"), seen.lookup(keys))
    exported = seen.export()
    np.testing.assert_array_equal(exported.values, seen.lookup(exported.keys))
    with pytest.warns(UserWarning, match="averaged: it reads rows as they are stored"):
        averaged(params, rows)
    with pytest.raises(ValueError, match=r"slot: want the handle itself.*lookup\(keys, slot=name\) reads"):
        now["t"].slot("ema", [1])
    with pytest.raises(ValueError, match="want the handle itself, got what kvjax"):
        averaged({"t": seen}, rows)
