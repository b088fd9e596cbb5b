"""Exports as files: every column, exactly, read back; fewer bits, and what they change; missing libraries."""

import dataclasses
import os
import sys
import time
import tracemalloc

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax import convert
from kvjax._formats import bundle, deeprec, safetensors, source
from kvjax._formats.errors import needed
from kvjax._formats.quantise import encode
from kvjax._formats.quantised_source import quantised
from kvjax._values.exported import Exported
from tests.support.checkpoints import IDS, assert_equal, trained
from tests.support.marks import few_rows, slow

FORMATS = {"safetensors": "safetensors", "npz": "numpy", "parquet": "pyarrow"}


def reader(format):
    pytest.importorskip(FORMATS[format])
    return getattr(convert, f"from_{format}")


def export_of(make, key_dtype="int64", dtype="float32", slots=True):
    table = trained(make(3, key_dtype=key_dtype, dtype=dtype).upsert(IDS, np.ones((5, 3))), optax.rmsprop(0.1))
    return table.export(slots=slots)


@pytest.mark.parametrize(
    "key_dtype, dtype", few_rows([("int64", "float32"), ("uint64", "bfloat16"), ("int64", "float16")], 1)
)
def test_exports_come_back_as_they_were(key_dtype, dtype, make, tmp_path):
    rows = export_of(make, key_dtype, dtype)
    for format in FORMATS:
        path = tmp_path / f"rows.{format}"
        assert getattr(rows, f"to_{format}")(path) is None
        found = reader(format)(path).rows
        if dtype == "bfloat16" and format == "parquet":
            assert found.values.dtype == np.float32
            found = found.of_columns(
                {n: a.astype(rows.columns()[n].dtype) for n, a in found.columns().items()}, found.last_step
            )
        assert_equal(found, rows)
        assert {n: a.dtype for n, a in found.columns().items()} == {n: a.dtype for n, a in rows.columns().items()}
        none = rows.take(np.zeros(5, bool))
        getattr(none, f"to_{format}")(str(path), slots=False)
        assert reader(format)(path).rows.values.shape == (0, 3) and reader(format)(path).rows.slots == {}
        assert [p.name for p in tmp_path.iterdir()] == [path.name]  # nothing half written beside it
        path.unlink()


def test_the_same_rows_are_the_same_bytes_at_any_time(make, tmp_path, monkeypatch):
    rows = export_of(make)
    for format, library in FORMATS.items():
        pytest.importorskip(library)
        with monkeypatch.context() as later:
            for name, at in ("a", 1e9), ("b", 1.1e9):
                later.setattr(time, "time", lambda at=at: at)
                getattr(rows, f"to_{format}")(tmp_path / name)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes(), format


@slow
@pytest.mark.parametrize("format", FORMATS)
def test_an_export_that_somebody_has_put_together_wrongly_is_no_file(format, make, tmp_path):
    """One of fewer keys than rows was one that readers took without a word."""
    rows = make(1).upsert(np.arange(3), np.ones((3, 1))).export()
    wrong = [({"keys": rows.keys[:2]}, "want 2 rows in each column"), ({"slots": None}, "want slots as a dict")]
    wrong += [({"versions": np.array([0, 5, 0])}, "want versions from 0 to last_step=0, got 5; ")]
    wrong += [({"freqs": np.array([0, -1, 0])}, r"want freqs from 0 to 2\*\*63 - 1, got -1; ")]
    wrong += [({"values": np.array([["a"]] * 3)}, "want values of numbers, got <U1")]
    wrong += [({"slots": {"m": np.array([None] * 3)}}, "want numbers of the slot 'm', got object")]
    for fields, text in wrong:
        other = dataclasses.replace(rows, **fields)
        with pytest.raises((TypeError, ValueError), match=rf"^kvjax: .*rows\.{format}: {text}"):
            getattr(other, f"to_{format}")(tmp_path / f"rows.{format}")
        with pytest.raises((TypeError, ValueError), match=f"^kvjax: Prune.report: {text}"):
            kvjax.Prune(min_norm=0.1).report(other)
    assert list(tmp_path.iterdir()) == []


def test_other_readers(make, tmp_path):
    rows = export_of(make, "uint64")
    rows.to_npz(tmp_path / "rows.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npz")["slot.nu"], rows.slots["nu"])
    rows.to_safetensors(tmp_path / "rows.safetensors")
    library = pytest.importorskip("safetensors.numpy")
    np.testing.assert_array_equal(library.load_file(tmp_path / "rows.safetensors")["values"], rows.values)
    parquet = pytest.importorskip("pyarrow.parquet")
    rows.to_parquet(tmp_path / "rows.parquet")
    found = parquet.read_table(tmp_path / "rows.parquet")
    assert found.schema.metadata[b"kvjax.last_step"] == b"3" and found.column_names == list(rows.columns())
    assert found["values"].to_pylist() == rows.values.tolist() and str(found.schema.field("keys").type) == "uint64"


