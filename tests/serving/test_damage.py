"""A damaged file is refused, or read within its bounds; one that is written stops nobody."""

import os
import random
import signal
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

import kvjax
from kvjax.serving import FrozenError, FrozenTable, _format
from tests.support.marks import examples, slow


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    table = kvjax.get_table("whole", dim=3, initializer=np.eye(3)).upsert(np.arange(200), np.ones((200, 3)))
    path = tmp_path_factory.mktemp("frozen") / "t"
    FrozenTable.write(path, table, quantise="int8")
    kvjax.drop_table("whole")
    return path.read_bytes()


def flip(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 4])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(rng, data):
    return data[: rng.randrange(len(data))] + bytes(rng.choice([0, 0, 5, 4096]))


def lose_a_part(rng, data):
    a, b = sorted(rng.sample(range(len(data)), 2))
    return data[:a] + data[b:]


def swap_bytes(rng, data):
    """As if another machine had written an array big-endian."""
    a = rng.randrange(0, len(data) - 64, 8)
    return data[:a] + data[a : a + 64][::-1] + data[a + 64 :]


def exchange(rng, data):
    a, b, n = rng.randrange(len(data) // 2), rng.randrange(len(data) // 2, len(data) - 99), rng.randrange(1, 99)
    return data[:a] + data[b : b + n] + data[a + n : b] + data[a : a + n] + data[b + n :]


def test_damage_is_refused_or_harmless(written, tmp_path):
    rng, refused, tried = random.Random(0), 0, 0
    for kind in [flip, cut, lose_a_part, swap_bytes, exchange] * examples(20, 300):
        (tmp_path / "t").write_bytes(data := kind(rng, written))
        tried += 1
        try:
            frozen = FrozenTable.open(tmp_path / "t")
            frozen.lookup(np.arange(-50, 250))  # any rows, within the file
            frozen.contains([0, -1])
            frozen.verify()
            frozen.export()
            assert data == written or zlib.crc32(data) != zlib.crc32(written)
            padding = _without_padding(data) == _without_padding(written)
            assert padding, kind
        except FrozenError as error:
            refused += 1
            assert str(error).startswith("kvjax: table '"), error
    assert refused > 0.8 * tried


def _without_padding(data):
    """What lies between the arrays means nothing, and has no digest."""
    places, end = _format.Description.of_json(data[(at := data.rindex(b'{"bits"')) : -16])[0].places()
    assert at == end
    return [data[a : a + n] for a, n in places.values()], data[end:], data[:8]


@pytest.mark.parametrize(
    "field",
    [
        '"rows": 200', '"dim": 3', '"bits": 7', '"dtype": "int8"', '"missing": "init"', '"name": "whole"', '"pool": 3',
        '"dtype": "float32"', '"key_dtype": "int64"', '"kind": "pool"',
    ],
)  # fmt: skip
def test_sizes_are_those_of_the_file(field, written, tmp_path):
    """Also where the digest is right: nothing is mapped or allocated for what the file does not have."""
    name, _ = field.split(": ")
    at = written.rindex(b'{"bits"')
    assert field.encode() in written[at:]
    for value in ("0", "-1", "4294967295", "1e9", "null", '"x"', "[]", "90"):
        data = written[at:-16].replace(field.encode(), f"{name}: {value}".encode())
        (tmp_path / "t").write_bytes(written[:at] + data + _format._TAIL.pack(len(data), zlib.crc32(data), _format.END))
        try:
            FrozenTable.open(tmp_path / "t")
            assert (name, value) in [('"name"', '"x"')]
        except FrozenError as error:
            assert "open: want" in str(error)


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.symlink("/dev/zero", tmp_path / "zero")
    for name in ("fifo", "zero"):
        with pytest.raises(FrozenError, match="want a file of bytes"):
            FrozenTable.open(tmp_path / name)


def test_a_write_that_fails_leaves_what_was_there(written, tmp_path, monkeypatch):
    (tmp_path / "t").write_bytes(written)
    frozen = FrozenTable.open(tmp_path / "t")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        frozen.update([1], [[1, 2, 3]])
    assert [path.name for path in tmp_path.iterdir()] == ["t"] and (tmp_path / "t").read_bytes() == written
    assert frozen.refresh() is frozen


_WRITER = """
import sys
import numpy as np
from kvjax.serving import FrozenTable
frozen = FrozenTable.open(sys.argv[1])
print("writing", flush=True)
for i in range(10**9):
    frozen = frozen.update(np.arange(100), np.full((100, 3), i % 100), removed=[100 + i % 100])
"""


@slow
def test_a_killed_writer_leaves_a_whole_file(written, tmp_path):
    (tmp_path / "t").write_bytes(written)
    rng = random.Random(0)
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path / "t")], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(rng.random() * 0.1)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        rows = FrozenTable.open(tmp_path / "t", verify=True).lookup(np.arange(100))
        np.testing.assert_array_equal(rows, np.broadcast_to(rows[0, 0], rows.shape))
