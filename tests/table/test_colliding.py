"""Ids that somebody has chosen so that they collide: they cost what others cost."""

import numpy as np
import optax

import kvjax
from tests.golden.reference import mix
from tests.support.marks import slow


def colliding(n):
    """Ids whose hashes, which are part of the format, differ in the low bits alone: they have one home."""
    with np.errstate(over="ignore"):
        x = np.uint64(0x9E37 << 48) + np.arange(n, dtype=np.uint64)
        for shift, factor in ((31, 0x319642B2D24D8EC3), (27, 0x96DE1B173F119089)):  # the inverse of `mix`
            x = (x ^ (x >> np.uint64(shift)) ^ (x >> np.uint64(2 * shift))) * np.uint64(factor)
        return x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))


@slow
def test_colliding_keys_are_spread(make):
    ids = colliding(20_000)
    with np.errstate(over="ignore"):
        assert len(set((mix(ids) >> np.uint64(20)).tolist())) == 1
    table = make(1)
    table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(ids, -np.arange(20_000.0, dtype=np.float32)[:, None]))
    stats = table.stats()
    assert stats.size == 20_000 and stats.probe_longest < 500  # it was thousands
    np.testing.assert_array_equal(table.lookup(ids)[:, 0], np.arange(20_000))
    assert table.remove(ids[::2]).contains(ids[:2]).tolist() == [False, True]
