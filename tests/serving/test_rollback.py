"""An older release becomes the current one again, as a whole and at once, and stays that until somebody says so."""

import datetime
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import optax
import pytest

import kvjax
from kvjax.checkpoint import save
from kvjax.serving import Changes, FrozenError, FrozenTable, PausedError, Releases
from tests.serving.test_releases import N, one_of, publish, rows
from tests.support.checkpoints import trained
from tests.support.marks import slow


@pytest.fixture
def releases(tmp_path):
    """Of numbers 0, 1 and 2, which are the releases 1, 2 and 3."""
    found = Releases(tmp_path / "v")
    publish(found, 0)
    for number in (1, 2):
        changes = Changes(np.arange(N), np.full((N, 4), number), step=number)
        found.update({"one": changes, "two": changes}, {"number": str(number).encode()}, keep=3)
    return found


def numbers(releases):
    return [info.number for info in releases.history()]


def folders(releases):
    return sorted(path.name for path in releases.path.iterdir() if path.is_dir())


def test_goes_back_and_stays(releases):
    server = Releases(releases.path)
    assert one_of(server.current()) == 2 and one_of(server.open(2)) == 1 and server.current().number == 3
    assert numbers(releases) == [1, 2, 3] and not server.paused
    now = releases.rollback(2)
    assert one_of(now) == 1 and now.number == 4 and now.info.again == 2 and now["one"].step == 1
    assert one_of(server.current()) == 2 and server.refresh().number == 4 and one_of(server.current()) == 1
    assert os.path.samefile(now["one"].path, server.open(2)["one"].path)  # the disk has it once
    assert numbers(releases) == [1, 2, 3, 4] and server.paused  # so it may go forward again, too
    for write in (lambda: publish(releases, 3), lambda: publish(releases, 4), lambda: releases.update({})):
        with pytest.raises(PausedError, match=r"want releases that are not paused, got release 4, .* Releases.resume"):
            write()
    assert releases.refresh() is now and folders(releases) == [f"{i:08}" for i in (1, 2, 3, 4)]
    assert releases.rollback(2) is now and releases.rollback(4) is now  # it is that already
    assert one_of(releases.rollback(3)) == 2 and releases.current().info.again == 3
    assert releases.rollback(4).info.again == 2  # which is where it has come from
    releases.resume(), releases.resume()
    assert not server.paused and publish(releases, 7).number == 7
    assert one_of(server.refresh()) == 7 and numbers(releases) == [6, 7] and server.current().info.again is None


def test_a_release_is_paused_where_it_is(releases):
    now = releases.current()
    assert releases.rollback(3) is now and releases.paused and numbers(releases) == [1, 2, 3]
    with pytest.raises(PausedError):
        releases.publish({}, {"a file": b""})


def test_what_is_known_of_releases(releases):
    earliest, latest = (releases.history()[i].published for i in (0, -1))
    now = datetime.datetime.now(datetime.UTC)
    assert now - datetime.timedelta(minutes=5) < earliest <= latest <= now
    said = releases.path / "00000001/info"
    whole = said.read_bytes()
    assert sorted(releases.history()[0].digests) == ["files/number", "one.frozen", "two.frozen"]
    said.unlink()  # as it was before there were any
    old = releases.history()[0]
    assert abs(old.published - earliest) < datetime.timedelta(minutes=1) and old.source is None and old.checkpoint == ()
    assert old.digests is None and old.damaged is None and one_of(releases.open(1)) == 0
    fields = json.loads(whole)
    for damage in (
        b"{", b"[]", b'{"published": "now", "source": null, "again": null}', b"[" * 100_000, b"\xff",
        json.dumps(fields | {"digests": {"one.frozen": -1}}).encode(),
        json.dumps(fields | {"digests": {"../00000002/one.frozen": 1}}).encode(),
        json.dumps(fields | {"digests": {"files/..": 1}}).encode(),
    ):  # fmt: skip
        said.write_bytes(damage)
        for call in (lambda: releases.open(1), lambda: releases.rollback(1)):
            with pytest.raises(FrozenError, match="want what is known of a release"):
                call()
        assert [info.damaged is None for info in releases.history()] == [False, True, True]
    assert releases.refresh().number == 3 and not releases.paused


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_release_is_what_was_published(rolled_back, releases):
    """Its files are bound together: none may be lost, changed, or be that of another release."""
    if rolled_back:
        releases.rollback(2)
        releases.resume()
    other = Releases(releases.path)
    path = other.current().path
    for place in ("two.frozen", "files/number"):
        file = path / place
        was = file.read_bytes()
        file.unlink()  # another release may have it, too
        with pytest.raises(FrozenError, match=rf"open: {place}: want the file that it was published with, got none"):
            Releases(releases.path).current()
        file.write_bytes((path.parent / "00000001" / place).read_bytes())
        with pytest.raises(FrozenError, match=rf"open: {place}: want CRC-32 [0-9a-f]{{8}}, as it was published"):
            Releases(releases.path).refresh()
        with pytest.raises(FrozenError, match=place):
            Releases(releases.path).rollback(int(path.name))
        file.write_bytes(was)
    (path / "three.frozen").write_bytes(b"not of this release")
    (path / "files/.left").write_bytes(b"by a file system")
    now = Releases(releases.path).current()
    assert sorted(now) == ["one", "two"] and list(now.files) == ["number"]


