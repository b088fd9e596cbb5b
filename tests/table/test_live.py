"""Following handles: reads of the newest finished version, from any thread, beside training."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few_rows, slow

REFUSED = (ValueError, RuntimeError, jax.errors.JaxRuntimeError)
KEYS = kvjax.keys(np.arange(512))


def sorts(dim):
    """A transform that is no row program, so that its step is one of several calls."""
    return optax.stateless(lambda updates, _: jax.tree.map(lambda g: -jnp.sort(g), updates))


TRANSFORMS = {"program": optax.sgd(1.0), "chunks": sorts(2)}


def train(tx):
    return jax.jit(lambda t, k: t.apply(tx, kvjax.SparseRows(k, jnp.ones((*k.shape, t.dim))))[0])


TRAIN = {name: train(tx) for name, tx in TRANSFORMS.items()}


@jax.jit
def rows_of(table, keys):
    return table.lookup(keys)


def test_every_read_sees_the_newest_version(make):
    table = make(2)
    live = table.live()
    for step in (1, 2, 3):
        table = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 2))))[0]
        assert live.lookup(7).tolist() == rows_of(live, kvjax.keys(7)).tolist() == [-2.0 * step] * 2
        assert live.contains([7, 8]).tolist() == [True, False]
        assert (int(live.frequency(7)), int(live.version_of(7))) == (2 * step, step)
    assert not live.pinned(7)
    table = table.pin([7])
    assert live.pinned([7, 8]).tolist() == [True, False]
    assert rows_of._cache_size() == 1  # for all versions
    assert kvjax.lookup_bag(live, np.array([[7, 7]]), pad_id=-1).tolist() == [[-6.0, -6.0]]
    assert jax.vmap(live.lookup)(kvjax.keys([7, 8]))[0].tolist() == [-6.0, -6.0]
    assert (len(live), live.shape, live.stats().size, repr(live)) == (1, (1, 2), 1, repr(live))
    assert repr(live).endswith("rows=1, live)")
    assert live.refresh().upsert(7, [1.0, 1.0]).lookup(7).tolist() == live.lookup(7).tolist() == [1.0, 1.0]


def test_a_read_that_starts_late_is_not_stale(make):
    """As behind the rest of a model: the table is written between the call and its lookup."""
    table = make(2).upsert(7, [1.0, 1.0])
    begun, written, rows = threading.Event(), threading.Event(), []

    def model(x):
        begun.set()
        assert written.wait(10)
        return x

    @jax.jit
    def serve(table, keys, x):
        x = jax.pure_callback(model, x, x)
        words = keys.words + (x * 0).astype(jnp.uint32)
        return table.lookup(kvjax.Keys(words)) + x

    live, x = table.live(), jnp.float32(0)
    thread = threading.Thread(target=lambda: rows.append(serve(live, kvjax.keys(7), x).tolist()))
    thread.start()
    assert begun.wait(10)
    jax.block_until_ready(table.upsert(7, [2.0, 2.0]))
    written.set()
    thread.join()
    assert rows == [[2.0, 2.0]]


def test_slots_are_read_too(make):
    table = make(2)
    live = table.live()
    tx = optax.trace(0.9)
    table, _ = table.apply(tx, kvjax.SparseRows(np.array([7]), jnp.ones((1, 2))))
    assert live.slot("trace", 7).tolist() == [1.0, 1.0]


def test_no_read_takes_the_error_of_another_call(make, tmp_path):
    """A device refuses a call before anybody has been told, and what it was refused for is for the code that writes."""
    stale = make(2)
    table, _ = stale.apply(optax.trace(0.9), kvjax.SparseRows(np.array([7]), jnp.ones((1, 2))))
    live = jax.block_until_ready(table).live()
    reads = [
        lambda: len(live.export()),
        lambda: live.stats().size,
        lambda: len(live.slot("trace", [7])),
        lambda: len(kvjax.checkpoint.save(tmp_path / "saved", {"t": live}) or live),
        lambda: len(kvjax.serving.FrozenTable.write(tmp_path / "frozen", live)),
    ]
    found = []
    for read in reads:
        with pytest.raises(REFUSED, match="remove: want the live handle"):
            jax.block_until_ready(stale.remove([7]))
            table.spec.host.version(table.name, 0)  # waits for the device
            found.append(read())
            kvjax.stats()
    assert found == [1] * len(reads) * kvjax.ffi.on_device()


def test_a_following_handle_only_reads_rows(make, mesh):
    table = make(2)
    live, grads = table.live(), kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    calls = {
        "apply": lambda t: t.apply(optax.sgd(1.0), grads),
        "upsert": lambda t: t.upsert(7, [1.0, 1.0]),
        "after": lambda t: t.after(jnp.ones(2)),
        "prefetch": lambda t: kvjax.prefetch(t, [7]),
        "value_and_grad": lambda t: kvjax.grad(lambda t: t.lookup(7).sum())(t),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError, match=rf"{op}: want a handle of one version, got one through which rows"):
            call(live)
    with pytest.raises(TypeError, match="live: want a call outside jit"):
        jax.jit(lambda t: t.live().lookup(7))(table)
    if kvjax.ffi.on_device():
        with pytest.raises(ValueError, match=r"lookup: want a read outside jit.* look the rows up before the program"):
            rows_of(make(2, mesh=mesh(1)).live(), KEYS)
    assert len(table) == 0
    # In a loss it is like any array that is not trained.
    assert kvjax.grad(lambda w: (w * live.lookup(7)).sum())(jnp.ones(2)).shape == (2,)
    prefetched, table = kvjax.prefetch(table, [7])
    table.upsert(7, [3.0, 3.0])
    assert live.lookup(prefetched).tolist() == [[3.0, 3.0]]


@slow
@pytest.mark.parametrize(
    "options",
    [{}, {"replicated": True}, {"admit": kvjax.admit.MinCount(9)}],
    ids=["shards", "copies", "shared row"],
)
def test_a_mesh_is_read_shard_by_shard(make, mesh, options):
    """Whatever mesh is around; what it reads, compiled or not, is what the handle of the last write reads."""
    table = make(2, mesh=mesh(2), **options)
    live, ids = table.live(), np.array([[3, 1], [4, -1], [1, 5]])
    table, _ = table.apply(optax.trace(0.9), kvjax.SparseRows(np.array([1, 3, 4, 4]), jnp.ones((4, 2))))
    reads = [
        lambda t: t.lookup(ids, pad_id=-1, missing="zeros"),
        lambda t: t.frequency(ids),
        lambda t: t.slot("trace", ids),
        lambda t: kvjax.lookup_bag(t, ids, pad_id=-1, combiner="mean"),
    ]
    jax.block_until_ready(table)

    def all_reads(table):
        return [read(table) for read in reads]

    compiled = all_reads if kvjax.ffi.on_device() else jax.jit(all_reads)
    for found, again, want in zip(all_reads(live), compiled(live), all_reads(table), strict=True):
        np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal(again, want)
    with jax.set_mesh(mesh(2)):
        assert live.lookup(np.zeros((0, 3), int)).shape == (0, 3, 2) and len(live) == len(table)


@pytest.mark.cpu_table
def test_a_compiled_read_reaches_all_shards(make, mesh):
    """From a program of one device or of all, whether the handle is an argument or a constant; until the rows move."""
    table, ids, over = make(2, mesh=mesh(2)), kvjax.keys(np.arange(8)), jax.sharding.PartitionSpec("x")
    live = table.live()
    closed = jax.jit(lambda: live.lookup(ids))
    before = closed()
    table = jax.block_until_ready(table.upsert(ids, np.arange(16.0).reshape(8, 2)))
    want = np.arange(16).reshape(8, 2).tolist()
    assert before.tolist() != want == closed().tolist() == rows_of(live, ids).tolist()
    assert jax.jit(jax.vmap(live.lookup))(ids.reshape(4, 2)).reshape(8, 2).tolist() == want
    local = jax.shard_map(live.lookup, mesh=mesh(2), in_specs=over, out_specs=over)
    assert jax.jit(local)(ids).tolist() == want
    table = kvjax.reshard(table, mesh(4))
    # The second where JAX's caches have been cleared meanwhile, and the program is traced again.
    moved = r"want the table (where the program takes its rows to be.*\.live\(\)|that the handle was made for)"
    for read in (closed, lambda: rows_of(live, ids)):
        with pytest.raises(REFUSED, match=moved):
            jax.block_until_ready(read())
    assert table.live().lookup(ids).tolist() == want


@slow
def test_threads_read_a_mesh_beside_training(make, mesh):
    """Programs of several devices, whose threads would wait for each other: each row is one of a finished step."""
    table, steps = make(2, mesh=mesh(4)), 30
    live, done, seen = table.live(), threading.Event(), []

    def follow(lookup):
        while not done.is_set():
            seen.append(np.asarray(lookup(live, KEYS)))

    lookups = [kvjax.Table.lookup, kvjax.Table.lookup if kvjax.ffi.on_device() else rows_of]
    threads = [threading.Thread(target=follow, args=(lookup,)) for lookup in lookups]
    for thread in threads:
        thread.start()
    for _ in range(steps):
        table = TRAIN["program"](table, KEYS)
    jax.block_until_ready(table.version)
    done.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert seen and all((rows[:, 0] == rows[:, 1]).all() for rows in seen)
    assert (np.asarray(live.lookup(KEYS)) == -float(steps)).all()


def test_a_table_of_other_rows_is_said(make):
    table = make(2)
    live = table.live()
    kvjax.drop_table(table.name)
    kvjax.get_table(table.name, dim=2)
    assert live.lookup(7).shape == (2,)  # of the table that has the name now
    kvjax.drop_table(table.name)
    kvjax.get_table(table.name, dim=3)
    with pytest.raises(RuntimeError, match=r"lookup: want the table that the handle was made for, .* dim 3"):
        live.lookup(7)


@slow
def test_initial_rows_of_a_function(make):
    """They are made before the read, which may meet a version with other rows."""
    table = make(2, initializer=jax.nn.initializers.ones, admit=kvjax.admit.MinCount(9, unadmitted=5))
    table = table.upsert([8], [[2.0, 2.0]])
    assert table.live().lookup([6, 8, 6, 5])[:, 0].tolist() == [1.0, 2.0, 1.0, 1.0]
    table = make(2, initializer=lambda rng, shape, dtype: jax.random.normal(rng, shape, dtype))
    want = table.lookup([1, 2, 3])
    table = table.upsert([2], [[2.0, 2.0]])
    np.testing.assert_array_equal(table.live().lookup([1, 2, 2, 3])[np.array([0, 3])], want[np.array([0, 2])])


@pytest.mark.parametrize(
    "transform,seconds", few_rows([("program", 0.3), ("chunks", 0.3), ("program", 4), ("chunks", 4)], 0, 1)
)
def test_reads_beside_training(make, transform, seconds):
    """Nothing is stale or torn, nobody waits for ever, and what is read only grows newer."""
    table, readers = make(2), 3
    step = TRAIN[transform]
    table = jax.block_until_ready(step(table, KEYS))
    live, stop, reads, problems = table.live(), threading.Event(), [0] * readers, []
    jax.block_until_ready(rows_of(live, KEYS))

    def read(number):
        last = 0.0
        try:
            while not stop.is_set():
                rows = np.asarray(rows_of(live, KEYS) if number else live.lookup(KEYS))
                assert (rows == rows[0, 0]).all(), "torn"
                assert rows[0, 0] <= last, "older than before"
                last, reads[number] = rows[0, 0], reads[number] + 1
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    for thread in threads:
        thread.start()
    steps, end = 1, time.monotonic() + seconds
    while (time.monotonic() < end or (min(reads) < 3 and time.monotonic() < end + 60)) and not problems:
        table, steps = jax.block_until_ready(step(table, KEYS)), steps + 1
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not problems and not any(thread.is_alive() for thread in threads)
    print(f"{transform}: {steps} steps and {reads} reads in {seconds} s")
    assert min(reads) >= 3
    assert live.lookup(7).tolist() == [-steps] * 2


def test_initial_rows_of_another_function_are_refused(make):
    """JAX makes them, by the spec that the handle has; numbers are the table's own."""
    name, key = make(1).name, [7]

    def anew(init):
        kvjax.drop_table(name)
        return kvjax.get_table(name, dim=1, initializer=init)

    def rows(x):
        return lambda rng, shape, dtype: jnp.full(shape, x, dtype)

    live, one = anew(1.0).live(), rows(1.0)
    anew(2.0)
    assert live.lookup(key).tolist() == [[2]]
    for before, after in [(one, rows(2.0)), (1.0, one), (one, 2.0)]:
        live = anew(before).live()
        assert live.lookup(key).tolist() == [[1]]
        anew(after)
        with pytest.raises(RuntimeError, match="lookup: want the table that the handle was made for, got another of"):
            live.lookup(key)
    live = anew(one).live()
    anew(one)
    assert live.lookup(key).tolist() == [[1]]
