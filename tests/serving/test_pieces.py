"""Frozen tables that are written of checkpoints piece by piece: the bytes of a table in memory, in less of it."""

import tracemalloc

import numpy as np
import pytest

import kvjax
from kvjax._formats import source
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
    monkeypatch.setattr("kvjax.checkpoint._format._CHUNK_BYTES", 1 << 18)
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