def test_what_cannot_be_gone_back_to(releases, tmp_path):
    for op in ("open", "rollback"):
        call = getattr(releases, op)
        with pytest.raises(KeyError, match=rf"{op}: want one of the releases \[1, 2, 3\], got 7; .*keep="):
            call(7)
        with pytest.raises(TypeError, match=f"{op}: want the number of a release, got '2'"):
            call("2")
        with pytest.raises(FrozenError, match=f"{op}: want a release that has been published, got no such folder"):
            getattr(Releases(tmp_path / "other"), op)(1)
    for call in (Releases(tmp_path / "other").resume, Releases(tmp_path / "other").history):
        with pytest.raises(FrozenError, match="want a release that has been published"):
            call()
    assert not Releases(tmp_path / "other").paused and not (tmp_path / "other").exists()
    (releases.path / "00000002/one.frozen").write_bytes(b"damaged")
    with pytest.raises(FrozenError, match="want a file that begins with"):
        releases.rollback(2)
    shutil.rmtree(releases.path / "00000001/files")
    with pytest.raises(FrozenError, match="files/number: want the file that it was published with"):
        releases.rollback(1)
    assert one_of(releases.refresh()) == 2 and not releases.paused and numbers(releases) == [1, 2, 3]


@pytest.mark.parametrize("damage", ["folder", "table", "info"])
def test_goes_back_from_what_is_damaged(damage, releases):
    path = releases.current().path
    if damage == "folder":
        shutil.rmtree(path)
    else:
        (path / {"table": "one.frozen", "info": "info"}[damage]).write_bytes(b"damaged")
    other = Releases(releases.path)
    with pytest.raises(FrozenError):
        other.current()
    assert one_of(other.rollback(2)) == 1 and other.current().number == 4 and one_of(releases.refresh()) == 1


_KILLED = """
import os, sys
left = int(sys.argv[2])
def dying(call):
    def calls(*args, **options):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*args, **options)
    return calls
for name in ("link", "rename", "replace", "fsync", "unlink", "mkdir"):
    setattr(os, name, dying(getattr(os, name)))
from kvjax.serving import Releases
Releases(sys.argv[1]).rollback(2)
assert "jax" not in sys.modules
"""


def killed(releases, tmp_path):
    """The folder after a rollback to release 2 that is killed at its first call, at its second, ..., and at none."""
    code, at = 9, 0
    while code == 9:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(releases.path, tmp_path / "copy")
        code = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "copy"), str(at)]).returncode
        yield Releases(tmp_path / "copy")
        at += 1
    assert code == 0


@slow
def test_killed_anywhere_it_is_the_old_state_or_the_new_one(releases, tmp_path):
    states = []
    for found in killed(releases, tmp_path):
        release = found.current()
        assert (one_of(release), release.number, found.paused) in ((2.0, 3, False), (1.0, 4, True))
        states.append(found.paused)
        assert numbers(found) == [1, 2, 3, 4][: release.number]
        if found.paused:
            with pytest.raises(PausedError):
                publish(found, 5)
            found.resume()
        assert one_of(publish(found, 5)) == 5 and not found.paused  # whichever number it has got
        assert folders(found) == [release.path.name, found.current().path.name]
    assert states == sorted(states) and 10 < states.count(False) < len(states)


