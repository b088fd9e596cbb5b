"""What fails on one device of a sharded table fails on all, says why, and leaves the table as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import kvjax
from tests.support.marks import few

SGD = optax.sgd(0.1)
FAILED = (ValueError, RuntimeError, KeyError)


def test_a_table_that_is_dropped_while_a_step_runs(mesh):
    """The step has been written before the table goes."""
    w = jnp.ones((64, 64))

    @jax.jit
    def step(table, keys):
        rows = table.lookup(keys)
        for _ in range(20):
            rows = jnp.tanh(rows @ w)
        grads = kvjax.grad(lambda t: jnp.sum(t.lookup(keys) * rows))(table)
        return table.apply(optax.adagrad(0.1), grads)[0]

    for _ in range(5):
        table = kvjax.get_table("dropped", dim=64, mesh=mesh(4))
        after = step(table, kvjax.keys(np.arange(512)))
        kvjax.drop_table("dropped")
        jax.block_until_ready(after.version)


@pytest.mark.parametrize("shards", few([None, 4], 0))
def test_a_table_is_dropped_after_what_reads_it(mesh, shards):
    keys = kvjax.keys(np.arange(50_000))
    read = jax.jit(lambda table: table.lookup(keys))
    for _ in range(3):
        table = kvjax.get_table("dropped", dim=8, mesh=mesh(shards) if shards else None)
        table = table.upsert(np.arange(99), np.ones((99, 8)))
        rows = [read(table), table.lookup(keys), read(table)]
        kvjax.drop_table("dropped")
        for each in rows:
            np.testing.assert_array_equal(each[:, 0], np.arange(50_000) < 99)


def test_lengths_that_do_not_fit_on_one_device(make, mesh):
    table, place = make(mesh=mesh(4)), mesh(4)
    pooled = jax.jit(
        jax.shard_map(
            lambda keys, lengths: kvjax.lookup_bag(table, keys, lengths=lengths),
            mesh=place, in_specs=(P("x"), P("x")), out_specs=P("x"), check_vma=False,
        )
    )  # fmt: skip
    keys = kvjax.keys(np.arange(16))
    np.testing.assert_array_equal(pooled(keys, jnp.full(8, 2)), np.zeros((8, 4)))
    with pytest.raises(FAILED, match="lookup_bag"):
        jax.block_until_ready(pooled(keys, jnp.array([2, 2, 2, 2, 2, 2, 2, 3])))
    assert table.refresh().version == table.version


@pytest.mark.parametrize("options", few([{}, {"max_capacity": 1000}]), ids=["plain", "limited"])
def test_apply_says_what_one_shard_refuses(make, mesh, options):
    table = make(mesh=mesh(4), key_dtype="int32", **options)
    table = table.upsert(kvjax.keys([2**40 + 1]), np.ones((1, 4)))  # one shard has a wide key
    table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(kvjax.keys(np.arange(8)), jnp.ones((8, 4))))
    before = table.export()
    narrow = kvjax.SparseRows(jnp.arange(8), jnp.ones((8, 4)))
    said = r"apply: want 64-bit keys, as this table holds them.*; no shard has done the step.* table.refresh\(\), or"
    with pytest.raises(FAILED, match=said):
        jax.block_until_ready(table.apply(optax.sgd(1.0), narrow)[0].version)
    after = table.refresh().export()
    np.testing.assert_array_equal(before.values, after.values)
    np.testing.assert_array_equal(before.freqs, after.freqs)


def test_a_failing_read_does_not_forget_a_write(make, mesh):
    """Stale reads beside a training loop, from the same thread, all dispatched at once."""
    table = make(mesh=mesh(4))
    stale, start = table, int(table.version)
    grads = kvjax.SparseRows(kvjax.keys(np.arange(8)), jnp.ones((8, 4)))
    for i in range(20):
        table, _ = table.apply(SGD, grads)
        with pytest.raises(FAILED, match="stale"):
            jax.block_until_ready(stale.lookup(np.arange(4)))
        assert int(table.version) == start + i + 1
    np.testing.assert_array_equal(table.frequency(np.arange(8)), np.full(8, 20))


def test_a_partitioner_of_64_bits_does_not_wrap(make, mesh):
    with jax.enable_x64(True):
        table = make(mesh=mesh(4), partitioner=lambda keys, n: keys.words[:, 0].astype(jnp.int64) * 2**32)
        for key, got in ((1, 2147483647), (-1, -1)):
            with pytest.raises(FAILED, match=rf"want shards in 0\.\.3, got {got} for key {key}\b"):
                jax.block_until_ready(table.lookup(np.array([0, key])))
