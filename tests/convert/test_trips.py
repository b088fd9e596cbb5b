"""Trips: what a table has, out to a file and back, and what is said of what does not come back."""

import dataclasses
import functools
import io
import json
import os
import tracemalloc
import zipfile

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax import convert
from kvjax._command.main import main
from kvjax.convert._files import open_file
from kvjax.serving import FrozenTable
from tests.support.tables import finished

FORMATS = {"npz": "numpy", "safetensors": "safetensors", "parquet": "pyarrow"}


@pytest.fixture(params=FORMATS)
def format(request):
    pytest.importorskip(FORMATS[request.param])
    return request.param


def read(format, path, *args):
    return getattr(convert, f"from_{format}")(path, *args)


def train(table, keys):
    ones = kvjax.SparseRows(kvjax.keys(keys), jnp.ones((len(keys), table.dim)))
    return table.apply(optax.adagrad(1.0, initial_accumulator_value=4.0), ones)[0]


@pytest.mark.parametrize("key_dtype", ["int32", "uint32", "uint64"])
def test_keys_mean_what_they_meant(key_dtype, format, make, tmp_path):
    ids = np.array([-1, 5], np.int64 if key_dtype == "uint64" else np.int32)  # of "uint32" the first is 2**32 - 1
    table = make(1, key_dtype=key_dtype).upsert(ids, [[7.0], [8.0]])
    path, name = tmp_path / f"rows.{format}", table.name
    getattr(table.export(), f"to_{format}")(path)
    imported = read(format, path)
    assert imported.key_dtype == imported.rows.key_dtype == table.export().take(np.array([True, False])).key_dtype
    getattr(imported.rows, f"to_{format}")(tmp_path / "again")
    assert read(format, tmp_path / "again").key_dtype == key_dtype
    convert.import_checkpoint(path, tmp_path / "saved", table=name)
    convert.export_checkpoint(tmp_path / "saved", tmp_path / "out", format=format)
    assert (tmp_path / "out").read_bytes() == path.read_bytes() or format == "npz"
    assert next(iter(kvjax.checkpoint.rows(tmp_path / "saved"))).key_dtype == key_dtype
    frozen = FrozenTable.write(tmp_path / "frozen", table.export(), missing="zeros")
    assert frozen.lookup(ids)[:, 0].tolist() == [7.0, 8.0]
    kvjax.drop_table(name)
    for copy in (imported.make("copy"), kvjax.checkpoint.restore(tmp_path / "saved")[name]):
        assert copy.spec.key_dtype == key_dtype and copy.lookup(ids)[:, 0].tolist() == [7.0, 8.0]
    if key_dtype != "uint64":  # and what JAX makes of ids is whole, as before
        assert copy.lookup(jnp.asarray(ids)).tolist() == [[7.0], [8.0]]


def test_rows_without_slots_get_none_in_deeprec(make, tmp_path):
    pytest.importorskip("google_crc32c")
    table = train(make(1), [1, 2]).upsert([3], [[10.0]])
    table.export(slots=True).to_deeprec(tmp_path / "a", "t", 2, slots=True)
    kvjax.checkpoint.save(tmp_path / "saved", [table])
    convert.export_checkpoint(tmp_path / "saved", tmp_path / "b", format="deeprec", slots=True)
    for path, name in ((tmp_path / "a", "t"), (tmp_path / "b", table.name)):
        imported = convert.from_deeprec(path, name, slots={"sum_of_squares": "sum_of_squares"})
        assert imported.left == ("slots of 1 keys, which not all of ['sum_of_squares'] have",)
        copy = train(imported.make("copy"), [1, 3])
        want = train(table.refresh().copy("want"), [1, 3])
        np.testing.assert_array_equal(copy.lookup([1, 2, 3]), want.lookup([1, 2, 3]))
        for each in ("copy", "want"):
            kvjax.drop_table(each)


