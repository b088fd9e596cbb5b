"""Several threads, and functions of the user's that run inside a write."""

import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._table import registry
from kvjax._table.live import live_version
from tests.support.marks import slow
from tests.support.tables import finished, on_gpu

REFUSED = (ValueError, MemoryError, RuntimeError)


def gradients(keys, dim=2):
    return kvjax.SparseRows(kvjax.keys(keys), jnp.ones((*np.shape(keys), dim)))


def train_by(table, grads):
    return table.apply(optax.sgd(1.0), grads)[0]


@jax.jit
def train(table, keys):
    return train_by(table, kvjax.SparseRows(keys, jnp.ones((*keys.shape, table.dim))))


@slow
def test_a_step_is_whole_to_other_threads(make):
    """Whoever asks for the live handle in the middle of a step waits until its rows are written."""
    table = make(32)
    keys = kvjax.keys(np.arange(100_000))
    table = jax.block_until_ready(train(table, keys))
    torn, seen, stop = [], set(), threading.Event()

    def watch():
        while not stop.is_set():
            handle = kvjax.get_table(table.name)
            try:
                rows = handle.export()
            except REFUSED:
                continue  # a step has begun since
            seen.add(int(rows.freqs[0]))
            trained = rows.values[:, 0] == -rows.freqs
            if not trained.all():
                torn.append(trained.mean())

    thread = threading.Thread(target=watch)
    thread.start()
    steps = 1
    while steps < 16 or (len(seen) < 3 and steps < 1000):  # until it has looked in between
        table = train(table, keys)
        steps += 1
        time.sleep(0.001)
    table = jax.block_until_ready(table)
    stop.set()
    thread.join()
    assert not torn and len(seen) >= 3
    assert (table.export().values == -steps).all()


@slow
@pytest.mark.parametrize("write, row", [(lambda t, g: t.upsert(g.keys, g.rows), 2), (train_by, -3)])
def test_refresh_after_an_interrupt_is_of_the_write_under_way(write, row, make, request):
    """Ctrl-C while the loop waits for what a step needs, so that its write is still to come. Its handle is lost."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have it ignored behind an &
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    side = 12_000 if on_gpu() else 700  # so that it takes tenths of a second
    slow_rows = jax.jit(lambda x, last: last * jax.lax.fori_loop(0, 40, lambda _, y: y @ x, x)[:2, :700])
    step = jax.jit(lambda table, rows: write(table, kvjax.SparseRows(kvjax.keys([1, 2]), rows)))
    table, eye = make(700), jnp.eye(side)
    table = step(table, jax.block_until_ready(slow_rows(eye, 1.0)))  # compiled
    rows = slow_rows(eye, 2.0)
    with pytest.raises(KeyboardInterrupt):
        lost = step(table, rows)
        signal.raise_signal(signal.SIGINT)
        jax.block_until_ready(lost.version)
    lost = None
    under_way = not rows.is_ready()
    live = table.refresh()
    assert under_way and int(live.version) == int(table.version) + 1
    assert live.lookup(kvjax.keys([1]))[0, 0] == row


def test_numbers_wait_for_the_handle(make):
    slow = make(64, max_capacity=2000, on_full="evict").on_evict(lambda *rows: time.sleep(0.01))
    for i in range(8):
        slow = train(slow, kvjax.keys(np.arange(500) + 500 * i))
        assert slow.stats().occurrences == 500 * (i + 1) and "rows=" in repr(slow)
    assert slow.stats().evicted == {"capacity": 2000}
    step = jax.jit(lambda t, k: t.apply(optax.trace(0.9), kvjax.SparseRows(k, jnp.ones((*k.shape, 64))))[0])
    other = step(make(64), kvjax.keys(np.arange(50_000)))
    assert other.slot("trace", 7)[0] == 1.0


def test_slots_in_the_program_that_makes_them(make):
    tx = optax.trace(0.9)

    @jax.jit
    def step(table, keys):
        table = table.apply(tx, kvjax.SparseRows(keys, jnp.ones((*keys.shape, 2))))[0]
        return table, table.slot("trace", keys, tx)

    table, slot = step(make(2), kvjax.keys([3, 4]))
    assert slot.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    with pytest.raises(KeyError, match="want one of its slots"):
        table.slot("mu", 3, tx)


def test_readers_wait_for_a_sink(make):
    """A lookup on another thread while a sink runs is a reader like any other."""
    table = make(1, max_capacity=10, on_full="evict")
    table = table.upsert(np.arange(10), np.ones((10, 1)))
    entered, results = threading.Event(), []

    def sink(*rows):
        entered.set()
        time.sleep(0.2)
        raise OSError("the disk is full")

    table.on_evict(sink)

    def read():
        entered.wait()
        results.append(float(table.lookup(3)[0]))
        results.append(table.stats().size)

    thread = threading.Thread(target=read)
    thread.start()
    with pytest.raises(REFUSED, match="the disk is full"):
        jax.block_until_ready(table.restrict(5))
    thread.join()
    assert results == [1.0, 10]


SINK_INTO_ANOTHER_TABLE = """
import threading, time
import jax, jax.numpy as jnp, numpy as np, optax
import kvjax