@slow
def test_killed_anywhere_in_a_second_rollback_it_stays_paused(releases, tmp_path):
    releases.rollback(1)
    states = []
    for found in killed(releases, tmp_path):
        states.append(found.current().number)
        assert (one_of(found.current()), found.current().number) in ((0.0, 4), (1.0, 5)) and found.paused
        with pytest.raises(PausedError):
            publish(found, 5)
        assert found.current().number == states[-1] and found.paused
    assert states == sorted(states) and {*states} == {4, 5}


def test_what_a_killed_writer_has_left_does_not_push_out_a_release(releases):
    shutil.copytree(releases.path / "00000002", releases.path / "00000004")
    (releases.path / "paused").write_bytes(b"00000004")
    (releases.path / ".paused.0123456789abcdef.part").write_bytes(b"0000")
    assert numbers(releases) == [1, 2, 3] and not releases.paused and releases.refresh().number == 3
    with pytest.raises(KeyError, match=r"want one of the releases \[1, 2, 3\], got 4"):
        releases.open(4)
    with pytest.raises(TypeError):
        releases.publish([])
    assert publish(releases, 3).number == 4 and not releases.paused and numbers(releases) == [3, 4]
    assert not [*releases.path.glob(".*")]


_READER = """
import sys
import numpy as np
from kvjax.serving import Releases
releases, seen, end = Releases(sys.argv[1]), [], float(sys.argv[2])
print("reading", flush=True)
while not seen or seen[-1][1] < end:
    release = releases.refresh()
    found = {float(x) for table in release.values() for x in np.unique(table.lookup(np.arange(int(sys.argv[3]))))}
    assert found == {float(release.files["number"])}, found
    seen.append((release.number, found.pop()))
assert seen == sorted(seen, key=lambda one: one[0])
print(any(later[1] < one[1] for one, later in zip(seen, seen[1:])))
"""


@slow
def test_no_mixture(tmp_path):
    """Readers go back and forth with the releases, all tables and files of each together."""
    releases, end = Releases(tmp_path), 30
    publish(releases, 0)
    command = [sys.executable, "-c", _READER, str(tmp_path), str(end), str(N)]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for reader in readers:
        assert reader.stdout.readline() == "reading\n"
    shared, failed, done = Releases(tmp_path), [], threading.Event()

    def read(ask):
        try:
            while not done.is_set():
                one_of(ask())
        except BaseException as error:
            failed.append(error)

    def oldest():
        try:
            return shared.open(shared.history()[0].number)
        except KeyError:  # it has gone meanwhile
            return shared.current()

    threads = [threading.Thread(target=read, args=(ask,)) for ask in (shared.refresh, shared.current, oldest)]
    for thread in threads:
        thread.start()
    for number in range(1, end + 1):
        release = publish(releases, number)
        if number % 3 == 1 and number < end:
            assert one_of(releases.rollback(release.number - 1)) == number - 1
            releases.resume()
    outputs = [reader.communicate(timeout=60)[0] for reader in readers]
    done.set()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert [reader.returncode for reader in readers] == [0, 0] and "True\n" in outputs, outputs


def test_a_frozen_table_is_published_as_it_is(releases, tmp_path):
    """Also one whose file has gone, or is another by now."""
    table = releases.open(1)["one"]
    now = releases.publish({"one": table, "two": rows(5)}, missing="zeros", keep=1)
    assert os.stat(now["one"].path).st_nlink == 1 and not table.path.exists()  # it was a link, and the other has gone
    again = releases.publish({"u": table, "one": now["one"]})
    assert again["u"].lookup(3).tolist() == [0.0] * 4 and os.path.samefile(again["one"].path, now["one"].path)
    mine = FrozenTable.write(tmp_path / "t", rows(6), missing="zeros", quantise="float16")
    FrozenTable.write(tmp_path / "t", rows(7), missing="zeros")
    for copy in (FrozenTable.write(tmp_path / "t", mine), FrozenTable.write(tmp_path / "u", mine, quantise="float16")):
        copy.verify()
        assert copy.lookup(3).tolist() == [6.0] * 4 and copy.error == mine.error and copy.missing is not None
    for options, said in (
        ({"quantise": "int8"}, "quantise="), ({"missing": np.ones(4)}, "missing="),
        ({"prune": kvjax.Prune(top_k=1), "missing": "zeros"}, "missing=, prune="),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"'{mine.name}', write: want a frozen table as it is, got {said}, which"):
            releases.publish({"one": mine}, **options)
    assert releases.refresh() is again


