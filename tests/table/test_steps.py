"""The table's last step is the clock: no write makes rows older than those before it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kvjax
from kvjax import admit, evict
from tests.support.marks import few, slow

SGD = optax.sgd(0.1)


def write(table, keys, step=None):
    keys = np.asarray(keys)
    return table.apply(SGD, kvjax.SparseRows(keys, jnp.ones((len(keys), table.dim))), step=step)[0]


def steps(table, keys):
    return table.version_of(np.asarray(keys)).tolist()


def test_a_lower_step_is_the_next_one(make):
    table = write(make(2), [1], 100)
    for n, (step, want) in enumerate([(1, 101), (101, 101), (2, 102), (None, 103), (200, 200), (0, 201)]):
        table = write(table, [10 + n], step)
        assert steps(table, [10 + n]) == [want] == [table.stats().last_step]


def test_steps_of_any_size_are_whole_and_the_greatest_stays(make):
    table, large = make(2), [2**32 - 1, 2**32, 2**63 - 1]
    for key, step in enumerate(large):
        table = write(table, [key], step)
    table = write(table, [3], 5)
    rows = table.export()
    assert rows.versions[np.argsort(rows.keys)].tolist() == [*large, 2**63 - 1] and rows.freqs.tolist() == [1] * 4


def test_what_a_step_may_be(make):
    """A NumPy array is as whole as its number, in a variable, too: JAX would cut these to 0 and 1."""
    table = write(make(2), [1], np.array(2**40))
    assert table.stats().last_step == 2**40
    table = write(table, [1], nnx.Variable(np.array(2**40 + 1)))
    assert table.stats().last_step == 2**40 + 1
    no_steps = [("x", "<U1"), (1.5, "float32"), (np.array([1]), r"\(1,\)"), (True, "bool")]
    for step, got in [*no_steps, (np.timedelta64(3, "s"), r"timedelta64\[s\]")]:
        with pytest.raises(TypeError, match=rf"apply: want an integer step \(\), got .*{got}"):
            write(table, [2], step)
    assert table.size() == 1


@pytest.mark.parametrize("place", few(["one place", "4", "replicated"], "one place"))
def test_a_fresh_optimizer_state_does_not_evict_the_newest(place, make, places):
    table = make(2, max_capacity=4, on_full="evict", evict=evict.LeastRecent(), **places[place])
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=SGD)
    for experiment in (0, 1):  # the second one counts from 0 again
        params = {"t": table}
        state = tx.init(params)
        for step in range(4):
            keys = np.array([10 * experiment + step])
            grads = {"t": kvjax.SparseRows(keys, jnp.ones((1, 2)))}
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        table = params["t"]
    assert sorted(table.export().keys.tolist()) == [10, 11, 12, 13]
    kept = table.export(kvjax.Prune(max_age=2)).keys
    assert sorted(kept.tolist()) == [11, 12, 13]


def test_two_states_on_one_table_share_its_clock(make):
    table = make(2)
    for step in (1, 2, 3):
        for state in (0, 1):
            table = write(table, [10 * state + step], step)
    assert steps(table, [1, 11, 2, 12, 3, 13]) == [1, 1, 2, 2, 3, 3]


@slow
def test_steps_may_be_seconds(make):
    """What counts by steps goes by the clock, from its first value on: windows, halves and periods, however far a step
    is from the one before."""
    now, day = 1_790_000_000, 86_400
    aged = make(1, evict=evict.MaxAge(30 * day).every(day))
    for days, keys in ((0, [1, 2]), (20, [2]), (31, [3])):
        aged = write(aged, keys, now + days * day)
    assert sorted(aged.export().keys.tolist()) == [2, 3]
    assert aged.export(kvjax.Prune(max_age=10 * day)).keys.tolist() == [3]
    frequent = make(1, max_capacity=3, on_full="evict", evict=evict.LeastFrequent(half_life=day))
    for days, keys in ((0, [1] * 8), (5, [2, 2]), (5, [3]), (5, [4])):
        frequent = write(frequent, keys, now + days * day)
    assert sorted(frequent.export().keys.tolist()) == [2, 3, 4]  # 8 halved five times is less than 1
    for days, left in ((14, 1), (29, 0), (400, 0)):
        waits = write(write(make(1, admit=admit.MinCount(3, max_age=15 * day)), [1], now), [2], now + days * day)
        assert waits.frequency([1]).tolist() == [left]
    sketch = make(1, admit=admit.Sketch(100, halve_every=day))
    for days, keys, left in ((0, [1] * 64, 64), (1, [2], 32), (4, [2], 4)):
        sketch = write(sketch, keys, now + days * day)
        assert sketch.frequency([1]).tolist() == [left]


@slow
def test_steps_that_rows_have_missed_are_those_of_the_optimizer(make):
    """By a clock, too, rows catch up with the updates that left them out, and not with the seconds."""
    rows = kvjax.optax.catch_up(optax.sgd(0.1, momentum=0.9))
    tx, found = kvjax.optax.partition(dense=SGD, tables=rows), []

    @jax.jit
    def train(params, state, keys, step=None):
        now = kvjax.optax.caught_up(params, state, rows)
        grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(keys) ** 2))(now)
        updates, state = tx.update(grads, state, params, **({} if step is None else {"step": step}))
        return optax.apply_updates(params, updates), state

    for clock in ([()] * 4, [(np.int32(1_790_000_000 + 86_400 * day),) for day in range(4)]):
        params = {"t": make(2, seed=3, initializer=kvjax.initializers.normal(1.0))}
        state = tx.init(params)
        for keys, step in zip(([1, 2], [2, 3], [1, 4], [4, 2]), clock, strict=True):
            params, state = train(params, state, kvjax.keys(keys), *step)
        found.append(kvjax.optax.caught_up(params, state, rows)["t"].export())
    np.testing.assert_array_equal(*(each.values for each in found))
    assert [each.last_step for each in found] == [4, clock[-1][0]]
