"""Table.load(merge=True): rows, and all that belongs to them, beside those of a table."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.checkpoints import assert_equal

TX = optax.adagrad(0.1)
MINE, THEIRS = np.array([-1, 0, 7, 2**63 - 1]), np.array([0, 5, -(2**63)])


def trained(table, keys, steps):
    for step in range(steps):
        table, _ = table.apply(TX, kvjax.SparseRows(keys, jnp.full((len(keys), table.dim), 1.0 + step)))
    return table


@pytest.mark.parametrize("over_mesh", [False, True])
def test_rows_come_with_all_that_belongs_to_them(over_mesh, make, mesh):
    other = trained(make(3), THEIRS, 3).pin(np.array([5]))
    table = trained(make(3, **({"mesh": mesh(4)} if over_mesh else {})), MINE, 1)
    was, new = table.export(slots=True), other.export(slots=True)
    got = table.load(new, merge=True).export(slots=True)
    kept = was.take(~np.isin(was.keys, new.keys))
    assert sorted(kept.keys.tolist()) == [-1, 7, 2**63 - 1]
    assert_equal(got.take(np.isin(got.keys, new.keys)), new)
    assert_equal(dataclasses.replace(got.take(~np.isin(got.keys, new.keys)), last_step=1), kept)
    assert got.last_step == 3 and list(got.slots) == ["sum_of_squares"]


def test_rows_without_slots_come_beside_rows_with_them(make):
    table = trained(make(2), MINE, 2)
    want = table.export(slots=True)
    table = table.load(trained(make(2), np.array([5]), 1).export(), merge=True)
    got = table.export(slots=True)
    assert got.has_slots.tolist() == (got.keys != 5).tolist()
    assert_equal(got.take(got.keys != 5), want)
    assert len(trained(table, np.array([5, 7]), 1)) == 5


def test_nothing_is_a_part_too(make):
    table = trained(make(2), MINE, 2)
    want, nothing = table.export(slots=True), make(2).export(slots=True)
    table = table.load(nothing, merge=True)
    assert_equal(table.export(slots=True), want)
    assert_equal(make(2).load(want, merge=True).export(slots=True), want)


def test_keys_that_wait_keep_their_counts(make):
    table = make(2, admit=kvjax.admit.MinCount(3))
    table, _ = table.apply(TX, kvjax.SparseRows(np.array([1, 2]), jnp.ones((2, 2))))
    table = table.load(make(2).upsert(np.array([1]), np.ones((1, 2))).export(), merge=True)
    assert len(table) == 1 and table.frequency(np.array([1, 2])).tolist() == [0, 1]


def test_what_does_not_fit_changes_nothing(make):
    table = trained(make(2, max_capacity=6, on_full="error"), MINE, 1)
    was = table.export(slots=True)
    with pytest.raises(ValueError, match=r"load: want values .*, 2\) float32"):
        table.load(make(3).upsert(np.array([1]), np.ones((1, 3))).export(), merge=True)
    with pytest.raises(ValueError, match=r"load: want rows with the slots"):
        sgd = optax.sgd(0.1, momentum=0.9)
        other, _ = make(2).apply(sgd, kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))))
        table.load(other.export(slots=True), merge=True)
    twice = make(2).upsert(np.array([1]), np.ones((1, 2))).export().take(np.array([0, 0]))
    with pytest.raises(ValueError, match="1"):
        table.load(twice, merge=True)
    with pytest.raises(MemoryError, match="max_capacity"):
        table.load(make(2).upsert(np.array([1, 2, 3]), np.ones((3, 2))).export(), merge=True)
    assert_equal(table.export(slots=True), was)


def test_an_import_adds_to_a_table(make):
    table = make(2).upsert(np.array([9]), np.full((1, 2), 4.0))
    table = kvjax.convert.from_dense(np.ones((3, 2), np.float32)).load(table, merge=True)
    assert sorted(table.export().keys.tolist()) == [0, 1, 2, 9] and table.lookup(9).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("policy", [kvjax.evict.MaxAge(2), kvjax.evict.MaxAge(2) & kvjax.evict.MinNorm(9.0)])
def test_rows_of_later_steps_make_the_others_old(policy, make):
    table, later = trained(make(2, evict=policy.every(1)), MINE, 1), trained(make(2), THEIRS, 6)
    with pytest.warns(UserWarning, match="some that are 5 steps ahead; the 3 rows that stay are older by these now"):
        table = table.load(later.export(slots=True), merge=True)
    assert table.stats().last_step == 6
    own = trained(make(2, evict=policy.every(1)), MINE, 1)
    rows, last = later.export(slots=True), own.stats().last_step
    versions = np.maximum(rows.versions - rows.last_step + last, 0)  # as docs/restarts.md has it
    own = own.load(dataclasses.replace(rows, versions=versions, last_step=last), merge=True)
    assert len(trained(own, MINE, 1)) == 6