@slow
def test_following_waits(make, tmp_path):
    """And then reads the deltas from the release on that it has gone back to."""
    saved, releases, table = tmp_path / "saved", Releases(tmp_path / "model"), make(2)

    def files(folder):
        return {"dense": folder.name.encode()}

    for step in range(3):
        table = table.upsert([step], [[1.0, step]])
        save(saved / str(step), [table], **({"since": "f"} if step else {"cursor": "f"}))
        releases.follow(saved, files, keep=9)
    assert [info.source for info in releases.history()] == [str(saved / str(step)) for step in range(3)]
    assert all(len(info.checkpoint) == 1 for info in releases.history())
    back = releases.rollback(1)
    assert back.files == {"dense": b"0"} and back.checkpoint == releases.open(1).checkpoint
    assert back.info.source == str(saved / "0")
    for _ in range(2):
        with pytest.warns(UserWarning, match="follow: want releases that are not paused, got release 4") as caught:
            assert releases.follow(saved, files) is back
        assert caught[0].filename == __file__
    table = table.upsert([3], [[1.0, 3.0]])
    save(saved / "3", [table], since="f")
    releases.resume()
    now = releases.follow(saved, files)
    np.testing.assert_array_equal(now[table.name].lookup(np.arange(6)), table.lookup(np.arange(6)))
    assert now.files == {"dense": b"3"} and now.number == 5


@slow
def test_a_rollback_while_a_checkpoint_is_read_wins(make, tmp_path):
    releases, table = Releases(tmp_path / "model"), make(1)
    for step in range(2):
        table = table.upsert([step], [[1.0]])
        save(tmp_path / str(step), [table])
        releases.follow(tmp_path / str(step))
    save(tmp_path / "2", [table.upsert([2], [[1.0]])])

    def files(folder):
        assert Releases(tmp_path / "model").rollback(1).number == 3
        return {}

    with pytest.warns(UserWarning, match="got release 3, which stays"):
        assert len(releases.follow(tmp_path / "2", files)[table.name]) == 1


@slow
def test_tables_that_go_back_beside_files_that_do_not(make, tmp_path):
    releases, table = Releases(tmp_path / "model"), make(1)
    for step in range(2):
        table = trained(table, optax.sgd(0.1))
        save(tmp_path / str(step), {"a": table})
    releases.follow(tmp_path / "1", {"dense": b"1", "more": b"1"})
    steps = [Releases(tmp_path / "x").follow(tmp_path / str(step))["a"].step for step in range(2)]
    said = rf"tables that go back \('a' from step {steps[1]} to {steps[0]}\) beside the files \['more'\] of release 1"
    with pytest.warns(UserWarning, match=said + ".*files=.*rollback"):
        releases.follow(tmp_path / "0", {"dense": b"0"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        releases.follow(tmp_path / "0")
        releases.follow(tmp_path / "1")
        releases.follow(tmp_path / "0", {"dense": b"0", "more": b"0"})
    releases.follow(tmp_path / "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="go back"):
            releases.follow(tmp_path / "0")
    assert releases.refresh()["a"].step == steps[1]


def test_a_release_that_is_current_and_cannot_be_paused(make, tmp_path, monkeypatch):
    releases = Releases(tmp_path / "model")
    for _ in range(2):
        releases.publish({"user": make(1)})

    def refuse(folder, name):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvjax.serving._folder.Folder.pause", refuse)
    with pytest.raises(OSError, match="rollback: No space left"):
        releases.rollback(2)
    assert [info.number for info in releases.history()] == [1, 2] and not releases.paused
