"""What is left of tables, and of what users gave them, once they are gone."""

import ctypes
import functools
import gc
import os
import signal
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._process import PROCESS
from kvjax._table import lifetime
from tests.support.engines import Memory
from tests.support.marks import slow


def resident():
    """MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture
def cleared(monkeypatch):
    """Limits tables whose programs are kept to three, and notes each time that they are cleared."""
    monkeypatch.setattr(lifetime, "MANY", 3)
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(len(PROCESS.outlived)))
    PROCESS.outlived.clear(), PROCESS.traced.clear()
    return cleared


def make_and_drop(names, trace=True, dim=1):
    for number in names:
        table = kvjax.get_table(f"lifetime{number}", dim=dim)
        if trace:
            jax.eval_shape(lambda table: table.contains(1), table)
        kvjax.drop_table(table.name)


def test_programs_of_dropped_tables_are_cleared(cleared):
    make_and_drop([0, 1, 0, 1, 0])  # which find their programs again
    assert not cleared
    make_and_drop(range(7), dim=2)
    assert cleared == [0, 0, 0]


def test_programs_of_places_that_tables_have_left_are_cleared(cleared, tmp_path):
    table = kvjax.get_table("lifetime", dim=1)
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        jax.eval_shape(lambda table: table.contains(1), table)
        table = table.to(kvjax.storage.Mmap(tmp_path / str(number)))
    kvjax.drop_table("lifetime")
    assert cleared == [0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
@pytest.mark.parametrize("call", ["create", "drop", "replace"])
def test_an_interrupt_leaves_tables_that_both_sides_know(call, number, make, mesh, monkeypatch):
    """Ctrl-C while the C++ side makes, drops or moves a large table is raised as soon as Python's own code runs."""
    table = make(1).upsert([7], [[1.0]])
    coming = functools.partial(getattr(ctypes.CDLL(None), "raise"), number)  # signal's own one runs the handlers

    def interrupted(*calls):
        monkeypatch.undo()
        one_go(*(each for called in calls for each in (called, coming)))

    def stop(*_):
        raise SystemExit

    before, one_go = signal.signal(number, stop), lifetime.in_one_go
    monkeypatch.setattr(lifetime, "in_one_go", interrupted)
    calls = {
        "create": lambda: kvjax.get_table("lifetime", dim=1),
        "drop": lambda: kvjax.drop_table(table.name),
        "replace": lambda: kvjax.reshard(table, mesh(2)),
    }
    try:
        with pytest.raises(SystemExit):
            calls[call]()
    finally:
        signal.signal(number, before)
    left = {"create": {table.name, "lifetime"}, "drop": set(), "replace": {table.name}}[call]
    assert set(kvjax.tables()) == set(kvjax.stats()) == left
    if call == "replace":
        assert kvjax.get_table(table.name).lookup(7).tolist() == [1.0]
    for name in left:
        kvjax.drop_table(name)
    new = kvjax.get_table(table.name, dim=1)
    with pytest.raises((ValueError, RuntimeError), match="stale"):
        jax.block_until_ready(table.lookup(7))
        new.stats()
    assert len(new) == 0


@pytest.mark.cpu_table
def test_an_engine_goes_with_its_table():
    """Though JAX keeps the programs of the table, and what is static about its handles."""
    engine = Memory()
    gone = weakref.ref(engine)
    table = kvjax.get_table("lifetime", dim=2, storage=kvjax.storage.External(engine))
    table, _ = table.apply(optax.sgd(0.1), kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))))
    jax.block_until_ready(table.version)
    assert table.spec.storage == kvjax.storage.External(engine)
    kvjax.drop_table("lifetime")
    del engine
    gc.collect()
    assert gone() is None and repr(table.spec.storage) == "External(engine=None)"
    with pytest.raises(ValueError, match="get_table: want an engine, got the storage of a table that is gone"):
        kvjax.get_table("lifetime", dim=2, storage=table.spec.storage)


def test_tables_without_programs_cost_others_nothing(cleared):
    make_and_drop(range(20), trace=False)
    assert not cleared


def test_score_functions_count_too(cleared):
    for bound in range(3):
        policy = kvjax.evict.MinScore(bound, lambda rows, bound=bound: rows.freqs)
        policy.text(), policy.text()
    make_and_drop([0], trace=False)
    assert cleared == [0]


def test_a_score_function_that_is_made_for_each_call_is_told():
    with pytest.warns(UserWarning, match="got 129 of the name .*told.<locals>.<lambda>; each compiles") as said:
        for _ in range(200):
            kvjax.evict.MinScore(0, lambda rows: rows.freqs).text()
    assert len(said) == 1 and said[0].filename == __file__


@slow
def test_memory_is_flat_where_calls_are_eager(monkeypatch):
    """For as many tables as there is time for: each compiles its programs, 20 to 80 ms of them."""
    monkeypatch.setattr(lifetime, "MANY", 16)
    keys, sizes = kvjax.keys(np.arange(4)), []
    for number in range(int(os.environ.get("KVJAX_TEST_TABLES", 64))):
        table = kvjax.get_table(f"lifetime{number}", dim=4)
        table.lookup(keys), table.upsert(keys, np.ones((4, 4)))
        kvjax.drop_table(table.name)
        if number % 16 == 15:
            gc.collect()
            sizes.append(resident())
    assert max(sizes[-2:]) - sizes[1] < 0.1 * (len(sizes) - 2) * 16, sizes  # MiB; it was 3 a table, and is 0.05 in all


def look_up(tables):
    return [table.lookup(kvjax.keys(np.arange(4))) for table in tables]


def choose(tables):
    policies = [kvjax.evict.MinScore(0, lambda rows: rows.freqs) for _ in range(100)]
    return [functools.reduce(lambda table, policy: table.evict(policy), policies, *tables).version]


@slow
@pytest.mark.filterwarnings("ignore:kvjax. evict. want a score function that is defined once")
@pytest.mark.parametrize("program, tables", [(look_up, 100), (choose, 1)])
def test_a_thousand_leave_nothing(program, tables):
    """Tables that are made, filled, read and dropped, and score functions that are used: a hundred to a program,
    because to compile takes most of the time. It was 50 KiB for a table in such a program, and 11 for a function."""
    rows = kvjax.get_table("lifetime", dim=16).upsert(kvjax.keys(np.arange(100)), np.ones((100, 16))).export()
    kvjax.drop_table("lifetime")
    sizes = []
    for first in range(0, 1000, 100):
        names = [f"lifetime{first + number}" for number in range(tables)]
        made = [kvjax.get_table(name, dim=16, admit=kvjax.admit.MinCount(2)).load(rows) for name in names]
        jax.block_until_ready(jax.jit(program)([table.on_evict(print) for table in made]))
        for name in names:
            kvjax.drop_table(name)
        gc.collect()
        sizes.append(resident())
    assert sizes[-1] - sizes[4] < 4, sizes  # MiB
