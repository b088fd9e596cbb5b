"""Placement: which shard owns a key, and what a partitioner and a mesh have to be."""

import numpy as np
import pytest

import kvjax
from tests.support.tables import AWKWARD, by_low_bits


@pytest.mark.parametrize(
    "bad",
    [
        lambda keys, n: 0,
        lambda keys, n: None,
        lambda keys, n: keys.words[:, 0] / 7.0,
        lambda keys, n: keys.words,
        lambda keys, n: np.asarray(keys.words)[:, 0],
    ],
)
def test_a_partitioner_is_tried_when_the_table_is_made(make, mesh, bad):
    with pytest.raises(ValueError, match=r"want partitioner\(keys \(3,\), num_shards\) -> int32\[3\], got"):
        make(mesh=mesh(4), partitioner=bad)


def test_a_mesh_that_a_table_is_not_on(make, mesh):
    table = kvjax.get_table("moved", dim=4, mesh=mesh(4))
    kvjax.reshard(table, mesh(2))
    with pytest.raises(ValueError, match="it has another mesh: leave mesh= out to get it where it is"):
        kvjax.get_table("moved", dim=4, mesh=mesh(4))


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 8])
def test_buckets_are_those_of_the_owners(mesh, shards):
    """What checkpoints are cut by is what C++ routes by: keys of each shard's range, and only they, are its own."""
    from kvjax._keys.buckets import buckets_of
    from kvjax._spec.placement import Placement

    placement = Placement.of(mesh(shards), ("x",))
    keys = np.concatenate([AWKWARD, np.arange(200_000)])
    owners, buckets = placement.owners(keys), buckets_of(keys)
    ranges = [placement.buckets(shard, shard) for shard in range(shards)]
    assert ranges[0][0] == 0 and ranges[-1][1] == 2**16
    for shard, (begin, end) in enumerate(ranges):
        np.testing.assert_array_equal(owners == shard, (begin <= buckets) & (buckets < end))


def test_devices_instead_of_a_mesh(make, mesh):
    devices = list(mesh(2).devices.flat)
    table = kvjax.get_table("t", dim=2, devices=devices).upsert(AWKWARD, np.ones((len(AWKWARD), 2)))
    assert table.spec.placement.num_shards == 2 and table.spec.placement.axes == ("devices",)
    assert len(kvjax.get_table("t", dim=2, devices=tuple(devices))) == len(kvjax.get_table("t", dim=2)) == len(AWKWARD)
    assert make(devices=devices, replicated=True).spec.placement.replicated
    for bad in ([], devices[0], [devices[0]] * 2, [0, 1], "cpu"):
        with pytest.raises(ValueError, match="want devices as a list of different JAX devices"):
            make(devices=bad)
    with pytest.raises(ValueError, match="want mesh= or devices=, not both"):
        make(devices=devices, mesh=mesh(2, explicit=True))
    with pytest.raises(ValueError, match="want mesh= or devices= beside wire="):
        make(wire="bfloat16")


def test_sizes_by_shard(make, mesh):
    keys, ones = np.arange(100), np.ones((100, 2))
    assert make(2).upsert(keys, ones).size(by="shard") == {0: 100}
    table = make(2, mesh=mesh(4), partitioner=by_low_bits).upsert(keys, ones)
    assert table.size(by="shard") == table.size(all_processes=True, by="shard") == dict.fromkeys(range(4), 25)
    copies = make(2, mesh=mesh(4), replicated=True).upsert(keys, ones)
    assert copies.size(by="shard") == copies.size(True, by="shard") == {0: 100}
    with pytest.raises(ValueError, match="size: want by='shard' or None, got 'key'"):
        table.size(by="key")