def test_what_deeprec_cannot_hold_is_said(make, tmp_path):
    pytest.importorskip("google_crc32c")
    table = make(1).pin([1, 2]).upsert([3], [[1.0]])
    kvjax.checkpoint.save(tmp_path / "saved", [table])
    left = convert.export_checkpoint(tmp_path / "saved", tmp_path / "a", format="deeprec").left
    assert left == ("the pins of 2 rows",)
    with pytest.warns(UserWarning, match="left out the pins of 2 rows"):
        table.export().to_deeprec(tmp_path / "b", "t")
    for reads, other in ((convert.from_tfplus, "from_deeprec"),):
        assert any(other in line for line in reads(tmp_path / "b", "t").left)
    with pytest.raises(convert.FileError, match=r"a name of kvjax's for each, got {'mu': \['a', 'b'\]}"):
        convert.from_deeprec(tmp_path / "b", "t", slots={"a": "mu", "b": "mu"})


def test_bytes_in_the_other_order_are_written_and_loaded(format, make, tmp_path):
    table = train(make(2), [1, 2])
    rows = table.export(slots=True)
    other = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in rows.columns().items()}
    swapped = kvjax.Exported.of_columns(other, rows.last_step)
    getattr(swapped, f"to_{format}")(tmp_path / "a")
    for copy in (read(format, tmp_path / "a").make("copy"), make(2).load(swapped)):
        for name, array in copy.export(slots=True).columns().items():
            np.testing.assert_array_equal(array, rows.columns()[name], err_msg=name)
    dense = convert.from_dense(np.arange(4, dtype=">f4").reshape(2, 2))
    assert dense.make("dense").lookup([1]).tolist() == [[2.0, 3.0]]


def test_loads_cut_no_numbers(make):
    table = make(1).upsert([1], [[1.0]])
    rows = table.export()
    for name, array in (("freqs", rows.freqs + 0.5), ("versions", rows.versions * 1.0), ("pinned", np.array([0.5]))):
        with pytest.raises(TypeError, match=f"'{table.name}', load: want {name} of (integers|bool), got float64"):
            table.load(dataclasses.replace(rows, **{name: array}))
    with pytest.raises(TypeError, match=f"'{table.name}', load: want numbers of the slot 'mu', got <U1"):
        table.load(dataclasses.replace(rows, slots={"mu": np.array(["a"])}))
    assert finished(table.lookup([1])).tolist() == [[1.0]]


def test_slots_come_in_the_order_of_the_optimizer(make, promotion):
    table, adam = make(1), optax.adam(0.1)
    grads = kvjax.SparseRows(kvjax.keys([1, 2]), jnp.ones((2, 1)))
    table, _ = table.apply(adam, grads)
    rows = table.export(slots=True)
    other = dataclasses.replace(rows, slots=dict(sorted(rows.slots.items(), reverse=True)))
    assert list(other.slots) != list(rows.slots)
    want, _ = table.copy("want").apply(adam, grads)
    table, _ = table.load(other).apply(adam, grads)
    np.testing.assert_array_equal(table.lookup([1, 2]), want.lookup([1, 2]))


@pytest.mark.parametrize("name", ["s3:rows", b"rows\xff"])
def test_any_name_of_a_file(name, format, tmp_path, monkeypatch):
    """Also one that is the beginning of a URL, or no text."""
    monkeypatch.chdir(tmp_path)
    rows = convert.from_dense(np.ones((3, 2), np.float32)).rows
    getattr(rows, f"to_{format}")(os.fsdecode(name))
    assert os.listdir(os.fsencode(tmp_path)) == [os.fsencode(name)]
    np.testing.assert_array_equal(read(format, os.fsdecode(name)).rows.values, rows.values)


