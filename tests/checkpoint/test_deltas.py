"""Deltas: a base and what has changed since are the table, whatever has been done to it; nothing else restores."""

import contextlib
import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvjax
from kvjax._process import PROCESS
from kvjax.checkpoint import CheckpointError, compact, diff, prune, restore, save, verify
from tests.support.marks import examples, slow
from tests.support.tables import Small, on_gpu

TX = optax.adagrad(0.1)
KEYS = np.array([0, 1, -1, 7, 2**40, -(2**63), 2**63 - 1, *range(100, 120)])


def has_delta(path, table="t"):
    return "delta" in json.loads((path / table / "kvjax.json").read_text())


def assert_same(got, want):
    """Two snapshots, to the bit."""
    for name, array in want.rows.columns().items():
        np.testing.assert_array_equal(got.rows.columns()[name], array, err_msg=name)
    assert got.rows.last_step == want.rows.last_step and got.slot_types == want.slot_types
    for name, array in want.admission.items():
        np.testing.assert_array_equal(got.admission[name], array, err_msg=name)


def step(table, keys):
    return table.apply(TX, kvjax.SparseRows(np.asarray(keys), jnp.ones((len(keys), table.dim))))[0]


def restored(path, make, like, **options):
    """What a checkpoint holds, in a table of its own."""
    spec = like.spec
    fresh = make(spec.dim, seed=spec.seed, initializer=spec.initializer, admit=spec.admit)
    return restore(path, {"t": fresh}, **options)["t"].snapshot()


def test_base_and_deltas_are_the_table(make, tmp_path):
    table = make(2, admit=kvjax.admit.MinCount(2)).upsert(KEYS[:10], np.ones((10, 2)))
    save(tmp_path / "base", {"t": table}, cursor="serving")
    want = []
    table = step(table.remove(KEYS[:2]), [7, 300, 300, 301]).pin(KEYS[4:5])
    save(tmp_path / "a", {"t": table}, since="serving")
    want.append(table.snapshot())
    table = step(table.upsert(KEYS[:1], np.full((1, 2), 5.0)), [301, 302]).unpin(KEYS[4:5])
    save(tmp_path / "b", {"t": table}, since="serving")
    want.append(table.snapshot())
    compact(tmp_path / "b", tmp_path / "whole")
    save(tmp_path / "live", {"t": table})
    assert has_delta(tmp_path / "a") and has_delta(tmp_path / "b") and not has_delta(tmp_path / "whole")
    assert json.loads((tmp_path / "b/t/kvjax.json").read_text())["rows"] == 3  # 0, 2**40, 301
    for path, snapshot in zip(("a", "b", "whole"), [*want, want[-1]], strict=True):
        assert_same(restored(tmp_path / path, make, table), snapshot)
        assert verify(tmp_path / path).ok
    assert diff(tmp_path / "b", tmp_path / "live").same

    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"want the checkpoint of digest .*base="):
        restore(tmp_path / "b", {"t": table})


def test_base_is_a_checkpoint_or_a_folder_of_some(make, tmp_path):
    table = make(1).upsert(KEYS[:3], np.ones((3, 1)))
    save(tmp_path / "0", {"t": table}, cursor="c")
    for i in (1, 2, 3):
        table = table.upsert(KEYS[i : i + 1], [[i]])
        save(tmp_path / str(i), {"t": table}, since="c")
    (tmp_path / "far/more").mkdir(parents=True)
    delta = (tmp_path / "3").rename(tmp_path / "far/more/3")
    want = table.snapshot()
    for base in (tmp_path, tmp_path / "2"):  # which builds on those beside it
        assert_same(restore(delta, {"t": table}, base=base)["t"].snapshot(), want)
    with pytest.raises(CheckpointError, match=r"none in .*nowhere, which is not there"):
        restore(delta, {"t": table}, base=tmp_path / "nowhere")
    save(tmp_path / "latest", {"t": table.refresh()})  # which has no number, beside those that have
    assert restore(tmp_path, {"t": table})["t"].shape == (3, 1)  # as in the last of these


