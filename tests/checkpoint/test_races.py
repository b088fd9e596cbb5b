"""Restores of one table by several threads at once: one has it, and the others leave it to that."""

import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import CheckpointError, restore, save
from kvjax.checkpoint._chain import Chain
from kvjax.checkpoint._restore import Restore, RestoreOptions


@pytest.fixture
def saved(make, tmp_path):
    table = make(2).upsert(np.arange(5), np.ones((5, 2)))
    save(tmp_path / "a", {"t": table})
    kvjax.drop_table(table.name)
    yield tmp_path / "a"
    if "t" in kvjax.tables():
        kvjax.drop_table("t")


def begun(path):
    one = Restore(Chain(path), "t", None, RestoreOptions())
    one.open()
    one.prepare()
    return one


@pytest.mark.parametrize("winner", [0, 1])
def test_what_another_has_restored_stays(winner, saved):
    both = [begun(saved), begun(saved)]  # of which the first has made the table
    both[winner].check()
    table, loser = both[winner].commit(), both[1 - winner]
    with pytest.raises(RuntimeError, match="want a table that nobody writes meanwhile"):
        loser.check()
    loser.undo()
    assert len(table) == 5 and kvjax.tables()["t"].lookup([4]).tolist() == [[1, 1]]


def test_what_another_has_written_stays(saved):
    one = begun(saved)
    table = kvjax.tables()["t"].upsert([9], np.ones((1, 2)))
    one.undo()
    assert table.export().keys.tolist() == [9]


def test_what_nobody_has_written_goes(saved):
    begun(saved).undo()
    assert "t" not in kvjax.tables()
    for path in saved.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        restore(saved)
    assert "t" not in kvjax.tables()
