"""Admission: which keys training gives a row."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import kvjax
from kvjax import admit
from tests.support.marks import few, slow
from tests.support.model import Model
from tests.support.tables import same_tables

SGD = optax.sgd(1.0)


def train(table, keys, rows=None, step=None):
    keys = np.asarray(keys, np.int64)
    rows = np.ones((len(keys), table.dim), np.float32) if rows is None else rows
    return table.apply(SGD, kvjax.SparseRows(keys, rows), step=step)[0]


def test_a_key_enters_on_its_kth_occurrence(make, x64):
    table = make(1, admit=admit.MinCount(3), initializer=0.5)
    table = train(table, [1, 1, 2])  # 1 has two, 2 has one
    assert len(table) == 0 and table.stats().tracked == 2 and table.stats().refused == 3
    table = train(table, [1, 2])
    assert table.export().keys.tolist() == [1] and table.stats().admitted == 1
    assert int(table.frequency(1)) == 3  # all occurrences, also those before
    assert table.lookup(1).tolist() == [-0.5]  # the step that admits is the first that trains
    table = train(table, [2, 2, 2])
    assert int(table.frequency(2)) == 5 and table.lookup(2).tolist() == [0.5 - 3]


def test_rows_made_by_hand_need_no_admission(make):
    table = train(make(1, admit=admit.MinCount(5)), [7])
    assert table.stats().tracked == 1
    table = table.upsert(np.array([7]), [[1.0]])
    assert table.stats().tracked == 0 and len(table) == 1
    table = train(table, [7])
    assert table.lookup(7).tolist() == [0.0] and int(table.frequency(7)) == 2  # with the one before it had a row
    assert len(make(1, admit=admit.MinCount(5)).lookup_or_insert(np.arange(3))[1]) == 3


@slow
@pytest.mark.parametrize("policy", [admit.MinCount(5), admit.Sketch(5, size=2**21)], ids=["count", "sketch"])
def test_writes_by_hand_change_no_frequency(make, policy):
    table = train(make(1, admit=policy), [1, 1, 2, 2, 2, 3, 4])
    writes = {1: lambda t: t.pin(1), 2: lambda t: t.upsert(2, [1.0]), 3: lambda t: t.add(3, [1.0])}
    for key, write in writes.items():
        before = int(table.frequency(key))
        table = write(table)
        assert table.contains(key) and int(table.frequency(key)) == before == {1: 2, 2: 3, 3: 1}[key]
    table = table.remove(np.array([1, 4, 4, 9]))
    left = 0 if isinstance(policy, admit.MinCount) else 1  # cells of a sketch are those of many keys
    assert table.frequency(np.array([1, 4])).tolist() == [2 * left, left] and table.stats().tracked == 0
    assert table.stats().removed == 1 and len(table) == 2


def test_count_by_batch(make):
    table = make(1, admit=admit.MinCount(2), count="batch")
    table = train(table, [1] * 10)
    assert len(table) == 0
    table = train(train(table, [1] * 10), [1, 1])
    assert int(table.frequency(1)) == 3


@pytest.mark.parametrize("policy", [admit.MinCount(3), admit.Sketch(3), admit.Probability(0.5)])
def test_the_order_of_keys_and_what_else_is_in_the_batch_change_nothing(policy, make):
    rng = np.random.default_rng(0)
    batches = [rng.zipf(1.5, 200) % 1000 for _ in range(6)]
    one, other = make(1, admit=policy, seed=1), make(1, admit=policy, seed=1)
    for batch in batches:
        one = train(one, batch)
        other = train(other, rng.permutation(batch))
    np.testing.assert_array_equal(one.export().keys, other.export().keys)
    np.testing.assert_array_equal(one.export().freqs, other.export().freqs)
    assert 0 < len(one) < len(np.unique(np.concatenate(batches)))


def test_unadmitted_keys_read_as_they_are_told(make):
    keys, dim = np.array([1, 2]), 2
    for unadmitted, want in [("init", 0.25), ("zeros", 0.0)]:
        table = make(dim, initializer=0.25, admit=admit.MinCount(2, unadmitted=unadmitted))
        table = train(train(table, [1]), [1])
        assert table.lookup(keys)[:, 0].tolist() == [0.25 - 1, want]
        assert table.lookup(keys, missing="init")[1].tolist() == [0.25, 0.25]
        assert table.lookup(keys, missing="zeros")[1].tolist() == [0.0, 0.0]
        assert table.lookup(keys, missing=[7.0, 8.0])[1].tolist() == [7.0, 8.0]
        assert jax.jit(lambda t: t.lookup(kvjax.keys(keys)))(table)[1, 0] == want


def test_unadmitted_keys_share_a_row_and_train_it(make):
    table = make(1, initializer=0.25, admit=admit.MinCount(2, unadmitted=-1))
    assert table.lookup(5).tolist() == [0.25]  # the shared key's initial row
    table = train(table, [5, 6], np.array([[1.0], [2.0]], np.float32))
    assert table.export().keys.tolist() == [-1] and table.lookup(99).tolist() == [0.25 - 3]
    assert int(table.frequency(-1)) == 2 and table.stats().refused == 2
    table = train(table, [5, 7, -1], np.array([[1.0], [4.0], [0.5]], np.float32))
    assert table.lookup(np.array([5, 8, -1]))[:, 0].tolist() == [0.25 - 1, 0.25 - 7.5, 0.25 - 7.5]
    assert table.lookup(7).tolist() == [0.25]  # which its next occurrence admits
    assert int(table.frequency(-1)) == 4 and int(table.frequency(5)) == 2


def test_the_loss_trains_the_shared_row(make, promotion):
    table = make(2, admit=admit.MinCount(10, unadmitted=0), initializer=0.1)
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.adam(0.1))
    params = {"table": table}
    state = tx.init(params)

    @jax.jit
    def step(params, state, keys):
        value, grads = kvjax.value_and_grad(lambda p: jnp.mean((p["table"].lookup(keys) - 1.0) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rng = np.random.default_rng(0)
    for _ in range(60):
        params, state, value = step(params, state, kvjax.keys(rng.integers(1, 2**60, 8)))
    assert float(value) < 0.01 and len(params["table"]) == 1


def test_a_sketch_never_keeps_a_key_waiting(make):
    """Conservative count-min: estimates are never too low, and mostly right."""
    rng = np.random.default_rng(0)
    table, k = make(1, admit=admit.Sketch(4, size=2**21)), 4
    keys = rng.zipf(1.3, 60_000) % 300_000
    for batch in keys.reshape(30, -1):
        table = train(table, batch)
    distinct, counts = np.unique(keys, return_counts=True)
    admitted = np.asarray(table.contains(distinct))
    assert admitted[counts >= k].all()
    assert admitted[counts < k].mean() < 0.02
    assert table.stats().bytes["admission"] == 2**21 and table.stats().tracked == 0


def test_a_sketch_remembers_evicted_keys_until_it_ages(make):
    for halve_every, again in [(None, 1), (2, 0)]:
        table = make(1, admit=admit.Sketch(3, halve_every=halve_every))
        table = train(table, [7, 7, 7], step=1).remove(7)
        assert len(train(table, [7], step=9)) == again
    table = train(make(1, admit=admit.MinCount(3)), [7, 7, 7]).remove(7)
    assert len(train(table, [7])) == 0


def test_probability_admits_its_share_of_keys_whenever_they_come(make):
    keys = np.arange(20_000)
    one = train(make(1, admit=admit.Probability(0.3), seed=5), keys)
    other = make(1, admit=admit.Probability(0.3), seed=5)
    for part in np.random.default_rng(0).permutation(keys).reshape(4, -1):
        other = train(other, part)
    assert abs(len(one) / len(keys) - 0.3) < 0.015
    np.testing.assert_array_equal(one.export().keys, other.export().keys)
    assert (one.export().keys.tolist()) != train(
        make(1, admit=admit.Probability(0.3), seed=6), keys
    ).export().keys.tolist()
    assert len(train(make(1, admit=admit.Probability(0.0)), keys)) == 0
    assert len(train(make(1, admit=admit.Probability(1.0)), keys)) == len(keys)


@pytest.mark.parametrize(
    "policy", [admit.MinCount(3, unadmitted=-1), admit.Sketch(3, halve_every=3), admit.Probability(0.5)]
)
def test_saving_and_restoring_in_the_middle_changes_nothing(policy, make, tmp_path):
    rng = np.random.default_rng(1)
    batches = [rng.zipf(1.6, 100) % 500 for _ in range(8)]
    one, other = make(2, admit=policy, seed=1), make(2, admit=policy, seed=1)
    for number, batch in enumerate(batches):
        one = train(one, batch)
        other = train(other, batch)
        if number == 3:
            with ocp.CheckpointManager(tmp_path) as manager:
                manager.save(0, args=ocp.args.Composite(t=kvjax.orbax.TableSave({"t": other.pin(5)})))
                manager.wait_until_finished()
                other = kvjax.get_table(other.name).clear()
                other = manager.restore(0, args=ocp.args.Composite(t=kvjax.orbax.TableRestore({"t": other})))["t"]["t"]
            one = one.pin(5)
    a, b = one.export(), other.export()
    for name in ("keys", "values", "freqs", "versions", "pinned"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert one.stats().tracked == other.stats().tracked and a.pinned.sum() == 1


def test_counts_that_another_admission_cannot_keep_are_not_lost_in_silence(make):
    copy = train(make(1, admit=admit.MinCount(3)), [1, 2]).snapshot()
    with pytest.warns(UserWarning, match="pending_keys"):
        make(1).load(copy)
    table = make(1, admit=admit.MinCount(2)).load(copy)  # another bound keeps the counts
    assert train(table, [1]).export().keys.tolist() == [1]
    copy = train(make(1, admit=admit.Sketch(3)), [1, 2]).snapshot()
    with pytest.warns(UserWarning, match="sketch"):
        make(1, admit=admit.Sketch(3, size=2**22)).load(copy)


def test_the_read_that_reaches_the_count_is_of_the_initial_row(make):
    """So a gradient trains the row that it was taken at, as with DeepRec's CounterFilter."""

    @jax.jit
    def step(table, keys):
        grads = kvjax.grad(lambda t: jnp.sum(0.5 * (t.lookup(keys) - 1.0) ** 2))(table)
        return table.apply(optax.sgd(0.2), grads)[0]

    for unadmitted, others in [("zeros", 0.0), ("init", 0.5), (-1, 0.5)]:
        table = make(1, initializer=0.5, admit=admit.MinCount(2, unadmitted=unadmitted))
        table = step(table, kvjax.keys([7]))
        assert not table.contains(7) and int(table.frequency(7)) == 1
        others = 0.6 if unadmitted == -1 else others  # the shared row has been trained
        np.testing.assert_allclose(table.lookup([7, 8])[:, 0], [0.5, others])
        assert table.lookup([7, 8], return_found=True)[1].tolist() == [False, False]
        table = step(table, kvjax.keys([7]))
        np.testing.assert_allclose(table.lookup([7, 8])[:, 0], [0.6, others])
        assert (table.frequency([7, 8]).tolist(), table.version_of(7)) == ([2, 0], 2)


