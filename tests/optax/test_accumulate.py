"""Gradients of several steps in one update: by key what optax.MultiSteps makes of dense tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.serialization import from_bytes, to_bytes

import kvjax
import kvjax.flax
from tests.support.marks import few, slow

pytestmark = pytest.mark.usefixtures("promotion")
ROWS, DIM, BATCH = 9, 2, 4


def loss(rows, w, y):
    return jnp.mean((rows @ w - y) ** 2)


def batches(steps):
    """Some keys come once in all of them, as rare ones do."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield rng.zipf(1.6, BATCH) % ROWS, rng.normal(size=BATCH).astype(np.float32)


@pytest.mark.parametrize("place", few(["one place", "1", "4"], "one place"))
@pytest.mark.parametrize("every", few([1, 2, 3], 2))
def test_equals_multi_steps_on_a_dense_table(every, place, make, places):
    table = make(DIM, initializer=1.0, **places[place])
    tables = optax.adagrad(0.3)
    tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(0.1), tables=tables), every)
    want_tx = optax.MultiSteps(optax.multi_transform({"t": tables, "w": optax.sgd(0.1)}, {"t": "t", "w": "w"}), every)
    params = {"t": table, "w": jnp.ones(DIM)}
    want = {"t": jnp.ones((ROWS, DIM)), "w": jnp.ones(DIM)}
    state, want_state = tx.init(params), want_tx.init(want)

    @jax.jit
    def step(params, state, ids, y):
        grads = kvjax.grad(lambda p: loss(p["t"].lookup(ids), p["w"], y))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def want_step(params, state, ids, y):
        grads = jax.grad(lambda p: loss(p["t"][ids], p["w"], y))(params)
        updates, state = want_tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for n, (ids, y) in enumerate(batches(3 * every + 1), 1):
        params, state = step(params, state, kvjax.keys(ids), y)
        want, want_state = want_step(want, want_state, ids, y)
        np.testing.assert_allclose(params["t"].lookup(np.arange(ROWS)), want["t"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(params["w"], want["w"], rtol=1e-5)
        assert params["t"].stats().last_step == n // every


def test_of_dense_gradients_the_mean_is_kept():
    """In float32: in 16 bits what comes after the first would be lost."""
    tx = kvjax.optax.accumulate(optax.sgd(1.0), 9)
    params = {"w": jnp.zeros(3, jnp.bfloat16), "none": jnp.zeros((0, 2))}
    state = tx.init(params)
    step = jax.jit(tx.update)
    for n in range(18):
        grads = {"w": jnp.full(3, 9.0 if n % 9 == 0 else 0.015625, jnp.bfloat16), "none": jnp.zeros((0, 2))}
        updates, state = step(grads, state, params)
        assert [x.shape for x in state.grads.values()] == [(1, 3)]
        want = -1.015625 if n % 9 == 8 else 0.0
        assert updates["w"].dtype == jnp.bfloat16 and updates["w"].tolist() == [want] * 3
    other = kvjax.optax.accumulate(optax.sgd(1.0), 2)  # another number of steps, while more are kept
    _, state = other.update(grads, state._replace(steps=jnp.int32(5)), params)
    assert state.steps == 0


def test_frequencies_are_those_of_all_steps(make):
    params = {"t": make(DIM)}
    tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1)), 2)
    state = tx.init(params)
    for ids in ([1, 1], [1, 2]):
        grads = {"t": kvjax.SparseRows(np.array(ids), jnp.ones((2, DIM)))}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert params["t"].frequency(np.array([1, 2, 3])).tolist() == [3, 1, 0]


@pytest.mark.parametrize("saver", few(["orbax", "flax"]))
def test_a_state_is_saved_and_restored_between_updates(saver, make, tmp_path):
    """Training goes on as if nothing had been."""
    tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.adagrad(0.3)), 3)

    def step(params, state, ids, y):
        grads = kvjax.grad(lambda p: loss(p["t"].lookup(ids), p["w"], y))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run(state, batches, save=None):
        for n, (ids, y) in enumerate(batches):
            state = step(*state, kvjax.keys(ids), y)
            state = save(state) if save is not None and n == 1 else state
        return state

    def saved(state):
        dense, tables = kvjax.orbax.split(state)
        if saver == "flax":
            dense = from_bytes(jax.tree.map(jnp.zeros_like, dense), to_bytes(dense))
        else:
            with ocp.CheckpointManager(tmp_path) as manager:
                manager.save(0, args=ocp.args.StandardSave(dense))
                like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dense)
                dense = manager.restore(0, args=ocp.args.StandardRestore(like))
        return kvjax.orbax.combine(dense, tables)

    made = [{"t": make(DIM, initializer=1.0, seed=1), "w": jnp.ones(DIM)} for _ in range(2)]
    whole, halves = (
        run((params, tx.init(params)), batches(7), save)[0] for params, save in zip(made, (None, saved), strict=True)
    )
    np.testing.assert_array_equal(whole["t"].lookup(np.arange(ROWS)), halves["t"].lookup(np.arange(ROWS)))
    np.testing.assert_array_equal(whole["w"], halves["w"])


