"""Places of frozen tables and releases: beside other things, inside of a release, and where a process leaves."""

import os
import pickle

import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import CheckpointError
from kvjax.convert import from_dense
from kvjax.serving import FrozenError, FrozenTable, Releases


def test_what_is_no_release_is_not_removed_as_an_old_one(tmp_path):
    """As the steps of an Orbax manager, whose names may have eight digits."""
    for number in range(1, 5):
        (tmp_path / f"steps/{number:08}/tables").mkdir(parents=True)
    releases = Releases(tmp_path / "steps")
    with pytest.raises(FrozenError, match=r"publish: want a folder of releases, or a new one, got one with 00000001, "):
        releases.publish({}, {"a file": b""})
    assert len(os.listdir(releases.path)) == 4  # and no lock
    release = Releases(tmp_path / "model").publish({}, {"a file": b""})
    for call in (Releases(release.path).current, lambda: Releases(release.path).publish({}, {"a file": b""})):
        with pytest.raises(FrozenError, match=f"; give {tmp_path}/model$"):
            call()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/kvjax.json").write_text("{}")
    with pytest.raises(FrozenError, match=r"publish: want a place outside of checkpoints, got .*saved; give"):
        Releases(tmp_path / "saved").publish({}, {"a file": b""})
    assert os.listdir(tmp_path / "saved") == ["kvjax.json"]


def test_nothing_is_written_into_a_release(make, tmp_path):
    table = make(2).upsert([1], np.ones((1, 2)))
    saved = tmp_path / "saved"
    kvjax.checkpoint.save(saved, [table])
    releases = Releases(tmp_path / "model")
    releases.publish({"user": table})
    (tmp_path / "model/lock").unlink()  # as in a copy
    files = sorted(tmp_path.rglob("*"))
    for place in ("00000001/new", "00000001", "00000050", "00000050/tables"):  # a release, or taken for an old one
        path = tmp_path / "model" / place
        for write, *args in (
            (kvjax.checkpoint.save, path, [table]),
            (kvjax.checkpoint.prune, saved, path, {}),
            (kvjax.convert.export_checkpoint, saved, path / "a.npz"),
        ):
            with pytest.raises(CheckpointError, match=r"want a place outside of releases, got .*model; give"):
                write(*args)
        with pytest.raises(FrozenError, match=r"want a folder of releases, got a place of one of them; give .*model"):
            Releases(path).publish({"user": table})
    assert sorted(tmp_path.rglob("*")) == files and releases.publish({"user": table}).number == 2
    kvjax.checkpoint.save(tmp_path / "model/other", [table])  # is no release's


def test_a_process_may_change_its_folder(tmp_path, monkeypatch):
    """A relative path stays that of the same files, also where the new folder has some of that name."""

    def rows(value):
        return from_dense(np.full((3, 4), value, np.float32)).rows

    for place, value in (("here", 1), ("elsewhere", 2)):
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        frozen, releases = FrozenTable.write("t", rows(value), missing="zeros"), Releases("r")
        releases.publish({"one": rows(value)}, missing="zeros")
        if place == "here":
            first, kept = releases, (frozen, FrozenTable.open("t"), releases.current()["one"])
    for table in (*kept, *(pickle.loads(pickle.dumps(each)) for each in kept)):
        assert table.refresh().lookup(1)[0] == 1
    first.publish({"one": rows(3)}, missing="zeros")
    assert first.refresh()["one"].lookup(1)[0] == 3 and releases.refresh()["one"].lookup(1)[0] == 2
    assert pickle.loads(pickle.dumps(first)).current().number == 2
    kept[0].update([1], np.full((1, 4), 5))
    assert kept[0].refresh().lookup(1)[0] == 5
