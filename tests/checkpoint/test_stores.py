"""Checkpoints in stores are those that a folder would have, there as a whole or not at all."""

import asyncio
import shutil
import sys
import warnings

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import kvjax
from kvjax._command.main import main
from kvjax._formats.paths import anywhere
from kvjax.checkpoint import CheckpointError, compact, diff, prune, restore, save, verify
from kvjax.serving import FrozenTable, Releases
from tests.support import stores
from tests.support.tables import same_tables

ROOT = "gs://bucket/run"


def test_they_are_the_same_files(store, table, tmp_path):
    save(tmp_path / "one", [table])
    save(f"{ROOT}/one", [table])
    here = {path.relative_to(tmp_path / "one").as_posix(): path.read_bytes()
            for path in (tmp_path / "one").rglob("*") if path.is_file()}  # fmt: skip
    assert stores.files_of(store.store, "bucket/run/one") == here
    found = verify(f"{ROOT}/one")
    assert found.ok and found.unlisted == () and str(found.path) == f"{ROOT}/one" and found.bytes > 0
    shutil.rmtree(tmp_path / "one")
    (back,) = restore(f"{ROOT}/one", {table.name: "back"}).values()
    same_tables(back, table)


def test_deltas_there_and_here(store, table, tmp_path):
    """A chain of which each link is in another place; the last numbered checkpoint of a folder is restored."""
    save(f"{ROOT}/0", [table], cursor="here")
    table = table.upsert(np.array([1, 99]), np.ones((2, 3), np.float32)).remove(np.array([2]))
    save(tmp_path / "1", [table], since="here")
    table = table.upsert(np.array([3]), np.zeros((1, 3), np.float32))
    save(f"{ROOT}/2", [table], since="here")
    (back,) = restore(ROOT, {table.name: "back"}, base=tmp_path / "1").values()
    same_tables(back, table)
    with pytest.raises(CheckpointError, match="got none beside it; give its folder as base="):
        restore(f"{ROOT}/2")
    compact(f"{ROOT}/2", f"{ROOT}/whole", base=tmp_path)
    assert diff(f"{ROOT}/whole", tmp_path / "1", base=ROOT).tables[table.name].changed == 1
    assert prune(f"{ROOT}/whole", f"{ROOT}/few", kvjax.Prune(top_k=5))[table.name].dropped.rows == 35
    assert len(restore(f"{ROOT}/few", {table.name: "few"})[table.name]) == 5
    (again,) = restore(f"{ROOT}/whole", cursor="there").values()
    save(f"{ROOT}/3", [again], since="there")
    assert verify(f"{ROOT}/3").ok


def test_a_base_that_another_has_replaced_is_told(store, table):
    """Of the same size: only when it was written tells it from the one before."""
    save(f"{ROOT}/0", [table], cursor="c")
    for number in (1, 2):
        save(f"{ROOT}/{number}", [table], since="c")
    for path in [path for path in store.store if path.startswith("/bucket/run/0/")]:
        del store.store[path]
    table = table.upsert(np.array([1]), np.ones((1, 3), np.float32))
    save(f"{ROOT}/0", [table])
    with pytest.warns(UserWarning, match="no delta that builds on it restores"):
        save(f"{ROOT}/3", [table], since="c")


@pytest.mark.parametrize("writes", [0, 1, 5, 12])
def test_a_save_that_fails_leaves_nothing(store, table, writes):
    save(f"{ROOT}/1", [table])
    before = dict(store.store)
    store.writes_left = writes
    with pytest.raises(OSError, match=r"want to write gs://bucket/run/2.*, got ConnectionError from the store"):
        save(f"{ROOT}/2", [table])
    store.writes_left = None
    assert store.store == before
    save(f"{ROOT}/2", [table])
    assert verify(f"{ROOT}/2").ok


def test_a_save_that_was_killed_is_passed_over(store, table):
    save(f"{ROOT}/1", [table])
    save(f"{ROOT}/2", [table])
    (anywhere(f"{ROOT}/2", "test") / ".kvjax-new").create(b"other")
    (anywhere(f"{ROOT}/2", "test") / "kvjax.json").remove()
    (anywhere(f"{ROOT}/3", "test") / ".kvjax-new").create(b"other")
    assert len(restore(ROOT, {table.name: "back"})[table.name]) == len(table)
    for place in (f"{ROOT}/2", f"{ROOT}/3"):
        with pytest.raises(CheckpointError, match="where another save is under way, or was killed; give"):
            save(place, [table])
    with pytest.raises(CheckpointError, match="a save is under way, or was killed before its end"):
        restore(f"{ROOT}/2")


def test_two_saves_to_one_path(store, table, monkeypatch):
    """Of which one has begun since the other found nothing there."""

    def begun(*_):
        (anywhere(f"{ROOT}/1", "test") / ".kvjax-new").create(b"other")

    monkeypatch.setattr("kvjax.checkpoint._chains.new.check_free", begun)
    with pytest.raises(CheckpointError, match="got another one that is under way"):
        save(f"{ROOT}/1", [table])
    assert list(store.store) == ["/bucket/run/1/.kvjax-new"]


