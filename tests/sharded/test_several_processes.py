"""Tables that are sharded over several processes, which are started here and talk over gloo.

Each launch makes many checks, since starting takes most of the time. The reference is a table in one place that each
process trains on the whole batch.
"""

import functools
import json
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from tests.support import processes
from tests.support.marks import slow
from tests.support.tables import KEYS, by_low_bits, same_rows, step

OPTIONS = {"dim": 3, "seed": 5, "initializer": kvjax.initializers.normal(0.1), "admit": kvjax.admit.MinCount(2)}


def everywhere(n=None):
    """A mesh of all devices, or of the first n of each process."""
    devices = [d for d in jax.devices() if n is None or d in jax.local_devices(d.process_index)[:n]]
    return jax.make_mesh((len(devices),), ("x",), devices=devices)


def batches(steps, seed=0):
    """No key twice in a batch, so that sums have one order."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(KEYS)[:24] for _ in range(steps)]


def shared(mesh, keys):
    """A batch of which each process gives its own part."""
    mine = np.split(keys, jax.process_count())[jax.process_index()]
    sharding = NamedSharding(mesh, P("x"))
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, np.asarray(x)), kvjax.keys(mine))


def trained(table, batches):
    for batch in batches:
        mesh = table.spec.placement.mesh if table.spec.placement else None
        table = step(table, kvjax.keys(batch) if mesh is None else shared(mesh, batch))
    return table


def fetch(x):
    return multihost_utils.process_allgather(x, tiled=True)


def own(table, rows):
    """Of the rows of a whole table, those of this process."""
    placement = table.spec.placement
    numbers = [shard.shard for shard in placement.local]
    return rows.take(np.isin(placement.owners(rows.keys), numbers))


def assert_is(table, reference):
    """A sharded table has the rows of one in one place, each process its own."""
    want, got = reference.snapshot(), table.snapshot()
    same_rows(own(table, want.rows), got.rows)
    assert got.rows.last_step == want.rows.last_step
    mine = np.isin(
        table.spec.placement.owners(want.admission["pending_keys"]), [s.shard for s in table.spec.placement.local]
    )
    for name in ("pending_keys", "pending_counts"):
        np.testing.assert_array_equal(got.admission[name], want.admission[name][mine])
    assert table.size(all_processes=True) == len(want.rows) and len(table) == len(got.rows)
    np.testing.assert_array_equal(fetch(table.lookup(KEYS)), reference.lookup(KEYS))


def fails(match, call):
    with pytest.raises(Exception) as info:
        jax.block_until_ready(call())
    assert re.search(match, str(info.value)), info.value


def save(folder, number, tables, **how):
    with ocp.CheckpointManager(folder) as manager:
        manager.save(number, args=ocp.args.Composite(tables=kvjax.orbax.TableSave(tables, **how)))
        manager.wait_until_finished()


def restore(folder, number, *args, **options):
    with ocp.CheckpointManager(folder) as manager:
        composite = ocp.args.Composite(tables=kvjax.orbax.TableRestore(*args, **options))
        return manager.restore(number, args=composite)["tables"]


# ---- two processes of one device: the least of everything ------------------------------------------------------------


def both(folder):
    reference, table = kvjax.get_table("r", **OPTIONS), kvjax.get_table("t", **OPTIONS, mesh=everywhere())
    reference, table = trained(reference, batches(2)), trained(table, batches(2))
    assert_is(table, reference)
    me = jax.process_index()
    differ = "the same keys and values on every device|the same keys|another process"
    fails(differ, lambda: table.upsert(np.arange(4) + 10 * me, np.ones((4, 3))).version)
    assert_is(table.refresh(), reference)
    save(folder, 1, {"t": table.refresh(), "r": reference})
    taken = "^kvjax: save: want a path with nothing there"
    there = (
        "^kvjax: save: want a call that all processes can do, got a failure in process 0 .CheckpointError: kvjax: save"
    )
    fails(there if me else taken, lambda: kvjax.checkpoint.save(f"{folder}/1", {"t": table.refresh()}))
    another = "want the same call in all processes.*{}"
    whole = {"t": table, "r": reference}
    fails(another.format("keys '. with"), lambda: restore(folder, 1, whole, keys=np.arange(4 + me)))
    fails(another.format("dtype"), lambda: restore(folder, 1, whole, dtype="bfloat16" if me else None))
    place = {"partitioner": by_low_bits} if me else {}
    fails(another.format("shards of 0 to 63"), lambda: kvjax.reshard(table.refresh(), everywhere(), **place).version)
    place = {"mesh": everywhere()} if me else {"mesh": everywhere(), "partitioner": by_low_bits}
    fails(another.format("placement"), lambda: restore(folder, 1, {"t": "elsewhere"}, **place))
    if "elsewhere" in kvjax.tables():
        kvjax.drop_table("elsewhere")
    with pytest.warns(UserWarning, match="table 'whole', restore: .* each of 2 processes has all rows"):
        whole = kvjax.checkpoint.restore(f"{folder}/1", {"t": "whole"})["t"]
    assert len(whole) == table.refresh().size(all_processes=True)
    kvjax.drop_table("whole")
    bound = kvjax.get_table("bound", dim=1, constraint=functools.partial(jnp.clip, max=1.0), mesh=everywhere())
    kvjax.checkpoint.save(f"{folder}/bound", [bound])  # whose text has an address
    kvjax.drop_table("bound")
    seeded = kvjax.get_table("seeded", dim=1, seed=me, mesh=everywhere())
    fails(another.format("seed 0 in process 0"), lambda: kvjax.checkpoint.save(f"{folder}/x", [seeded]))
    kvjax.drop_table("seeded")
    prune = kvjax.Prune(min_frequency=1 + me)
    fails(another.format("prune 'min_frequency=1"), lambda: kvjax.checkpoint.save(f"{folder}/x", [table], prune=prune))
    differ = "not on CUDA yet" if kvjax.ffi.on_device() else differ
    for call in (lambda t: t.restrict(8 + me), lambda t: t.evict(kvjax.evict.MaxAge(3 + me)),
                 lambda t: t.evict(kvjax.evict.MaxAge(3)) if me else t.restrict(8)):  # fmt: skip
        fails(differ, lambda call=call: call(table.refresh()).version)
    old = table.refresh()
    table, reference = (each.upsert(KEYS[:1], np.ones((1, 3))) for each in (old, reference))
    stale = "stale" if me else "a failure in process 1 .*stale"
    fails(stale, lambda: (old if me else table).switch_optimizer(optax.adam(0.1)).version)
    assert_is(table.refresh(), reference)
    left_behind()
    save(folder, 2, {"t": table, "r": reference}, cursor="c")
    later, other = kvjax.get_table("q", **OPTIONS), kvjax.get_table("s", **OPTIONS, mesh=everywhere())
    for number in (3, 4):
        tables = (table, reference, other, later)
        table, reference, other, later = (trained(each, batches(2, number)) for each in tables)
        save(folder, number, {"t": table, "r": reference, "s": other, "q": later}, delta_since="c")
    print("done")


def left_behind():
    """Rows of one step, all that a process has, may be behind those of another process."""
    table, tx = kvjax.get_table("lazy", dim=1, mesh=everywhere()), kvjax.optax.catch_up(optax.sgd(1.0, momentum=0.5))
    table, state = table.apply(tx, kvjax.SparseRows(kvjax.keys(np.arange(8)), jnp.ones((8, 1))), tx.init(1))
    of_first = np.flatnonzero(table.spec.placement.owners(np.arange(8)) == 0)
    table, state = table.apply(tx, kvjax.SparseRows(kvjax.keys(of_first), jnp.ones((len(of_first), 1))), state)
    if jax.process_index():
        with pytest.warns(UserWarning, match=r"behind \((\d) of \1, by up to 1 steps"):
            table.export()
    else:
        table.export()
    found = "behind" if jax.process_index() else "failure in process 1 .*behind"
    fails(found, lambda: table.switch_optimizer(optax.sgd(1.0)).version)
    kvjax.drop_table("lazy")


@slow
def test_two_processes_train_fail_and_save_together(tmp_path):
    outputs = processes.run(both, str(tmp_path), n=2, devices=1, timeout=200)
    assert all("done" in output for output in outputs)
    tables = restore(tmp_path, 1, {"r": None, "t": None})
    one, other = tables["r"].snapshot(), tables["t"].snapshot()
    same_rows(one.rows, other.rows)
    assert len(one.rows) > 10
    np.testing.assert_array_equal(one.admission["pending_counts"], other.admission["pending_counts"])
    for number in (3, 4):  # to which two tables have come
        for name in "trsq":
            meta = json.loads((tmp_path / f"{number}/tables/{name}/kvjax.json").read_text())
            assert ("delta" in meta) == (number == 4 or name in "tr"), (number, name)
    tables = restore(tmp_path, 4, {"r": None, "t": None, "q": None, "s": None})
    for one, other in (("r", "t"), ("q", "s")):
        same_rows(tables[one].snapshot().rows, tables[other].snapshot().rows)
    assert len(tables["s"]) > 10


# ---- two processes of two devices ----------------------------------------------------------------------------------


def only_low(keys, n):
    return jnp.where(keys.words[:, 0] < 100, keys.words[:, 0] % jnp.uint32(n), jnp.uint32(n)).astype(jnp.int32)


def two(folder):
    me = jax.process_index()
    reference, table = kvjax.get_table("r", **OPTIONS), kvjax.get_table("t", **OPTIONS, mesh=everywhere())
    reference, table = reference.pin(KEYS[:3]), table.pin(KEYS[:3])
    reference, table = trained(reference, batches(3)), trained(table, batches(3))
    assert_is(table, reference)
    assert 0 < len(table.export()) < len(reference) and table.stats().size == len(table)
    found = fetch(table.contains(shared(everywhere(), KEYS)))
    np.testing.assert_array_equal(found, reference.contains(KEYS))
    table, reference = table.upsert(KEYS[:5], np.ones((5, 3))), reference.upsert(KEYS[:5], np.ones((5, 3)))
    assert_is(table, reference)
    same_rows(table.load(table.export(slots=True)).export(), own(table, reference.export()))
    table = table.refresh()

    # Failures: of a shard, for a key that only one process has; and of one process on the host.
    narrow = kvjax.get_table("narrow", dim=3, mesh=everywhere(), partitioner=only_low)
    keys = np.where(np.arange(8) == 7, 1000, np.arange(8))
    there = "partitioner: want shards in 0..3, got 4" if me == 1 else "a failure in another process"
    fails(there, lambda: narrow.lookup(shared(everywhere(), keys)))
    fails(there, lambda: step(narrow, shared(everywhere(), keys)).version)
    own_ids = np.arange(4) + 10 * me
    differ = "the same keys and values on every device" if me == 1 else "the same keys|another process"
    fails(differ, lambda: narrow.refresh().upsert(own_ids, np.ones((4, 3))).version)
    # So does a read; keys that are not even as many would end the process in a collective.
    for read in (lambda t: t.lookup(own_ids), lambda t: t.contains(np.zeros(4 + me, np.int64)),
                 lambda t: t.lookup([8, 0] if me else [3, 1]), lambda t: t.frequency(np.arange(4 * me))):  # fmt: skip
        fails(differ, lambda read=read: read(narrow.refresh()))
    assert np.asarray(narrow.refresh().lookup(np.arange(8))).shape == (8, 3)  # on every device
    narrow = step(narrow.refresh(), shared(everywhere(), np.arange(8)))
    assert narrow.size(all_processes=True) == 8
    rows = table.export()
    bad = rows.take(np.r_[np.arange(len(rows)), 0]) if me == 1 else rows
    fails(
        "distinct keys, got key .* twice" if me == 1 else "failure in process 1 .*distinct keys",
        lambda: table.load(bad),
    )
    other = reference.export().take(own_keys(table, reference) | (np.arange(len(reference)) < 9))
    fails("the rows of its own shards in each process, or all rows in all", lambda: table.load(other))
    rule = kvjax.Prune(predicate=sorry)
    fails(
        "failure in process 1 .*sorry" if me == 0 else "sorry", lambda: save(folder + "x", 1, {"t": table}, prune=rule)
    )
    assert_is(table, reference)
    assert_is(table.load(reference.snapshot()), reference)
    table = table.refresh()

    alone = {"me": kvjax.get_table(f"only{me}", dim=2)} if me == 1 else {}
    fails("want it in the call of each process", lambda: save(folder + "x", 2, alone))

    # Copies on devices of both processes.
    copy = kvjax.get_table("copy", **OPTIONS, mesh=everywhere(), replicated=True)
    copy = trained(copy.pin(KEYS[:3]), batches(3)).upsert(KEYS[:5], np.ones((5, 3)))
    assert_is(copy, reference)

    save(folder, 1, {"t": table, "copy": copy, "r": reference})
    for name in ("t", "copy", "r"):
        kvjax.drop_table(name)
    again = restore(folder, 1, {"t": None, "copy": None}, mesh=everywhere(1))
    reference = restore(folder, 1, {"r": None})["r"]
    assert_is(again["t"], reference)
    assert_is(again["copy"], reference)

    table = again["t"]
    kvjax._table.reshard._PIECE_BYTES = 300  # several rounds
    for place in ({"mesh": everywhere()}, {"mesh": everywhere(), "partitioner": by_low_bits},
                  {"mesh": everywhere(1), "replicated": True}, {"mesh": everywhere(1)}):  # fmt: skip
        old, table = table, kvjax.reshard(table, **place)
        assert_is(table, reference)
    fails("stale one|a failure in another process", lambda: old.lookup(KEYS))
    table = table.to(kvjax.storage.Mmap(folder))
    assert_is(table, reference)
    if not kvjax.ffi.on_device():  # which has no use for a folder
        fails("none|a failure in another process", lambda: table.to(kvjax.storage.Mmap(folder + "none" * me)).version)
    table = table.refresh().to(kvjax.storage.Host())
    assert_is(table, reference)
    fails("name 'fork0' in process 0 and name 'fork1' in process 1|another process", lambda: table.copy(f"fork{me}"))
    taken = {"fork": kvjax.get_table("fork", dim=3)} if me else {}
    fails("no table has, got 'fork'" if taken else "failure in process 1 .*'fork'", lambda: table.copy("fork"))
    if taken:
        kvjax.drop_table("fork")
    fork = table.copy("fork")
    assert_is(trained(fork, batches(2, 1)), trained(reference.copy("other"), batches(2, 1)))
    kvjax.drop_table("fork"), kvjax.drop_table("other")
    alone = kvjax.reshard(table, None)
    same_rows(alone.export(slots=True), reference.export(slots=True))
    table = kvjax.reshard(alone, everywhere())
    assert_is(trained(table, batches(2, 1)), trained(reference, batches(2, 1)))
    local = jax.make_mesh((2,), ("x",), devices=jax.local_devices())
    fails("devices of the same processes", lambda: kvjax.reshard(table.refresh(), local).version)
    fails("devices of this process", lambda: kvjax.get_table("far", dim=2, mesh=remote()).version)
    print("done")


def own_keys(table, reference):
    return np.isin(reference.export().keys, table.export().keys)


def remote():
    return jax.make_mesh((2,), ("x",), devices=[d for d in jax.devices() if d not in jax.local_devices()])


def sorry(rows):
    """A rule that fails in process 1."""
    if jax.process_index() == 1:
        raise OSError("sorry")
    return np.ones(len(rows), bool)


# ---- four processes of one device, on what two have saved ----------------------------------------------------------


def four(folder):
    mesh = everywhere()
    reference = restore(folder, 1, {"r": None})["r"]
    table = kvjax.get_table("t", **OPTIONS, mesh=mesh, partitioner=by_low_bits)
    both = restore(folder, 1, {"t": table, "copy": None}, mesh=mesh)
    assert_is(both["t"], reference)
    assert_is(both["copy"], reference)
    table, reference = trained(both["t"], batches(2, 1)), trained(reference, batches(2, 1))
    assert_is(table, reference)
    save(folder, 2, {"t": table, "r": reference}, cursor="c")
    for number in (3, 4):
        gone = KEYS[number : 3 * number]
        table, reference = (trained(each.remove(gone), batches(1, number)) for each in (table, reference))
        save(folder, number, {"t": table, "r": reference}, delta_since="c")
    save(folder, 5, {"t": table, "r": reference}, prune=kvjax.Prune(top_k=9, keep=KEYS[-1:]))  # of all, ties too
    assert_is(restore(folder, 3, {"t": table})["t"], restore(folder, 3, {"r": reference})["r"])
    print("done")


@slow
def test_all_of_it(mesh, tmp_path):
    """Two processes, then four on their checkpoint, then this one on that of the four."""
    mesh = mesh(8, explicit=True)
    for target, n, devices in ((two, 2, 2), (four, 4, 1)):
        outputs = processes.run(target, str(tmp_path), n=n, devices=devices, timeout=300)
        assert all("done" in output for output in outputs)
    folders = [p.name for p in sorted((tmp_path / "2/tables/t").glob("shard-*")) if p.is_dir()]
    assert folders == [f"shard-0000{i}-of-00004" for i in range(4)]
    copies = [p.name for p in (tmp_path / "1/tables/copy").glob("shard-*") if p.is_dir()]
    assert copies == ["shard-00000-of-00001"]
    sizes = []
    for number in (1, 2, 3, 4, 5):
        for name in "tr":
            meta = json.loads((tmp_path / str(number) / "tables" / name / "kvjax.json").read_text())
            assert ("delta" in meta) == (number in (3, 4))
        both = restore(tmp_path, number, {"r": None, "t": None}, **({"mesh": mesh} if number == 1 else {}))
        one, other = both["r"].snapshot(), both["t"].snapshot()
        same_rows(one.rows, other.rows)
        np.testing.assert_array_equal(one.admission["pending_counts"], other.admission["pending_counts"])
        sizes.append(len(one.rows))
        for name in both:
            kvjax.drop_table(name)
    assert sizes[4] in (9, 10) and 20 < sizes[0] <= sizes[1]


# ---- a process dies, or is told to end -------------------------------------------------------------------------------


def save_for_ever(folder):
    table = kvjax.get_table("t", dim=3, mesh=everywhere())
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3)) as manager:
        for number in range(1_000_000):
            table = table.upsert(np.arange(1000), np.full((1000, 3), number, np.float32))
            manager.save(number, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": table})))
            print("step", number, flush=True)


@slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_death_ends_the_others_and_the_last_checkpoint_is_whole(victim, tmp_path):
    with processes.start(save_for_ever, str(tmp_path), devices=2) as group:
        group.wait_for("step 5\n")
        group.kill(victim)
        codes = group.wait(timeout=4 * processes.PATIENCE)
        assert codes[victim] == -9 and codes[1 - victim] not in (0, None)
    with ocp.CheckpointManager(tmp_path) as manager:
        last = manager.latest_step()
    assert last >= 3
    rows = restore(tmp_path, last)["t"].export()
    assert len(rows) == 1000 and (rows.values == last).all()


def save_when_told(folder):
    table = kvjax.get_table("t", dim=3, mesh=everywhere())
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(save_interval_steps=1_000_000)) as manager:
        for number in range(1, 1_000_000):
            table = table.upsert(np.arange(100), np.full((100, 3), number, np.float32))
            manager.save(number, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": table})))
            print("step", number, flush=True)
            if manager.reached_preemption(number):
                break
    print("last", number, flush=True)


@slow
def test_a_preemption_of_one_saves_the_last_step_of_all(tmp_path):
    with processes.start(save_when_told, str(tmp_path)) as group:
        group.wait_for("step 5\n")
        group.kill(1, signal.SIGTERM)
        assert group.wait(timeout=60) == [0, 0]
        last = [int(group.output(process).rsplit("last ", 1)[1]) for process in range(2)]
    with ocp.CheckpointManager(tmp_path) as manager:
        assert last == 2 * [manager.latest_step()]
    rows = restore(tmp_path, last[0])["t"].export()
    assert len(rows) == 100 and (rows.values == last[0]).all()
