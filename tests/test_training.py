"""Training with kvjax equals training with nn.Embed and the same optax transform."""

import functools
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import kvjax

VOCABULARY, DIM, BATCH = 16, 8, 16

pytestmark = pytest.mark.usefixtures("promotion")

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.05),
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.01),
    "rmsprop": lambda: optax.rmsprop(0.05),
    "lion": lambda: optax.lion(0.01),
    "scheduled": lambda: optax.adam(optax.linear_schedule(0.1, 0.0, 20)),
}


def wide(ids):
    return kvjax.keys(np.asarray(ids, np.int64) * 2**40 - 7)


class Net(nn.Module):
    table: str | None
    dtype: object = None

    @nn.compact
    def __call__(self, ids):
        if self.table is None:
            rows = nn.Embed(VOCABULARY, DIM, dtype=self.dtype)(ids)
        else:
            rows = kvjax.flax.Embed(self.table, DIM, dtype=self.dtype)(ids)
        return nn.Dense(1)(jnp.tanh(rows))[..., 0].astype(jnp.float32)


def loss_fn(net, params, ids, y):
    return jnp.mean((net.apply({"params": params}, ids) - y) ** 2)


def states(optimizer, tables=None, dtype=None, clip=None):
    """A dense and a kvjax TrainState with the same parameters."""
    dense_net, net = Net(None, dtype), Net("t", dtype)
    params = dense_net.init(jax.random.key(0), jnp.arange(3))["params"]
    tx = optimizer()
    dense_tx = optax.chain(clip, tx) if clip else tx
    dense = TrainState.create(apply_fn=dense_net, params=params, tx=dense_tx)
    table = kvjax.get_table("t", dim=DIM, initializer=kvjax.initializers.normal(DIM**-0.5))
    table = table.upsert(wide(np.arange(VOCABULARY)), params["Embed_0"]["embedding"])
    mixed = {"Embed_0": {"table": table}, "Dense_0": params["Dense_0"]}
    tx = kvjax.optax.partition(dense=tx, tables=tables or optimizer())
    tx = optax.chain(kvjax.optax.joint(clip), tx) if clip else tx
    return dense, TrainState.create(apply_fn=net, params=mixed, tx=tx)


@jax.jit
def dense_step(state, ids, y):
    loss, grads = jax.value_and_grad(lambda p: loss_fn(state.apply_fn, p, ids, y))(state.params)
    return state.apply_gradients(grads=grads), loss


def kv_step(state, ids, y):
    loss, grads = kvjax.value_and_grad(lambda p: loss_fn(state.apply_fn, p, ids, y))(state.params)
    return state.apply_gradients(grads=grads), loss


def rows_of(state):
    return np.asarray(state.params["Embed_0"]["table"].lookup(wide(np.arange(VOCABULARY))))


