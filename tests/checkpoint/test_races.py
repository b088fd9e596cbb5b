"""Restores of one table by several threads at once: one has it, and the others leave it to that."""

import concurrent.futures
import threading

import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import CheckpointError, restore, save
from kvjax.checkpoint._chains.chain import Chain
from kvjax.checkpoint._tables.restore_table import Restore, RestoreOptions, get_or_make


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
    return one, one.prepare(one.open())


@pytest.mark.parametrize("winner", [0, 1])
def test_what_another_has_restored_stays(winner, saved):
    both = [begun(saved), begun(saved)]  # of which the first has made the table
    both[winner][1].check()
    table, (loser, ready) = both[winner][1].commit(), both[1 - winner]
    with pytest.raises(RuntimeError, match="want a table that nobody writes meanwhile"):
        ready.check()
    loser.undo()
    assert len(table) == 5 and kvjax.tables()["t"].lookup([4]).tolist() == [[1, 1]]


def test_what_another_has_made_and_restored_stays(saved, monkeypatch):
    """It does both between this one's look for a table of the name and its own making of one."""

    def late(*args):
        monkeypatch.undo()
        restore(saved)
        return get_or_make(*args)

    monkeypatch.setattr("kvjax.checkpoint._tables.restore_table.get_or_make", late)
    begun(saved)[0].undo()
    assert len(kvjax.tables()["t"]) == 5


def test_what_another_has_written_stays(saved):
    one, _ = begun(saved)
    table = kvjax.tables()["t"].upsert([9], np.ones((1, 2)))
    one.undo()
    assert table.export().keys.tolist() == [9]


def test_what_nobody_has_written_goes(saved):
    begun(saved)[0].undo()
    assert "t" not in kvjax.tables()
    for path in saved.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        restore(saved)
    assert "t" not in kvjax.tables()


def test_what_has_gone_meanwhile_is_no_table_to_restore_into(saved):
    """Of two, the first made the table, failed, and took it away again before the other looked for the last time."""
    (one, _), (other, ready) = begun(saved), begun(saved)
    one.undo()
    with pytest.raises(RuntimeError, match="table 't', restore: want a table that nobody writes meanwhile"):
        ready.check()
    other.undo()
    assert "t" not in kvjax.tables()


def test_a_merge_keeps_what_another_has_written(saved):
    one = Restore(Chain(saved), "t", None, RestoreOptions(merge=True))
    opened = one.open()
    restore(saved)["t"].upsert([99], np.ones((1, 2)))
    ready = one.prepare(opened)
    ready.check()
    assert ready.commit().export().keys.tolist().count(99) == 1 and len(kvjax.tables()["t"]) == 6


def test_threads_restore_all_tables_or_none(make, tmp_path):
    """Whoever gives a table back has it, and all of the others'."""
    names = ["a", "b"]
    save(tmp_path / "two", {name: make(2).upsert(np.arange(9), np.ones((9, 2))) for name in names})
    waits = threading.Barrier(3)

    def begin():
        waits.wait()
        return restore(tmp_path / "two")

    for _ in range(15):
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(begin) for _ in range(3)]
            ended = [call.exception() for call in calls]
        assert None in ended and all(isinstance(error, (RuntimeError, type(None))) for error in ended), ended
        for name in names:
            assert len(kvjax.tables()[name]) == 9
            kvjax.drop_table(name)