@slow
def test_a_damaged_copy_of_a_base_hides_no_other(make, tmp_path):
    table = make(1).upsert(KEYS[:3], np.ones((3, 1)))
    save(tmp_path / "base", {"t": table}, cursor="c")
    table = table.upsert(KEYS[:1], [[2.0]])
    save(tmp_path / "delta", {"t": table}, since="c")
    want, unread = table.snapshot(), ("zarr.json", "offsets")
    for path in [path.relative_to(tmp_path / "base") for path in (tmp_path / "base").rglob("*") if path.is_file()]:
        if {path.name, path.parent.name} & {*unread}:
            continue
        shutil.copytree(tmp_path / "base", tmp_path / "copy")  # newer, so it is looked at first
        for damaged in (tmp_path / "copy" / path, tmp_path / "base" / path):
            damaged.write_bytes((data := damaged.read_bytes())[:-1] + bytes([data[-1] ^ 4]))
            if damaged.is_relative_to(tmp_path / "copy"):
                table = restore(tmp_path / "delta", {"t": table})["t"]
                assert_same(table.snapshot(), want)
        with pytest.raises(CheckpointError):
            restore(tmp_path / "delta", {"t": table})
        (tmp_path / "base" / path).write_bytes(data)
        shutil.rmtree(tmp_path / "copy")


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["upsert", "step", "step", "remove", "evict", "restrict", "pin", "unpin", "assign", "add", "insert",
             "accum", "clear", "clear_slots", "load", "grow", "save", "save", "save", "move", "compact", "restore"]
        ),
        st.lists(st.integers(0, len(KEYS) - 1), min_size=5, max_size=5),  # of one shape, to compile once
    ),
    max_size=14,
)  # fmt: skip


def write(table, operation, keys):
    """One write of any kind."""
    n, dim = len(keys), table.dim
    if operation == "upsert":
        return table.upsert(keys, np.full((n, dim), 2.0))
    if operation == "step":
        return step(table, keys) if n else table
    if operation == "evict":
        return table.evict(kvjax.evict.LeastRecent(3))
    if operation == "restrict":
        return table.restrict(5)
    if operation == "assign":
        return table.assign(keys, np.full((n, dim), 3.0))
    if operation == "add":
        return table.add(keys, np.full((n, dim), 0.5, np.float32))
    if operation == "insert":
        return table.lookup_or_insert(keys)[1]
    if operation == "accum":
        rows = np.full((n, dim), 4.0, np.float32)
        return table.accum(keys, rows, rows + 1, np.arange(n) % 2 == 0)
    if operation == "load":
        rows = table.export(slots=True)
        return table.load(rows.take(np.arange(len(rows)) % 2 == 0))
    if operation == "grow":
        return table.upsert(np.arange(1000, 3000), np.ones((2000, dim)))
    if operation == "move":
        return table.to(kvjax.storage.Hybrid(0) if on_gpu() else kvjax.storage.Host())  # where programs find it
    if operation in ("clear", "clear_slots"):
        return getattr(table, operation)()
    return getattr(table, operation)(keys)


@slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"admit": kvjax.admit.MinCount(2, max_age=2)},
        {"admit": kvjax.admit.MinCount(3, unadmitted=7)},
        {"admit": kvjax.admit.MinCount(2, max_waiting=3)},
        {"admit": kvjax.admit.Sketch(2, 2**21, halve_every=2)},
        {"max_capacity": 8, "on_full": "evict", "evict": kvjax.evict.LeastFrequent()},
        {"shards": 4},
        {"storage": Small(256)},
    ],
    ids=["plain", "windows", "shared", "waiting", "sketch", "full", "sharded", "two memories"],
)
def test_whatever_has_been_done(options, mesh, tmp_path_factory):
    options = dict(options)
    if "storage" in options and not kvjax.ffi.on_device():
        pytest.skip("wants tables on a device")
    if shards := options.pop("shards", None):
        options["mesh"] = mesh(shards, explicit=True)
    left_out = {"move", *(["evict", "restrict"] if kvjax.ffi.on_device() else [])} if shards else ()

    @given(OPERATIONS)
    @settings(
        max_examples=examples(2, 3 if options else 5),
        suppress_health_check=list(HealthCheck),
    )
    def run(operations):
        folder = tmp_path_factory.mktemp("deltas")
        name = "ops"
        with contextlib.suppress(KeyError):
            kvjax.drop_table(name)
        table = kvjax.get_table(name, dim=2, **options)
        save(folder / "0", {"t": table}, cursor="serving")
        save(folder / "other", {"t": table}, cursor="training")
        wants = [table.snapshot()]
        for operation, numbers in [*operations, ("save", [])]:
            keys, last = KEYS[np.array(numbers, int)], folder / str(len(wants) - 1)
            if operation == "save":
                save(folder / str(len(wants)), {"t": table}, since="serving")
                wants.append(table.snapshot())
            elif operation == "compact":  # later deltas build on it
                compact(last, folder / "new")
                shutil.rmtree(last)
                (folder / "new").rename(last)
            elif operation == "restore":
                table = restore(last, {"t": table}, cursor="serving")["t"]
            elif operation not in left_out:
                with contextlib.suppress(RuntimeError, MemoryError):  # a full table, which stays as it is
                    table = write(table, operation, keys)
        save(folder / "trained", {"t": table}, since="training")
        compact(folder / "trained", folder / "compact")
        for path, want in [*((str(i), w) for i, w in enumerate(wants)), ("trained", wants[-1])]:
            table = restore(folder / path, {"t": table})["t"]
            assert_same(table.snapshot(), want)
        assert diff(folder / "compact", folder / "trained").same
        assert_same(restore(folder / "compact", {"t": table})["t"].snapshot(), wants[-1])
        shutil.rmtree(folder)
        kvjax.drop_table(name)

    run()