def batches(kind, steps=8):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        if kind == "permutation":
            ids = rng.permutation(VOCABULARY)
        elif kind == "all":  # every row, some of them often
            ids = np.concatenate([rng.permutation(VOCABULARY), rng.integers(0, 4, BATCH)])
        else:
            ids = rng.integers(0, VOCABULARY // 2, BATCH // 4)
        yield ids, jnp.asarray(rng.normal(size=len(ids)), jnp.float32)


def train_both(dense, state, kind, **jit_options):
    step = jax.jit(kv_step, **jit_options)
    for ids, y in batches(kind):
        dense, want = dense_step(dense, jnp.asarray(ids), y)
        state, got = step(state, wide(ids), y)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    return dense, state


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["permutation", "all"])
def test_every_row_touched(name, kind):
    dense, state = train_both(*states(OPTIMIZERS[name]), kind)
    want = dense.params["Embed_0"]["embedding"]
    if kind == "permutation" and name in ("sgd", "adagrad"):
        np.testing.assert_array_equal(rows_of(state), want)
    else:
        np.testing.assert_allclose(rows_of(state), want, rtol=1e-6, atol=2e-7)
    np.testing.assert_allclose(
        state.params["Dense_0"]["kernel"], dense.params["Dense_0"]["kernel"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_rows_touched_now_and_then(name, x64):
    """For these, a row that is not in the batch does not change in dense training either."""
    dense, state = train_both(*states(OPTIMIZERS[name]), "some")
    np.testing.assert_allclose(rows_of(state), dense.params["Embed_0"]["embedding"], rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_lazy_rows_stay_as_they_are(name):
    _, state = states(OPTIMIZERS[name])
    step = jax.jit(kv_step)
    state, _ = step(state, wide(np.arange(4)), jnp.ones(4))
    before = rows_of(state)
    state, _ = step(state, wide(np.arange(4, 8)), jnp.ones(4))
    np.testing.assert_array_equal(rows_of(state)[:4], before[:4])
    assert (rows_of(state)[4:8] != before[4:8]).all()


def test_global_count_equals_dense_at_a_late_first_touch():
    tx = kvjax.optax.rowwise(optax.adam(0.05), count="global")
    dense, state = states(OPTIMIZERS["adam"], tables=tx)
    step = jax.jit(kv_step)
    for ids in ([0, 1, 2, 3],) * 5 + ([8, 9, 10, 11],):
        before = dense.params["Embed_0"]["embedding"][8:12]
        dense, _ = dense_step(dense, jnp.array(ids), jnp.ones(4))
        state, _ = step(state, wide(ids), jnp.ones(4))
    moved = dense.params["Embed_0"]["embedding"][8:12] - before
    np.testing.assert_allclose(rows_of(state)[8:12] - before, moved, rtol=1e-4, atol=1e-6)


def test_clip_by_global_norm_is_that_of_a_dense_table():
    dense, state = train_both(*states(OPTIMIZERS["sgd"], clip=optax.clip_by_global_norm(0.1)), "all")
    np.testing.assert_allclose(rows_of(state), dense.params["Embed_0"]["embedding"], rtol=1e-6, atol=2e-7)


def test_clipping_the_raw_gradient_tree_is_refused():
    _, state = states(OPTIMIZERS["sgd"])
    tx = optax.chain(optax.clip_by_global_norm(0.1), state.tx)
    state = TrainState.create(apply_fn=state.apply_fn, params=state.params, tx=tx)
    with pytest.raises((TypeError, ValueError, jax.errors.JaxRuntimeError)):
        jax.block_until_ready(jax.jit(kv_step)(state, wide([1]), jnp.ones(1)))


def test_bfloat16_compute_and_donation():
    dense, state = states(OPTIMIZERS["sgd"], dtype=jnp.bfloat16)
    step = jax.jit(kv_step, donate_argnums=0)
    for ids, y in batches("permutation", steps=3):
        dense, _ = dense_step(dense, jnp.asarray(ids), y)
        state, _ = step(state, wide(ids), y)
    np.testing.assert_allclose(rows_of(state), dense.params["Embed_0"]["embedding"], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_16_bits(dtype, make):
    table = make(DIM, dtype=dtype, initializer=1.0)
    grads = kvjax.SparseRows(np.arange(4), jnp.full((4, DIM), 0.5))
    table, _ = table.apply(optax.adam(0.125), grads)
    assert table.lookup(0).dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(table.lookup(np.arange(4)).astype(jnp.float32), 0.875, atol=0.01)
    assert table.export(slots=True).slots["mu"].dtype == np.float32


def test_microbatches_equal_the_whole_batch():
    dense, state = states(OPTIMIZERS["sgd"])
    ids, y = next(batches("all", steps=1))

    @jax.jit
    def step(state, ids, y):
        def body(total, batch):
            loss, grads = kvjax.value_and_grad(lambda p: loss_fn(state.apply_fn, p, *batch))(state.params)
            return total + loss / 4, grads

        ids, y = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), (ids, y))
        loss, grads = jax.lax.scan(body, jnp.float32(0), (ids, y))

        def mean(g):
            return kvjax.merge(g, scale=0.25) if isinstance(g, kvjax.SparseRows) else jnp.mean(g, 0)

        grads = jax.tree.map(mean, grads, is_leaf=lambda x: isinstance(x, kvjax.SparseRows))
        return state.apply_gradients(grads=grads), loss

    dense, _ = dense_step(dense, jnp.asarray(ids), y)
    state, _ = step(state, wide(ids), y)
    np.testing.assert_allclose(rows_of(state), dense.params["Embed_0"]["embedding"], rtol=1e-5, atol=1e-6)
    counts = np.bincount(ids, minlength=VOCABULARY)
    table = state.params["Embed_0"]["table"]
    np.testing.assert_array_equal(table.frequency(wide(np.arange(VOCABULARY))), counts)


def test_compiles_once(caplog):
    _, state = states(OPTIMIZERS["adam"])
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids, y):
        traces.append(1)
        return kv_step(state, ids, y)

    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for ids, y in batches("some"):
            state, _ = step(state, wide(ids), y)
    assert len(traces) == sum("Compiling jit(step)" in r.message for r in caplog.records) == 1


def test_scan_over_steps_equals_single_steps(make):
    """A whole training loop inside one compiled program."""
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.adam(0.1))
    ids = np.random.default_rng(1).integers(0, 9, (5, 6)) * 2**35

    def step(carry, keys):
        params, state = carry
        grads = kvjax.grad(lambda p: jnp.sum((p["t"].lookup(keys) * p["w"] - 1.0) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def start():
        params = {"t": make(2, initializer=0.5), "w": jnp.ones(())}
        return params, tx.init(params)

    one = start()
    for row in ids:
        one, _ = jax.jit(step)(one, kvjax.keys(row))
    all_, _ = jax.jit(lambda c, k: jax.lax.scan(step, c, k))(start(), kvjax.keys(ids))
    a, b = one[0]["t"].export(slots=True), all_[0]["t"].export(slots=True)
    for name in ("keys", "values", "freqs", "versions"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 12, None])
def test_chunk_size_changes_nothing(chunk_bytes, make, monkeypatch):
    monkeypatch.setattr(kvjax.storage, "_CHUNK_BYTES", chunk_bytes)
    rng = np.random.default_rng(0)
    table = make(3, initializer=1.0)
    grads = kvjax.SparseRows(rng.integers(0, 150, 400), jnp.asarray(rng.normal(size=(400, 3)), jnp.float32))
    state = kvjax.optax.rowwise(OPTIMIZERS["scheduled"]()).init(3)
    for _ in range(3):
        table, state = table.apply(OPTIMIZERS["scheduled"](), grads, state)
    assert len(table) == len(np.unique(np.asarray(grads.keys)))
    assert [int(s) for s in state] == [3]
    monkeypatch.undo()
    whole, want_state = make(3, initializer=1.0), kvjax.optax.rowwise(OPTIMIZERS["scheduled"]()).init(3)
    for _ in range(3):
        whole, want_state = whole.apply(OPTIMIZERS["scheduled"](), grads, want_state)
    np.testing.assert_allclose(table.export().values, whole.export().values, rtol=1e-6)


def test_empty_batch_counts_the_step(make):
    table, tx = make(3), OPTIMIZERS["scheduled"]()
    state = kvjax.optax.rowwise(tx).init(3)
    grads = kvjax.SparseRows(np.zeros(0, np.int64), jnp.zeros((0, 3)))
    table, state = table.apply(tx, grads, state)
    assert len(table) == 0 and [int(s) for s in state] == [1]


def test_transforms_by_table_name(make):
    tables = {"a": make(2, initializer=1.0), "b": make(2, initializer=1.0), "c": make(2, trainable=False)}
    by_name = {tables["a"].name: optax.sgd(1.0), tables["b"].name: optax.sgd(0.5)}
    for choice in (by_name, by_name.get):
        params = {k: t.refresh().clear() for k, t in tables.items()}
        tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=choice)
        state = tx.init(params)
        grads = kvjax.grad(lambda p: sum(jnp.sum(t.lookup(np.array([1]))) for t in p.values()))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        got = {k: params[k].lookup(1).tolist() for k in params}
        assert got == {"a": [0.0, 0.0], "b": [0.5, 0.5], "c": [0.0, 0.0]}
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables={})
    with pytest.raises(ValueError, match="want a transform for every table"):
        tx.init(params)