def test_a_save_that_another_one_overtakes(store, table, monkeypatch):
    """Which was whole between the look at the path and the mark there; nothing of it goes, and nothing is mixed."""
    save(f"{ROOT}/1", [table])
    before = dict(store.store)
    monkeypatch.setattr("kvjax.checkpoint._chains.new.check_free", lambda *_: None)
    with pytest.raises(CheckpointError, match="got another one that is under way"):
        save(f"{ROOT}/1", [table])
    assert store.store == before


def test_a_warning_after_a_save_leaves_it(store, table):
    """Where warnings are errors: the checkpoint was whole before."""
    save(f"{ROOT}/1", [table], cursor="warned")
    for path in [path for path in store.store if path.startswith("/bucket/run/1/")]:
        del store.store[path]
    with pytest.warns(UserWarning, match="no delta that builds on it restores"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning):
            save(f"{ROOT}/2", [table], since="warned")
        warnings.simplefilter("default")
        save(f"{ROOT}/3", [table], since="warned")
    assert all(verify(f"{ROOT}/{i}", alone=True).ok and verify(f"{ROOT}/{i}").missing for i in (2, 3))


@pytest.mark.parametrize("odd", ["run*", "run[12]", "r?n1", "run1/1"])
def test_a_save_that_fails_removes_its_own_files_alone(store, table, odd):
    """Whatever its path would mean as a pattern; and nothing that is saved below it."""
    save("gs://bucket/run1/1/2", [table])
    before = dict(store.store)
    store.writes_left = 5
    with pytest.raises((OSError, CheckpointError)):
        save(f"gs://bucket/{odd}", [table])
    store.writes_left = None
    assert store.store == before


def test_a_mark_whose_answer_was_lost(store, table, monkeypatch):
    """A store's package tries again, and is told that there is a file: its own."""
    real = store.pipe_file

    def twice(self, path, value, mode="overwrite", **kwargs):
        real(self, path, value, mode, **kwargs)
        if mode == "create":
            real(self, path, value, mode, **kwargs)

    monkeypatch.setattr(store, "pipe_file", twice)
    save(f"{ROOT}/1", [table])
    assert verify(f"{ROOT}/1").ok


def test_no_path_and_a_scheme_in_capitals(store, table):
    with pytest.raises(ValueError, match=r"want a path in a store, got 'gs://'; name a bucket"):
        save("gs://", [table])
    save("GS://bucket/run/1", [table])
    assert len(restore(f"{ROOT}/1", {table.name: "back"})[table.name]) == 40


def test_nothing_is_replaced(store, table):
    save(f"{ROOT}/1", [table])
    before = dict(store.store)
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match="nothing in a store can be replaced at once"):
            save(f"{ROOT}/1", [table], overwrite=overwrite)
    with pytest.raises(CheckpointError, match="want a place outside of checkpoints"):
        compact(f"{ROOT}/1", f"{ROOT}/1/in")
    assert store.store == before


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "gone"])
@pytest.mark.parametrize("file", ["kvjax.json", "{}/kvjax.json", "{}/shard-00000-of-00001/values/c.0.0"])
def test_damage_is_an_error(store, table, file, damage):
    save(f"{ROOT}/1", [table])
    path = anywhere(f"{ROOT}/1/{file.format(table.name)}", "test")
    data = path.read_at_most(1 << 20)
    path.remove()
    flipped = bytes([data[0] ^ 1]) + data[1:]
    found = {"flipped": flipped, "cut": data[:-1], "longer": data + b"x", "empty": b""}.get(damage)
    if found is not None:
        path.write_bytes(found)
    before = table.export()
    with pytest.raises(CheckpointError, match=r"gs://bucket/run/1"):
        restore(f"{ROOT}/1")
    assert np.array_equal(table.export().values, before.values)
    assert damage == "gone" or not verify(f"{ROOT}/1").ok


def test_orbax_s_handlers(store, table):
    """As Orbax's CheckpointManager calls them with the paths that it has of stores."""
    handler, place = kvjax.orbax.TableHandler(), epath.Path(f"{ROOT}/0/tables")
    handler.save(place, kvjax.orbax.TableSave({table.name: table}))
    (back,) = handler.restore(place, kvjax.orbax.TableRestore({table.name: "back"})).values()
    same_tables(back, table)
    assert handler.metadata(place)[table.name]["rows"] == len(table)
    with pytest.raises(CheckpointError, match="want a folder without it"):
        handler.save(place, kvjax.orbax.TableSave({table.name: table}))

    class Creating:
        path = epath.Path(f"{ROOT}/1/tables")

        async def await_creation(self):
            return self.path

    async def through():
        await (await kvjax.orbax.StatefulTables({table.name: table}).save(Creating()))
        loaded = kvjax.orbax.StatefulTables({table.name: None})
        await (await loaded.load(Creating.path))
        return loaded.tables[table.name]

    assert len(asyncio.run(through())) == len(back)