@pytest.mark.parametrize("policy", [admit.MinCount, admit.Sketch])
def test_occurrences_of_one_step_are_read_as_one(make, policy):
    """Whatever the batch is made of, and however it is cut: what a key reads as is known before the step."""
    table = make(1, initializer=0.5, admit=policy(2, unadmitted="zeros"))
    assert table.lookup([7, 7, 7])[:, 0].tolist() == [0.0] * 3
    table = train(table, [7, 7, 7])
    assert len(table) == 0 and int(table.frequency(7)) >= 2
    assert table.lookup([7, 9])[:, 0].tolist() == [0.5, 0.0]
    table = train(table, [7])
    assert table.lookup(7).tolist() == [-0.5]


@pytest.mark.parametrize("unadmitted", few(["zeros", -1]))
def test_waiting_keys_read_alike_wherever_they_are(make, mesh, unadmitted):
    options = {"initializer": jax.nn.initializers.ones, "admit": admit.MinCount(2, unadmitted=unadmitted)}
    one, other = make(1, **options), make(1, mesh=mesh(2), **options)
    for keys in ([5, 6, 7, 8], [5, 6], [6, 9]):
        ids = np.array([5, 6, 7, 8, 9, -1])
        read = [t.lookup(ids, return_found=True) for t in (one, other)]
        np.testing.assert_array_equal(*[rows for rows, _ in read])
        np.testing.assert_array_equal(*[found for _, found in read])
        np.testing.assert_array_equal(one.frequency(ids), other.frequency(ids))
        one, other = train(one, keys), train(other, keys)