def test_what_does_not_fit_is_refused(make):
    inner = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1))
    for every in (0, 1.5, None):
        with pytest.raises(ValueError, match="want an integer of 1 or more as every"):
            kvjax.optax.accumulate(inner, every)
    with pytest.raises(TypeError, match="want an optax transform"):
        kvjax.optax.accumulate("adam", 2)
    params, tx, other = {"t": make(DIM)}, kvjax.optax.accumulate(inner, 2), kvjax.optax.accumulate(inner, 4)
    _, state = tx.update({"t": kvjax.SparseRows(np.arange(2), jnp.ones((2, DIM)))}, tx.init(params), params)
    with pytest.raises(ValueError, match="want the gradients of batches of one shape"):
        tx.update({"t": kvjax.SparseRows(np.arange(3), jnp.ones((3, DIM)))}, state, params)
    grads = {"t": kvjax.SparseRows(np.arange(2), jnp.ones((2, DIM)))}
    with pytest.raises(ValueError, match=r"of every=4 steps, got one of 2; .*_replace\(inner=state.inner\)"):
        other.update(grads, state, params)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    _, state = other.update(grads, other.init(params)._replace(inner=state.inner), params)
    assert state.steps == 1 and params["t"].stats().last_step == 1


@slow
def test_in_a_stock_nnx_optimizer(make):
    """Whose state keeps the structure that it had when it was made; eager steps and compiled ones go on with it."""

    class Model(nnx.Module):
        def __init__(self, table):
            self.embed = kvjax.flax.nnx.Embed(table)
            self.scale = nnx.Param(jnp.ones(DIM))

        def __call__(self, keys):
            return self.embed(keys) @ self.scale[...]

    def step(model, optimizer, keys, y):
        grads = kvjax.flax.nnx.grad(lambda model: jnp.mean((model(keys) - y) ** 2))(model)
        optimizer.update(model, grads)

    tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.adagrad(0.3)), 2)
    model = Model(make(DIM, initializer=1.0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = {"t": make(DIM, initializer=1.0), "w": jnp.ones(DIM)}
    state = tx.init(params)
    for i, (ids, y) in enumerate(batches(6)):
        keys = kvjax.keys(ids)
        (step if i < 3 else nnx.jit(step))(model, optimizer, keys, y)
        grads = kvjax.grad(lambda p, keys=keys, y=y: loss(p["t"].lookup(keys), p["w"], y))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    table = model.embed.table.get_value()
    assert len(table) == len(params["t"]) > 0
    np.testing.assert_allclose(table.export().values, params["t"].export().values, rtol=1e-6)
    np.testing.assert_allclose(model.scale[...], params["w"], rtol=1e-6)


@slow
def test_an_nnx_model_is_restored_in_the_middle(make, tmp_path):
    """By the template of the README: the state after a step, which no step has made."""

    class Model(nnx.Module):
        def __init__(self, name):
            self.embed = kvjax.flax.nnx.Embed(kvjax.get_table(name, dim=DIM, seed=1, initializer=1.0))
            self.scale = nnx.Param(jnp.ones(DIM))

        def __call__(self, keys):
            return self.embed(keys) @ self.scale[...]

    @nnx.jit
    def step(model, optimizer, keys, y):
        value, grads = kvjax.flax.nnx.value_and_grad(lambda model: jnp.mean((model(keys) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    def made(name):
        model = Model(name)
        tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.adagrad(0.3)), 4)
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = made("middle")
    given = [(kvjax.keys(ids), y) for ids, y in batches(7)]
    for batch in given[:6]:
        step(model, optimizer, *batch)
    dense, tables = kvjax.orbax.split(nnx.state((model, optimizer)))
    with ocp.CheckpointManager(tmp_path) as manager:
        saved = ocp.args.Composite(state=ocp.args.StandardSave(dense), tables=kvjax.orbax.TableSave(tables))
        manager.save(6, args=saved)
    values = []
    for batch in given[6:]:
        values.append(step(model, optimizer, *batch))
    rows = model.embed.table[...].lookup(np.arange(ROWS))
    kvjax.drop_table("middle")

    model, optimizer = made("middle")
    batch = given[0]
    template = nnx.eval_shape(lambda *args: (step(*args), nnx.state(args[:2]))[1], model, optimizer, *batch)
    dense, tables = kvjax.orbax.split(template)
    with ocp.CheckpointManager(tmp_path) as manager:
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(dense), tables=kvjax.orbax.TableRestore(tables))
        found = manager.restore(6, args=wanted)
    nnx.update((model, optimizer), kvjax.orbax.combine(found["state"], found["tables"]))
    for batch, value in zip(given[6:], values, strict=True):
        assert step(model, optimizer, *batch) == value
    np.testing.assert_array_equal(model.embed.table[...].lookup(np.arange(ROWS)), rows)
    kvjax.drop_table("middle")


@slow
@pytest.mark.parametrize("trainable", [True, False])
def test_a_table_that_the_loss_does_not_read_is_saved_and_restored(trainable, make, tmp_path):
    """Orbax saves no arrays of no elements, as the gradients of such a table are."""
    params = {"t": make(DIM), "unread": make(DIM, trainable=trainable), "w": jnp.ones(DIM)}
    tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1)), 2)
    state, ids = tx.init(params), np.arange(3)

    def step(params, state):
        grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(ids) @ p["w"]))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(params, state)
    dense, tables = kvjax.orbax.split((params, state))
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(state=ocp.args.StandardSave(dense), t=kvjax.orbax.TableSave(tables)))
        manager.wait_until_finished()
        items = ocp.args.Composite(state=ocp.args.StandardRestore(dense), t=kvjax.orbax.TableRestore(tables))
        restored = manager.restore(1, args=items)
    params, state = step(*kvjax.orbax.combine(restored["state"], restored["t"]))
    assert len(params["t"]) == 3 and len(params["unread"]) == 0 and int(state.steps) == 0
