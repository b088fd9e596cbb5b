"""Saves in whatever state the process is: in a loop of asyncio, forked, at its end, without threads or open files."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

import kvjax
from kvjax.checkpoint import restore, save, verify
from kvjax.checkpoint._chains import new
from kvjax.checkpoint._disk import arrays, files, pace, threads
from kvjax.serving import FrozenTable, Releases
from tests.support.marks import slow


@pytest.fixture
def tables():
    return [kvjax.get_table(f"in_process_{i}", dim=2).upsert(np.arange(5), np.full((5, 2), i)) for i in range(3)]


def test_in_a_loop_that_runs(tables, tmp_path):
    async def cell():
        save(tmp_path / "a", tables)
        kvjax.orbax._handler.TableHandler().save(tmp_path / "b", kvjax.orbax.TableSave({"t": tables[0]}))
        return verify(tmp_path / "a").ok and verify(tmp_path / "b").ok

    assert asyncio.run(cell())


def test_no_thread_can_be_had(tables, tmp_path, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    alone = threads.FileThreads()
    monkeypatch.setattr(kvjax.checkpoint._disk.arrays, "THREADS", alone)
    monkeypatch.setattr(threading.Thread, "start", start)
    save(tmp_path / "a", tables)
    monkeypatch.undo()
    assert restore(tmp_path / "a", {"in_process_2": "in_process_read"})["in_process_2"].lookup(4).tolist() == [2, 2]
    assert alone._threads == []


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_begins_nothing_more_and_waits_for_the_rest(error):
    begun, ended, all_begun = [], [], threading.Event()

    def slow_one():
        begun.append(1)
        if len(begun) == 2:
            all_begun.set()
        all_begun.wait(30)
        time.sleep(0.2)
        ended.append(1)

    def fails():
        all_begun.wait(30)
        raise error("once")

    with pytest.raises(error, match="once"):
        threads.side_by_side([slow_one, fails, slow_one, *[lambda: time.sleep(0.01)] * 10_000])
    assert len(ended) == 2
    threads.side_by_side([])


INTERRUPTED = """
import signal, threading, time
from kvjax.checkpoint._disk.threads import side_by_side
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
begun, ended = threading.Event(), []

def call():
    if threading.current_thread() is threading.main_thread():
        return begun.wait(30)
    begun.set()
    time.sleep(0.2)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    time.sleep(0.3)
    ended.append(1)
    raise OSError("as the interrupt comes")

try:
    side_by_side([call, call])
except KeyboardInterrupt:  # and not the error of the other
    assert ended == [1]
    print("interrupted")
"""


@slow
def test_an_interrupt_waits_for_what_is_under_way():
    """In a process whose main thread this is sure to be."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=300)
    assert done.stdout == "interrupted\n", done.stderr[-2000:]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_save_that_fails_as_it_begins_waits_for_what_is_under_way(error, tables, tmp_path, monkeypatch):
    """The next save makes the same folder, and must not find in it what this one is still writing."""
    begun, ended, write, said = threading.Event(), [], pace.write_file, arrays.zarr_json

    def slow_write(path, data):
        begun.set()
        time.sleep(0.2)
        ended.append(write(path, data))
        return ended[-1]

    def second_fails(dtype, shape):
        if calls:
            assert begun.wait(30)
            raise error
        calls.append(shape)
        return said(dtype, shape)

    calls = []
    monkeypatch.setattr(pace, "write_file", slow_write)
    monkeypatch.setattr(arrays, "zarr_json", second_fails)
    with pytest.raises(error):
        save(tmp_path / "a", tables[:1])
    assert len(ended) == 1


def test_a_handler_saves_while_a_thread_starts(tables, tmp_path, monkeypatch):
    alone, start, saved = threads.FileThreads(), threading.Thread.start, []

    def interrupted(self):
        start(self)
        if not saved:  # where Python runs the handlers of signals
            saved.append(1)
            save(tmp_path / "b", tables)

    monkeypatch.setattr(kvjax.checkpoint._disk.arrays, "THREADS", alone)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    saving = threading.Thread(target=save, args=(tmp_path / "a", tables[:1]), daemon=True)
    start(saving)
    saving.join(60)
    assert not saving.is_alive()
    assert saved and verify(tmp_path / "a").ok and verify(tmp_path / "b").ok


