"""Tables of which a part is in pinned host memory are the same tables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.tables import Small, same_tables

Device, Host, Hybrid = kvjax.storage.Device, kvjax.storage.Host, kvjax.storage.Hybrid
DIM = 6
on_device = pytest.mark.skipif(not kvjax.ffi.on_device(), reason="wants tables on a device")


def train(table, steps, seed=0):
    """Steps of Adam whose keys are ever rarer, from one that changes with the seed."""
    tx, rng = optax.adam(0.1), np.random.default_rng(seed)

    @jax.jit
    def step(table, keys):
        rows = jnp.ones((keys.shape[0], DIM)) * jnp.arange(keys.shape[0])[:, None]
        return table.apply(tx, kvjax.SparseRows(keys, rows))[0]

    for _ in range(steps):
        ids = np.minimum(rng.geometric(0.04, 96), 200) * 31 + seed
        table = step(table, kvjax.keys(ids))
    return table


def on_the_device(table):
    stats = table.stats()
    return stats.bytes["values"] + stats.bytes["slots"] - stats.pinned["bytes"]


@on_device
@pytest.mark.parametrize("limit", [0, 4096])
def test_training_is_the_same_in_two_memories(limit, make, promotion):
    options = {"dim": DIM, "initializer": kvjax.initializers.normal(0.1), "seed": 5}
    one, table = make(**options), make(**options, storage=Small(limit))
    for seed in range(3):
        one, table = train(one, 4, seed), train(table, 4, seed)
        same_tables(one, table)
        assert on_the_device(table) <= limit and table.stats().pinned["rows"] > 0
    one, table = one.restrict(60), table.restrict(60)
    same_tables(one, table)
    same_tables(one.clear_slots(), table.clear_slots())


@on_device
def test_frequent_keys_have_their_rows_on_the_device(make, promotion):
    table = train(make(dim=DIM, storage=Small(4096)), 12)
    stats = table.stats()
    rows = np.sort(table.export().freqs)
    assert stats.pinned["rows"] > len(rows) / 4
    coldest = rows[: stats.pinned["rows"]].sum() / rows.sum()
    assert coldest <= stats.pinned_share < 1.3 * coldest + 0.01  # frequencies count in quarters of powers of two
    flat = stats.flat()
    assert flat["pinned/rows"] == stats.pinned["rows"] and flat["pinned_share"] == stats.pinned_share
    assert table.to(Small(0)).stats().pinned_share == 1.0


@on_device
def test_tables_move_between_the_device_and_both(make, promotion):
    options = {"dim": DIM, "initializer": kvjax.initializers.normal(0.1), "seed": 5}
    one, table = train(make(**options), 5), train(make(**options), 5)
    for storage in (Small(2048), Device(), Hybrid(1 << 30), Small(0)):
        table = table.to(storage)
        assert table.spec.storage == storage
        same_tables(one, table)
        one, table = train(one, 2, seed=1), train(table, 2, seed=1)
        same_tables(one, table)


@on_device
def test_a_table_that_fits_is_one_on_the_device(make, promotion):
    here, there = (train(make(dim=DIM, storage=storage), 3).stats() for storage in (Device(), Hybrid(8 << 20)))
    assert here.bytes == there.bytes and there.pinned == {"bytes": 0, "rows": 0} and there.pinned_share == 0.0
    assert train(make(dim=DIM, storage=Hybrid(1 << 20)), 1).stats().pinned["bytes"] == 4 << 20  # no slab fits


def test_without_the_backend(make):
    if kvjax.ffi.trouble(kvjax.ffi.DEVICE) is None:
        pytest.skip("it is here")
    with pytest.raises(RuntimeError, match=r"want the backend 'cuda' for storage=Hybrid\(device_bytes=5\)"):
        make(storage=Hybrid(5))
    table = make(storage=Host())
    assert table.stats().pinned == {"bytes": 0, "rows": 0} and table.stats().pinned_share == 0.0
