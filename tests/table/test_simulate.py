"""Simulations are what tables of these limits do, and a sample of keys is a small log of its own."""

from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import simulate
from kvjax._keys.buckets import buckets_of

arrow = pytest.importorskip("pyarrow")
RNG = np.random.default_rng(0)


def lru(log, limit):
    """Hits, rows, rows made and rows evicted of a cache of the keys that came last."""
    cache, hits, made, evicted = OrderedDict(), 0, 0, 0
    for key in log:
        hits, made = hits + (key in cache), made + (key not in cache)
        cache[key] = True
        cache.move_to_end(key)
        if limit is not None and len(cache) > limit:
            cache.popitem(last=False)
            evicted += 1
    return hits / len(log), len(cache), made, evicted


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_a_key_a_step_is_a_cache(dtype):
    log = (RNG.zipf(1.3, 400) % 60).astype(dtype) - (0 if dtype is np.uint64 else 30)
    limits = [1, 5, 20, None]
    found = simulate([log[i : i + 1] for i in range(len(log))], limits)
    for limit, one in zip(limits, found, strict=True):
        assert one.max_capacity == limit
        assert (one.hit_rate, one.rows, one.inserted, one.evicted) == pytest.approx(lru(log.tolist(), limit))
    assert kvjax.tables() == {}


def test_occurrences_count_by_batch():
    """A key that occurs twice in its first batch is missed twice; its second batch finds all of it."""
    (one,) = simulate([[7, 7, 8], [], [7, 7, 7, 9]], [None])
    assert one.hit_rate == 3 / 7 and one.rows == one.inserted == 3


def test_policies_and_admission_are_those_of_tables():
    log = [[1, 1, 1], [2, 2], [3], [4]]
    (recent,) = simulate([*log, [1]], [2])
    (frequent,) = simulate([*log, [1]], [2], evict=kvjax.evict.LeastFrequent())
    assert recent.hit_rate == 0 and frequent.hit_rate == 1 / 8
    (aged,) = simulate([*log, [1]], [None], evict=kvjax.evict.MaxAge(2).every(1))
    assert aged.hit_rate == 0 and aged.evicted > 0
    (few,) = simulate([*log, [1], [1]], [None], admit=kvjax.admit.MinCount(3))
    assert few.rows == 1 and few.hit_rate == 2 / 9 and few.refused == 4
    (own,) = simulate([*log, [1]], [2], evict=kvjax.evict.LowestScore(None, lambda rows: rows.freqs * 1.0))
    assert own == frequent


def test_steps_by_a_clock():
    """A policy of ages sees when batches came, and not how many."""
    log, clock, aged = [[1], [2], [1], [1]], [10, 11, 12, 100], kvjax.evict.MaxAge(5).every(1)
    assert simulate(log, [None], evict=aged)[0].evicted == 0
    (found,) = simulate(log, [None], evict=aged, step=clock)
    assert (found.hit_rate, found.evicted, found.rows) == (2 / 4, 1, 1)
    assert simulate(log, [None], evict=aged, step=jnp.array(clock)) == [found]
    (same,) = simulate(log, [None], evict=aged, step=iter(range(1, 1000)))
    assert same.evicted == 0
    assert simulate(log, [None], evict=aged, step=arrow.array(clock)) == [found]
    for wrong in (clock[:3], [1, 2, 3, 2**31], [1.5] * 4, ["1"] * 4, 3, np.array(3), "3", arrow.array([1, 2, None, 4])):
        with pytest.raises((ValueError, TypeError), match=r"kvjax: simulate: want (steps|a step|step=) .*step"):
            simulate(log, [None], step=wrong)
    assert kvjax.tables() == {}


def test_a_sample_is_a_log_of_its_keys():
    """With half of each limit; numbers are those of all keys again."""
    log = [RNG.zipf(1.2, 500) % 5000 for _ in range(20)]
    mine = [batch[buckets_of(batch) < 32768] for batch in log]
    limits, seen = [400, 2000, None], []
    twice = kvjax.admit.MinCount(2)
    sampled = simulate(log, limits, admit=twice, sample=0.5, progress=seen.append)
    alone = simulate(mine, [200, 1000, None], admit=twice)
    assert seen == [500] * 20
    missing = 0.5 * 10000 - sum(map(len, mine))
    for limit, one, other in zip(limits, sampled, alone, strict=True):
        assert one.max_capacity == limit
        for number in ("rows", "inserted", "evicted", "refused"):
            assert getattr(one, number) == 2 * getattr(other, number), number
        assert one.hit_rate == pytest.approx((other.hit_rate * sum(map(len, mine)) + missing) / 5000)
    assert sampled[0].evicted > 0 < sampled[0].refused
    whole = simulate(log, limits, admit=twice)
    assert [one.hit_rate for one in sampled] == pytest.approx([one.hit_rate for one in whole], abs=0.05)


def test_nothing_to_replay():
    assert simulate([], [3, None]) == [kvjax.Simulated(limit, 0.0, 0, 0, 0, 0) for limit in (3, None)]
    assert simulate([[1, 2]], []) == []


def test_what_is_refused_leaves_no_table():
    for wrong, match in (
        ({"max_capacity": [0]}, "limits in max_capacity= as integers >= 1 or None, got 0"),
        ({"max_capacity": [2.5]}, "got 2.5"),
        ({"sample": 0.0}, "sample= as more than 0 and at most 1, got 0.0"),
        ({"evict": kvjax.evict.MinNorm(1.0).every(2)}, "judges rows by frequency or age"),
        ({"max_capacity": [2]}, "hold all keys of a batch, got 2 and a batch of 3 distinct keys; leave"),
        (
            {"max_capacity": [None, 2], "sample": 0.5},
            "got 2 and a batch of . distinct keys in a sample of 0.5, .*1",
        ),
    ):
        with pytest.raises((ValueError, MemoryError, jax.errors.JaxRuntimeError), match=match):
            simulate([[1, 2, 3]], **({"max_capacity": [None]} | wrong))
    with pytest.raises(TypeError):
        simulate([np.array([1.5])], [None])
    for wrong in ("evict", "admit"):
        with pytest.raises(TypeError, match=rf"simulate: want {wrong}= of kvjax.{wrong} or None, got 'x'"):
            simulate([[1]], [None], **{wrong: "x"})
    for one in (5, np.array(5), jnp.array(5)):  # of which arrays say that they can be gone through
        with pytest.raises(TypeError, match=r"simulate: want the keys of each step, got .*5"):
            simulate(one, [None])
        with pytest.raises(TypeError, match=r"simulate: want a list of limits as max_capacity=, got 5; give \[5\]"):
            simulate([[1]], one)
    with pytest.raises(TypeError, match="want ids of 64 bits"):
        simulate([jnp.asarray(np.array([2**40 + 1]))], [None])

    def nested():
        yield [1]
        simulate([[2]], [None])

    with pytest.raises(RuntimeError, match="want one simulation at a time"):
        simulate(nested(), [None])
    assert kvjax.tables() == {} and simulate([[1], [1]], [None])[0].hit_rate == 0.5
