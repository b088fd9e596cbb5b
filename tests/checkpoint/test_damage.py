"""Damage: what is not as it was saved is refused in kvjax's words, and then no table is another than before."""

import functools
import json
import os
import random
import re
import resource
import shutil
from pathlib import Path

import numpy as np
import optax
import pytest
import tensorstore as ts

import kvjax
from kvjax._formats import atomic
from kvjax.checkpoint import compact, diff, merge, prune, save, verify
from kvjax.checkpoint._chains.catalog import Catalog
from kvjax.checkpoint._disk.format import CheckpointError
from kvjax.checkpoint._tables.restore_table import Restore
from kvjax.serving import FrozenTable, Releases
from tests.support import damages
from tests.support.checkpoints import IDS, array_at, assert_equal, rewrite, trained
from tests.support.marks import examples, slow

SHARD = "shard-00000-of-00001"
HANDLER = kvjax.orbax.TableHandler()


def restore(folder, tables=None):
    return HANDLER.restore(folder, kvjax.orbax.TableRestore(tables))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two tables at two steps, and what they were at the first."""
    folder, want, tx = (
        tmp_path_factory.mktemp("written"),
        {},
        optax.rmsprop(0.1, momentum=0.9),
    )  # two slots of one shape
    one = kvjax.get_table("one", dim=2, initializer=np.eye(2), admit=kvjax.admit.MinCount(2)).upsert(
        IDS, np.ones((5, 2))
    )
    two = kvjax.get_table(
        "two", dim=2, evict=kvjax.evict.MaxAge(5).every(3), constraint=kvjax.constraints.max_norm(9.0)
    )
    for step in ("1", "2"):
        one, two = trained(one.pin(IDS[:2]), tx), trained(two, tx, steps=2)
        HANDLER.save(folder / step, kvjax.orbax.TableSave({"one": one, "two": two}))
        want = want or {table.name: table.export(slots=True) for table in (one, two)}
    for name in want:
        kvjax.drop_table(name)
    return folder, want


@pytest.fixture
def saved(written, tmp_path):
    """A copy of them, to be damaged."""
    return shutil.copytree(written[0], tmp_path / "saved"), written[1]


# ---- anything, anywhere ------------------------------------------------------------------------------------------


def test_damage_is_refused_or_harmless(tmp_path):
    """`python -m tests.support.damages` does many more."""
    found = damages.check(tmp_path, damages.write(tmp_path), examples(30, 500))
    assert sum(count for (_, became), count in found.items() if became == "refused") > found.total() / 2


@slow
@pytest.mark.parametrize(("name", "each"), [("kvjax.json", 1), ("flips/kvjax.json", 7)])
def test_every_bit_of_what_describes_tables_counts(name, each, tmp_path):
    """Of the manifest all are flipped, of a table's own file, which is longer, one in seven."""
    folder = tmp_path / "c"
    save(folder, [kvjax.get_table("flips", dim=1).upsert(IDS, np.ones((5, 1)))])
    kvjax.drop_table("flips")
    text = (folder / name).read_bytes()
    for bit in range(0, len(text) * 8, each):
        data = bytearray(text)
        data[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"^kvjax: "):
            restore(folder)
        assert kvjax.tables() == {}, bit


def test_the_first_format_is_refused_in_our_words(tmp_path):
    """It has no digests, so a number may be another; but what no table can have is told, whatever it is."""
    rng, refused = random.Random(1), 0
    golden = Path(__file__).parents[1] / "golden/checkpoint_v1"
    text = (golden / "golden/kvjax.json").read_bytes()
    shutil.copytree(golden, tmp_path / "v1")
    for i in range(examples(60, len(text) * 8)):
        data, bit = bytearray(text), i if examples(0, 1) else rng.randrange(len(text) * 8)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "v1/golden/kvjax.json").write_bytes(data)
        try:
            restore(tmp_path / "v1")
            kvjax.drop_table("golden")
        except CheckpointError as error:
            refused += 1
            assert str(error).startswith(("kvjax: table ", "kvjax: restore: ")), (bit, error)
        assert kvjax.tables() == {}
    assert refused > i / 2


