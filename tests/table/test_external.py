"""Rows in an engine of the user's: the same table as in memory, whatever the engine does."""

import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.engines import Memory
from tests.support.marks import slow

pytestmark = pytest.mark.cpu_table
External = kvjax.storage.External
REFUSED = (ValueError, RuntimeError)
ADAGRAD = optax.adagrad(0.5)


@pytest.fixture
def engine():
    return Memory()


@pytest.fixture
def table(make, engine):
    return make(4, storage=External(engine), initializer=kvjax.initializers.normal(1.0))


def keys(*ids):
    return kvjax.keys(np.array(ids, np.int64))


def trained(table, ids, tx=ADAGRAD, **options):
    grads = kvjax.SparseRows(keys(*ids), jnp.ones((len(ids), 4)))
    return jax.block_until_ready(table.apply(tx, grads, **options)[0])


def test_rows_are_in_the_engine_and_leave_it(table, engine):
    table = trained(table, [7, -1, 7])
    same = kvjax.get_table("same", dim=4, initializer=kvjax.initializers.normal(1.0), seed=table.spec.seed)
    same = trained(same, [7, -1, 7])
    np.testing.assert_array_equal(table.lookup(keys(7, -1, 8)), same.lookup(keys(7, -1, 8)))
    assert engine.columns() == {"values": {7, 2**64 - 1}, "slots": {7, 2**64 - 1}}
    np.testing.assert_array_equal(engine.rows["values"][7], same.lookup(7))  # which other programs can read
    np.testing.assert_array_equal(table.slot("sum_of_squares", 7), same.slot("sum_of_squares", 7))
    assert table.stats().bytes["values"] == table.stats().bytes["slots"] == 0
    table = table.remove(keys(7))
    assert engine.columns() == {"values": {2**64 - 1}, "slots": {2**64 - 1}}
    table.clear()
    assert engine.columns() == {"values": set(), "slots": set()}


def test_rows_written_before_the_first_step_keep_the_slots_it_makes(table, engine):
    told = []
    table.on_evict(lambda keys, rows, slots, freqs, versions, reason: told.append(slots["sum_of_squares"].tolist()))
    table = table.upsert(keys(7, 8), np.zeros((2, 4), np.float32))
    table = trained(table, [7])
    assert engine.columns() == {"values": {7, 8}, "slots": {7}}
    want = table.export(slots=True).slots["sum_of_squares"].tolist()
    jax.block_until_ready(table.evict(kvjax.evict.MaxAge(0), step=9))
    assert sorted(told[0]) == sorted(want) and engine.columns() == {"values": set(), "slots": set()}


@slow
def test_a_get_that_fails_changes_nothing(table, engine):
    table = trained(table, [1, 2])
    before, versions = table.export(), table.version_of(keys(1, 2)).tolist()
    with engine.failing("get"):
        with pytest.raises(REFUSED, match=f"'{table.name}', storage: want a storage engine that works") as info:
            trained(table, [1, 3])
        assert isinstance(info.value.__cause__, ConnectionError)
        with pytest.raises(REFUSED, match="ConnectionError: the server is gone"):
            jax.block_until_ready(table.lookup(keys(1)))
        assert table.contains(keys(1, 3)).tolist() == [True, False]  # which needs no row
    np.testing.assert_array_equal(table.export().values, before.values)
    assert table.version_of(keys(1, 2)).tolist() == versions
    assert len(trained(table, [1, 3])) == 3


@slow
def test_rows_that_are_not_taken_stay_in_memory(table, engine):
    table = trained(table, [1, 2])
    old = engine.rows["values"][1].copy()
    with engine.failing("put", "delete"):
        with pytest.warns(UserWarning, match=f"'{table.name}', storage: want an engine that takes rows, got Conn"):
            table = trained(table, [1, 3])
        np.testing.assert_array_equal(engine.rows["values"][1], old)
        assert not np.array_equal(table.lookup(1), old)  # it is whole, and reads as it is
        exported = table.export(slots=True)
        for _ in range(2):  # this write and all to come, until the engine takes the rows
            with pytest.warns(UserWarning), pytest.raises(REFUSED, match="the server is gone"):
                jax.block_until_ready(table.remove(keys(2)).version)
    after = table.export(slots=True)
    for name in exported.slots:
        np.testing.assert_array_equal(after.slots[name], exported.slots[name])
    table = table.remove(keys(2))
    assert engine.columns()["values"] == {1, 3}
    np.testing.assert_array_equal(engine.rows["values"][1], table.lookup(1))


@slow
def test_rows_that_are_not_deleted_may_be_there_still(table, engine):
    table = trained(table, [1, 2])
    with (
        engine.failing("delete"),
        pytest.warns(UserWarning, match="engine that deletes rows, .*; it may have them still"),
    ):
        table = table.remove(keys(2))
        jax.block_until_ready(table.version)
    assert len(table) == 1 and engine.columns()["values"] == {1, 2}
    table = table.remove(keys(3))  # which tries again first
    assert len(table) == 1 and engine.columns()["values"] == {1}