FORGETS = [
    admit.MinCount(3, unadmitted="zeros", max_age=4, max_waiting=60), admit.MinCount(3, max_age=3),
    admit.MinCount(3, max_waiting=40), admit.MinCount(3, unadmitted=-1, max_waiting=40),
]  # fmt: skip


@pytest.mark.parametrize("policy", few(FORGETS, 0))
def test_waiting_keys_are_forgotten(make, policy):
    """As the model says, also by a table that goes on from a snapshot in the middle."""
    rng, step = np.random.default_rng(3), 0
    table, want = make(1, admit=policy, initializer=0.5), Model(1, lambda key: np.full(1, 0.5), admit=policy)
    keys = np.arange(300)
    for i in range(40):
        batch = rng.zipf(1.3, 16) % 300
        step += int(rng.integers(1, 3)) if i % 9 else 7
        table = train(table, batch, step=step)
        want.apply(batch.tolist(), np.ones((16, 1), np.float32), lambda value, slot, g: (value - g, slot), step)
        if i % 8 == 7:
            assert table.stats().tracked == len(want.admission.pending)
            np.testing.assert_array_equal(table.frequency(keys), want.frequency(keys.tolist()))
            np.testing.assert_array_equal(table.lookup(keys), want.lookup(keys.tolist()))
        if i == 23:
            saved = table.snapshot()
            table = table.clear().load(saved)
    assert 0 < table.stats().tracked < 60 and len(table) > 5