# ---- one by one --------------------------------------------------------------------------------------------------


def test_a_table_that_is_lost_is_missed(saved):
    folder, _ = saved
    shutil.rmtree(folder / "1/one")
    with pytest.raises(CheckpointError, match=r"table 'one', restore: want the file .*1/one/shard-"):
        restore(folder / "1")
    (folder / "2/kvjax.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"want .*2/kvjax.json, the manifest that lists all tables, got no such file"
    ):
        restore(folder / "2")
    (folder / "3").mkdir()
    for nothing in ("3", "4"):
        with pytest.raises(CheckpointError, match="want a checkpoint of tables, got none"):
            restore(folder / nothing)


@pytest.mark.parametrize("first", [True, False], ids=["v1", "v2"])
def test_what_zarr_says_of_an_array_is_not_believed(first, saved, tmp_path):
    """Else big endian or a transposed array would be other rows, and a forged shape all memory."""
    folder, want = saved
    if first:
        folder = shutil.copytree(Path(__file__).parents[1] / "golden/checkpoint_v1", tmp_path / "v1")
        want = {"golden": restore(folder)["golden"].export(slots=True)}
    else:
        folder = folder / "1"
    table = next(iter(want))
    path = folder / table / SHARD / "values/zarr.json"
    meta = json.loads(path.read_text())
    meta["codecs"][0]["configuration"]["endian"] = "big"
    meta["codecs"].insert(0, {"name": "transpose", "configuration": {"order": [1, 0]}})
    for forged in (meta, {"shape": [2**40, 2]}, 0):
        path.write_text(json.dumps(forged))
        assert_equal(restore(folder)[table].export(slots=True), want[table])


def test_sizes_are_held_against_the_bytes_that_are_there(saved):
    """Each of these would end the process, or take all memory, if it were believed."""
    folder = saved[0] / "1"
    meta = json.loads((folder / "two/kvjax.json").read_text())
    types = [["v", f"float32[{2**40}]"], ["v", "float32[99999999]"]]
    forged = [{"rows": 2**40, "extras": {}}, {"rows": 1}, *({"slots": [slot]} for slot in types)]
    for fields in forged:
        rewrite(folder, "two", meta=meta | fields)
        with pytest.raises(CheckpointError, match="table 'two', restore: want"):
            restore(folder)


READERS = {
    "restore": lambda path, out: restore(path),
    "compact": compact,
    "prune": lambda path, out: prune(path, out, kvjax.Prune(min_frequency=1, keep=IDS)),
    "diff": lambda path, out: diff(path, path),
    "export": lambda path, out: kvjax.convert.export_checkpoint(path, f"{out}.npz", table="two"),
    "frozen": lambda path, out: FrozenTable.write(out, path, name="two"),
    "verify": lambda path, out: verify(path).ok or restore(path),
}


@pytest.mark.parametrize("op", READERS)
def test_what_is_forged_is_refused_by_every_reader(op, saved, tmp_path):
    """Before a list of its chunks, which would be of 2**28 and more, or memory for its rows; if it is read at all."""
    folder, most = saved[0] / "1", 2**48
    offsets = np.full(65537, most)
    offsets[0] = 0
    waiting = {name: ["int64", [most]] for name in ("pending_keys", "pending_counts")}
    forged = {
        "extras": ({"extras": waiting}, {}),
        "sketch": ({"extras": {"sketch": ["uint16", [most]]}}, {}),
        "initializer": ({"initializer": {"kind": "pool", "shape": [most, 2]}}, {}),
        "rows": ({"rows": most}, {f"{SHARD}/offsets": offsets}),
        "slots": ({"slots": [["v", "float32[7]"]]}, {}),
    }
    least = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, (fields, arrays) in forged.items():
        shutil.copytree(folder, tmp_path / name)
        rewrite(tmp_path / name, "two", arrays, meta=fields)
        try:
            READERS[op](tmp_path / name, tmp_path / f"out_{name}")
            assert op in ("diff", "export", "frozen") and name != "rows"
        except CheckpointError as error:
            assert re.search("table 'two', .*: want (.*/c.0.* in the list|.* with .* bytes, got)", str(error))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - least < 1 << 18  # KiB


