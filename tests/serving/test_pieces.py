"""Frozen tables that are written of checkpoints piece by piece: the bytes of a table in memory, in less of it."""

import tracemalloc

import numpy as np
import pytest

import kvjax
from kvjax._formats import source
from kvjax._values.exported import Exported
from kvjax.checkpoint import save
from kvjax.serving import FrozenTable, Releases
from tests.support.marks import slow
from tests.support.tables import AWKWARD


def frozen_bytes(folder, origin, **options):
    FrozenTable.write(folder / "t", origin, **options).verify()
    found = (folder / "t").read_bytes()
    (folder / "t").unlink()
    assert not list(folder.iterdir())  # what did not fit into memory has left nothing
    return found


@pytest.mark.parametrize("piece", [pytest.param(1 << 24, id="one"), 1 << 14, pytest.param(1 << 8, marks=slow)])
def test_the_bytes_are_those_of_a_table(piece, make, tmp_path, monkeypatch):
    """A delta on another checkpoint, with removed rows; also what is pruned, and blocks that end elsewhere."""
    monkeypatch.setattr(source, "PIECE_BYTES", piece)
    monkeypatch.setattr("kvjax.serving._write._BLOCK_BYTES", 3000)
    rng, out = np.random.default_rng(0), tmp_path / "out"
    out.mkdir()
    table = make(7, initializer=kvjax.initializers.normal(1.0), dtype="float16", key_dtype="uint64")
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, 3000))
    table = table.upsert(keys, rng.normal(size=(len(keys), 7))).upsert(AWKWARD, np.ones((8, 7)))
    save(tmp_path / "c/0", [table], cursor="pieces")
    table = table.upsert(keys[:200], rng.normal(size=(200, 7))).remove(keys[100:900])
    save(tmp_path / "c/1", [table], since="pieces")
    prunes = [None, kvjax.Prune(min_norm=2.5, keep=[1]), kvjax.Prune(top_k=100), lambda rows: rows.keys > 2**63]
    for prune, quantise in zip(prunes, (None, "int8", "bfloat16", "int8"), strict=True):
        options = {"prune": prune, "quantise": quantise}
        assert frozen_bytes(out, tmp_path / "c", **options) == frozen_bytes(out, table, **options)
    release = Releases(tmp_path / "model").follow(tmp_path / "c", quantise="int8")
    assert release[table.name].path.read_bytes() == frozen_bytes(out, table, quantise="int8")


def test_of_no_rows(make, tmp_path):
    table, out = make(2), tmp_path / "out"
    out.mkdir()
    save(tmp_path / "c", [table])
    everything = kvjax.Prune(min_frequency=1)
    assert frozen_bytes(out, tmp_path / "c", prune=everything) == frozen_bytes(out, table)


def test_more_rows_than_a_file_counts(make, tmp_path, monkeypatch):
    monkeypatch.setattr("kvjax.serving._write.MOST_ROWS", 2)
    table = make(1).upsert(np.arange(3), np.ones((3, 1)))
    with pytest.raises(ValueError, match=r"write: want at most 2 rows, got 3; leave some out with prune="):
        FrozenTable.write(tmp_path / "t", table)
    assert not list(tmp_path.iterdir())
    FrozenTable.write(tmp_path / "t", table, prune=lambda rows: rows.keys > 0)


def one_percent(rows):
    return rows.keys % 100 == 0


@slow
@pytest.mark.parametrize("prune", [None, one_percent])
def test_a_part_is_in_memory(prune, make, tmp_path, monkeypatch):
    """Of 40 MB, over a delta; beside it there are some numbers for each bucket of the checkpoint, and for each row of
    which a rule is asked."""
    monkeypatch.setattr(source, "PIECE_BYTES", 1 << 19)
    monkeypatch.setattr("kvjax.serving._write._BLOCK_BYTES", 1 << 19)
    monkeypatch.setattr("kvjax.checkpoint._disk.format._CHUNK_BYTES", 1 << 18)
    table = make(200, initializer=0.5).upsert(np.arange(50_000), np.ones((50_000, 200)))
    save(tmp_path / "c/0", [table], cursor="part")
    save(tmp_path / "c/1", [table.upsert([0, 1], np.zeros((2, 200))).remove([100])], since="part")
    tracemalloc.start()
    try:
        frozen = FrozenTable.write(tmp_path / "t", tmp_path / "c", quantise="float16", prune=prune)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50_000 * 800 / 3 and len(frozen) == (49_999 if prune is None else 499), peak


def exported(n):
    zeros, values = np.zeros(n, np.int64), np.arange(4.0 * n, dtype=np.float32).reshape(n, 4)
    return Exported(np.arange(n), values, zeros, zeros, {}, zeros > 0, zeros > 0, 0, n)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_an_update_in_pieces_has_the_bytes_of_one_at_once(n, tmp_path, monkeypatch):
    rng, found = np.random.default_rng(0), []
    before = FrozenTable.write(tmp_path / "t", exported(n), missing="zeros", quantise="int8")
    changed, removed = np.split(rng.permutation(n + 300)[: n // 2 + 200], [n // 4 + 150])  # some of them are there
    for block in (1 << 22, 64, 16):
        monkeypatch.setattr("kvjax.serving._write._BLOCK_BYTES", block)
        after = before.update(changed, np.ones((len(changed), 4)), removed=removed, path=tmp_path / "u")
        after.verify()
        found.append(after.path.read_bytes())
    assert found[0] == found[1] == found[2]
    kept = np.setdiff1d(np.arange(n), np.concatenate([changed, removed]))
    assert (after.lookup(changed) == 1).all() and not after.contains(removed).any()
    np.testing.assert_array_equal(after.lookup(kept), before.lookup(kept))
    assert len(after) == len(kept) + len(changed) and not len(before.update(removed=np.arange(n), path=tmp_path / "u"))


def test_an_update_has_a_part_in_memory(tmp_path, monkeypatch):
    """Of 24 bytes a row; beside it there is a number for each bucket."""
    monkeypatch.setattr("kvjax.serving._write._BLOCK_BYTES", 1 << 19)
    before = FrozenTable.write(tmp_path / "t", exported(300_000), missing="zeros")
    tracemalloc.start()
    try:
        before.update([1, 300_001], np.ones((2, 4)), removed=[2])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 300_000 * 20, peak