@slow
@pytest.mark.parametrize("call", ["get", "put"])
def test_an_interrupt_of_the_engine_is_raised(table, engine, call, monkeypatch):
    """Ctrl-C while the main thread is in the engine, where a step whose rows are not taken ends all the same."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have it ignored behind an &
    table = trained(table, [1, 2])

    def interrupted(*arguments):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, call, interrupted)
    with warnings.catch_warnings(), pytest.raises(KeyboardInterrupt):
        warnings.simplefilter("ignore")
        try:
            trained(table, [1, 3])
        finally:
            signal.signal(signal.SIGINT, before)
    assert len(trained(table.refresh(), [1, 3])) == 3 and engine.columns()["values"] == {1, 2, 3}


@slow
@pytest.mark.parametrize("got", [np.zeros((1, 3), np.float32), np.zeros((1, 4)), None])
def test_what_get_gives_is_checked(table, engine, got):
    table = trained(table, [1])
    engine.get = lambda column, keys: got
    with pytest.raises(REFUSED, match=r"ValueError: kvjax: storage: want values \(1, 4\) float32 from get"):
        jax.block_until_ready(table.lookup(keys(1)))


@slow
def test_what_is_no_engine_or_cannot_be_is_refused(make, table, engine):
    with pytest.raises(TypeError, match=r"storage\.External: want an engine with get, put and delete"):
        External({})
    engine.put = lambda keys, rows: None
    with pytest.raises(TypeError, match=r"want an engine with put\(column, keys, rows\), got put\(keys, rows\)"):
        External(engine)
    del engine.put
    with pytest.raises(ValueError, match=f"want an engine of its own, got that of table '{table.name}'"):
        kvjax.get_table("other", dim=4, storage=External(engine))
    with pytest.raises(ValueError, match=r"want a table in one place beside storage\.External"):
        kvjax.get_table("mesh", dim=4, storage=External(Memory()), devices=jax.devices()[:2])
    assert kvjax.get_table(table.name).spec.storage == External(engine)


@slow
def test_moves_loads_and_checkpoints(table, engine, tmp_path):
    import orbax.checkpoint as ocp

    table = trained(table, range(100))
    rows = table.export(slots=True)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": table})))
        manager.wait_until_finished()
        table = trained(table.remove(keys(*range(50))), range(90, 110))
        args = ocp.args.Composite(tables=kvjax.orbax.TableRestore({"t": table}))
        table = manager.restore(1, args=args)["tables"]["t"]

    def check(table):
        now = table.export(slots=True)
        for name in ("keys", "values", "freqs", "versions"):
            np.testing.assert_array_equal(getattr(now, name), getattr(rows, name))
        for name in rows.slots:
            np.testing.assert_array_equal(now.slots[name], rows.slots[name])

    check(table)
    table.lookup(keys(1)).block_until_ready()  # with which the engine has it all
    assert engine.columns()["values"] == set(range(100))
    np.testing.assert_array_equal(engine.rows["values"][1], table.lookup(1))
    table = table.to(kvjax.storage.Host())
    check(table)
    other = Memory()
    table = table.to(External(other))
    check(table)
    assert other.columns()["values"] == set(range(100))
    table = table.clear().load(rows)
    check(table)
    check(trained(table, range(5)).refresh().load(rows))


@slow
def test_chunked_steps_and_scores(make, engine):
    """An update that is no program runs in chunks; scores and norms are taken of rows that are not in memory."""

    def first(rows):
        return rows.values[:, 0]

    tables = [make(4, storage=storage, seed=3, initializer=kvjax.initializers.normal(1.0))
              for storage in (External(engine), kvjax.storage.Host())]  # fmt: skip
    tx = optax.GradientTransformation(
        lambda params: {"n": jnp.zeros(3)}, lambda u, s, p: (jnp.sort(u) * -0.5, {"n": s["n"] + 1})
    )
    for policy in (kvjax.evict.MinNorm(1.0), kvjax.evict.LowestScore(3, first), kvjax.evict.MinScore(0.5, first)):
        tables = [trained(table, range(40), tx) for table in tables]
        dry = [table.evict(policy, dry_run=True) for table in tables]
        assert dry[0] == dry[1] and sum(dry[0].values()) > 0
        tables = [table.evict(policy) for table in tables]
        a, b = (table.export(slots=True) for table in tables)
        np.testing.assert_array_equal(a.keys, b.keys)
        np.testing.assert_array_equal(a.values, b.values)
        np.testing.assert_array_equal(a.slots["n"], b.slots["n"])
    assert engine.columns()["values"] == set(b.keys.tolist())


@slow
def test_memory_is_that_of_a_call(engine, make):
    """Rows that no call works on take no memory: 40 MB of values, of which a call takes a part."""
    table = make(256, storage=External(engine))
    engine.put = lambda column, keys, rows: None
    rows = np.ones((1000, 256), np.float32)
    table.upsert(np.arange(1000), rows)
    before = resident()
    for start in range(1000, 41_000, 1000):
        table = jax.block_until_ready(table.refresh().upsert(np.arange(start, start + 1000), rows))
    assert len(table) == 41_000 and resident() - before < 25e6


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