@pytest.mark.parametrize(
    ("arrays", "text"),
    [({"keys": IDS[[0, 0, 2, 3, 4]]}, "want distinct keys"), ({"freqs": np.full(5, -1)}, "want freqs of 0 or more"),
     ({"versions": np.full(5, -1)}, "want versions from 0 to last_step="),
     ({"versions": np.full(5, 2**40)}, "want versions from 0 to last_step="),
     ({"has_slots": np.full(5, 2, np.uint8)}, "want truth values"),
     ({"offsets": np.arange(65537)}, "want offsets from 0 to 5")],
    ids=["keys", "freqs", "before", "after", "has_slots", "offsets"],
)  # fmt: skip
def test_verify_checks_what_a_restore_checks(arrays, text, saved):
    """Not only the bytes, which are as they were written here."""
    folder = saved[0] / "1"
    rewrite(folder, "two", {f"{SHARD}/{name}": array for name, array in arrays.items()})
    (problem,) = verify(folder).problems
    assert text in problem.problem and (problem.table, problem.path) == ("two", "two")
    with pytest.raises(CheckpointError, match=text):
        restore(folder)


def test_a_chunk_that_unpacks_to_more_than_a_chunk(tmp_path):
    folder = shutil.copytree(Path(__file__).parents[1] / "golden/checkpoint_v1", tmp_path / "v1")
    zeros = {"shape": [1 << 24], "data_type": "uint8", "chunk_grid": {"name": "regular", "configuration": {
        "chunk_shape": [1 << 24]}}, "codecs": [{"name": "bytes"}, {"name": "zstd"}, {"name": "crc32c"}]}  # fmt: skip
    spec = {"driver": "zarr3", "kvstore": f"file://{folder}/bomb", "metadata": zeros}
    store = ts.open(spec | {"store_data_equal_to_fill_value": True}, create=True).result()
    store.write(np.zeros(1 << 24, np.uint8)).result()
    shutil.copy(folder / "bomb/c/0", folder / "golden" / SHARD / "freqs/c/0")
    with pytest.raises(CheckpointError, match=r"want whole chunks of .*freqs"):
        restore(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"options": {"capacity": 4 * 10**9}},
        {"options": {"admit": {"rule": "Probability", "p": 2.0, "unadmitted": "init"}}},
        {"options": {"evict": {"rule": "_Not", "inner": 3}}},
        {"options": {"evict": {"rule": "Every", "policy": {"rule": "MaxAge", "steps": 3}, "steps": "x"}}},
        {"options": {"evict": functools.reduce(lambda rule, _: {"rule": "_Not", "inner": rule}, range(450), None)}},
        {"options": {"on_full": "evict", "max_capacity": None}},
        {"initializer": {"kind": "normal", "a": 0.0, "b": float("nan")}},
        {"initializer": {"kind": "open", "a": 0.0, "b": 1.0}},
        *({"initializer": {"kind": "segments", "ends": ends, "parts": [{"kind": kind, "a": 0.0, "b": 1.0}] * 2}}
          for ends, kind in [([1], "normal"), ([2, 1], "normal"), ([0, 2], "normal"), ([1, 2], "pool"), (2, "normal"),
                             ([1, 2.0], "normal"), ([1, 3], "normal"), ([], "normal")]),
        {"seed": -1}, {"seed": "7"}, {"trainable": 1}, {"last_step": 2**70}, {"dim": 2.0}, {"later": 1},
        {"slots": [["v", "object[2]"]]}, {"slots": [["v", "float32[-2]"]]}, {"slots": [["v", "float32"]]},
        {"extras": {"other": ["bool", [5]]}}, {"num_shards": 0, "shards": []},
    ],
    ids=lambda fields: "-".join(map(str, fields)),
)  # fmt: skip
def test_fields_are_checked(fields, saved):
    """Also where the digests are right: a program may have written them wrong."""
    folder = saved[0] / "1"
    with pytest.raises(CheckpointError, match=r"^kvjax: table 'two', restore: want"):
        rewrite(folder, "two", meta=fields)
        restore(folder)


