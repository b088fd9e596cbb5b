"""Transforms that ask for facts about a row, against formulas in float64, in tables and on dense arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._training.update import lowered
from kvjax.ffi import is_device
from kvjax.optax import RowFacts, Words, add_row_noise, mean_of_duplicates, scale_by_cowclip, scale_by_frequency
from tests.support.marks import few, slow

pytestmark = pytest.mark.usefixtures("promotion")
DIM = 3


def cowclip(r, zeta):
    """Algorithm 1 of the paper, without decay of weights."""

    def of(w, g, n, frequency):
        bound = n * max(r * np.linalg.norm(w), zeta)
        return g * min(1.0, bound / np.linalg.norm(g)) if g.any() else g

    return of


FORMULAS = {
    "mean": (mean_of_duplicates(), lambda w, g, n, frequency: g / n),
    "frequency": (scale_by_frequency(-0.5, 2), lambda w, g, n, frequency: g / np.sqrt(max(frequency, 2))),
    "cowclip": (scale_by_cowclip(0.3, 0.2), cowclip(0.3, 0.2)),
}


@pytest.mark.parametrize("name", few(FORMULAS, "cowclip"))
def test_formulas(name, make):
    """Of keys that stand in a batch some times; a row of zeros and a gradient of zeros among them."""
    tx, of = FORMULAS[name]
    table = make(dim=DIM, seed=1, initializer=kvjax.initializers.normal(0.5)).upsert(3, jnp.zeros(DIM))
    keys = np.arange(6)
    want = {key: np.asarray(row, np.float64) for key, row in zip(keys, table.lookup(keys), strict=True)}
    frequency, rng = dict.fromkeys(keys, 0), np.random.default_rng(0)
    step = jax.jit(lambda table, grads: table.apply(optax.chain(tx, optax.sgd(0.5)), grads)[0])
    for _ in range(4):
        batch = rng.integers(0, 6, 10)
        rows = rng.normal(size=(10, DIM)).astype(np.float32)
        rows[batch == 2] = 0
        table = step(table, kvjax.SparseRows(batch, jnp.asarray(rows)))
        for key in np.unique(batch):
            n, g = (batch == key).sum(), rows[batch == key].sum(0, dtype=np.float64)
            frequency[key] += n
            want[key] -= 0.5 * of(want[key], g, n, frequency[key])
    np.testing.assert_allclose(table.lookup(keys), np.stack([want[key] for key in keys]), rtol=1e-5, atol=1e-6)
    if not is_device(table.spec.storage.backend):
        assert lowered(table.spec, kvjax.optax.rowwise(tx), (), {}, True) is not None


def facts(n):
    zero, keys = np.zeros(n, np.uint32), Words(np.arange(n, dtype=np.uint32), np.zeros(n, np.uint32))
    count = np.arange(n, dtype=np.int32)
    return RowFacts(count, count, count, Words(zero, zero), Words(zero + np.uint32(1), zero), keys)


@jax.jit
def on_dense_rows():
    """Rows by frequency, and noise of three steps by two seeds."""
    rows, noises = jnp.zeros((5, 2)), []
    for seed in (1, 1 + 2**32):
        tx = add_row_noise(1.0, gamma=2.0, seed=seed)
        state, noise = tx.init(rows), [None] * 3
        for i in range(3):
            noise[i], state = tx.update(rows, state, row_facts=facts(5))
        noises.append(noise)
    return scale_by_frequency(-1.0, 2).update(rows + 1, optax.EmptyState(), row_facts=facts(5))[0], jnp.array(noises)


def test_each_argument_counts():
    scaled, noise = on_dense_rows()
    np.testing.assert_allclose(scaled[:, 0], [1 / 2, 1 / 2, 1 / 2, 1 / 3, 1 / 4], rtol=1e-6)
    np.testing.assert_allclose(noise[:, 1:], noise[:, :1] * np.array([1 / 2, 1 / 3])[:, None, None], rtol=1e-5)
    assert (noise[0] != noise[1]).all() and len(np.unique(noise[0, 0])) == 10


@slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_parameters_want_facts(dtype):
    params, grads = jnp.ones((3, 2), dtype), jnp.full((3, 2), 4, dtype)
    for name, want in (("mean", [4, 4, 2]), ("frequency", [2.83, 2.83, 2.83]), ("cowclip", [0, 0.3, 0.6])):
        tx = FORMULAS[name][0]
        with pytest.raises(ValueError, match="no facts about rows"):
            tx.update(grads, tx.init(params), params)
        updates, _ = tx.update({"a": grads}, tx.init(params), {"a": params}, row_facts={"a": facts(3)})
        assert updates["a"].dtype == params.dtype
        np.testing.assert_allclose(np.asarray(updates["a"][:, 0], np.float32), want, rtol=1e-2)
    with pytest.raises(ValueError, match=r"scale_by_cowclip: .* no params"):
        scale_by_cowclip().update(grads, optax.EmptyState(), row_facts=facts(3))
    with pytest.raises(ValueError, match="want an integer of 1 or more as least"):
        scale_by_frequency(least=0)


def zeros(keys, dim):
    return kvjax.SparseRows(keys, jnp.zeros((len(keys), dim)))


@slow
def test_noise_is_that_of_its_key_and_step(make, places, tmp_path):
    """Whatever the order of a batch, its duplicates, what else is in it, the shards, and a restore."""
    tx, keys = optax.chain(add_row_noise(0.25, seed=2**40 + 1), optax.sgd(1.0)), np.arange(40) * 7919**3
    rows, state = [], kvjax.optax.rowwise(tx).init(8)
    for i, place in enumerate([places["one place"], {}, places["4"]]):
        batch = keys if i else np.concatenate([keys[::-1], keys[:9]])
        table, _ = make(dim=8, **place).apply(tx, zeros(batch, 8), state, step=3)
        rows.append(np.asarray(table.lookup(keys)))
    for other in rows[1:]:
        np.testing.assert_allclose(other, rows[0], rtol=0, atol=1e-6)
    kvjax.checkpoint.save(tmp_path / "saved", [table])
    (restored,) = kvjax.checkpoint.restore(tmp_path / "saved", {table.name: table}).values()
    half, _ = restored.apply(tx, zeros(keys[:20], 8), state, step=7)  # the rest of the batch with a step of its own
    whole, _ = make(dim=8).apply(tx, zeros(keys, 8), state, step=7)
    moved = np.asarray(half.lookup(keys[:20])) - rows[0][:20]
    np.testing.assert_allclose(moved, whole.lookup(keys[:20]), rtol=0, atol=1e-6)
    noise = rows[0].ravel()
    assert abs(noise.std() - 0.5) < 0.06 and abs(noise.mean()) < 0.06 and len(set(noise)) == noise.size
    again, _ = make(dim=8).apply(tx, zeros(keys, 8), state, step=4)
    assert abs(np.corrcoef(np.asarray(again.lookup(keys)).ravel(), noise)[0, 1]) < 0.2
    if not is_device(again.spec.storage.backend):
        assert lowered(again.spec, kvjax.optax.rowwise(tx), (np.int32(0),), {}, True) is not None


@slow
def test_noise_is_normal_and_falls(make):
    tx, keys = add_row_noise(1.0, gamma=2.0, seed=1), np.arange(2000)
    table, state = make(dim=16), kvjax.optax.rowwise(tx).init(16)
    for scale in (1.0, 1 / 2, 1 / 3):
        before = np.asarray(table.lookup(keys))
        table, state = table.apply(tx, zeros(keys, 16), state)
        noise = (np.asarray(table.lookup(keys)) - before).ravel() / scale
        moments = [np.mean(noise**k) for k in (1, 2, 3, 4)]
        np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.15)
    with pytest.raises(TypeError, match="an integer as seed"):
        add_row_noise(1.0, seed=0.5)


@slow
def test_verdicts():
    """A dense array with facts is the reference: noise moves rows that a batch leaves out, and clipping does not."""
    equal = dict.fromkeys((scale_by_cowclip(), scale_by_frequency(), mean_of_duplicates()), "equal")
    for tx, verdict in (equal | {add_row_noise(0.1): "lazy"}).items():
        assert kvjax.optax.check_compatibility(optax.chain(tx, optax.sgd(0.1)), 4).verdict == verdict
    chained = optax.chain(scale_by_cowclip(), optax.adam(0.1))
    assert kvjax.optax.check_compatibility(chained, 4).verdict == "lazy"


@slow
def test_a_transform_of_facts_that_cannot_do_without_them():
    def update(grads, state, params=None, *, row_facts=None, **extra):
        return grads / jnp.maximum(row_facts.occurrences, 1)[..., None], state

    tx = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    assert kvjax.optax.check_compatibility(optax.chain(tx, optax.sgd(0.1)), 4).verdict == "equal"
    found = kvjax.optax.check_compatibility(optax.chain(tx, optax.adam(0.1)), 4)
    assert found.verdict == "lazy" and "catch_up has no closed form of it" in found.mend