def test_a_place_where_no_file_can_be_is_said_before_rows_are_written(tmp_path):
    rows = convert.from_dense(np.ones((3, 2), np.float32)).rows
    for format in FORMATS:
        reader(format)
        with pytest.raises(IsADirectoryError, match="want a file to write, got a folder"):
            getattr(rows, f"to_{format}")(tmp_path)
        with pytest.raises(FileNotFoundError, match=r"want a folder to write the file in.*no/rows'"):
            getattr(rows, f"to_{format}")(tmp_path / "no/rows")
    assert not list(tmp_path.iterdir())


def test_only_files_are_replaced(tmp_path):
    """Not a device, as /dev/null is, and of a link the file that it names."""
    rows = convert.from_dense(np.ones((2, 2), np.float32)).rows
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="want a file to write, got a device or a pipe"):
        rows.to_npz(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there/rows.npz")
    rows.to_npz(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and len(convert.from_npz(tmp_path / "there/rows.npz").rows) == 2


def test_a_damaged_list_of_an_archive_hides_no_column(make, tmp_path):
    table = make(2).upsert([1, 2], np.ones((2, 2))).pin([1])
    table.export(slots=True).to_npz(tmp_path / "rows.npz")
    data = (tmp_path / "rows.npz").read_bytes()
    at = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1)  # the list, at its second entry
    for length in (28, 30, 32):  # of the name, of more fields, of a comment
        damaged = bytearray(data)
        damaged[at + length + 1] = 1
        (tmp_path / "rows.npz").write_bytes(damaged)
        with pytest.raises(convert.FileError, match="want an npz archive"):
            convert.from_npz(tmp_path / "rows.npz")


def test_a_library_that_is_missing(make, tmp_path, monkeypatch):
    rows = make(1).export()
    for module, name in {"pyarrow": "to_parquet", "google_crc32c": "to_deeprec"}.items():
        monkeypatch.setitem(sys.modules, module, None)
        args = ("v",) if name == "to_deeprec" else ()
        with pytest.raises(ImportError, match=rf"want {module.replace('_', '-')}, got no such module; pip install"):
            getattr(rows, name)(tmp_path / "rows", *args)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="want safetensors"):
        convert.from_safetensors(__file__)
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_does_not_load_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "pyarrow.py").write_text("raise ImportError('libfoo.so.1: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"want pyarrow, got one that does not load \(libfoo.so.1: no such file\)"):
        needed("pyarrow", "writing Parquet", "parquet")


def test_scales_of_what_is_no_int8_are_left(tmp_path):
    np.savez(tmp_path / "a.npz", keys=np.arange(3), values=np.ones((3, 2)), scales=np.full(3, 2.0))
    imported = convert.from_npz(tmp_path / "a.npz")
    assert imported.left == ("the column 'scales'",) and (imported.rows.values == 1).all()


def rows_of(values, keys=None):
    keys = np.arange(len(values)) if keys is None else keys
    zeros = np.zeros(len(keys), np.int64)
    return Exported(keys, values, zeros, zeros, {}, zeros.astype(bool), zeros.astype(bool), 0, len(keys))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_quantised_rows(dtype, tmp_path):
    values = np.random.default_rng(0).normal(size=(400, 7)).astype(np.float32)
    values[3] = 0
    error = rows_of(values).to_npz(tmp_path / "rows.npz", quantise=dtype)
    found = convert.from_npz(tmp_path / "rows.npz").rows.values.astype(np.float64)
    change = found - values
    assert error.max == np.abs(change).max() > 0 and error.rms == pytest.approx(np.sqrt((change**2).mean()))
    cosines = (found * values).sum(1)[values.any(1)] / (np.linalg.norm(found, axis=1) * np.linalg.norm(values, axis=1))[
        values.any(1)
    ]
    assert error.cosine == pytest.approx(cosines.min()) and error.cosine > 0.999
    assert error.bytes_before == values.nbytes and error.bytes_after == (
        400 * 7 + 1600 if dtype == "int8" else 400 * 14
    )
    if dtype == "int8":
        largest = np.abs(values).max(axis=1, keepdims=True)
        assert (np.abs(change) <= largest / 254 * 1.001).all()


def test_what_fewer_bits_cannot_hold(tmp_path):
    path = tmp_path / "rows.npz"
    assert rows_of(np.array([[np.inf, 1], [1e-9, 0]], np.float32)).to_npz(path, quantise="float16").cosine == 0
    with pytest.raises(ValueError, match=r"want rows that float16 can hold, got 1000000\.0 in the row of key 1; "):
        rows_of(np.array([[1, 1], [0, 1e6]], np.float32)).to_npz(tmp_path / "other.npz", quantise="float16")
    with pytest.raises(ValueError, match="want rows that int8 can hold, got nan in the row of key "):
        rows_of(np.array([[1, 1], [np.nan, 0]], np.float32)).to_npz(tmp_path / "other.npz", quantise="int8")
    with pytest.raises(ValueError, match=r"want quantise= as one of .*, got 'int4'"):
        rows_of(np.ones((1, 1), np.float32)).to_npz(tmp_path / "other.npz", quantise="int4")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.npz"]
    assert not encode(np.full((1, 2), 1e-45, np.float32), "int8")[0].any()


def test_deeprec_layout(make, tmp_path):
    pytest.importorskip("google_crc32c")
    keys = np.array([0, 7, 1007, 2**62, 999, 5])
    rows = make(2, dtype="bfloat16").upsert(keys, np.arange(12).reshape(6, 2)).export()
    rows.to_deeprec(tmp_path / "model.ckpt-1", "v", partitions=3)
    found = bundle.Bundle(tmp_path / "model.ckpt-1")
    assert len(found.entries) == 3 * 9
    for part in range(3):
        own = found.read(f"v/part_{part}-keys")
        buckets, offsets = own % 1000, found.read(f"v/part_{part}-partition_offset")
        assert (buckets % 3 == part).all() and (np.diff(buckets) >= 0).all() and offsets[-1] == len(own)
        for bucket in range(1000):
            assert (buckets[offsets[bucket] : offsets[bucket + 1]] == bucket).all()
    back = convert.from_deeprec(tmp_path, "v").rows
    order = np.argsort(back.keys), np.argsort(rows.keys)
    np.testing.assert_array_equal(back.values[order[0]], rows.values[order[1]])
    assert back.values.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="want keys from 0 to 2\\*\\*63 - 1, got 1 others, the first -1"):
        make(1).upsert(np.array([-1]), [[1.0]]).export().to_deeprec(tmp_path / "other", "v")