def test_a_refused_restore_changes_no_other_table(saved):
    """Whether it is met while files are read, while a table is made, or while its rows are put together."""
    folder, _ = saved
    good = kvjax.get_table("good", dim=2, initializer=np.eye(2), admit=kvjax.admit.MinCount(2)).upsert(
        IDS, np.ones((5, 2))
    )
    HANDLER.save(folder / "3", kvjax.orbax.TableSave({"good": good}))
    for name in ("one", "two"):
        shutil.copytree(folder / "1" / name, folder / "3" / name)
    keys = array_at(folder / "3/two" / SHARD / "keys")
    forged = {"distinct keys": {"keys": keys[[0, 0, 2, 3, 4]]}, "freqs of 0": {"keys": keys, "freqs": np.full(5, -1)}}
    good = good.clear()
    for (want, arrays), tables in zip(forged.items(), (None, {"good": good, "one": None, "two": None}), strict=True):
        rewrite(folder / "3", "two", {f"{SHARD}/{name}": array for name, array in arrays.items()})
        with pytest.raises(CheckpointError, match=f"table 'two', restore: want {want} .*/3/two"):
            restore(folder / "3", tables)
        assert list(kvjax.tables()) == ["good"] and len(good) == 0  # by the handle from before
    two = restore(folder / "1", {"two": None})["two"]
    with pytest.raises(ValueError, match="table 'good', restore: want one table of the checkpoint to load into it"):
        restore(folder / "3", {"good": None, "one": good})
    assert len(two) == 5 and len(good) == 0


def test_a_write_of_another_thread_stops_the_restore_of_all_tables(saved, monkeypatch):
    tables = restore(saved[0] / "1")
    before = tables["one"].clear().upsert([9], np.ones((1, 2)))
    prepare = Restore.prepare

    def prepare_and_write(self, *given):
        ready = prepare(self, *given)
        if self.name == "two":
            tables["two"] = tables["two"].upsert([5], np.ones((1, 2)))
        return ready

    monkeypatch.setattr(Restore, "prepare", prepare_and_write)
    with pytest.raises(RuntimeError, match="'two', restore: want a table that nobody writes meanwhile, got"):
        restore(saved[0] / "1", tables | {"one": before})
    assert before.export().keys.tolist() == [9] and tables["two"].contains(5)


