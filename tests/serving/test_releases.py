"""Readers in threads and processes have one release or another, and never a mixture, while others are published."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvjax._values.exported import Exported
from kvjax.serving import Changes, FrozenError, FrozenTable, Releases, _folder, _release
from tests.support.marks import slow

N = 2000


def rows(value, n=N):
    zeros = np.zeros(n, np.int64)
    values = np.full((n, 4), value, np.float32)
    return Exported(np.arange(n), values, zeros, zeros, {}, zeros > 0, zeros > 0, 0, n)


def test_who_writes_gets_its_own_release(tmp_path, monkeypatch):
    """Also where the next writer has waited only for the folder."""
    releases, next_one, unlock = Releases(tmp_path), Releases(tmp_path), _folder.unlock
    publish(releases, 0)

    def unlocked(lock):
        unlock(lock)
        with monkeypatch.context() as patched:
            patched.setattr(_folder, "unlock", unlock)
            publish(next_one, 9)

    monkeypatch.setattr(_folder, "unlock", unlocked)
    writes = [
        lambda: publish(releases, 1),
        lambda: releases.update({"one": Changes()}),
        lambda: releases.update({}, {"number": b"2"}),
    ]
    assert [write().number for write in writes] == [2, 4, 6]
    assert releases.refresh().number == 7


def test_who_reads_makes_no_folder(tmp_path):
    with pytest.raises(FrozenError, match="want a release that has been published"):
        Releases(tmp_path / "modle").current()
    assert not list(tmp_path.iterdir())


def test_a_release_is_changed_by_nobody(tmp_path):
    releases = Releases(tmp_path)
    release = releases.publish({"one": rows(1)}, missing="zeros")
    table = release["one"]
    for of_release in (table, pickle.loads(pickle.dumps(table)), pickle.loads(pickle.dumps(release))["one"]):
        with pytest.raises(ValueError, match=r"a table of a release, which never changes; .* Releases\.update"):
            of_release.update([1], np.zeros((1, 4)))
    assert table.update([1], np.zeros((1, 4)), path=tmp_path / "own").update([1], np.ones((1, 4))).lookup(1)[0] == 1
    for tables, files, error in (({"日本" * 60: rows(1)}, {}, ValueError), ({}, {"w": "text"}, TypeError)):
        with pytest.raises(error, match=rf"kvjax: {'file' if files else 'table'} '.*', publish: want"):
            releases.publish(tables, files, missing="zeros")
    assert Releases(tmp_path).current().number == 1


def one_of(release):
    """All tables and files of a release hold its number."""
    keys = np.arange(N)
    numbers = {float(x) for table in release.values() for x in np.unique(table.lookup(keys))}
    assert numbers == {float(release.files["number"])}, numbers
    return numbers.pop()


def publish(releases, number):
    """Every third time whole tables, else what has changed."""
    files = {"number": str(number).encode()}
    if number % 3 == 0:
        return releases.publish({"one": rows(number), "two": rows(number)}, files, missing="zeros")
    changes = Changes(np.arange(N)[::-1], np.full((N, 4), number), removed=[N + 5], step=number)
    return releases.update({"one": changes, "two": changes}, files)


_READER = f"""
import sys
import numpy as np
from kvjax.serving import Releases
N = {N}
releases, seen, end = Releases(sys.argv[1]), [], float(sys.argv[2])
keys = np.arange(N)
print("reading", flush=True)
while not seen or seen[-1] < end:
    release = releases.refresh()
    numbers = {{float(x) for table in release.values() for x in np.unique(table.lookup(keys))}}
    assert numbers == {{float(release.files["number"])}}, numbers
    seen.append(numbers.pop())