def test_a_merged_gradient_that_was_changed_is_refused_or_merged_again(make):
    table = make(2)
    merged = kvjax.merge(kvjax.SparseRows(np.array([1, 2, 3]), jnp.ones((3, 2))))
    dropped = merged.replace(counts=jnp.array([1, 0, 1], jnp.int32))
    assert sorted(table.apply(optax.sgd(1.0), dropped)[0].export().keys.tolist()) == [1, 3]
    table = table.refresh().clear()
    joined = jax.tree.map(lambda a: jnp.concatenate([jnp.atleast_1d(a)] * 2), merged)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="distinct keys, then padding"):
        jax.block_until_ready(table.apply(optax.sgd(1.0), joined)[0])
    table = table.refresh()
    assert len(table) == 0
    table, _ = table.apply(optax.sgd(1.0), kvjax.merge([merged, merged]))
    assert table.frequency(np.array([1, 2, 3])).tolist() == [2, 2, 2]


def test_partition_checks_all_tables_before_it_writes_one(make):
    params = {"a": make(2), "b": make(3)}
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
    state = tx.init(params)
    good = kvjax.SparseRows(np.array([1]), jnp.ones((1, 2)))
    for bad, kind in ((kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))), ValueError), (jnp.ones(3), TypeError)):
        with pytest.raises(kind, match=r"SparseRows|gradient rows"):
            tx.update({"a": good, "b": bad}, state, params)
    assert len(params["a"]) == 0 and int(params["a"].refresh().version) == 0