@pytest.mark.parametrize("number, mend", [(errno.EMFILE, "ulimit -n"), (errno.EACCES, "let this process read it")])
def test_what_cannot_be_read_now_is_not_called_damaged(number, mend, tables, tmp_path, monkeypatch):
    save(tmp_path / "a", tables[:1])
    opened = os.open

    def refuse(path, *args, **kwargs):
        if "/values/" in str(path):
            raise OSError(number, os.strerror(number))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(files.os, "open", refuse)
    for call in (restore, verify):
        with pytest.raises(OSError, match=mend) as raised:
            call(tmp_path / "a")
        assert raised.value.errno == number and "values" in raised.value.filename
    monkeypatch.undo()
    assert verify(tmp_path / "a").ok


def test_where_a_process_may_not_look_is_said_with_the_mend(tables, tmp_path, monkeypatch):
    save(tmp_path / "a", tables[:1])
    FrozenTable.write(tmp_path / "f", tables[0])

    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(new, "is_checkpoint", refuse)
    monkeypatch.setattr("kvjax.serving._format.os.open", refuse)
    for op, call, mend in (
        ("restore", lambda: restore(tmp_path / "a"), "let this process read it"),
        ("verify", lambda: verify(tmp_path / "a"), "let this process read it"),
        ("save", lambda: save(tmp_path / "a", tables[:1], overwrite=True), "let this process write there"),
        ("open", lambda: FrozenTable.open(tmp_path / "f"), "let this process read it"),
    ):
        with pytest.raises(PermissionError, match=rf"kvjax: {op}: Permission denied; {mend}"):
            call()


def test_a_child_does_not_keep_the_lock_of_releases(tables, tmp_path):
    releases = Releases(tmp_path)
    with releases._folder.locked("publish"):
        paths = {fd: os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
        held = [os.dup(int(fd)) for fd, path in paths.items() if path == str(tmp_path / "lock")]  # as a fork does
    assert held
    thread = threading.Thread(target=releases.publish, args=({"t": tables[0]},), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    for fd in held:
        os.close(fd)


def test_who_waits_for_another_publisher_says_so(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(kvjax.serving._folder, "_PATIENCE", 0.1)
    releases, held, leave = Releases(tmp_path), threading.Event(), threading.Event()

    def hold():
        with releases._folder.locked("publish"):
            held.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    threading.Timer(0.5, leave.set).start()
    with pytest.warns(UserWarning, match="another has had for"):
        releases.publish({"t": tables[0]})
    thread.join()


def test_through_a_handle_that_follows(tmp_path):
    table = kvjax.get_table("in_process_live", dim=1).upsert([7], [[1.0]])
    live, done, asked = table.live(), threading.Event(), []

    def mistaken(rows):
        asked.append(1)
        time.sleep(0.05)
        raise ValueError("a mistake")

    def train():
        handle = table
        while not done.is_set():
            handle = jax.block_until_ready(handle.add([7], [[1.0]]))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with pytest.raises(ValueError, match="a mistake"):
            save(tmp_path / "pruned", [live], prune=mistaken)
        assert len(asked) == 1  # and not once for each write that comes meanwhile
        seen = [1.0]
        releases = Releases(tmp_path / "releases")
        for i in range(3):
            seen.append(live.export().values[0, 0])
            save(tmp_path / str(i), [live])
            seen.append(
                restore(tmp_path / str(i), {"in_process_live": "in_process_saved"})["in_process_live"].lookup(7)[0]
            )
            kvjax.drop_table("in_process_saved")
            seen.append(releases.publish({"t": live})["t"].lookup(np.array([7]))[0, 0])
    finally:
        done.set()
        thread.join()
    assert seen == sorted(seen) and seen[-1] > 1.0
    with pytest.raises(ValueError, match="handle of one version"):
        save(tmp_path / "cursor", [live], cursor="in_process")


SCRIPT = """
import atexit, os, sys, threading, warnings
import kvjax, numpy as np
from kvjax.checkpoint import save, verify
warnings.simplefilter("ignore")
folder, table = sys.argv[1], kvjax.get_table("t", dim=2).upsert(np.arange(5), np.ones((5, 2)))
save(folder + "/first", [table])
child = os.fork()
if child == 0:
    os._exit(0 if verify(folder + "/first").ok else 1)
assert os.waitpid(child, 0)[1] == 0
atexit.register(lambda: save(folder + "/exit", [table]))

def late():
    threading.main_thread().join()
    save(folder + "/late", [table])

threading.Thread(target=late).start()
"""


@slow
def test_in_a_forked_child_and_at_the_end_of_the_process(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr[-2000:]
    assert all(verify(tmp_path / name).ok for name in ("first", "exit", "late"))