cold = kvjax.get_table("cold", dim=64)

def sink(keys, values, slots, freqs, versions, reason):
    time.sleep(0.002)
    table = kvjax.get_table("cold")
    jax.block_until_ready(table.upsert(keys, values))

hot = kvjax.get_table("hot", dim=64, max_capacity=2000, on_full="evict").on_evict(sink)
step = jax.jit(lambda t, k: t.apply(optax.sgd(1.0), kvjax.SparseRows(k, jnp.ones((500, 64))))[0])
stop = threading.Event()

def log():
    while not stop.is_set():
        kvjax.stats(), kvjax.tables()

thread = threading.Thread(target=log)
thread.start()
for i in range(40):
    hot = step(hot, kvjax.keys(np.arange(500) + 500 * i))
    kvjax.get_table("hot") if i % 2 else kvjax.stats()
hot = jax.block_until_ready(hot)
stop.set()
thread.join()
print(len(hot), len(kvjax.get_table("cold")))
"""


@slow
def test_a_sink_may_write_to_another_table_while_others_ask_for_tables():
    done = subprocess.run([sys.executable, "-c", SINK_INTO_ANOTHER_TABLE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2000 18000\n", done.stdout + done.stderr


def test_a_donated_handle_can_be_refreshed(make):
    table = make(1, max_capacity=2, on_full="error").remove(9)  # whose version is JAX's, from a program
    step = jax.jit(lambda t, k: train(t, k), donate_argnums=0)
    with pytest.raises(REFUSED, match="max_capacity=2"):
        finished(step(table, kvjax.keys([1, 2, 3])))
    if table.version.is_deleted():
        with pytest.raises(RuntimeError, match="one that was donated"):
            len(table)
    assert len(table.refresh()) == 0


def test_a_handle_of_a_dropped_table_is_not_one_of_the_next(make):
    old = make(2, initializer=1.0)
    kvjax.drop_table(old.name)
    with pytest.raises(KeyError):
        old.refresh()
    new = kvjax.get_table(old.name, dim=3, initializer=9.0)
    with pytest.raises(RuntimeError, match="another of its name, with dim 3"):
        old.refresh()
    with pytest.raises(REFUSED, match=r"stale|another of its name"):
        old.on_evict(print)
    assert new.lookup(5).tolist() == [9.0] * 3


def test_a_table_that_another_thread_replaces_meanwhile(make, monkeypatch):
    """The version that is read is never taken for another table's."""
    table, read = make(2), live_version

    def replaced(spec, failed=False):
        monkeypatch.undo()
        kvjax.drop_table(spec.name)
        kvjax.get_table(spec.name, dim=3)
        return read(spec)

    monkeypatch.setattr("kvjax._table.table.live_version", replaced)
    got = kvjax.get_table(table.name)
    assert got.dim == 3 and got.lookup(1).shape == (3,)
    monkeypatch.setattr("kvjax._table.derived_handles.live_version", replaced)
    kvjax.drop_table(table.name)
    table = kvjax.get_table(table.name, dim=2)
    with pytest.raises(RuntimeError, match="another of its name, with dim 3"):
        table.refresh()


@pytest.mark.parametrize("all_of, read", [(kvjax.tables, "live"), (kvjax.stats, "stats_of")])
def test_a_table_that_another_thread_moves_meanwhile_is_there(all_of, read, make, mesh, monkeypatch):
    """It is asked for where it was, and its numbers shard by shard, of which some are gone."""
    table, of = make(2, mesh=mesh(2)), getattr(registry, read)

    def moved(spec):
        monkeypatch.undo()
        kvjax.reshard(kvjax.get_table(spec.name), None)
        return of(spec)

    monkeypatch.setattr(registry, read, moved)
    assert table.name in all_of() and table.refresh().spec.placement is None


@pytest.mark.parametrize("all_of, read", [(kvjax.tables, "live"), (kvjax.stats, "stats_of")])
def test_an_error_about_a_table_that_stays_is_raised(all_of, read, make, monkeypatch):
    make(2)
    failing = iter([KeyError("shard")] * 3)  # so that a loop ends here

    def failed(spec):
        raise next(failing)

    monkeypatch.setattr(registry, read, failed)
    with pytest.raises(KeyError, match="shard"):
        all_of()
    assert len(list(failing)) == 2