def test_options_of_waiting_keys(make):
    for options in ({"max_age": 0}, {"max_waiting": 0}, {"max_age": 1.5}):
        with pytest.raises(ValueError, match="want an integer max_"):
            admit.MinCount(2, **options)
    with pytest.raises(ValueError, match="want an integer count >= 1, got 0"):
        admit.MinCount(0)
    make(1, admit=admit.MinCount(2**30 - 3))
    for count in (2**30 - 2, 2**31 - 1):  # which were lost where they were saved or copied
        with pytest.raises(ValueError, match=r"want a count below 2\*\*30 - 2, got"):
            make(1, admit=admit.MinCount(count))


@slow
def test_waiting_keys_have_a_bound_in_memory(make):
    """Two million keys that never come back."""
    table = make(1, admit=admit.MinCount(2, max_waiting=20_000))
    sizes = []
    for start in range(0, 2_000_000, 20_000):
        table = train(table, np.arange(start, start + 20_000))
        sizes.append(table.stats().bytes["admission"])
    assert len(table) == 0 and table.stats().tracked <= 40_000
    assert max(sizes[5:]) == max(sizes[:5]) <= 52 * 80_000


@slow
@pytest.mark.parametrize("policy", [admit.MinCount(3, unadmitted="zeros", max_age=4), admit.MinCount(3, max_age=3)])
def test_an_age_forgets_the_same_on_any_number_of_shards(make, mesh, policy):
    rng = np.random.default_rng(4)
    one, other = make(1, admit=policy), make(1, admit=policy, mesh=mesh(4))
    for _ in range(12):
        batch = rng.zipf(1.3, 32) % 300
        one, other = train(one, batch), train(other, batch)
    same_tables(one, other)