assert seen == sorted(seen)
print(len(set(seen)))
"""


@slow
def test_no_mixture(tmp_path):
    releases, end = Releases(tmp_path / "v"), 20
    publish(releases, 0)
    command = [sys.executable, "-c", _READER, str(tmp_path / "v"), str(end)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for reader in readers:
        assert reader.stdout.readline() == "reading\n"
    shared, seen, failed, done = Releases(tmp_path / "v"), [set(), set()], [], threading.Event()

    def read(i):
        try:
            while not done.is_set():
                seen[i].add(one_of(shared.refresh() if i else shared.current()))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for number in range(1, end + 1):
        publish(releases, number)
        time.sleep(0.005)
    outputs = [reader.communicate(timeout=60)[0] for reader in readers]
    done.set()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert [reader.returncode for reader in readers] == [0, 0], outputs
    assert all(int(output) > 3 for output in outputs) and len(seen[1]) > 3
    assert len([path for path in (tmp_path / "v").iterdir() if path.name.isdigit()]) == 2


@slow
def test_one_file_is_replaced_under_its_readers(tmp_path):
    frozen = FrozenTable.write(tmp_path / "t", rows(0), missing="zeros")
    failed, done = [], threading.Event()

    def read():
        mine = frozen
        try:
            while not done.is_set():
                assert len(np.unique(mine.lookup(np.arange(N)))) == 1
                mine = mine.refresh()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 25):
        frozen = frozen.update(np.arange(N), np.full((N, 4), number))
    done.set()
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_what_goes_wrong_leaves_the_current_release(tmp_path):
    releases = Releases(tmp_path / "v")
    with pytest.raises(FrozenError, match="refresh: want a release that has been published, got no such folder"):
        releases.current()
    releases.publish({"a/b": rows(0, 3)}, {"number": b"0"}, missing="zeros")
    release = releases.current()
    assert list(release) == ["a/b"] and release.number == 1 and len(release["a/b"]) == 3
    with pytest.raises(KeyError, match=r"'a-b', release: want a table of release 1, got \['a/b'\]; did you mean"):
        release["a-b"]
    assert "a-b" not in release and release.get("a-b") is None
    for call in (releases.publish, releases.update):
        with pytest.raises(TypeError, match="want a mapping by name, got list"):
            call([])
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"kvjax: publish: .*; a file is where that path wants a folder"):
        Releases(tmp_path / "file").publish({"t": rows(1, 1)})
    with pytest.raises(FrozenError, match=r"got a folder; a folder of releases is read by Releases\(path\)"):
        FrozenTable.open(tmp_path / "v")
    with pytest.raises(FrozenError, match="update: want a release that has been published, got no such folder"):
        Releases(tmp_path / "none").update({})
    assert not (tmp_path / "none").exists()
    with pytest.raises(KeyError, match="update: want a table of the current release"):
        releases.update({"other": Changes()})
    with pytest.raises(ValueError, match="want distinct keys"):
        releases.update({"a/b": Changes([1, 1], np.ones((2, 4)))})
    for name in ("", "..", "n" * 300):
        with pytest.raises(ValueError, match="publish: want a name of 1 to"):
            releases.update({}, {name: b"1"})
    assert releases.refresh() is release
    again = releases.update({}, {"number": b"1"})
    assert os.stat(again["a/b"].path).st_nlink == 2 and again.files == {"number": b"1"}
    shutil.rmtree(again.path)
    with pytest.raises(FrozenError, match="want the files of the current release"):
        Releases(tmp_path / "v").refresh()
    (tmp_path / "v/current").write_text("../../etc")
    with pytest.raises(FrozenError, match="want the name of a release"):
        releases.refresh()
    assert releases.current()["a/b"].lookup([0]).tolist() == [[0.0] * 4]
    for damaged in (b"../../etc", b"00000002"):  # the folder of the second one is lost
        (tmp_path / "v/current").write_bytes(damaged)
        assert releases.publish({"a/b": rows(7, 3)}, missing="zeros")["a/b"].lookup([0]).tolist() == [[7.0] * 4]


def test_files_of_a_folder_that_are_none(tmp_path):
    """Of a pipe reading would wait, of a device it would not end."""
    trainer = Releases(tmp_path / "v")
    for value in range(2):
        trainer.publish({"a": rows(value, 3)}, {"b": b"0"}, missing="zeros")

    def long(path):
        path.touch()
        os.truncate(path, 1 << 40)

    folder, zero = tmp_path / "v", lambda path: path.symlink_to("/dev/zero")
    for make in (os.mkfifo, os.mkdir, zero, long):
        for name in ("current", "00000002/info", "00000002/checkpoint", "00000002/files/b"):
            path, kept = folder / name, tmp_path / "kept"
            if path.exists():
                path.rename(kept)
            if make is not long or path.name != "b":
                make(path)
                with pytest.raises(FrozenError, match=r"^kvjax: "):
                    Releases(folder).current()
                assert [info.number for info in Releases(folder).history()] == [1, 2] if name != "current" else True
                path.rmdir() if path.is_dir() else path.unlink()
            if kept.exists():
                kept.rename(path)
    assert Releases(folder).current()["a"].lookup([0]).tolist() == [[1.0] * 4]
    info = json.loads((folder / "00000002/info").read_text())
    for place in ("files/" + "n" * 300, "files/\ud800", "n" * 300 + ".frozen"):
        (folder / "00000002/info").write_text(json.dumps(info | {"digests": {place: 0}}))
        with pytest.raises(FrozenError, match="want what is known of a release"):
            Releases(folder).current()


def test_a_release_that_this_process_may_not_read(tmp_path, monkeypatch):
    folder = tmp_path / "v"
    Releases(folder).publish({"a": rows(0, 3)}, {"b": b"0"}, missing="zeros")

    def refuse(path, *args):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(_release, "contents", refuse)  # a test that root runs may read all
    with pytest.raises(PermissionError, match=r"kvjax: open: Permission denied; let this.*files/b"):
        Releases(folder).current()
    real = os.scandir  # which Path.iterdir calls, too, in Python 3.13
    monkeypatch.setattr(os, "scandir", lambda path: (real if os.fspath(path) == str(folder) else refuse)(path))
    (info,) = Releases(folder).history()
    assert info.damaged.startswith("kvjax: open: Permission denied; let this process read it: ")


def test_a_pause_that_nobody_can_read_does_not_end(tmp_path):
    folder = tmp_path / "v"
    releases = Releases(folder)
    for value in range(2):
        releases.publish({"a": rows(value, 3)}, missing="zeros")
    releases.rollback(1)
    for damage in (lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"0000"), os.mkfifo):
        (folder / "paused").unlink()
        damage(folder / "paused")
        for call in (lambda: releases.paused, lambda: releases.publish({"a": rows(1, 3)}, missing="zeros")):
            with pytest.raises(FrozenError, match=r"want names of releases in its file 'paused', got .*call Releases"):
                call()
        assert releases.refresh()["a"].lookup([0]).tolist() == [[0.0] * 4]
    (folder / "paused").unlink()
    (folder / "paused").write_bytes(b"?")
    releases.rollback(1)
    assert releases.paused
    name = (folder / "current").read_bytes()
    (folder / "current").write_bytes(b"")  # then nobody knows of which release it speaks
    for call in (lambda: releases.paused, lambda: releases.publish({"a": rows(1, 3)}, missing="zeros")):
        with pytest.raises(FrozenError, match="want the name of a release in its file 'current'"):
            call()
    (folder / "current").write_bytes(name)
    assert releases.paused
    (folder / "paused").write_bytes(b"?")
    releases.resume()
    assert not releases.paused and releases.publish({"a": rows(1, 3)}, missing="zeros").number == 4


def test_a_folder_that_is_made_anew_has_other_releases_of_the_same_numbers(tmp_path):
    """Whoever has the old one open takes the new one, to read it and to change it."""
    server, trainer = Releases(tmp_path / "v"), Releases(tmp_path / "v")
    for value in (1, 2):
        Releases(tmp_path / "v").publish({"t": rows(value, 3)}, {"value": b"%d" % value}, missing="zeros")
        now = server.refresh()
        assert (now.number, now["t"].lookup([0]).tolist(), now.files["value"]) == (1, [[value] * 4], b"%d" % value)
        info = tmp_path / "v/00000001/info"
        shutil.copyfile(info, tmp_path / "copy")
        os.replace(tmp_path / "copy", info)  # as file systems are whose files get another inode and time at each mount
        assert server.refresh() is now
        if value == 1:
            trainer.refresh()
            shutil.rmtree(tmp_path / "v")
    changed = trainer.update({"t": Changes([1], np.full((1, 4), 9))})
    assert changed["t"].lookup([0, 1])[:, 0].tolist() == [2.0, 9.0] and changed.files["value"] == b"2"


def test_numbers_of_more_than_eight_digits(tmp_path):
    releases = Releases(tmp_path)
    releases.publish({"t": rows(1, 3)}, missing="zeros")
    (tmp_path / "00000001").rename(tmp_path / "99999999")
    (tmp_path / "current").write_text("99999999")
    assert [releases.publish({"t": rows(2, 3)}, missing="zeros").number for _ in range(2)] == [10**8, 10**8 + 1]
    assert [info.number for info in Releases(tmp_path).history()] == [10**8, 10**8 + 1]
    assert Releases(tmp_path).open(10**8)["t"].lookup(1).tolist() == [2.0] * 4


def test_arguments_that_mean_nothing_publish_nothing(tmp_path):
    releases = Releases(tmp_path / "v")
    releases.publish({"t": rows(1, 3)}, missing="zeros")
    for keep, error in ((0, ValueError), (-1, ValueError), (None, TypeError), (1.5, TypeError), ("2", TypeError)):
        for call in (releases.publish, releases.update):
            with pytest.raises(error, match=r"want keep= of 1 or more releases, got"):
                call({}, {"file": b""}, keep=keep)
    with pytest.raises(ValueError, match=r"releases '.*v', publish: want a table or a file, got none"):
        releases.publish({})
    with pytest.raises(TypeError, match=r"'t', update: want a kvjax.serving.Changes, got dict"):
        releases.update({"t": {"keys": [1]}})
    for call in (releases.publish, releases.update):
        with pytest.raises(TypeError, match="files: want a mapping by name, got list"):
            call({}, ["w"])
    for dtype, value in ((None, 1e300), ("float16", 1e300), ("float16", 1e6)):
        frozen = FrozenTable.write(tmp_path / "t", rows(1, 3), missing="zeros", quantise=dtype)
        with pytest.raises(ValueError, match=r"update: want .*float(32|16)"):
            frozen.update([1], np.full((1, 4), value), path=tmp_path / "u")
    with pytest.raises(ValueError, match=r"write: want values that float32 can hold, got 1e\+300"):
        FrozenTable.write(tmp_path / "t", rows(1, 3), missing=np.full(4, 1e300))
    assert [info.number for info in releases.history()] == [1]
    (tmp_path / "file").touch()
    with pytest.raises(FrozenError, match="want a release that has been published, got no such folder"):
        Releases(tmp_path / "file").current()
    assert pickle.loads(pickle.dumps(releases)).current()["t"].lookup(1).tolist() == [1.0] * 4
    (tmp_path / "v/00000001/checkpoint").write_bytes(b"\xff")
    with pytest.raises(FrozenError, match="00000001/checkpoint"):
        Releases(tmp_path / "v").current()
    assert releases.history()[0].damaged is not None


def test_a_release_that_goes_while_it_is_opened_is_not_taken_for_a_whole_one(tmp_path, monkeypatch):
    """A slow reader and two writers: at every file that it opens, what it opens is replaced."""
    releases, read, readers_thread = Releases(tmp_path), _release.read, threading.get_ident()
    publish(releases, 0)
    number = 0

    def write():
        nonlocal number
        for _ in range(2):
            publish(releases, number := number + 1)

    def slow_read(path):
        if number < 4 and threading.get_ident() == readers_thread:
            writer = threading.Thread(target=write)
            writer.start(), writer.join(60)
        return read(path)

    reader = Releases(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(_release, "read", slow_read)
        found = reader.refresh()
    assert sorted(found) == ["one", "two"] and one_of(found) == number == 4
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_names_are_those_of_the_tables(tmp_path):
    releases, name = Releases(tmp_path / "v"), "\u7528\u6237/a"
    assert releases.publish({name: rows(1.0, 3)}, missing="zeros")[name].name == name
    with pytest.raises(ValueError, match=f"table '{name}', write: want missing="):
        releases.publish({name: rows(1.0, 3)})
    with pytest.raises(TypeError, match="publish: want names, got 1; give a string"):
        releases.publish({1: rows(1.0, 3)})
    with pytest.raises(ValueError, match=r"publish: want a name of 1 to 200 bytes, .* got 207; publish it under"):
        releases.publish({"\u7528" * 23: rows(1.0, 3)})
    assert list(releases.current()) == [name]


_WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from tests.serving.test_releases import Releases, publish
releases = Releases(sys.argv[1])
number = int(releases.current().files["number"])
while True:
    publish(releases, number := number + 1)
    print("writing", flush=True)
"""


@slow
def test_killed_writers_leave_whole_releases(tmp_path):
    releases, last = Releases(tmp_path / "v"), 0
    publish(releases, 0)
    for i in range(4):
        command = [sys.executable, "-c", _WRITER, str(tmp_path / "v"), *sys.path]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.02 + 0.013 * i)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        number = one_of(Releases(tmp_path / "v").current())
        assert number >= last
        last = number
    publish(releases, 3 * int(last) + 3)
    assert not list((tmp_path / "v").glob(".new-*")) and last > 0
