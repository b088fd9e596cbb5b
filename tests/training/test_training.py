"""Training with kvjax equals training with nn.Embed and the same optax transform."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._training import apply as training
from kvjax._training import ways
from kvjax.ffi import is_device
from tests.support import marks
from tests.support.marks import few, few_rows, slow
from tests.support.training import (
    DIM,
    OPTIMIZERS,
    VOCABULARY,
    batches,
    dense_step,
    kv_step,
    loss_fn,
    rows_of,
    states,
    train_both,
    wide,
)
from tests.support.transforms import row_by_row

pytestmark = pytest.mark.usefixtures("promotion")


QUICK = [("sgd", "permutation"), ("adagrad", "permutation"), ("adam", "all"), ("scheduled", "all")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in QUICK else slow)
        for name in OPTIMIZERS
        for kind in ("permutation", "all")
    ],
)
def test_every_row_touched(name, kind):
    dense, state = train_both(*states(OPTIMIZERS[name]), kind)
    want = dense.params["Embed_0"]["embedding"]
    if not marks.hasty and kind == "permutation" and name == "sgd":  # contracted as LLVM does it
        np.testing.assert_array_equal(rows_of(state), want)
    else:
        np.testing.assert_allclose(rows_of(state), want, rtol=1e-6, atol=2e-7)
    np.testing.assert_allclose(
        state.params["Dense_0"]["kernel"], dense.params["Dense_0"]["kernel"], rtol=1e-5, atol=1e-6
    )


def test_a_schedule_where_jax_checks_itself():
    """A schedule's arithmetic is evaluated by jaxprs of kvjax's, of which JAX then counts the names."""
    grads = kvjax.SparseRows(kvjax.keys([1, 2]), jnp.ones((2, 3)))
    with jax.enable_checks(True):
        tx = optax.sgd(optax.linear_schedule(0.5, 0.0, 7))
        state = kvjax.optax.rowwise(tx).init(3)
        table, _ = kvjax.get_table("t", dim=3, initializer=1.0).apply(tx, grads, state)
    np.testing.assert_allclose(table.lookup([1, 2]), 0.5)


@pytest.mark.parametrize("x64", few([False, True], 1), indirect=True)
@pytest.mark.parametrize("name", few(["sgd", "adagrad"]))
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


@pytest.mark.parametrize("chunk_bytes", few([1, 1 << 12], 1))
def test_chunk_size_changes_nothing(chunk_bytes, make, monkeypatch):
    tx, rng = OPTIMIZERS["scheduled"](), np.random.default_rng(0)
    grads = kvjax.SparseRows(rng.integers(0, 150, 400), jnp.asarray(rng.normal(size=(400, 3)), jnp.float32))
    monkeypatch.setattr(training, "lowered", lambda *_: None)  # a program has no chunks
    gather, sizes = ways.training.gather, []

    def gathered(spec, version, begun, start, chunk, *rest, **facts):
        sizes.append(chunk)
        return gather(spec, version, begun, start, chunk, *rest, **facts)

    monkeypatch.setattr(ways.training, "gather", gathered)

    def trained(most):
        monkeypatch.setattr(ways, "_CHUNK_BYTES", most)
        table, state = make(3, initializer=1.0), kvjax.optax.rowwise(tx).init(3)
        step = jax.jit(lambda *of: table.at(of[0]).apply(tx, *of[1:]))  # traced for this size
        for _ in range(3):
            table, state = step(table.version, grads, state)
        return table, state

    table, state = trained(chunk_bytes)
    whole, want_state = trained(1 << 20)
    assert is_device(table.spec.storage.backend) or sizes[0] < 400 <= sizes[-1], sizes  # a device's rows go at once
    assert len(table) == len(np.unique(np.asarray(grads.keys)))
    assert [int(s) for s in jax.tree.leaves(state)] == [int(s) for s in jax.tree.leaves(want_state)] == [3]
    np.testing.assert_array_equal(table.export().values, whole.export().values)


def test_empty_batch_counts_the_step(make):
    table, tx = make(3), OPTIMIZERS["scheduled"]()
    state = kvjax.optax.rowwise(tx).init(3)
    grads = kvjax.SparseRows(np.zeros(0, np.int64), jnp.zeros((0, 3)))
    table, state = table.apply(tx, grads, state)
    assert len(table) == 0 and [int(s) for s in jax.tree.leaves(state)] == [1]


def test_a_merged_gradient_that_was_changed_is_merged_again(make):
    table = make(2)
    merged = kvjax.merge(kvjax.SparseRows(np.array([1, 2, 3]), jnp.ones((3, 2))))
    dropped = merged.replace(counts=jnp.array([1, 0, 1], jnp.int32))
    assert sorted(table.apply(optax.sgd(1.0), dropped)[0].export().keys.tolist()) == [1, 3]
    table = table.refresh().clear()
    joined = jax.tree.map(lambda a: jnp.concatenate([jnp.atleast_1d(a)] * 2), merged)
    # What has equal keys is summed again.
    assert table.apply(optax.sgd(1.0), joined)[0].frequency(np.array([1, 2, 3])).tolist() == [2, 2, 2]
    table = table.refresh().clear()
    table, _ = table.apply(optax.sgd(1.0), kvjax.merge([merged, merged]))
    assert table.frequency(np.array([1, 2, 3])).tolist() == [2, 2, 2]


def test_live_handles_wait_for_steps_in_flight():
    _, state = states(OPTIMIZERS["adam"])
    step = jax.jit(kv_step)
    ids = kvjax.keys(np.arange(50_000))
    for _ in range(5):
        state, _ = step(state, ids, jnp.ones(50_000))
        live = kvjax.get_table("t")
        assert int(live.version) == int(state.params["Embed_0"]["table"].version)


@row_by_row
@pytest.mark.parametrize(
    "tx, extra",
    few_rows(
        [
            (optax.masked(optax.adam(0.1), True), {}),
            (optax.inject_hyperparams(optax.adam)(learning_rate=0.1), {}),
            (optax.chain(optax.clip(0.5), optax.adamw(0.1)), {}),
            (optax.adafactor(0.1), {}),
            (optax.adan(0.1), {}),
            (optax.chain(optax.ema(0.9), optax.adam(0.1)), {}),
            (optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()), {"value": jnp.float32(1.0)}),
        ],
        5,
    ),
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


def by_transform(rate, table, grads):
    return table.apply(optax.sgd(rate), grads)[0]


def by_state(rate, table, grads):
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
    params = {"t": table}
    state = optax.tree.set(tx.init(params), learning_rate=rate)
    return optax.apply_updates(params, tx.update({"t": grads}, state, params)[0])["t"]


@pytest.mark.parametrize("write", [by_transform, by_state])
@pytest.mark.parametrize("jit", few([True, False], True))
def test_no_derivative_by_a_rate_is_a_silent_zero(make, promotion, write, jit):
    """A table does its update itself, and JAX sees none of it."""
    table = make(2, initializer=1.0)

    def after(rate, table):
        table = write(rate, table, kvjax.SparseRows(np.array([1, 2]), jnp.ones((2, 2))))
        return jnp.sum(table.lookup(np.array([1, 2]))), table

    derive = jax.grad(after, has_aux=True)
    with pytest.raises(ValueError, match=r"apply: want a derivative .* got one through the write"):
        (jax.jit(derive) if jit else derive)(0.1, table)
    value, table = (jax.jit(after) if jit else after)(0.5, table)
    assert float(value) == 2.0