def test_a_folder_of_files_is_read_as_one(format, make, tmp_path):
    """As Spark writes them, empty ones too, or the processes of a sharded table."""
    table = train(make(2, key_dtype="int32"), [1, 2, 3, 4])
    rows = table.export(slots=True)
    folder = tmp_path / f"rows.{format}"
    folder.mkdir()
    for i, keep in enumerate((rows.keys < 3, rows.keys > 9, rows.keys >= 3)):
        part = dataclasses.replace(rows.take(keep), last_step=7 - i)
        getattr(part, f"to_{format}")(folder / f"part-{i}.{format}")
    (folder / "_SUCCESS").touch()
    imported = read(format, folder)
    assert (imported.rows.last_step, imported.key_dtype, imported.left) == (7, "int32", ())
    copy = imported.make("copy")
    for name, array in copy.export(slots=True).columns().items():
        np.testing.assert_array_equal(array, rows.columns()[name], err_msg=name)
    assert main(["convert", str(folder), str(tmp_path / "saved")]) == 0
    assert len(kvjax.checkpoint.restore(tmp_path / "saved")["rows"]) == 4
    with pytest.raises(
        kvjax.checkpoint.CheckpointError, match=f"files .*{format}; if they are rows, .*--from {format}"
    ):
        kvjax.checkpoint.restore(folder)
    getattr(rows.take(rows.keys > 3), f"to_{format}")(folder / f"part-9.{format}", slots=False)
    with pytest.raises(convert.FileError, match=r"want the same columns in all files, got \['slot.sum_of_squares'\]"):
        read(format, folder)
    (tmp_path / "none").mkdir()
    with pytest.raises(convert.FileError, match=f"or a folder of such, got a folder without any .*{format}"):
        read(format, tmp_path / "none")


def test_files_of_a_folder_are_not_all_open_nor_in_memory(tmp_path):
    """Spark writes hundreds, each a row group."""
    pytest.importorskip("pyarrow")
    for i in range(20):
        keys = np.arange(100) + 100 * i
        convert.from_dense(np.ones((100, 64), np.float32), keys).rows.to_parquet(tmp_path / f"part-{i:02}.parquet")
    before = len(os.listdir("/proc/self/fd"))
    rows = open_file("parquet", tmp_path).rows
    assert len(os.listdir("/proc/self/fd")) == before
    parts = rows.read(["keys"], 0, 0)  # which opens the columns
    tracemalloc.start()
    for start in range(0, rows.num_rows, 50):
        parts = rows.read(["keys", "values"], start, start + 50)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert parts["keys"][-1] == 1999 and held < 3 * 100 * 64 * 4  # and not of all twenty


def test_a_file_that_is_replaced_while_it_is_read(tmp_path):
    """Columns of two files are no table."""
    pytest.importorskip("pyarrow")
    keys, path = np.arange(1000), tmp_path / "rows.parquet"
    convert.from_dense(np.zeros((1000, 2), np.float32), keys).rows.to_parquet(path)
    source = open_file("parquet", path).rows
    source.read(["keys"], 0, 1000)
    convert.from_dense(np.ones((1000, 2), np.float32), keys[::-1].copy()).rows.to_parquet(path)
    with pytest.raises(convert.FileError, match="want the file that was there when it was first read, got another"):
        source.read(["values"], 0, 1000)


def test_keys_of_another_sign_have_their_own_dtype(format, make, tmp_path):
    rows = make(1, key_dtype="int32").upsert([5], [[7.0]]).export()
    other = dataclasses.replace(rows, keys=rows.keys.view(np.uint64))
    getattr(other, f"to_{format}")(tmp_path / "a")
    assert read(format, tmp_path / "a").key_dtype == "uint64"
    assert FrozenTable.write(tmp_path / "b", other, missing="zeros").lookup([5])[:, 0].tolist() == [7.0]


