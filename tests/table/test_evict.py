"""Eviction: which rows are removed when a table is full, when a policy runs by itself, and by hand."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax import evict
from tests.support.eviction import POLICIES, REFUSED, filled, many, train
from tests.support.marks import few, slow, wide_is_slow
from tests.support.policies import chosen_rows
from tests.support.tables import finished, same_rows


class Seen:
    """A row as the reference sees it."""

    def __init__(self, value, frequency, version):
        self.value, self.frequency, self.version = value, frequency, version


def contents(table):
    out = table.export()
    rows = zip(out.keys.tolist(), out.values, out.freqs.tolist(), out.versions.tolist(), strict=True)
    return {key: Seen(*rest) for key, *rest in rows}


@wide_is_slow
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("compiled", few([False, True], 1), ids=["eager", "jit"])
def test_policies(policy, compiled, make, x64):
    table = filled(make(2))
    for step in (None, 8):
        before = contents(table)
        going = chosen_rows(policy, before, table.stats().last_step if step is None else step, 0)
        gone = sum(table.stats().evicted.values())
        if not compiled:
            reasons = Counter(reason for _, reason in going)
            want = {repr(part): reasons[repr(part)] for part in policy.alternatives()}
            assert table.evict(policy, step, dry_run=True) == want
        table = (jax.jit(lambda t, s=step: t.evict(policy, s)) if compiled else lambda t, s=step: t.evict(policy, s))(
            table
        )
        assert set(contents(table)) == set(before) - {key for key, _ in going}
        assert sum(table.stats().evicted.values()) - gone == len(going)


def test_reasons_are_the_alternatives(make):
    table = filled(make(2)).evict(evict.MaxAge(3) | evict.MinFrequency(2) & ~evict.MinNorm(0.1))
    assert set(table.stats().evicted) == {"MaxAge(3)", "MinFrequency(2) & ~MinNorm(0.1)"}
    assert table.stats().flat()["evicted/MaxAge(3)"] > 0


def test_a_dry_run_counts_and_changes_nothing(make):
    table = filled(make(2)).pin(np.array([3]))
    table.on_evict(lambda *rows: 1 / 0)  # is not called
    before, stats, version = table.export(slots=True), table.stats(), int(table.version)
    policy = evict.MinFrequency(2) | evict.MinFrequency(2) | evict.MaxAge(10**6)
    dry = table.evict(policy, dry_run=True)
    assert dry == {"MinFrequency(2)": int((before.freqs[before.keys != 3] < 2).sum()), "MaxAge(1000000)": 0}
    assert table.evict(policy, np.int64(10**7), dry_run=True)["MaxAge(1000000)"] == 39 - dry["MinFrequency(2)"]
    same_rows(before, table.export(slots=True))
    assert table.stats() == stats and int(table.version) == int(table.refresh().version) == version
    table = table.on_evict(None).evict(policy)
    assert table.stats().evicted == {"MinFrequency(2)": dry["MinFrequency(2)"]}
    assert table.evict(policy, dry_run=True) == {"MinFrequency(2)": 0, "MaxAge(1000000)": 0}
    assert make(1).evict(policy, dry_run=True) == {"MinFrequency(2)": 0, "MaxAge(1000000)": 0}


def test_a_dry_run_that_is_refused(make):
    table = filled(make(1))
    later = table.restrict(30)
    with pytest.raises((RuntimeError, *REFUSED), match=r"evict: want .*version"):
        table.evict(evict.MaxAge(1), dry_run=True)
    with pytest.raises(TypeError, match="evict: want a call outside jit"):
        jax.jit(lambda t: t.evict(evict.MaxAge(1), dry_run=True))(later)
    with pytest.raises(TypeError, match="evict: want a call outside jit"):
        jax.jit(lambda step: later.evict(evict.MaxAge(1), step, dry_run=True))(3)
    with pytest.raises(ValueError, match=r"live"):
        later.live().evict(evict.MaxAge(1), dry_run=True)
    with pytest.raises(ValueError, match="want a number of rows"):
        later.evict(evict.LeastRecent(), dry_run=True)
    with pytest.raises(REFUSED, match="division by zero"):
        later.evict(evict.LowestScore(3, lambda rows: 1 / 0), dry_run=True)
    assert later.evict(evict.LeastRecent(31), dry_run=True) == {"LeastRecent(31)": 30}
    assert len(later.evict(evict.LeastRecent(1))) == 29


def test_what_survives_does_not_depend_on_the_order_of_arrival(make):
    """All rows tie: the hash of the key decides."""
    keys = np.arange(1000)
    survivors = []
    for seed in range(3):
        table = make(1)
        for part in np.random.default_rng(seed).permutation(keys).reshape(10, -1):
            table = table.upsert(part, np.ones((100, 1)))
        survivors.append(table.evict(evict.LeastRecent(300)).restrict(500).export().keys.tolist())
    assert len(survivors[0]) == 500 and survivors[0] == survivors[1] == survivors[2]


def test_evicted_rows_leave_nothing_behind(make, promotion):
    adam = optax.adam(0.1)
    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    table, _ = make(2, initializer=0.5).apply(adam, grads, optax_state(adam))
    fresh = table.export(slots=True)
    table = table.evict(evict.LeastRecent(1))
    assert len(table) == 0 and int(table.frequency(7)) == 0 and table.lookup(7).tolist() == [0.5, 0.5]
    table, _ = table.apply(adam, grads, optax_state(adam), step=1)
    again = table.export(slots=True)
    for name, slot in fresh.slots.items():
        np.testing.assert_array_equal(slot, again.slots[name])


def optax_state(tx):
    return kvjax.optax.rowwise(tx).init(2)


def test_restrict(make):
    table = filled(make(2)).pin(np.array([3, 4]))
    for by in ("version", "frequency"):
        n = len(table) - 9
        seen = {k: r for k, r in contents(table).items() if k not in (3, 4)}
        leaf = evict.LeastRecent(9) if by == "version" else evict.LeastFrequent(9)
        going = {key for key, _ in chosen_rows(leaf, seen, 0, 0)}
        before = set(contents(table))
        table = table.restrict(n, by=by)
        assert set(contents(table)) == before - going and len(table) == n
    table = table.restrict(10**9)
    assert len(table) == n
    table = jax.jit(lambda t: t.restrict(0))(table)
    assert sorted(table.export().keys.tolist()) == [3, 4] and table.stats().evicted["restrict"] > 9
    for bad in [(-1, "version"), (2.5, "version"), (1, "norm")]:
        with pytest.raises(ValueError, match="restrict"):
            table.restrict(*bad)


def test_pins(make, tmp_path):
    table = make(1, initializer=0.5).pin(np.array([1, 2]))
    assert table.lookup(1).tolist() == [0.5] and len(table) == 2
    asked = kvjax.keys(np.array([[1, 2], [3, -1]]))
    assert table.pinned(asked).tolist() == jax.jit(lambda t: t.pinned(asked))(table).tolist()
    assert table.pinned(asked).tolist() == [[True, True], [False, False]]
    table = train(table, [1, 2, 3]).evict(~evict.MinFrequency(0))
    assert sorted(table.export().keys.tolist()) == [1, 2]
    assert table.load(table.snapshot()).export().pinned.tolist() == [True, True]
    table = table.refresh().unpin(np.array([1, 99]))
    assert table.pinned([1, 2, 99]).tolist() == [False, True, False]
    table = table.evict(~evict.MinFrequency(0))
    assert table.export().keys.tolist() == [2]
    assert len(table.remove(2)) == 0


# ---- full tables


def test_a_full_table_evicts_exactly_what_is_needed(make):
    table = make(1, max_capacity=4, on_full="evict")
    for key in [1, 2, 3, 4, 1, 5, 6]:
        table = train(table, [key])
        assert len(table) <= 4
    assert sorted(table.export().keys.tolist()) == [1, 4, 5, 6] and table.stats().evicted == {"capacity": 2}
    table = table.upsert(np.arange(10, 14), np.ones((4, 1)))
    assert sorted(table.export().keys.tolist()) == [10, 11, 12, 13]


def test_rows_of_the_batch_and_pinned_rows_stay(make):
    table = train(train(make(1, max_capacity=4, on_full="evict"), [1, 2]), [3, 4])
    table = train(table, [1, 5])  # 2 is the oldest that is not in the batch
    assert sorted(table.export().keys.tolist()) == [1, 3, 4, 5]
    table = train(table.pin(np.array([3])), [6, 7, 8])
    assert sorted(table.export().keys.tolist()) == [3, 6, 7, 8]
    before = table.export()
    with pytest.raises(REFUSED, match=r"max_capacity=4.*3 may go"):
        finished(train(table, [10, 11, 12, 13]))
    np.testing.assert_array_equal(table.refresh().export().keys, before.keys)


def test_the_row_that_unadmitted_keys_share_stays(make):
    table = make(1, admit=kvjax.admit.MinCount(2, unadmitted=7))
    table = train(train(table, [1, 2, 2]), [2])
    assert set(contents(table)) == {2, 7}
    assert set(contents(table.evict(evict.MinFrequency(100)))) == {7}


def test_the_policy_of_a_full_table_comes_first(make):
    table = make(1, max_capacity=4, on_full="evict", evict=evict.MinFrequency(2))
    table = train(train(table, [1, 1, 2, 3]), [4, 4])
    table = train(table, [5])  # all that the policy chooses go: 2 and 3
    assert sorted(table.export().keys.tolist()) == [1, 4, 5]
    table = train(table, [1, 4, 5, 6, 6])
    table = train(table, [7, 8])  # the policy finds nothing; the two that were written longest ago, by their hashes
    assert len(table) == 4 and table.stats().evicted == {"MinFrequency(2)": 2, "capacity": 2}


def occurrences(rows):
    return rows.freqs


def test_frequencies_that_have_halved_for_ages_keep_their_order(make):
    """Those of before 1,100 half-lives would all be 0 as floats."""
    table = make(1)
    for key in range(20):
        table = train(table, [key], step=1000 + 1000 * key)
    table = train(table, [99], step=200_000)
    table = table.evict(evict.LeastFrequent(10, half_life=10.0))
    assert sorted(table.export().keys.tolist()) == [*range(10, 20), 99]


def test_a_number_evicts_ahead(make):
    table = make(1, max_capacity=8, on_full="evict", evict=evict.LeastRecent(4))
    for key in range(9):
        table = train(table, [key])
    assert sorted(table.export().keys.tolist()) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "policy",
    [
        evict.LeastFrequent(2), evict.LeastFrequent(2, half_life=1e6), 
        evict.LowestScore(2, occurrences), evict.LeastFrequent(),
    ],
    ids=repr,
)  # fmt: skip
def test_a_ranking_makes_all_the_space_that_a_step_needs(make, policy):
    """Whatever its number is: not the rows that it would keep longest, as they were written longest ago."""
    table = make(1, max_capacity=10, on_full="evict", evict=policy)
    for _ in range(3):
        table = train(table, [1, 2, 3])
    for first in range(10, 50, 7):
        table = train(table, np.arange(first, first + 7))
    assert {1, 2, 3} <= set(contents(table)) and len(table) == 10
    assert table.stats().evicted.get("capacity", 0) == 0


def test_the_reference_lets_a_ranking_of_no_rows_make_space():
    rows = {key: Seen(np.zeros(1), 1, key) for key in (3, 1, 2)}
    assert chosen_rows(evict.LeastRecent(0), rows, 9, 2) == [(1, "LeastRecent(0)"), (2, "LeastRecent(0)")]


@pytest.mark.parametrize(
    "write",
    [
        lambda t: train(t, [1, 9]),
        lambda t: t.upsert(np.array([1, 9]), np.ones((2, 1))),
        lambda t: t.add(np.array([1, 9]), np.ones((2, 1))),
        lambda t: t.accum(np.array([1, 9]), np.ones((2, 1)), np.ones((2, 1)), np.array([True, False])),
        lambda t: t.lookup_or_insert(np.array([1, 9]))[1],
        lambda t: t.pin(np.array([1, 9])),
        lambda t: t.load(kvjax.Exported(**many(3))),
    ],
    ids=["apply", "upsert", "add", "accum", "lookup_or_insert", "pin", "load"],
)
def test_on_full_error_changes_nothing(write, make):
    table = make(1, max_capacity=2, on_full="error").upsert(np.array([1, 2]), np.ones((2, 1)))
    before = table.export()
    with pytest.raises(REFUSED, match="max_capacity=2"):
        finished(write(table))
    after = table.refresh().export()
    for name in ("keys", "values", "freqs", "versions", "pinned"):
        np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
    assert int(table.refresh().version) == int(table.version)


def test_on_full_grow_counts(make):
    table = make(1, max_capacity=2).upsert(np.arange(5), np.ones((5, 1)))
    assert len(table) == 5 and table.stats().over_capacity == 3
    assert len(table.load(kvjax.Exported(**many(7)))) == 7


# ---- every so many steps


def test_policies_every_so_many_steps(make):
    table = make(1, evict=evict.MaxAge(2).every(5))
    sizes = []
    for step in range(1, 12):
        table = train(table, [100 + step], step=step)
        sizes.append(len(table))
    assert sizes == [1, 2, 3, 4, 3, 4, 5, 6, 7, 3, 4]
    assert table.stats().evicted == {"MaxAge(2)": 7}
    table = train(table, [7], step=23)  # 15 and 20 have passed in between
    assert table.export().keys.tolist() == [7]


# ---- memory, arguments


@slow
@pytest.mark.cpu_table
def test_bytes_are_those_of_rows_and_not_reserved(make):
    table = make(4, capacity=1_000_000).upsert(np.arange(3), np.ones((3, 4)))
    assert table.stats().bytes["values"] == table.stats().bytes["headers"] == 4096  # a page of each
    table = table.upsert(np.arange(300_000), np.ones((300_000, 4)))
    assert 300_000 * 16 <= table.stats().bytes["values"] <= 300_000 * 16 + 2**21


@slow
@pytest.mark.cpu_table
def test_memory_is_given_back(make):
    table = make(64).upsert(np.arange(100_000), np.ones((100_000, 64)))
    table, _ = table.apply(optax.adagrad(0.1), kvjax.SparseRows(np.arange(10), jnp.ones((10, 64))))
    full = table.stats().bytes
    table = table.restrict(1000)
    few = table.stats().bytes
    for plane in ("values", "slots", "index"):
        assert few[plane] < full[plane] / 10, plane
    kept = table.export(slots=True)
    assert kept.keys.shape == (1000,) and set(range(10)) <= set(kept.keys.tolist())
    np.testing.assert_array_equal(table.lookup(kept.keys), kept.values)
    assert table.clear().stats().bytes["values"] == 0
    table = table.refresh().reserve(50_000).upsert(np.arange(60_000), np.ones((60_000, 64)))
    assert table.restrict(5).stats().capacity >= 50_000  # what was reserved stays


def test_what_evict_takes(make):
    table = make(1)
    with pytest.raises(TypeError, match="a policy of kvjax"):
        table.evict(evict.MaxAge(1).every(2))
    with pytest.raises(ValueError, match="a number of rows"):
        table.evict(evict.LeastRecent() | evict.MaxAge(1))
    with pytest.raises(TypeError, match=r"every\(\.\.\.\) comes last"):
        evict.MaxAge(1) & evict.MaxAge(2).every(3)
    with pytest.raises(TypeError, match=r"every\(\.\.\.\) comes last"):
        evict.MaxAge(2).every(3) | evict.MaxAge(1)
    with pytest.raises(TypeError, match="between policies"):
        evict.MaxAge(1) and evict.MinNorm(1.0)
    assert repr(evict.MaxAge(np.int64(3)) & evict.MinNorm(np.float32(0.5))) == "MaxAge(3) & MinNorm(0.5)"
    for call in (lambda t: t.stats().size, lambda t: t.on_evict(print).version, lambda t: t.reserve(3).version):
        with pytest.raises(TypeError, match="outside jit"):
            jax.jit(call)(table)
    mine = type("Mine", (evict.MaxAge,), {})
    with pytest.raises(ValueError, match=r"kvjax: evict\.MaxAge: want an integer .*, got -1; see kvjax\.evict$"):
        mine(-1)
    with pytest.raises(ValueError, match="step of 0 or more"):
        table.evict(evict.MaxAge(1), step=-3)