def test_a_step_that_orbax_has_not_ended_is_passed_over(store, table):
    """In stores it has its name from the beginning."""
    metadata = '{{"item_handlers": {{"tables": "kvjax.orbax._handler.TableHandler"}}, "init_timestamp_nsecs": 5{}}}'
    for step, end in ((1, ', "commit_timestamp_nsecs": 9'), (2, "")):
        place = anywhere(f"{ROOT}/{step}", "test")
        (place / "_CHECKPOINT_METADATA").write_bytes(metadata.format(end).encode())
        kvjax.orbax.TableHandler().save(str(place / "tables"), kvjax.orbax.TableSave({table.name: table}))
        table = table.remove(np.array([step]))
    assert len(restore(ROOT, {table.name: "back"})[table.name]) == 40


def test_files_for_other_programs(store, table, tmp_path):
    export = table.export()
    for suffix in ("npz", "parquet", "safetensors"):
        write = getattr(export, f"to_{suffix}")
        write(tmp_path / f"x.{suffix}")
        write(f"{ROOT}/x.{suffix}")
        assert store.store[f"/bucket/run/x.{suffix}"].getvalue() == (tmp_path / f"x.{suffix}").read_bytes()
    save(f"{ROOT}/1", [table])
    kvjax.convert.export_checkpoint(f"{ROOT}/1", f"{ROOT}/y.npz")
    assert np.array_equal(kvjax.convert.from_npz(f"{ROOT}/y.npz").rows.keys, export.keys)
    for suffix in ("parquet", "safetensors"):
        read = getattr(kvjax.convert, f"from_{suffix}")
        assert np.array_equal(read(f"{ROOT}/x.{suffix}").rows.values, export.values)
    with pytest.raises(FileNotFoundError, match=r"want a file, got none: 'gs://bucket/run/z\.npz'"):
        kvjax.convert.from_npz(f"{ROOT}/z.npz")
    prune = kvjax.Prune(top_k=3)
    for name, pruned in (("a", None), ("b", prune)):
        report = kvjax.convert.import_checkpoint(f"{ROOT}/y.npz", f"{ROOT}/{name}", table=name, prune=pruned)
        assert report.rows == len(restore(f"{ROOT}/{name}")[name]) == (40 if pruned is None else 3)
    before = dict(store.store)
    with pytest.raises(ValueError, match="want quantise="):
        export.to_npz(f"{ROOT}/z.npz", quantise="float3")
    assert store.store == before


def test_frozen_tables_are_written_from_them(store, table, tmp_path):
    save(f"{ROOT}/1", [table], cursor="here")
    frozen = FrozenTable.write(tmp_path / "frozen", f"{ROOT}/1")
    assert np.array_equal(frozen.lookup([3]), np.asarray(table.lookup([3])))
    releases = Releases(tmp_path / "releases")
    releases.follow(f"{ROOT}/1")
    table = table.upsert(np.array([3]), np.full((1, 3), 7, np.float32))
    save(f"{ROOT}/2", [table], since="here")
    assert releases.follow(ROOT)[table.name].lookup([3]).tolist() == [[7, 7, 7]]


def test_the_commands(store, table, tmp_path, capsys):
    save(f"{ROOT}/1", [table])
    save(f"{ROOT}/2", [table.remove(np.array([5]))])
    for command in (["inspect", ROOT], ["verify", f"{ROOT}/1"], ["top", f"{ROOT}/1"]):
        assert main(command) == 0, command
        assert table.name in capsys.readouterr().out or command[0] == "verify"
    assert main(["diff", f"{ROOT}/1", f"{ROOT}/2"]) == 1
    assert main(["prune", f"{ROOT}/1", f"{ROOT}/few", "--top-k", "3"]) == 0
    assert main(["convert", f"{ROOT}/few", f"{ROOT}/few.npz"]) == 0
    assert main(["convert", f"{ROOT}/few", str(tmp_path / "few.parquet")]) == 0
    assert (tmp_path / "few.parquet").exists() and "/bucket/run/few.npz" in store.store


def test_a_store_without_its_package(table, monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(
        ImportError, match=r"^kvjax: save: want the package that reaches az://, got none; pip install 'kvjax\[azure\]'$"
    ):
        save("az://container/x", [table])


def test_a_manager_with_other_items(store, table):
    """A composite in which tables are one item, without Orbax's steps, which want a client of that store."""
    checkpointer = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    place = epath.Path(f"{ROOT}/7")
    checkpointer.save(place, args=ocp.args.Composite(
        tables=kvjax.orbax.TableSave({table.name: table}), note=ocp.args.JsonSave({"a": 1}),
    ))  # fmt: skip
    restored = checkpointer.restore(place, args=ocp.args.Composite(
        tables=kvjax.orbax.TableRestore({table.name: "back"}), note=ocp.args.JsonRestore(),
    ))  # fmt: skip
    assert restored.note == {"a": 1}
    same_tables(restored.tables[table.name], table)