def test_what_a_folder_of_files_must_be(make, tmp_path):
    def export(name, key_dtype, keys, **others):
        name.parent.mkdir(exist_ok=True)
        make(1, key_dtype=key_dtype).upsert(keys, np.ones((len(keys), 1))).export().to_npz(name)
        with zipfile.ZipFile(name, "a") as archive:
            for column, array in others.items():
                with archive.open(f"{column}.npy", "w") as file:
                    np.lib.format.write_array(file, array)

    export(tmp_path / "two/a.npz", "int32", [1])
    export(tmp_path / "two/b.npz", "int64", [2])
    with pytest.raises(
        convert.FileError, match=r"want files of one table, got those of tables of \['int32', 'int64'\]"
    ):
        convert.from_npz(tmp_path / "two")
    with np.load(tmp_path / "two/b.npz") as written:
        arrays = {name: array for name, array in written.items() if name != "kvjax.json"}
    np.savez(tmp_path / "two/b.npz", **arrays)
    assert convert.from_npz(tmp_path / "two").key_dtype == "int32"  # the other says nothing
    with pytest.raises(convert.FileError, match="want one file, whose rows are numbered, got a folder"):
        convert.from_npz(tmp_path / "two", {"keys": None})
    export(tmp_path / "scalar/a.npz", "int64", [1], lr=np.array(0.5))
    with pytest.raises(convert.FileError, match="'freqs' for 1 keys"):
        convert.from_npz(tmp_path / "scalar", {"freqs": "lr"})
    export(tmp_path / "two/below/c.npz", "int64", [3])
    with pytest.raises(convert.FileError, match=r"want files in one folder, got another below, below/c\.npz"):
        convert.from_npz(tmp_path / "two")