def test_sources_are_read_piece_by_piece(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    whole = {"keys": np.arange(150_000), "values": rng.normal(size=(150_000, 2)).astype(np.float32)}
    keep = rng.random(150_000) < 0.4
    keep[65536:131072] = False
    monkeypatch.setattr(source, "PIECE_BYTES", 1 << 16)
    kept = source.Source.of(whole, {}).where(keep)
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate(list(kept.pieces(name))), array[keep])
    assert (
        kept.read(["keys"], 5, 5)["keys"].shape == (0,)
        and source.Source.of(whole, {}).where(keep & False).num_rows == 0
    )

    def read(names, start, stop):
        return {name: np.zeros((stop - start, 1024), np.float32) for name in names}

    endless = source.Source({"values": (np.dtype(np.float32), (1024,))}, 4_000, read, {})
    tracemalloc.start()
    safetensors.write(tmp_path / "large", endless)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20 and (tmp_path / "large").stat().st_size > 16_000_000
    tracemalloc.stop()


def test_what_is_computed_from_wide_rows_is_read_in_pieces_of_these(monkeypatch):
    monkeypatch.setattr(source, "PIECE_BYTES", 1 << 12)
    seen = []

    def read(names, start, stop):
        seen.append(stop - start)
        return {"values": np.ones((stop - start, 64), np.float32)}

    plain = source.Source({"values": (np.dtype(np.float32), (64,))}, 1000, read, {})
    wide, quantiser = quantised(plain, "int8", "file")
    assert sum(map(len, wide.pieces("scales"))) == sum(map(len, wide.pieces("values"))) == 1000
    assert max(seen) == 16 and quantiser.report().max == 0 and quantiser.rows == 1000


@slow
@pytest.mark.parametrize("format", FORMATS)
def test_damaged_files(format, make, tmp_path):
    """Bytes that are others, and ends that are missing: an error of ours, or the same rows; never others."""
    path = tmp_path / f"rows.{format}"
    read = reader(format)
    rows = export_of(make)
    getattr(rows, f"to_{format}")(path)
    data, caught = path.read_bytes(), 0
    rng = np.random.default_rng(0)
    for at in rng.permutation(len(data))[:80]:
        for bad in (data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :], data[:at]):
            path.write_bytes(bad)
            try:
                assert_equal(read(path).rows, rows)
            except ValueError as error:
                caught += 1
                assert str(error).startswith("kvjax: "), error
    assert caught > 120


@slow
def test_deeprec_rows_are_put_in_order_in_a_file(tmp_path, monkeypatch):
    """Where there are many of them; the files are the same to the byte, and nothing is left beside them."""
    pytest.importorskip("google_crc32c")
    rng = np.random.default_rng(0)
    rows = rows_of(rng.normal(size=(5000, 4)).astype(np.float32), rng.integers(0, 2**62, 5000))
    rows.slots.update(mu=rows.values + 1, count=np.arange(5000))
    rows = dataclasses.replace(rows, has_slots=np.arange(5000) % 7 > 0)
    written = []
    for limit in (1 << 26, 0):
        monkeypatch.setattr(deeprec, "_IN_MEMORY", limit)
        monkeypatch.setattr(source, "PIECE_BYTES", 1 << 12)
        with pytest.warns(UserWarning, match="left out the slot 'count', which has not the shape of a row"):
            rows.to_deeprec(tmp_path / "m", "v", partitions=3, slots=True)
        written.append([path.read_bytes() for path in sorted(tmp_path.iterdir())])
    assert written[0] == written[1] and len(written[0]) == 2
    found = convert.from_deeprec(tmp_path / "m", "v", slots={"mu": "mu"}).rows
    assert set(found.keys[found.has_slots].tolist()) == set(rows.keys[rows.has_slots].tolist())
    np.testing.assert_array_equal(found.slots["mu"][found.has_slots], found.values[found.has_slots] + 1)
