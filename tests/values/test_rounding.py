"""Rows of 16 bits: stochastic rounding, and constraints, which come before it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax._training.rounding import random_bits, stochastic
from tests.support.marks import examples, few, slow, wide_is_slow

SGD = optax.sgd(1.0)
TYPES = [jnp.bfloat16, jnp.float16]


def ordered(x):
    """Values of a 16-bit type as integers in the same order; neighbours differ by 1, both zeros are 0."""
    bits = np.asarray(x).view(np.uint16).astype(np.int32)
    return np.where(bits & 0x8000, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("dtype", TYPES)
def test_exact_values_never_change(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    random = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, 2**16, np.uint32))
    for bits in (random, jnp.zeros(2**16, jnp.uint32), jnp.full(2**16, 2**32 - 1, jnp.uint32)):
        got = np.asarray(stochastic(jnp.asarray(every.astype(np.float32)), dtype, bits))
        number = ~np.isnan(every.astype(np.float32))
        if dtype == jnp.bfloat16:  # XLA may take the subnormal numbers of float32 for zeros
            number &= (np.abs(every.astype(np.float32)) >= 2.0**-126) | (every.astype(np.float32) == 0)
        np.testing.assert_array_equal(got.view(np.uint16)[number], every.view(np.uint16)[number])
        assert np.isnan(got.astype(np.float32)[np.isnan(every.astype(np.float32))]).all()


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=examples(25, 100))
@given(x=st.floats(-(2.0**17), 2.0**17, width=32, allow_subnormal=False), seed=st.integers(0, 2**32 - 1))
def test_only_the_two_neighbours(dtype, x, seed):
    bits = jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, 64, np.uint32))
    got = np.asarray(stochastic(jnp.full(64, x, jnp.float32), dtype, bits))
    with np.errstate(over="ignore"):
        near = np.float32(x).astype(dtype)
    if abs(x) > float(jnp.finfo(dtype).max):
        assert (got == near).all()
        return
    towards = np.sign(x - near.astype(np.float64))
    assert set((ordered(got) - ordered(near)).tolist()) <= {0, int(towards)}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("x", few([1.0001, -3.999, 1e-3, 65000.0, 3e-5, -7e-8, 1e-9], 1, 6))
def test_the_mean_is_the_value(dtype, x):
    """Over 200,000 keys, within 5 standard errors; in float16 the last three are subnormal."""
    n = 200_000
    keys = np.arange(2 * n, dtype=np.uint32).reshape(n, 2)
    rows = jnp.full((n, 1), x, jnp.float32)
    bits = random_bits(rows, jnp.asarray(keys), jnp.array([3, 0], jnp.uint32), 11)
    got = np.asarray(stochastic(rows, dtype, bits)).astype(np.float64)
    gap = got.max() - got.min()
    assert gap > 0
    assert abs(got.mean() - np.float32(x)) < 5 * gap / 2 / n**0.5


@pytest.mark.parametrize("dtype", TYPES)
def test_what_lies_beyond_the_largest_value(dtype):
    top = float(jnp.finfo(dtype).max)
    spacing = top - float(np.nextafter(np.array(top, dtype), np.array(0, dtype)))
    x = np.array([top, top + spacing * 0.49, top + spacing * 0.51, np.inf, -np.inf, -top, 3e38], np.float32)
    for bits in (0, 2**32 - 1):
        got = stochastic(jnp.asarray(x), dtype, jnp.full(len(x), bits, jnp.uint32))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(np.asarray(got)[:-1], x.astype(dtype)[:-1])


@slow
def test_random_bits_are_uniform_and_depend_on_everything():
    rows = jnp.ones((1000, 8))
    keys = np.zeros((1000, 2), np.uint32)
    keys[:, 0] = np.arange(1000)
    step = np.array([1, 0], np.uint32)
    base = np.asarray(random_bits(rows, keys, step, 5))
    assert len(np.unique(base)) > base.size * 0.999
    ones = np.unpackbits(base.view(np.uint8)).reshape(-1, 32).mean(0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / base.size**0.5
    correlation = np.corrcoef(base.T.astype(np.float64))
    assert np.abs(correlation - np.eye(8)).max() < 5 / 1000**0.5
    others = [
        random_bits(rows + 1e-6, keys, step, 5),
        random_bits(rows, keys[:, ::-1], step, 5),
        random_bits(rows, keys, step[::-1], 5),
        random_bits(rows, keys, step, 5 << 32),
    ]
    for other in others:
        assert (np.asarray(other) != base).mean() > 0.99
    part = np.asarray(random_bits(rows[100:103], keys[100:103], step, 5))
    np.testing.assert_array_equal(part, base[100:103])


def test_random_bits_are_frozen():
    """Or training after a restore would not go on as it would have."""
    keys = np.arange(4, dtype=np.uint32).reshape(2, 2)
    for seed, want in (
        (5, [[539554379, 55916749], [3331675044, 2778812296]]),
        (5 + 2**63, [[4142575117, 1555814332], [1774314788, 1646890852]]),
    ):
        assert random_bits(jnp.ones((2, 2)), keys, keys[0], seed).tolist() == want


def train(table, batches):
    """One step of sgd per batch, compiled once."""
    apply = jax.jit(lambda t, keys, grads, step: t.apply(SGD, kvjax.SparseRows(keys, grads), step=step)[0])
    for step, (keys, grads) in enumerate(batches, 1):
        table = apply(table, kvjax.keys(keys), grads, jnp.int32(step))
    return table


@slow
@pytest.mark.parametrize("dtype", TYPES)
def test_small_updates_are_not_lost(dtype, make):
    keys, grads = np.arange(64), jnp.full((64, 8), 1e-4)
    batches = [(keys, grads)] * 100
    still = train(make(8, dtype=dtype, initializer=1.0), batches).lookup(keys).astype(jnp.float32)
    moved = train(make(8, dtype=dtype, initializer=1.0, rounding="stochastic"), batches).lookup(keys)
    assert (still == 1).all()
    spread = float(moved.astype(jnp.float32).std()) / (64 * 8) ** 0.5
    assert abs(float(moved.astype(jnp.float32).mean()) - 0.99) < 5 * spread < 0.005


@wide_is_slow
def test_the_same_whatever_the_batches_and_chunks(make, monkeypatch, tmp_path, x64):
    rng = np.random.default_rng(0)
    keys = rng.permutation(300) * 2**33
    grads = jnp.asarray(rng.normal(size=(300, 3)) * 1e-3, jnp.float32)
    options = dict(dtype="bfloat16", initializer=kvjax.initializers.normal(1.0), seed=5, rounding="stochastic")

    def export(table):
        return np.asarray(table.export().values).view(np.uint16)

    want = export(train(make(3, **options), [(keys, grads)] * 3))
    order = rng.permutation(300)
    np.testing.assert_array_equal(export(train(make(3, **options), [(keys[order], grads[order])] * 3)), want)
    halves = make(3, **options)
    for step in (1, 2, 3):
        for half in (slice(0, 100), slice(100, 300)):
            halves, _ = halves.apply(SGD, kvjax.SparseRows(keys[half], grads[half]), step=step)
    np.testing.assert_array_equal(export(halves), want)
    monkeypatch.setattr("kvjax._training.apply.lowered", lambda *_: None)  # a program has no chunks
    monkeypatch.setattr("kvjax._training.ways._CHUNK_BYTES", 1)
    jitted = jax.jit(lambda t: train(t, [(keys, grads)] * 3))
    np.testing.assert_array_equal(export(jitted(make(3, **options))), want)
    assert (export(train(make(3, **options | {"seed": 6}), [(keys, grads)] * 3)) != want).any()
    other_steps = make(3, **options)
    for step in (1, 2, 4):
        other_steps, _ = other_steps.apply(SGD, kvjax.SparseRows(keys, grads), step=step)
    assert (export(other_steps) != want).any()


# ---- constraints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float16"], "bfloat16"))
def test_constraints_hold_after_every_update(dtype, make):
    rng = np.random.default_rng(1)
    keys, batches = np.arange(40), []
    for _ in range(4):
        batches.append((keys, jnp.asarray(rng.normal(size=(40, 5)), jnp.float32)))
    small = train(make(5, dtype=dtype, constraint=kvjax.constraints.max_norm(0.5)), batches).lookup(keys)
    norms = np.linalg.norm(np.asarray(small, np.float32), axis=1)
    assert norms.max() <= 0.5 * 1.01 and norms.min() > 0
    positive = train(make(5, dtype=dtype, constraint=kvjax.constraints.non_negative()), batches).lookup(keys)
    free = np.zeros((40, 5), np.float32)
    for _, grads in batches:
        free = np.maximum(free - np.asarray(grads), 0).astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(positive, np.float32), free, rtol=1e-2)


def test_only_updated_rows_are_constrained(make):
    table = make(2, constraint=kvjax.constraints.max_norm(1.0)).upsert(np.array([1, 2]), np.full((2, 2), 9.0))
    table, _ = table.apply(optax.sgd(0.0), kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))))
    np.testing.assert_allclose(table.lookup(np.array([1, 2])), [[0.5**0.5] * 2, [9.0, 9.0]], rtol=1e-6)


def test_equal_constraints_are_the_same_table(make):
    table = make(2, constraint=kvjax.constraints.max_norm(1.0))
    assert kvjax.get_table(table.name, dim=2, constraint=kvjax.constraints.max_norm(1.0)).spec == table.spec
    with pytest.raises(ValueError, match=r"constraint max_norm\(limit=2.0\) \(not max_norm\(limit=1.0\)\)"):
        kvjax.get_table(table.name, dim=2, constraint=kvjax.constraints.max_norm(2.0))