def test_everything_is_on_the_disk_before_the_step_is_listed(saved, monkeypatch):
    folder, flushed = saved[0] / "3", set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.add(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    HANDLER.save(folder, kvjax.orbax.TableSave({"one": restore(saved[0] / "1")["one"]}))
    new = {re.sub(r"/\.([^/]*)\.[0-9a-f]{16}\.part$", r"/\1", path) for path in flushed}
    folders = {str(path) for path in [folder.parent, folder, *folder.rglob("*")] if path.is_dir()}
    assert folders <= new and len(folders) > 10
    assert {str(path) for path in folder.rglob("*") if path.is_file()} <= new


@pytest.mark.parametrize(
    "name", ["commit_success.txt", "kvjax.json", "_METADATA", "checkpoint", "x" * 400, "\u00e4" * 100, "%2E", "a=b"]
)
def test_any_name_can_be_saved(name, tmp_path):
    table = kvjax.get_table(name, dim=1).upsert(IDS, np.ones((5, 1)))
    HANDLER.save(tmp_path, kvjax.orbax.TableSave({name: table, name + "x": table}))
    tables = restore(tmp_path)
    assert tables.keys() == {name, name + "x"} and len(tables[name + "x"]) == 5


def test_slots_of_any_name_can_be_saved(tmp_path):
    table = kvjax.get_table("t", dim=1).upsert(IDS, np.ones((5, 1)))
    rows, long = table.export(), {"m" * 300: np.ones((5, 1), np.float32), "m" * 301: np.zeros((5, 1), np.float32)}
    table = table.load(type(rows)(**(vars(rows) | {"slots": long, "has_slots": np.ones(5, bool)})))
    HANDLER.save(tmp_path, kvjax.orbax.TableSave({"t": table}))
    assert restore(tmp_path)["t"].export(slots=True).slots["m" * 300].sum() == 5


def test_names_that_are_none(tmp_path):
    table = kvjax.get_table("t", dim=1)
    for name in ("", "\ud800", 7):
        with pytest.raises(ValueError, match="'t', save: want a name to save it under"):
            HANDLER.save(tmp_path, kvjax.orbax.TableSave({name: table}))
    for name in ("", "\ud800"):
        with pytest.raises(ValueError, match="get_table: want a name in UTF-8 that is not empty"):
            kvjax.get_table(name, dim=1)


def test_a_save_of_which_a_part_is_elsewhere_is_no_checkpoint(saved):
    """As where processes write to disks of their own: it is told when it is saved."""
    folder, _ = saved
    (folder / "1/one" / f"{SHARD}.json").unlink()
    with pytest.raises(CheckpointError, match=r"^kvjax: save: want the file .*share"):
        HANDLER.finalize(folder / "1")


def test_who_reads_what_is_replaced_meanwhile_reads_the_other(make, tmp_path, monkeypatch):
    table = make(1).upsert(IDS[:2], [[1.0], [2.0]])
    save(tmp_path / "a", [table])
    table = table.upsert(IDS[:2], [[3.0], [4.0]])
    save(tmp_path / "b", [table])
    a, b, c, lists, exchanges = *(tmp_path / name for name in "abc"), Catalog.lists, []

    def late(self, name):
        found = lists(self, name)
        if exchanges:
            exchanges.clear()
            atomic._exchange(a, b)
        return found

    def rows(path):
        return sorted(kvjax.checkpoint.restore(path)[table.name].lookup(IDS[:2])[:, 0].tolist())

    def exported():
        kvjax.convert.export_checkpoint(a, tmp_path / "rows.npz")
        return sorted(np.load(tmp_path / "rows.npz")["values"][:, 0].tolist())

    monkeypatch.setattr(Catalog, "lists", late)
    calls = {
        "restore": lambda: rows(a),
        "compact": lambda: compact(a, c, overwrite=True) or rows(c),
        "prune": lambda: prune(a, c, kvjax.Prune(), overwrite=True) and rows(c),
        "export": exported,
        "write": lambda: sorted(FrozenTable.write(tmp_path / "frozen", a).lookup(IDS[:2])[:, 0].tolist()),
        "follow": lambda: sorted(Releases(tmp_path / "model").follow(a)[table.name].lookup(IDS[:2])[:, 0].tolist()),
        "merge": lambda: merge([a, a], c, overwrite=True) and rows(c),
        "diff": lambda: diff(a, c).same and rows(a),
        "diff of the second": lambda: diff(c, a).same and rows(a),
        "verify": lambda: verify(a).ok and rows(a),
    }
    for op, call in calls.items():
        if op.startswith("diff"):  # both of which are those behind the exchange
            compact(b, c, overwrite=True)
        was = rows(a)
        exchanges.append(True)
        assert call() == rows(a) != was, op
