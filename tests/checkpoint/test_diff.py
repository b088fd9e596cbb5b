"""kvjax.checkpoint.diff: what two checkpoints have, and how much they differ."""

import numpy as np
import optax
import pytest

from kvjax.checkpoint import CheckpointError, diff, merge, restore, save
from tests.support.checkpoints import assert_equal, many, trained
from tests.support.marks import slow


@slow
@pytest.mark.parametrize("piece", [1 << 26, 1])
def test_differences(piece, make, tmp_path, monkeypatch):
    monkeypatch.setattr("kvjax._formats.source.PIECE_BYTES", piece * 4096)
    table = many(trained(make(3), optax.rmsprop(0.1)))
    save(tmp_path / "a", {"t": table, "gone": make(1)})
    keys = table.export().keys
    other = table.remove(keys[:3]).upsert(keys[3:5], np.zeros((2, 3))).upsert(np.array([5, 6, 7, 8]), np.ones((4, 3)))
    other = other.pin(keys[5:6])
    save(tmp_path / "b", {"t": other, "new": make(1)})
    found = diff(tmp_path / "a", tmp_path / "b", examples=2)
    t = found.tables["t"]
    assert (found.added, found.removed, found.same) == (("new",), ("gone",), False)
    assert (t.added, t.removed, t.changed) == (4, 3, 3)
    assert t.columns["values"] == 2 and t.columns["pinned"] == 1 and t.largest["values"] > 0
    assert set(t.examples["removed"]) <= set(keys[:3].tolist()) and len(t.examples["changed"]) == 2
    assert t.rows == (len(keys), len(other))
    assert list(t.columns) == [name for name in other.snapshot().rows.columns() if name in t.columns]  # always
    some = diff(tmp_path / "a", tmp_path / "b", tables=["t"], examples=2)
    assert some.tables == found.tables and some.added == some.removed == ()
    assert diff(tmp_path / "a", tmp_path / "b", tables=["new"]).added == ("new",)
    with pytest.raises(CheckpointError, match=r"'other', diff: want one of .* hold \['gone', 'new', 't'\]"):
        diff(tmp_path / "a", tmp_path / "b", tables=["t", "other"])
    was = other.snapshot().rows
    assert_equal(restore(tmp_path / "b", {"t": other})["t"].snapshot().rows, was)


def test_a_difference_to_what_is_not_finite_is_infinite(make, tmp_path):
    table = make(2).upsert([1, 2], np.ones((2, 2)))
    save(tmp_path / "a", {"t": table})
    for value in (np.nan, np.inf):
        table = table.upsert([1], [[value, 1.0]])
        save(tmp_path / "b", {"t": table}, overwrite=True)
        assert diff(tmp_path / "a", tmp_path / "b").tables["t"].largest == {"values": np.inf}


@pytest.mark.parametrize("number", [-1, 1.5, True])
def test_examples_that_are_no_number_of_keys(number, tmp_path):
    with pytest.raises(ValueError, match=rf"^kvjax: diff: want examples= as an integer >= 0, got {number}; 0 returns"):
        diff(tmp_path, tmp_path, examples=number)
    with pytest.raises(ValueError, match=r"^kvjax: merge: want 1 weights, a positive number for each, got "):
        merge([tmp_path], tmp_path / "out", "mean", weights=number)
