"""Chunks go to the disk past the system's cache, whole, whatever the file system can do."""

import errno
import fcntl
import os

import numpy as np
import pytest

from kvjax._formats import atomic
from kvjax.checkpoint._disk import direct, files


def _put(path, n, at=0):
    data = direct.aligned(n + at)[at:]
    data[:] = np.random.default_rng(n).integers(0, 256, n)
    entry = files.write_file(path, data)
    assert path.read_bytes() == data.tobytes()
    assert entry == (n, files.digest(data))


def test_memory_is_used_again_and_bounded(monkeypatch):
    free = []
    monkeypatch.setattr(direct, "_FREE", free)
    one = direct.aligned(5000)
    at = one.ctypes.data
    direct.give_back(one)
    assert direct.aligned(100).ctypes.data == at and not free
    some = [direct.aligned(n) for n in [0, 1, 1 << 23] * 8]
    assert all(x.ctypes.data % direct.BLOCK == 0 for x in some if len(x) > 0)
    assert [len(x) for x in some] == [0, 1, 1 << 23] * 8
    for x in some:
        direct.give_back(x)
    assert 0 < len(free) < len(some)
    assert len(direct.aligned(1 << 24)) == 1 << 24


@pytest.mark.parametrize("refused", ["nothing", "the way", "the bytes", "all but a part"])
def test_every_byte_is_written(tmp_path, monkeypatch, refused):
    way, write, wide = fcntl.fcntl, os.write, []

    def set_way(fd, command, *flags):
        if refused == "the way" and flags and flags[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return way(fd, command, *flags)

    def put(fd, data):
        if way(fd, fcntl.F_GETFL) & os.O_DIRECT:
            wide.append(len(data))
            if refused == "the bytes":
                raise OSError(errno.EINVAL, "")
            if refused == "all but a part" and len(wide) % 2:
                data = data[:4096]
        return write(fd, data)

    monkeypatch.setattr(fcntl, "fcntl", set_way)
    monkeypatch.setattr(os, "write", put)
    for i, n in enumerate([0, 1, 4095, 4096, 4097, 12288, 20001]):
        _put(tmp_path / str(i), n)
        _put(tmp_path / f"{i} beside", n, at=16)
    assert all(n % 4096 == 0 for n in wide)
    assert bool(wide) == (refused != "the way")


def test_what_a_killed_writer_left_goes(tmp_path):
    left, others = (tmp_path / f".{name}.0123456789abcdef.part" for name in ("rows", "others"))
    left.touch()
    others.touch()
    with atomic.written(tmp_path / "rows") as one:
        with atomic.written(tmp_path / "rows") as other:  # which leaves what is being written alone
            other.write(b"2")
        assert (tmp_path / "rows").read_bytes() == b"2" and not left.exists()
        one.write(b"1")
    assert (tmp_path / "rows").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == [others.name, "rows"]


def test_other_failures_are_said(tmp_path, monkeypatch):
    def put(fd, data):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", put)
    with pytest.raises(OSError, match=r"kvjax: save: no space; make space there, .*: '.*/full'"):
        _put(tmp_path / "full", 8192)
    with (
        pytest.raises(OSError, match=r"kvjax: write: no space; make space there, .*: '.*/whole'"),
        atomic.written(tmp_path / "whole"),
    ):
        put(0, b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
