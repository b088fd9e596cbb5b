"""Releases in a folder that has something else."""

import os

import pytest

from kvjax.serving import FrozenError, Releases


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