def test_a_column_that_nobody_asks_for_may_be_of_anything(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = {"keys": [1, 2], "values": arrow.array([[1.0], [2.0]], arrow.list_(arrow.float32())), "w": [None, 1.0]}
    parquet.write_table(arrow.table(rows), tmp_path / "a.parquet")
    for path in (tmp_path / "a.parquet", tmp_path):
        assert convert.from_parquet(path).left == ("the column 'w'",)


def test_arrays_by_columns_wait_until_they_are_asked_for(tmp_path):
    wide = np.asfortranarray(np.ones((4000, 64), np.float32))
    for i in range(8):
        np.savez(tmp_path / f"{i}.npz", keys=np.arange(4000) + 4000 * i, values=wide, unasked=wide)
    tracemalloc.start()
    rows = open_file("npz", tmp_path).rows
    for start in range(0, rows.num_rows, 1000):
        rows.read(["keys", "values"], start, start + 1000)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < wide.nbytes and most < 4 * wide.nbytes


def test_columns_and_slots_from_a_shell(tmp_path, capsys):
    path = tmp_path / "rows.npz"
    np.savez(path, ids=np.array([7, 8]), emb=np.ones((2, 3), np.float32))
    assert main(["convert", str(path), str(tmp_path / "a"), "--column", "keys=ids", "--column", "values=emb"]) == 0
    assert main(["get", str(tmp_path / "a"), "7", "8"]) == 0
    assert main(["convert", str(path), str(tmp_path / "b.npz"), "--column", "keys=", "--column", "values=emb"]) == 0
    assert convert.from_npz(tmp_path / "b.npz").rows.keys.tolist() == [0, 1]
    assert main(["convert", str(path), str(tmp_path / "c")]) == 2
    assert "say with --column what they are called" in capsys.readouterr().err
    for name, values in (("t", np.ones((2, 3))), ("t_m", np.full((2, 3), 2.0))):
        np.array([7, 8]).tofile(tmp_path / f"{name}_mht_1of1_rank0_size1-keys")
        values.astype(np.float32).tofile(tmp_path / f"{name}_mht_1of1_rank0_size1-values")
    args = ["convert", str(tmp_path), str(tmp_path / "d.npz"), "--from", "tfra", "--table", "t", "--fill", "count=5"]
    assert main([*args, "--slot", "m=mu"]) == 0
    slots = convert.from_npz(tmp_path / "d.npz").rows.slots
    assert slots["mu"].tolist() == [[2.0] * 3] * 2 and slots["count"].tolist() == [5, 5]
    assert main([*args, "--overwrite", "--slot", "m=mu", "--slot", "m=nu"]) == 2
    assert "want --slot m once" in capsys.readouterr().err
    os.mkdir(tmp_path / "tfra")
    (tmp_path / "tfra/t_mht_1of1_rank0_size1-keys").touch()
    assert main(["convert", str(tmp_path / "tfra"), str(tmp_path / "e")]) == 2
    assert "kvjax: convert: want a checkpoint of tables, got" in (text := capsys.readouterr().err) and "--from" in text
    pytest.importorskip("google_crc32c")
    assert main(["convert", str(tmp_path / "b.npz"), str(tmp_path / "f"), "--to", "deeprec"]) == 0
    assert len(convert.from_deeprec(tmp_path / "f", "b").rows) == 2  # the file's name


def test_what_metadata_and_arguments_say_wrongly(tmp_path, make):
    np.savez(tmp_path / "a.npz", keys=np.array([1, 2]), values=np.ones((2, 1), np.float32), freqs=np.array([2**62, 1]))
    for said in (
        {"last_step": 2**70},
        {"last_step": -3},
        {"last_step": "x"},
        {"key_dtype": "uint32"},
        {"key_dtype": "i8"},
    ):
        (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes())
        with zipfile.ZipFile(tmp_path / "b.npz", "a") as archive:
            archive.writestr("kvjax.json", json.dumps(said))
        ((name, value),) = said.items()
        found = convert.from_npz(tmp_path / "b.npz")  # by another program, perhaps, which means something else
        assert found.left == (f"{name} of the metadata, {str(value)!r}",)
        assert (found.rows.last_step, found.key_dtype) == (0, "int64")
    np.savez(tmp_path / "late.npz", keys=np.array([1]), values=np.ones((1, 1), np.float32), versions=np.array([5]))
    with zipfile.ZipFile(tmp_path / "late.npz", "a") as archive:
        archive.writestr("kvjax.json", json.dumps({"last_step": "4"}))
    for read in (convert.from_npz, functools.partial(convert.import_checkpoint, path=tmp_path / "late")):
        with pytest.raises(convert.FileError, match="want versions up to last_step=4, as the metadata says, got 5; "):
            read(tmp_path / "late.npz")
    imported = convert.from_npz(tmp_path / "a.npz")
    with pytest.raises(TypeError, match="table 'new', import: want no dim=, which the rows have, got 1"):
        imported.make("new", dim=1)
    most = imported.make("new").export().freqs.max()
    convert.import_checkpoint(tmp_path / "a.npz", tmp_path / "saved")
    assert next(iter(kvjax.checkpoint.rows(tmp_path / "saved"))).freqs.max() == most == 2**62 - 1
    for wrong in ({"colums": {}}, {"slots": {}}):
        with pytest.raises(TypeError, match=r"import_checkpoint: want of from_npz's arguments \['columns'\], got"):
            convert.import_checkpoint(tmp_path / "a.npz", tmp_path / "other", **wrong)
    kvjax.checkpoint.save(tmp_path / "two", {"one": make(1), "two": make(1)})
    with pytest.raises(convert.FileError, match=r"got \['one', 'two'\]; say which: table="):
        convert.export_checkpoint(tmp_path / "two", tmp_path / "c.npz")
    for limit in ("x", float("inf"), float("nan"), 0, True):
        with pytest.raises(ValueError, match="max_norm: want a finite limit above 0"):
            kvjax.constraints.max_norm(limit)


@pytest.mark.parametrize("packing", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_says_it_has_more_than_a_file_can(packing, tmp_path):
    """Nothing is allocated for it, be it of as many rows as it says."""
    n, header = 1 << 36, io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (n,)})
    with zipfile.ZipFile(tmp_path / "rows.npz", "w", packing) as archive:
        archive.writestr("keys.npy", header.getvalue())
        archive.filelist[0].file_size += 8 * n
    with pytest.raises(convert.FileError, match=r"want 'keys.npy' of at most \d+ bytes in a file of \d+, got"):
        convert.from_npz(tmp_path / "rows.npz", {"values": "keys", "keys": None})