@slow
@pytest.mark.parametrize("write", ["clear", "clear_slots", "load", "restore", "move", "drop"])
def test_what_is_not_known_is_saved_whole(write, mesh, tmp_path):
    table = step(kvjax.get_table("t", dim=2).upsert(KEYS, np.ones((len(KEYS), 2))), [7, 8])
    save(tmp_path / "base", {"t": table}, cursor="c")
    if write == "restore":
        table = restore(tmp_path / "base", {"t": table})["t"]
    elif write == "load":
        table = table.load(table.export(slots=True))
    elif write == "move":
        table = kvjax.reshard(table, mesh(2, explicit=True))
    elif write == "drop":
        kvjax.drop_table("t")
        table = kvjax.get_table("t", dim=3).upsert(KEYS[:2], np.ones((2, 3)))
    else:
        table = getattr(table, write)()
    want = table.snapshot()
    save(tmp_path / "a", {"t": table}, since="c")
    known = kvjax.ffi.on_device() and write in ("load", "restore")  # a device compares all rows
    assert has_delta(tmp_path / "a") == known
    if not known:
        shutil.rmtree(tmp_path / "base")
    assert_same(restore(tmp_path / "a", {"t": table})["t"].snapshot(), want)
    table = restore(tmp_path / "a", {"t": table})["t"]
    save(tmp_path / "b", {"t": table}, cursor="c")
    save(tmp_path / "c", {"t": table.remove(KEYS[:1])}, since="c")
    assert has_delta(tmp_path / "c")
    kvjax.drop_table("t")


@slow
def test_a_save_that_fails_moves_no_cursor(make, tmp_path, monkeypatch):
    table = make(2).upsert(KEYS, np.ones((len(KEYS), 2)))
    save(tmp_path / "base", {"t": table}, cursor="c")
    table = table.remove(KEYS[:3])
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvjax.checkpoint._tables.save.write_manifest", lambda folder: (_ for _ in ()).throw(OSError("full"))
        )
        with pytest.raises(OSError, match="full"):
            save(tmp_path / "a", {"t": table}, since="c")
    table = table.remove(KEYS[3:4])
    save(tmp_path / "b", {"t": table}, since="c")
    want = table.snapshot()
    assert_same(restore(tmp_path / "b", {"t": table})["t"].snapshot(), want)
    with pytest.raises(CheckpointError, match=r"want a cursor 'other'.*'c' of \['t'\]"):
        save(tmp_path / "c", {"t": table}, since="other")
    with pytest.raises(ValueError, match="prune="):
        save(tmp_path / "c", {"t": table}, cursor="c", prune=kvjax.Prune(top_k=1))
    with pytest.raises(RuntimeError, match="stale"):
        save(tmp_path / "c", {"t": table}, since="c")
    assert not (tmp_path / "c").exists()


@slow
def test_deltas_by_orbax(make, tmp_path):
    table = make(2).upsert(KEYS, np.ones((len(KEYS), 2)))
    wants = []
    with ocp.CheckpointManager(tmp_path) as manager:
        for number in range(4):
            how = {"cursor": "c"} if number == 0 else {"delta_since": "c"}
            args = ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": table}, **how))
            manager.save(number, args=args)
            wants.append(table.snapshot())
            table = step(table.remove(KEYS[number : number + 1]), [number])
        manager.wait_until_finished()
        for number, want in enumerate(wants):
            args = ocp.args.Composite(tables=kvjax.orbax.TableRestore({"t": table}))
            table = manager.restore(number, args=args)["tables"]["t"]
            assert_same(table.snapshot(), want)
            assert has_delta(tmp_path / str(number) / "tables") == (number > 0)
    assert_same(restore(tmp_path, {"t": table})["t"].snapshot(), wants[-1])


@slow
def test_deltas_go_on_after_a_restore(make, tmp_path):
    table = make(2, admit=kvjax.admit.MinCount(2)).upsert(KEYS, np.ones((len(KEYS), 2)))
    save(tmp_path / "base", {"t": table}, cursor="c")
    save(tmp_path / "a", {"t": step(table, [*KEYS[:3], 500])}, since="c")
    PROCESS.cursors.clear()  # as in another process
    for wrong in ({"slots": False}, {"keys": KEYS}, {"merge": True}):
        with pytest.raises(ValueError, match=f"got {next(iter(wrong))}"):
            restore(tmp_path / "a", {"t": table}, cursor="c", **wrong)
    with pytest.raises(ValueError, match="the admission that was saved"):
        restore(tmp_path / "a", {"t": make(2, seed=table.spec.seed)}, cursor="c")
    table = restore(tmp_path / "a", {"t": table}, cursor="c")["t"]
    table = step(table.remove(KEYS[:1]), [500])
    save(tmp_path / "b", {"t": table}, since="c")
    want = table.snapshot()
    assert has_delta(tmp_path / "b") and len(want.admission["pending_keys"]) == 0
    assert_same(restore(tmp_path / "b", {"t": table})["t"].snapshot(), want)


