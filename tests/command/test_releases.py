"""``kvjax releases``: what it lists, and how an operator goes back from a bad release without Python."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax._command.main import main
from kvjax.serving import Changes, Releases


@pytest.fixture
def run(capsys):
    def run(*args):
        status = main(["releases", *map(str, args)])
        out, err = capsys.readouterr()
        return status, json.loads(out) if "--json" in args and status < 2 else out + err

    return run


@pytest.fixture
def folder(make, tmp_path):
    releases = Releases(tmp_path / "model")
    tables = {"user": make(2).upsert([1, 2], np.ones((2, 2))), "item": make(3).upsert([1], [[1.0, 2.0, 3.0]])}
    releases.publish(tables, {"bias": b"0.5"}, keep=4)
    releases.update({"user": Changes([2, 3], np.zeros((2, 2)), step=7)}, keep=4)
    return tmp_path / "model"


def test_what_is_there(folder, run):
    status, found = run(folder, "--json", "--verify")
    assert status == 0 and found["damaged"] == []
    assert (found["folder"], found["current"], found["paused"]) == (str(folder), 2, False)
    assert [release["number"] for release in found["releases"]] == [1, 2]
    for release, rows, step in zip(found["releases"], (2, 3), (0, 7), strict=True):
        user = release["tables"]["user"]
        assert (user["rows"], user["dim"], user["dtype"], user["step"]) == (rows, 2, "float32", step)
        assert user["bytes"] == (folder / f"{release['number']:08}" / "user.frozen").stat().st_size
        assert release["tables"]["item"]["rows"] == 1 and release["files"] == {"bias": 3}
        assert release["again"] is None and release["source"] is None and release["checkpoint"] == []
        assert release["published"].endswith("+00:00")
    status, text = run(folder)
    assert status == 0 and "release 2 is the current one\n" in text and "item, user" in text and "bias" in text


def test_back_and_on(folder, run):
    status, found = run(folder, "--rollback", 1, "--json")
    assert status == 0 and (found["current"], found["paused"]) == (3, True) and found["releases"][-1]["again"] == 1
    assert Releases(folder).current()["user"].lookup([2]).tolist() == [[1.0, 1.0]]
    status, text = run(folder)
    assert status == 0 and "release 3 is the current one, paused" in text and "--resume" in text
    status, text = run(folder, "--resume")
    assert status == 0 and "paused" not in text and not Releases(folder).paused


def test_back_from_a_release_that_cannot_be_opened(folder, run):
    file = folder / "00000002/user.frozen"
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-9])
    status, found = run(folder, "--json")
    assert status == 1 and found["releases"][1]["tables"] is None and "user.frozen" in found["damaged"][0]
    status, text = run(folder)
    assert status == 1 and "damaged" in text and text.count("user.frozen") == 1
    status, found = run(folder, "--rollback", 1, "--json")
    assert status == 0 and (found["current"], found["paused"]) == (3, True)  # it was done
    assert "user.frozen" in found["damaged"][0] and run(folder)[0] == 1  # the damaged one is still there
    assert run(folder, "--rollback", 1, "--verify")[0] == 1
    assert sorted(Releases(folder).current()) == ["item", "user"]


def test_nobody_knows_whether_it_is_paused(folder, run):
    """Who is to say so sees all that there is."""
    assert run(folder, "--rollback", 1)[0] == 0
    (folder / "paused").write_bytes(b"")
    status, found = run(folder, "--json")
    assert status == 1 and found["paused"] is None and len(found["releases"]) == 3 and "'paused'" in found["damaged"][0]
    status, text = run(folder)
    assert status == 1 and "until --resume or --rollback" in text and text.count("'paused'") == 1
    assert run(folder, "--resume")[0] == 0 and not Releases(folder).paused


def test_what_is_known_of_one_is_damaged(folder, run):
    (folder / "00000001/info").write_text("{")
    status, found = run(folder, "--json")
    assert status == 1 and "00000001/info" in found["damaged"][0] and found["current"] == 2
    assert [release["tables"] is None for release in found["releases"]] == [True, False]
    assert run(folder, "--rollback", 2)[0] == 0 and Releases(folder).paused


@pytest.mark.parametrize("where", ["user.frozen", "info"])
def test_one_that_may_not_be_read(where, folder, run, monkeypatch):
    """Hides none of the others, and is no reason to stay with it."""
    refused = folder / "00000002" / where
    refuse = OSError(errno.EACCES, os.strerror(errno.EACCES), str(refused))
    read, read_bytes = os.open, Path.read_bytes
    monkeypatch.setattr(os, "open", lambda path, *how: _raise(refuse) if path == refused else read(path, *how))
    monkeypatch.setattr(Path, "read_bytes", lambda path: _raise(refuse) if path == refused else read_bytes(path))
    status, found = run(folder, "--json")
    assert status == 1 and [release["tables"] is None for release in found["releases"]] == [False, True]
    (problem,) = found["damaged"]
    assert "Permission denied; let this process read it: " in problem and problem.endswith(str(refused))
    assert run(folder, "--rollback", 1)[0] == 0 and Releases(folder).current().number == 3


def _raise(error):
    raise error


def test_every_byte_is_read_if_that_is_asked(folder, run):
    file = folder / "00000001/item.frozen"
    data = bytearray(file.read_bytes())
    data[data.index(np.float32(3).tobytes())] ^= 1
    file.unlink()  # the other release has it, too
    file.write_bytes(data)
    assert run(folder)[0] == 0
    status, text = run(folder, "--verify")
    assert status == 1 and text.count("item.frozen") == 1


def test_errors(folder, run, tmp_path, capsys):
    status, text = run(folder, "--rollback", 9)
    assert status == 2 and "kvjax: releases" in text and "want one of the releases [1, 2], got 9" in text
    status, text = run(tmp_path / "none")
    assert status == 2 and "want a release that has been published, got no such folder; check the path, or" in text
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    assert "want a release that has been published, got none" in run(tmp_path / "empty")[1]
    current = (folder / "current").read_bytes()
    for text in (b"", None):
        (folder / "current").unlink()
        if text is not None:
            (folder / "current").write_bytes(text)
        status, text = run(folder, "--rollback", 1)
        assert status == 2 and "write the name of one that is there (00000002, say) into its file 'current'" in text
        (folder / "current").write_bytes(current)
    with pytest.raises(SystemExit):
        main(["releases", str(folder), "--rollback", "1", "--resume"])
    assert "not allowed with" in capsys.readouterr().err
    assert kvjax.serving.Releases(folder).current().number == 2
