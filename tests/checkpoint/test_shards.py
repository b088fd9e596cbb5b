"""Checkpoints of tables that are sharded over devices: written from any number of shards, read into any other."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import kvjax
from kvjax._command.saved import SavedTable
from kvjax._formats import source
from kvjax._spec.placement import Placement
from kvjax._values.prune import norms_of
from kvjax.checkpoint._chains.catalog import Catalog, write_manifest
from kvjax.checkpoint._chains.chain import Chain
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._disk import format
from kvjax.checkpoint._tables import taken_rows, write
from tests.support.checkpoints import DAMAGES, array_at, chunks_of, restore, rewrite, save
from tests.support.marks import few, few_rows, slow
from tests.support.tables import KEYS, by_high_bits, by_low_bits, same_rows, same_tables, trained


def read(folder, placement=None):
    """What a process restores of a table, and all counts."""
    rows = ChainRows(Chain(Catalog(folder)), "t")
    own = taken_rows.own_rows(rows.source(), placement, rows.offsets)
    return own.read(list(own.types), 0, own.num_rows) | rows.counts()


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("here", "there"),
    few_rows(
        [
            ("8", "4"), ("4", "one place"), ("one place", "8"), ("partitioner", "another"),
            ("replicated", "partitioner"), ("axis", "replicated"),
        ],
    ),
)  # fmt: skip
def test_training_goes_on_the_same(here, there, make, places, tmp_path, promotion):
    options = {"dim": 3, "initializer": kvjax.initializers.normal(0.1), "seed": 5, "admit": kvjax.admit.MinCount(2)}
    one, saved = trained(make(**options).pin(KEYS[:3])), trained(make(**options, **places[here]).pin(KEYS[:3]))
    save(tmp_path, 1, {"t": saved})
    table = make(**options, **places[there]).upsert(np.array([77]), np.ones((1, 3)))
    table = restore(tmp_path, 1, {"t": table})["t"]
    assert table.spec.placement == make(**options, **places[there]).spec.placement
    same_tables(one, table)
    same_tables(trained(one, seed=1), trained(table, seed=1))


@pytest.mark.parametrize("admit", few([kvjax.admit.MinCount(3), kvjax.admit.Sketch(3, halve_every=4)]))
def test_one_process_writes_the_same_bytes_from_any_number_of_shards(admit, mesh, tmp_path):
    written = []
    for n in (None, 1, 4, 8):
        table = kvjax.get_table("t", dim=3, admit=admit, mesh=None if n is None else mesh(n))
        save(tmp_path / str(n), 1, {"t": trained(table.pin(KEYS[:3]), 3)})
        kvjax.drop_table("t")
        written.append(files(tmp_path / str(n) / "1/tables/t"))
    assert written[0] == written[1] == written[2] == written[3] and len(written[0]) > 10


@pytest.mark.parametrize("there", few(["one place", "4", "partitioner", "replicated"]))
def test_tables_are_made_where_one_says(there, make, places, tmp_path):
    table = trained(make(3, mesh=places["8"]["mesh"], admit=kvjax.admit.Sketch(2), evict=None))
    want = table.snapshot()
    save(tmp_path, 1, {table.name: table})
    kvjax.drop_table(table.name)
    with ocp.CheckpointManager(tmp_path) as manager:
        args = kvjax.orbax.TableRestore(**places[there])
        again = manager.restore(1, args=ocp.args.Composite(tables=args))["tables"][table.name]
    assert again.spec == dataclasses.replace(table.spec, placement=again.spec.placement)
    assert (again.spec.placement is None) == (there == "one place")
    for name, array in want.admission.items():
        np.testing.assert_array_equal(again.snapshot().admission[name], array)
    np.testing.assert_array_equal(again.export().values, want.rows.values)


@slow
def test_a_partitioner_is_a_name_in_the_checkpoint(make, mesh, tmp_path):
    table = trained(make(3, mesh=mesh(4), partitioner=by_low_bits))
    size = len(table)
    save(tmp_path, 1, {table.name: table})
    meta = json.loads((tmp_path / f"1/tables/{table.name}/kvjax.json").read_text())
    assert meta["partitioner"] == f"{by_low_bits.__module__}.by_low_bits"
    kvjax.drop_table(table.name)
    with ocp.CheckpointManager(tmp_path) as manager:
        with pytest.raises(
            ValueError, match=rf"restore: want the table's partitioner, {by_low_bits.__module__}.by_low_bits, .*mesh="
        ):
            manager.restore(1, args=ocp.args.Composite(tables=kvjax.orbax.TableRestore(mesh=mesh(4))))
        assert table.name not in kvjax.tables()
        args = kvjax.orbax.TableRestore(mesh=mesh(2), partitioner=by_high_bits)
        assert len(manager.restore(1, args=ocp.args.Composite(tables=args))["tables"][table.name]) == size
        kvjax.drop_table(table.name)
        assert (
            len(manager.restore(1, args=ocp.args.Composite(tables=kvjax.orbax.TableRestore()))["tables"][table.name])
            == size
        )


def test_a_partitioner_out_of_range_changes_nothing(make, mesh, tmp_path):
    save(tmp_path, 1, {"t": trained(make(3, seed=1))})
    table = make(3, seed=1, mesh=mesh(2), partitioner=lambda keys, n: jnp.full(keys.shape, n, jnp.int32))
    with pytest.raises(ValueError, match=r"shards in 0\.\.1, got 2"):
        restore(tmp_path, 1, {"t": table})
    assert len(table.refresh()) == 0


def test_a_load_that_fails_in_one_shard_changes_none(make, mesh):
    table = trained(make(3, mesh=mesh(4)))
    rows = table.export(slots=True)
    with pytest.raises(ValueError, match=r"distinct keys, got key .* twice"):
        table.load(rows.take(np.r_[np.arange(len(rows)), len(rows) - 1]))
    same_rows(rows, table.export(slots=True))  # through the same handle


def test_a_shard_without_rows_keeps_the_slots_that_it_would_have(make, mesh):
    table = trained(make(3, mesh=mesh(8)))
    rows = table.export(slots=True)
    few = rows.take(np.arange(len(rows)) == len(rows) - 1)  # the shards before have none
    same_rows(few, table.load(few).export(slots=True))
    assert len(few.slots) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage, make, mesh, tmp_path):
    good, bad = trained(make(3)), trained(make(3, mesh=mesh(4)))
    save(tmp_path, 1, {"good": good, "bad": bad})
    damage(tmp_path / "1/tables/bad")
    good, bad = good.clear(), bad.clear()
    with pytest.raises(ValueError, match="table 'bad', restore"):
        restore(tmp_path, 1, {"good": good, "bad": bad})
    assert len(good) == len(bad) == 0


# ---- checkpoints of several processes, as one of them would read and write them ------------------------------------


def part(placement, shards):
    """The placement as a process sees it that has only some of the shards."""
    seen = dataclasses.replace(placement)
    seen.__dict__["local"] = tuple(shard for shard in placement.local if shard.shard in shards)
    return seen


def rows_of(arrays):
    return dict(zip(arrays["keys"].tolist(), arrays["values"].tolist(), strict=True))


@pytest.fixture
def two_shards(make, mesh, tmp_path):
    """A checkpoint as two processes write it, and the rows in it."""
    table = trained(make(3, mesh=mesh(4), admit=kvjax.admit.MinCount(2), initializer=1.0).pin(KEYS[:9]), 3)
    copy, meta = table.snapshot(), write.freeze("t", table, None, None).meta
    columns = source.Source.of(copy.rows.columns(), {})
    whole = rows_of(copy.rows.columns())
    shards_meta, parts = [], []
    for shards in ((0, 1), (2, 3)):
        low, high = (copy.offsets[len(copy.offsets) // 4 * s] for s in (shards[0], shards[1] + 1))
        keep = np.zeros(len(copy.rows), bool)
        keep[low : (high or None)] = True
        mine = np.isin(table.spec.placement.owners(copy.admission["pending_keys"]), shards)
        arrays = {name: copy.admission[name][mine] for name in ("pending_keys", "pending_counts")}
        arrays["offsets"] = np.concatenate([[0], np.cumsum(keep)])[copy.offsets]
        extras = {n: [a.dtype.name, a.shape] for n, a in arrays.items() if n in copy.admission}
        extras["pinned"] = ["bool", [int(keep.sum())]]
        shards_meta.append({"rows": int(keep.sum()), "extras": extras})
        parts.append((arrays, columns.where(keep)))
    meta = {key: value for key, value in meta.items() if key != "extras"}
    meta |= {"num_shards": 2, "shards": shards_meta, "name": "t"}
    for i, (arrays, rows) in enumerate(parts):
        write.write(tmp_path, [write.Stored(meta, arrays, rows, i)])
    write_manifest(tmp_path)
    return tmp_path, table, whole


def test_a_process_reads_the_rows_of_its_shards(two_shards, mesh, monkeypatch):
    monkeypatch.setattr(source, "PIECE_BYTES", 1000)
    folder, table, whole = two_shards
    assert rows_of(read(folder)) == whole
    before = table.snapshot()
    arrays = read(folder)
    rows = kvjax.Exported.of_columns({name: arrays[name] for name in before.rows.columns()}, before.rows.last_step)
    counts = {name: array for name, array in arrays.items() if name in before.admission}
    after = table.load(dataclasses.replace(before, rows=rows, admission=counts)).snapshot()
    same_rows(before.rows, after.rows)
    np.testing.assert_array_equal(before.admission["pending_counts"], after.admission["pending_counts"])
    for n, partitioner in ((4, None), (8, None), (4, by_low_bits)):
        placement = Placement.of(mesh(n), ("x",), partitioner=partitioner)
        for shards in ({0}, {1, 2}, {0, n - 1}, set(range(1, n))):
            seen = part(placement, shards)
            keys = np.array(list(whole))
            mine = keys[np.isin(placement.owners(keys), list(shards))]
            assert rows_of(read(folder, seen)) == {key: whole[key] for key in mine.tolist()}


def test_the_reader_of_the_docs(two_shards, make, tmp_path_factory):
    """Which knows nothing of kvjax, on checkpoints of one process and of two."""
    (folder, table, whole), others = two_shards, tmp_path_factory.mktemp("others")
    text = (Path(__file__).parents[2] / "docs/format.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    assert code.count("\n") <= 60 and "kvjax" not in re.sub(r"kvjax\.json", "", code)
    reader = {}
    exec(compile(code, "format.md", "exec"), reader)
    meta, shards = reader["read_table"](folder, "t")
    assert meta["rows"] == len(whole) and len(shards) == 2 and "pinned" in shards[0]
    columns = table.export(slots=True).columns()
    for name in columns.keys() - {"pinned"}:
        np.testing.assert_array_equal(np.concatenate([shard[name] for shard in shards]), columns[name], err_msg=name)
    assert sum(len(shard["pending_keys"]) for shard in shards) == len(table.snapshot().admission["pending_keys"]) > 0
    for key_dtype in ("int32", "uint32", "uint64"):
        other = make(3, key_dtype=key_dtype).upsert(np.array([1, np.iinfo(key_dtype).max], key_dtype), np.ones((2, 3)))
        kvjax.checkpoint.save(others / key_dtype, [other])
        _, (shard,) = reader["read_table"](others / key_dtype, other.name)
        np.testing.assert_array_equal(shard["keys"], other.export().keys, err_msg=key_dtype)
    other, name = trained(make(3, dtype="bfloat16", admit=kvjax.admit.Sketch(2)), 2), "_a.\u00e4" * 99
    kvjax.orbax.TableHandler().save(others / "other", kvjax.orbax.TableSave({name: other}))
    _, (shard,) = reader["read_table"](others / "other", name)
    np.testing.assert_array_equal(shard["values"], other.export().values)
    np.testing.assert_array_equal(shard["sketch"], other.snapshot().admission["sketch"])
    np.testing.assert_array_equal(shard["offsets"], other.snapshot().offsets)
    values = chunks_of(folder / "t/shard-00001-of-00002/values")[0]
    values.write_bytes(values.read_bytes()[::-1])
    with pytest.raises(ValueError, match="not as it was written"):
        reader["read_table"](folder, "t")


@slow
def test_exports_and_the_command_line_read_all_shards(two_shards, tmp_path_factory):
    folder, table, whole = two_shards
    rows_npz = tmp_path_factory.mktemp("exported") / "rows.npz"
    kvjax.convert.export_checkpoint(folder, rows_npz, slots=True)
    rows = kvjax.convert.from_npz(rows_npz).rows
    same_rows(rows, table.export(slots=True))
    saved = SavedTable(Chain(folder), "t").open()
    for name, column in table.export().columns().items():
        if name != "pinned":
            np.testing.assert_array_equal(saved.column(name), column, err_msg=name)
    chosen = np.array([len(whole) - 1, 0, len(whole) // 2])
    found = saved.at(chosen)
    np.testing.assert_array_equal(norms_of(found["values"]), saved.norms()[chosen])
    np.testing.assert_array_equal(found["keys"], table.export().keys[chosen])
    assert [len(column) for column in saved.at(chosen[:0]).values()] == [0] * len(found)
    (rows,) = kvjax.checkpoint.rows(folder, slots=True)
    same_rows(rows, table.export(slots=True))
    (rows,) = kvjax.checkpoint.rows(folder, keys=[*KEYS[::3], 12345])
    same_rows(rows, (export := table.export()).take(np.isin(export.keys, KEYS[::3])))


def test_a_process_reads_no_more_than_it_needs(make, mesh, tmp_path, monkeypatch):
    """Chunks with the rows of others may even be missing."""
    monkeypatch.setattr(format, "_CHUNK_BYTES", 1 << 22)
    table = make(1024, mesh=mesh(4)).upsert(np.arange(4096), np.ones((4096, 1024)))
    save(tmp_path, 1, {"t": table})
    folder = tmp_path / "1/tables"
    chunks = chunks_of(folder / "t/shard-00000-of-00001/values")
    assert len(chunks) == 4
    chunks[-1].unlink()
    first, last = (part(table.spec.placement, {shard}) for shard in (0, 3))
    assert 900 < len(read(folder, first)["keys"]) < 1100
    with pytest.raises(ValueError, match="'t', restore: want the file"):
        read(folder, last)


def no_shard(folder):
    shutil.rmtree(folder / "shard-00001-of-00002")


def fewer_rows(folder):
    meta = json.loads((folder / "kvjax.json").read_text())
    meta["shards"] = meta["shards"][:1]
    (folder / "kvjax.json").write_text(json.dumps(meta))


def swapped(folder):
    one, other = folder / "shard-00000-of-00002", folder / "shard-00001-of-00002"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


@pytest.mark.parametrize("damage", [no_shard, fewer_rows, swapped])
def test_a_shard_that_is_not_as_written(damage, two_shards):
    folder, table, _ = two_shards
    damage(folder / "t")
    for placement in (None, part(table.spec.placement, {0, 3})):
        with pytest.raises(ValueError, match="'t', restore: want"):
            read(folder, placement)


def test_offsets_that_lie_are_noticed(two_shards, mesh):
    folder, table, _ = two_shards
    shard = "shard-00000-of-00002"
    offsets = array_at(folder / "t" / shard / "offsets")
    moved = np.where(np.arange(len(offsets)) > 100, offsets[-1], 0)
    rewrite(folder, "t", {f"{shard}/offsets": moved})
    with pytest.raises(ValueError, match="want distinct keys by"):
        read(folder, part(table.spec.placement, {0}))
