"""Imports as checkpoints: bytes as of a table that is made of the rows and saved, whatever is in memory at once."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax import convert
from kvjax._command.main import main
from kvjax._formats import source
from kvjax._formats.choices import FILE_FORMATS
from kvjax._formats.choices import SYSTEMS as NAMES
from kvjax._formats.files import FORMATS
from kvjax.convert._import_checkpoint import OPENERS
from tests.support.checkpoints import trained
from tests.support.marks import slow

GOLDEN = Path(__file__).parents[1] / "golden"
SYSTEMS = {
    "tfra": ("tfra_slots", "user/emb", {"slots": {"m": "mu", "v": "nu"}, "fill": {"count": 7}}),
    "deeprec": ("deeprec", "user", {"slots": {"Adagrad": "sum_of_squares"}}),
    "tfplus": ("tfplus/model.ckpt-1", "emb", {}),
}


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@slow
@pytest.mark.parametrize("piece", [1 << 24, 64])
@pytest.mark.parametrize("format", ["npz", "safetensors", "parquet", *SYSTEMS])
def test_it_is_the_checkpoint_of_the_table_that_is_made_of_the_rows(format, piece, make, tmp_path, monkeypatch):
    where, variable, how = tmp_path / f"rows.{format}", None, {}
    if format in SYSTEMS:
        pytest.importorskip("google_crc32c")
        folder, variable, how = SYSTEMS[format]
        where = GOLDEN / folder
    else:
        pytest.importorskip({"parquet": "pyarrow"}.get(format, "numpy"))
        table = trained(make(3, key_dtype="uint64", dtype="bfloat16")).pin(np.array([7], np.uint64))
        getattr(table.export(slots=True), f"to_{format}")(where)
    read = getattr(convert, f"from_{format}")
    imported = read(where, *filter(None, [variable]), **how)
    dtype = "bfloat16" if format == "parquet" else None  # which has none
    table = imported.make("t", **({"dtype": dtype} if dtype else {}))
    kvjax.checkpoint.save(tmp_path / "whole", [table])
    kvjax.drop_table("t")
    monkeypatch.setattr(source, "PIECE_BYTES", piece)
    given = {"table": "t", "format": format, "variable": variable, "dtype": dtype, **how}
    report = convert.import_checkpoint(where, tmp_path / "some", **given)
    assert (report.rows, report.left) == (len(imported.rows), imported.left)
    assert files_of(tmp_path / "some") == files_of(tmp_path / "whole")
    prune = kvjax.Prune(top_k=3)
    report = convert.import_checkpoint(where, tmp_path / "some", **given, prune=prune, overwrite=True)
    kvjax.checkpoint.prune(tmp_path / "whole", tmp_path / "top", prune)
    assert report.rows == 3 < report.total and files_of(tmp_path / "some") == files_of(tmp_path / "top")


@slow
def test_what_is_wrong_leaves_nothing(make, tmp_path):
    np.savez(tmp_path / "twice.npz", keys=np.array([1, 2, 1]), values=np.ones((3, 1), np.float32))
    np.savez(tmp_path / "wide.npz", keys=np.array([1, 2]), values=np.ones((2, 1)))
    np.savez(tmp_path / "large.npz", keys=np.array([1, 2]), values=np.array([[1.0], [7e4]]))
    np.savez(tmp_path / "old.npz", keys=np.array([1]), values=np.ones((1, 1), np.float32), freqs=np.array([-1]))
    wrongs = {
        ("twice.npz",): "each key once, got 1 keys that are there again, the first 1",
        ("wide.npz",): "rows of .*, got float64; say dtype=",
        ("old.npz",): "freqs and versions of at least 0",
        ("rows.what",): "a format of",
        ("rows.npz", "variable"): "variable= for another system's alone",
        ("rows.tfra",): "variable= for another system's alone",
    }
    for (name, *more), message in wrongs.items():
        with pytest.raises(ValueError, match=message):
            convert.import_checkpoint(tmp_path / name, tmp_path / "out", **dict.fromkeys(more, "x"))
    with pytest.raises(ValueError, match="float16 can hold, got larger ones in 1 rows, for instance of key 2"):
        convert.import_checkpoint(tmp_path / "large.npz", tmp_path / "out", dtype="float16")
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}
    convert.import_checkpoint(tmp_path / "wide.npz", tmp_path / "out", dtype="float16", seed=3)
    (table,) = kvjax.checkpoint.restore(tmp_path / "out").values()
    assert (table.name, table.spec.dtype, table.spec.seed, len(table)) == ("wide", "float16", 3, 2)
    np.savez(tmp_path / "none.npz", keys=np.zeros(0, np.int64), values=np.ones((0, 2), np.float32))
    assert convert.import_checkpoint(tmp_path / "none.npz", tmp_path / "none").rows == 0
    assert kvjax.checkpoint.restore(tmp_path / "none")["none"].shape == (0, 2)


def test_the_source_of_tfra_may_have_another_dtype(tmp_path, capsys):
    """Its files do not say theirs, and of two numbers of 32 bits one of 64 is nothing."""
    np.arange(3).tofile(tmp_path / "t-keys")
    np.array([[0.5, 2.0], [1.5, -3.0], [0.1, 9.0]]).tofile(tmp_path / "t-values")
    given = {"format": "tfra", "variable": "t", "source_dtype": "float64"}
    with pytest.raises(convert.FileError, match=r'float64; say dtype="float32" to round them, .* source_dtype='):
        convert.import_checkpoint(tmp_path, tmp_path / "out", **given)
    with pytest.raises(convert.FileError, match=r"want source_dtype= of numbers, such as 'float32', got 'float46'"):
        convert.import_checkpoint(tmp_path, tmp_path / "out", format="tfra", variable="t", source_dtype="float46")
    with pytest.raises(convert.FileError, match=r"1 keys that are there again, .* rows out, or say dim=, key_dtype="):
        convert.from_tfra(tmp_path, "t", key_dtype="int32")
    with pytest.raises(convert.FileError, match=r"want files of 't', t_mht_\.\.\.-keys, got no such folder"):
        convert.from_tfra(tmp_path / "none", "t")
    convert.import_checkpoint(tmp_path, tmp_path / "out", **given, dtype="float32")
    (rows,) = kvjax.checkpoint.rows(tmp_path / "out", keys=[2])
    assert rows.values.dtype == np.float32 and rows.values.tolist() == [[np.float32(0.1), 9.0]]
    shell = ["convert", str(tmp_path), str(tmp_path / "t.npz"), "--from", "tfra", "--table", "t"]
    assert main([*shell, "--dim", "2"]) == 2
    want = "and --dtype of the variable, or --source-dtype if --dtype is that of a new checkpoint"
    assert want in " ".join(capsys.readouterr().err.split())
    assert main([*shell, "--source-dtype", "float64"]) == 2
    want = "float64; say --dtype float32 to round them, for TFRA beside --source-dtype, which is that of its files"
    assert want in " ".join(capsys.readouterr().err.split())
    assert main([*shell, "--source-dtype", "float64", "--dtype", "float32"]) == 0
    assert np.load(tmp_path / "t.npz")["values"].shape == (3, 2)
    np.savez(tmp_path / "rows.npz", keys=np.arange(3), values=np.ones((3, 1), np.float32))
    with pytest.raises(convert.FileError, match="want source_dtype= for tfra alone, got 'float64' for npz"):
        convert.import_checkpoint(tmp_path / "rows.npz", tmp_path / "out2", source_dtype="float64")


@slow
@pytest.mark.parametrize("format", ["npz", "safetensors", "parquet", "tfra"])
def test_rows_are_read_piece_by_piece(format, tmp_path, monkeypatch):
    """Of 40 MB, an import and an export have a part in memory; beside it there are some numbers for each bucket."""
    pytest.importorskip({"parquet": "pyarrow", "safetensors": "safetensors"}.get(format, "numpy"))
    monkeypatch.setattr(source, "PIECE_BYTES", 1 << 19)
    monkeypatch.setattr("kvjax.checkpoint._disk.format._CHUNK_BYTES", 1 << 18)
    seen = []
    n, where, how = 50_000, tmp_path / f"rows.{format}", {}
    values = np.tile(np.arange(n, dtype=np.float32)[:, None], (1, 200))
    if format == "tfra":
        where, how = tmp_path, {"variable": "t"}
        np.arange(n).tofile(tmp_path / "t-keys")
        values.tofile(tmp_path / "t-values")
    else:
        getattr(convert.from_dense(values).rows, f"to_{format}")(where)
    tracemalloc.start()
    try:
        convert.import_checkpoint(where, tmp_path / "out", format=format, progress=seen.append, **how)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes / 2 and len(seen) > 50 and sum(seen) > values.nbytes, peak
    tracemalloc.start()
    try:  # from file to file, too
        given = ["--from", format, *(["--table", "t"] if how else [])]
        assert main(["convert", str(where), str(tmp_path / "again.npz"), "--json", *given]) == 0
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes / 2 and len(np.load(tmp_path / "again.npz")["keys"]) == n, peak
    some = kvjax.checkpoint.restore(tmp_path / "out", keys=np.array([7, n - 1]))
    assert next(iter(some.values())).lookup(np.array([7, n - 1]))[:, -1].tolist() == [7, n - 1]


def test_each_format_and_system_is_known_by_its_name():
    assert tuple(FORMATS) == FILE_FORMATS and tuple(OPENERS) == NAMES
