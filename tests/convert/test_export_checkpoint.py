"""Checkpoints as files of other programs: the same rows as an export of the table, in pieces, pruned, quantised."""

import numpy as np
import optax
import pytest

import kvjax
from kvjax import convert
from kvjax._command.main import main
from kvjax._formats import source
from tests.support.checkpoints import assert_equal, trained
from tests.support.marks import slow


def saved(make, folder, n=300):
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, n)
    table = trained(make(3, dtype="bfloat16").upsert(keys, np.arange(3 * n).reshape(n, 3) % 7), optax.rmsprop(0.1))
    kvjax.checkpoint.save(folder / "one", [table])
    return table


@slow
def test_a_checkpoint_is_exported_in_pieces(make, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "PIECE_BYTES", 1 << 10)
    table = saved(make, tmp_path)
    prune = kvjax.Prune(min_norm=1, top_k=200, keep=[0], predicate=lambda rows: rows.keys > 0)
    seen = []
    report = convert.export_checkpoint(tmp_path / "one", tmp_path / "all.npz", slots=True, progress=seen.append)
    whole = table.export(slots=True)
    assert report.rows == report.total == len(table) and len(seen) > 10
    assert sum(seen) == sum(array.nbytes for array in whole.columns().values())
    assert_equal(convert.from_npz(tmp_path / "all.npz").rows, whole)
    report = convert.export_checkpoint(tmp_path / "one", tmp_path / "some.npz", prune=prune, quantise="int8")
    want = table.export(prune)
    found = convert.from_npz(tmp_path / "some.npz").rows
    np.testing.assert_array_equal(found.keys, want.keys)
    assert np.abs(found.values - want.values.astype(np.float32)).max() == report.error.max <= 7 / 254
    for format in ("safetensors", "parquet", "xlsx"):
        path = tmp_path / f"out.{format}"
        if format == "xlsx":
            with pytest.raises(ValueError, match=r"want a format of .*, got 'xlsx'"):
                convert.export_checkpoint(tmp_path / "one", path)
        else:
            convert.export_checkpoint(tmp_path / "one", path)
            np.testing.assert_array_equal(getattr(convert, f"from_{format}")(path).rows.keys, table.export().keys)
    positive = kvjax.Prune(predicate=lambda rows: rows.keys > 0)
    report = convert.export_checkpoint(
        tmp_path / "one", tmp_path / "d", format="deeprec", prune=positive, partitions=3, slots=True
    )
    assert report.left == ()
    back = convert.from_deeprec(tmp_path / "d", "table0", slots={"nu": "nu"})
    kept = whole.take(whole.keys > 0)
    order, theirs = np.argsort(kept.keys), np.argsort(back.rows.keys)
    np.testing.assert_array_equal(back.rows.slots["nu"][theirs], kept.slots["nu"][order])
    with pytest.raises(ValueError, match="want no partitions= for npz"):
        convert.export_checkpoint(tmp_path / "one", tmp_path / "x.npz", partitions=3)
    with pytest.raises(ValueError, match=r"want one table of the checkpoint, got 'tabel0'.*did you mean 'table0'"):
        convert.export_checkpoint(tmp_path / "one", tmp_path / "x.npz", table="tabel0")


@slow
def test_an_empty_table(make, tmp_path):
    kvjax.checkpoint.save(tmp_path / "one", [make(2)])
    for format in ("npz", "safetensors", "parquet", "deeprec"):
        report = convert.export_checkpoint(
            tmp_path / "one", tmp_path / "out", format=format, prune=kvjax.Prune(min_norm=1, top_k=1)
        )
        assert report.rows == 0, format


@pytest.mark.parametrize("progress, got", [(5, "got 5; give"), (lambda: None, "got one of .*: too many .*; give one")])
def test_progress_that_is_no_function_of_a_number(progress, got, tmp_path):
    place = tmp_path / "place"
    for op, call in (
        ("export", lambda: convert.export_checkpoint(place, place / "a.npz", progress=progress)),
        ("import", lambda: convert.import_checkpoint(place / "a.npz", place, progress=progress)),
        ("simulate", lambda: kvjax.simulate([], [None], progress=progress)),
    ):
        with pytest.raises(TypeError, match=f"^kvjax: {op}: want a function of a number, or None, as progress, {got}"):
            call()


@pytest.mark.parametrize("format, made", [("npz", "x"), ("deeprec", "x.index")])
def test_the_command_replaces_no_file_unasked(format, made, make, tmp_path, capsys):
    kvjax.checkpoint.save(tmp_path / "one", [make(1)])
    (tmp_path / made).write_text("mine")
    args = ["convert", str(tmp_path / "one"), str(tmp_path / "x"), "--to", format]
    assert main(args) == 2 and (tmp_path / made).read_bytes() == b"mine"
    want = f"want a path with nothing there, got {tmp_path / made}, which exists; give another, or --overwrite\n"
    assert capsys.readouterr().err.endswith(want)
    assert main([*args, "--overwrite"]) == 0 and (tmp_path / made).read_bytes() != b"mine"
