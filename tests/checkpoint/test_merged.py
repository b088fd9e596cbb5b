"""restore(merge=True): rows of a checkpoint over those of a table."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._formats import source
from kvjax.checkpoint import restore, save
from kvjax.checkpoint._chains.chain_rows import ChainRows
from tests.checkpoint.test_functions import TX
from tests.support.checkpoints import assert_equal, many, trained
from tests.support.marks import slow


@slow
def test_merging_with_other_slots_changes_nothing(make, tmp_path):
    one = trained(make(3), optax.rmsprop(0.1, momentum=0.9))
    save(tmp_path / "a", {"t": one})
    target = trained(make(3, seed=one.spec.seed), TX)
    was = target.snapshot()
    with pytest.raises(ValueError, match=r"^kvjax: table .*, restore: want rows with the slots .*slots=False"):
        restore(tmp_path / "a", {"t": target}, merge=True)
    assert_equal(target.snapshot().rows, was.rows)
    target = restore(tmp_path / "a", {"t": target}, merge=True, slots=False)["t"]
    assert list(target.export(slots=True).slots) == ["nu"] and not target.export().has_slots.any()


@slow
def test_counts_of_waiting_keys_are_merged(make, tmp_path):
    admit = kvjax.admit.MinCount(9)
    one = make(2, admit=admit)
    one, _ = one.apply(optax.sgd(0.1), kvjax.SparseRows(np.array([1, 2]), jnp.ones((2, 2))))
    save(tmp_path / "a", {"t": one})
    two, _ = one.apply(optax.sgd(0.1), kvjax.SparseRows(np.array([2, 3]), jnp.ones((2, 2))))
    two = restore(tmp_path / "a", {"t": two}, merge=True)["t"]
    assert two.frequency(np.array([1, 2, 3])).tolist() == [1, 1, 1]


def test_a_merge_reads_a_few_rows_at_a_time(make, tmp_path, monkeypatch):
    """Into a table that has half of the keys, and one of its own."""
    table, read, sizes = many(make(2)), ChainRows.between, []
    save(tmp_path / "a", {"t": table})
    want, some = table.export(), table.export().keys[::2]
    table = table.clear().upsert(np.r_[some, 77], np.full((251, 2), 9.0))

    def counted(self, first, last, names=None):
        found = read(self, first, last, names)
        sizes.append(len(found["keys"]) if "values" in found else 0)
        return found

    monkeypatch.setattr(ChainRows, "between", counted)
    monkeypatch.setattr(source, "PIECE_BYTES", 2000)
    table = restore(tmp_path / "a", {"t": table}, merge=True)["t"]
    assert sum(sizes) >= 500 and max(sizes) < 80
    got = table.export()
    assert table.lookup(77).tolist() == [9.0] * 2
    assert_equal(got.take(got.keys != 77), want)


@slow
def test_keys_keep_their_sign(make, tmp_path):
    """2**63 + 5 of one table would be another id of the other."""
    large = np.array([1, 2**63 + 5], np.uint64)
    save(tmp_path / "a", {"t": make(2, seed=1, key_dtype="uint64").upsert(large, np.ones((2, 2)))})
    table = make(2, seed=1).upsert(np.array([7, -9]), np.full((2, 2), 2.0))
    with pytest.raises(ValueError, match=r"want a table with key_dtype 'uint64', .* got one with key_dtype 'int64'"):
        restore(tmp_path / "a", {"t": table}, merge=True)
    assert table.export().keys.tolist() == [-9, 7]
    table = make(2, seed=1, key_dtype="uint64").upsert(np.array([7, 2**64 - 9], np.uint64), np.full((2, 2), 2.0))
    rows = restore(tmp_path / "a", {"t": table}, merge=True)["t"].export()
    assert dict(zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True)) == {
        1: 1, 2**63 + 5: 1, 7: 2, 2**64 - 9: 2,
    }  # fmt: skip
