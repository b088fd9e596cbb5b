"""A sharded table is the table it would be in one place: same numbers for any number of shards."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._table.checks import version_on_host
from tests.support.marks import few, slow
from tests.support.tables import AWKWARD, same_rows


@slow  # tests/sharded/test_stateful.py asks the reference model, quickly
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_reads_and_writes_are_those_of_one_table(make, mesh, shards):
    rng = np.random.default_rng(shards)
    options = {"dim": 3, "initializer": kvjax.initializers.normal(0.1), "seed": 7}
    one, sharded = make(**options), make(**options, mesh=mesh(shards))
    keys = np.concatenate([AWKWARD, rng.integers(0, 60, 55)])
    rows = rng.normal(size=(len(keys), 3)).astype(np.float32)
    old, exists = rows - 1, rng.random(len(keys)) < 0.5
    for write in (
        lambda t: t.lookup_or_insert(keys[:20])[1],
        lambda t: t.upsert(keys, rows),
        lambda t: t.assign(keys + 3, rows),
        lambda t: t.add(keys[::-1], rows),
        lambda t: t.accum(keys + 30, old, rows, exists),
        lambda t: t.pin(keys[5:9] + 100),
        lambda t: t.unpin(keys[6:7] + 100),
        lambda t: t.remove(keys[3:12]),
        lambda t: t.clear_slots(),
    ):
        one, sharded = write(one), write(sharded)
        same_rows(one.export(slots=True), sharded.export(slots=True))
        assert len(one) == len(sharded)
    asked = keys.reshape(7, 9)
    for read in (
        lambda t: t.lookup(asked),
        lambda t: t.lookup(asked, return_found=True)[1],
        lambda t: t.lookup(asked, missing="zeros", pad_id=5),
        lambda t: t.contains(asked),
        lambda t: t.frequency(asked),
        lambda t: t.version_of(asked),
        lambda t: t.pinned(asked + 100),
        lambda t: t.lookup(7),
        lambda t: t.lookup(np.zeros((0, 4), np.int64)),
    ):
        np.testing.assert_array_equal(read(one), read(sharded))
    assert len(sharded.clear()) == 0


def test_shards_are_joined_by_one_copy(make, mesh):
    """Beside what each gives: a list of all of these would be another."""
    table = make(64, mesh=mesh(4)).upsert(np.arange(20_000), np.ones((20_000, 64), np.float32))
    tracemalloc.start()
    rows = table.export()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == 20_000 and peak < 1.6 * sum(array.nbytes for array in rows.columns().values())


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_an_empty_batch_in_chunks_is_a_step(make, mesh, shards):
    sort = optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.sort(x, -1), g))  # no row program
    table = make(2, **({"mesh": mesh(shards)} if shards else {})).upsert([1], [[1.0, 2.0]])
    table, _ = table.apply(sort, kvjax.SparseRows(np.zeros(0, np.int64), jnp.zeros((0, 2))))
    assert table.lookup([1]).tolist() == [[1.0, 2.0]] and table.stats().last_step == 1


@pytest.mark.parametrize(
    "tx", few([optax.sgd(0.1), optax.adagrad(0.1), optax.adam(0.01)], 0), ids=["sgd", "adagrad", "adam"]
)
@pytest.mark.parametrize("shards", few([1, 2, 4, 8], 2))
def test_training_is_that_of_one_table(make, mesh, tx, shards, promotion):
    options = {"dim": 4, "initializer": kvjax.initializers.normal(0.1), "seed": 3}
    tables = [make(**options), make(**options, mesh=mesh(shards))]
    states = [kvjax.optax.rowwise(tx).init(4)] * 2
    losses = [0.0] * 2
    rng = np.random.default_rng(0)

    def loss(table, keys):
        """Its gradients have the same bits however XLA compiles a batch, which those of tanh, say, need not have."""
        return jnp.sum((table.lookup(keys) + 1) ** 2)

    @jax.jit
    def step(table, state, keys):
        value, grads = kvjax.value_and_grad(loss)(table, keys)
        table, state = table.apply(tx, grads, state)
        return table, state, value

    for _ in range(4):
        # No key twice, so that nothing is summed and even the last bit is the same.
        keys = kvjax.keys(np.concatenate([AWKWARD, rng.permutation(90)[:23]]))
        for i, table in enumerate(tables):
            tables[i], states[i], losses[i] = jax.block_until_ready(step(table, states[i], keys))
        np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    same_rows(*(table.export(slots=True) for table in tables))


def test_a_failure_of_one_shard_is_one_of_all_and_changes_nothing(make, mesh):
    table = make(mesh=mesh(4), partitioner=lambda keys, n: keys.words[:, 0].astype(jnp.int32))
    table = table.upsert(np.arange(4), np.ones((4, 4)))
    before = table.export()
    for call in (
        lambda: table.lookup(np.array([1, 4])),
        lambda: table.upsert(np.array([1, 4]), np.zeros((2, 4))),
        lambda: table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([1, 4]), jnp.ones((2, 4))))[0],
    ):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"0\.\.3, got 4 for key 4"):
            jax.block_until_ready(call())
    same_rows(before, table.export())
    assert table.refresh().version == table.version


@slow
def test_results_of_numpy_keys_are_on_every_device(make, mesh):
    table = make(mesh=mesh(4))
    for n in (3, 16):
        for result in (table.lookup(np.arange(n)), table.frequency(np.arange(n))):
            assert result.sharding.is_fully_replicated and len(result.sharding.device_set) == 4


def test_a_handle_that_has_just_been_made_is_not_called_stale(make, mesh):
    table = make(mesh=mesh(8))
    start = int(table.version)
    for i in range(5):
        table = table.upsert(np.arange(1000) + i, np.ones((1000, 4)))
        assert f"rows={1000 + i:,}, version={start + i + 1})" in repr(table)


def test_a_call_on_the_whole_table_waits_for_its_slowest_shard(make, mesh):
    table = make(dim=8, initializer=0.0, mesh=mesh(2))
    keys = np.arange(200_000)
    keys = keys[table.spec.placement.owners(keys) == 1]
    rows = jnp.ones((len(keys), 8))
    for _ in range(3):
        table = table.clear().upsert(keys, rows)
        number = version_on_host(table, "export")
        assert [table.spec.host.version(table.name, shard) for shard in table.spec.shards] == [number] * 2


def test_a_table_in_one_place_is_not_written_by_several_devices(make, mesh):
    table, place = make(), mesh(4)
    written = jax.shard_map(
        lambda t, keys: t.lookup_or_insert(keys)[1],
        mesh=place,
        in_specs=(jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("x")),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match="want a table that is made for several devices, got one in one place"):
        written(table, kvjax.keys(np.arange(8)))
    assert len(table) == 0