def test_live_handles_wait_for_steps_in_flight():
    _, state = states(OPTIMIZERS["adam"])
    step = jax.jit(kv_step)
    ids = kvjax.keys(np.arange(50_000))
    for _ in range(5):
        state, _ = step(state, ids, jnp.ones(50_000))
        live = kvjax.get_table("t")
        assert int(live.version) == int(state.params["Embed_0"]["table"].version)


@pytest.mark.parametrize(
    "tx, extra",
    [
        (optax.masked(optax.adam(0.1), True), {}),
        (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), {}),
        (optax.chain(optax.clip(0.5), optax.adamw(0.1)), {}),
        (optax.adafactor(0.1), {}),
        (optax.apply_if_finite(optax.adan(0.1), 3), {}),
        (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), {}),
        (optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()), {"value": jnp.float32(1.0)}),
    ],
)
def test_transforms_of_unusual_states_equal_one_row_at_a_time(tx, extra, make):
    table, state = make(4, initializer=1.0), kvjax.optax.rowwise(tx).init(4)
    row, want = jnp.ones(4), tx.init(jnp.ones(4))
    full = optax.with_extra_args_support(tx)
    for i in range(3):
        grad = jnp.arange(4.0) - i
        table, state = table.apply(tx, kvjax.SparseRows(np.array([7]), grad[None]), state, **extra)
        updates, want = full.update(grad, want, row, **extra)
        row = optax.apply_updates(row, updates)
    np.testing.assert_allclose(table.lookup(7), row, rtol=1e-5, atol=1e-6)


def test_rowwise_checks_its_arguments():
    with pytest.raises(ValueError, match="count"):
        kvjax.optax.rowwise(optax.sgd(0.1), count="bogus")
    with pytest.raises(TypeError, match="optax transform"):
        kvjax.optax.rowwise(0.1)
    with pytest.raises(ValueError, match="random keys"):
        kvjax.optax.rowwise(optax.add_noise(0.1, 0.5, jax.random.key(0))).init(3)


def test_multi_steps_inside_partition(make):
    """Each row waits for its own second touch."""
    params = {"t": make(2, initializer=1.0)}
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.MultiSteps(optax.sgd(0.5), 2))
    state, seen = tx.init(params), []
    for _ in range(2):
        updates, state = tx.update({"t": kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(float(params["t"].lookup(7)[0]))
    assert seen == [1.0, 0.5]


def test_global_norm_is_that_of_a_dense_table():
    dense, state = states(OPTIMIZERS["sgd"])
    ids, y = next(batches("all", steps=1))
    want = jax.grad(lambda p: loss_fn(dense.apply_fn, p, jnp.asarray(ids), y))(dense.params)
    got = kvjax.grad(lambda p: loss_fn(state.apply_fn, p, wide(ids), y))(state.params)
    np.testing.assert_allclose(kvjax.optax.global_norm(got), optax.tree.norm(want), rtol=1e-5)