@slow
@pytest.mark.parametrize(
    "how", [{"mesh": 3}, {"dtype": "bfloat16"}, {"keys": KEYS[1:5]}, {"slots": False}], ids=lambda how: next(iter(how))
)
def test_ways_to_restore_a_delta(how, make, mesh, tmp_path):
    """Other shards, a dtype, some keys, no slots: as from a checkpoint that was saved whole."""
    how = {"mesh": mesh(how["mesh"], explicit=True)} if "mesh" in how else how
    table = step(make(2).upsert(KEYS, np.ones((len(KEYS), 2))), KEYS[:5])
    (tmp_path / "x").mkdir(), (tmp_path / "y").mkdir()
    save(tmp_path / "x/base", {"t": table}, cursor="c")
    table = step(table.remove(KEYS[:2]), KEYS[3:7])
    save(tmp_path / "y/delta", {"t": table}, since="c")
    save(tmp_path / "y/whole", {"t": table})
    got = []
    for path, base in (("delta", tmp_path / "x/base"), ("whole", None)):
        got.append(restore(tmp_path / "y" / path, base=base, **how)["t"].snapshot())
        kvjax.drop_table("t")
    assert_same(*got)


@slow
def test_damaged_and_other_deltas_are_refused(make, tmp_path):
    table = make(2).upsert(KEYS, np.ones((len(KEYS), 2)))
    save(tmp_path / "base", {"t": table}, cursor="c")
    for name in "ab":
        table = step(table, KEYS[:4])
        save(tmp_path / name, {"t": table.refresh()}, since="c")
    was = table.snapshot()
    other = make(2).upsert(KEYS, np.zeros((len(KEYS), 2)))
    PROCESS.cursors.clear()
    (tmp_path / "far").mkdir()
    kept = (tmp_path / "base").rename(tmp_path / "far/base")
    save(tmp_path / "base", {"t": other})  # another base, at the same path
    with pytest.raises(CheckpointError, match="on which the delta"):
        compact(tmp_path / "a", tmp_path / "x", base=tmp_path / "base")
    compact(tmp_path / "a", tmp_path / "whole-a", base=kept)
    shutil.rmtree(tmp_path / "a")
    assert_same(restore(tmp_path / "b", {"t": table})["t"].snapshot(), was)  # what is compacted stands for it

    unread = ("zarr.json", "offsets")  # by a restore into one place
    files = [
        path for path in (tmp_path / "b").rglob("*") if path.is_file() and not {path.name, path.parent.name} & {*unread}
    ]
    table = table.refresh()
    for path in files:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
        with pytest.raises((CheckpointError, ValueError)):
            restore(tmp_path / "b", {"t": table})
        path.unlink()
        with pytest.raises((CheckpointError, ValueError)):
            restore(tmp_path / "b", {"t": table})
        path.write_bytes(data)
    assert_same(table.snapshot(), was)


@slow
@pytest.mark.parametrize("piece", [1 << 24, 1024])
def test_pruned_offline(piece, make, tmp_path, monkeypatch):
    monkeypatch.setattr("kvjax._formats.source.PIECE_BYTES", piece)
    table = step(make(2, initializer=np.eye(2)).upsert(KEYS, np.arange(len(KEYS) * 2.0).reshape(-1, 2)), KEYS[:9])
    table = step(table, KEYS[:3]).pin(KEYS[:2])
    save(tmp_path / "base", {"t": table}, cursor="c")
    table = table.remove(KEYS[:1])
    save(tmp_path / "delta", {"t": table, }, since="c")  # fmt: skip
    for rule in (
        kvjax.Prune(min_norm=20.0, top_k=4),
        kvjax.Prune(min_frequency=1, keep=KEYS[-1:]),
        lambda r: r.freqs > 1,
    ):
        want = table.export(rule, slots=True)
        reports = prune(tmp_path / "delta", None, rule)
        assert reports["t"].total.rows - reports["t"].dropped.rows == len(want)
        prune(tmp_path / "delta", tmp_path / "out", rule, overwrite=True)
        got = restored(tmp_path / "out", make, table).rows
        for name, array in want.columns().items():
            np.testing.assert_array_equal(got.columns()[name], array, err_msg=name)
    with pytest.raises(CheckpointError, match="nothing there"):
        prune(tmp_path / "delta", tmp_path / "out", kvjax.Prune())
