"""TensorFlow's bundles, "<prefix>.index" and "<prefix>.data-00000-of-00001": checkpoints of TensorFlow and its forks.

The index is a sorted table in LevelDB's form, from the name of a tensor to a message that says where its bytes are in
the data files. Read and written without TensorFlow, by what tensor_bundle.proto and tsl/lib/io/format.h publish.
"""

from __future__ import annotations

import dataclasses
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvjax._formats import source
from kvjax._formats.atomic import replaced
from kvjax._formats.columns import InFile
from kvjax._formats.errors import FileError, needed
from kvjax._formats.paths import local
from kvjax._formats.regular import check_regular
from kvjax._formats.source import as_written, raw

_MAGIC = 0xDB4775248B80FB57
_FOOTER, _TRAILER = 48, 5
_MOST_INDEX = 1 << 28
_MOST_STATE = 1 << 20  # bytes of a file "checkpoint", of which the first line counts
_DTYPES: dict[int, np.dtype[Any]] = {
    number: np.dtype(kind)
    for number, kind in {
        1: np.float32, 2: np.float64, 3: np.int32, 4: np.uint8, 5: np.int16, 6: np.int8, 9: np.int64, 10: np.bool_,
        14: ml_dtypes.bfloat16, 17: np.uint16, 19: np.float16, 22: np.uint32, 23: np.uint64,
    }.items()
}  # fmt: skip
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class BundleEntry:
    """Where a tensor is.

    Attributes:
      dtype: None where NumPy has none for it (strings), or where the tensor is cut into slices.
      shape: of the tensor.
      shard: number of the data file.
      offset: of its first byte there.
      size: in bytes.
      crc: its masked CRC32C.
    """

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int


class Bundle:
    """The tensors of a bundle; each is read when it is asked for, and held against its checksum.

    Args:
      prefix: of the files; the path of the index file is one, too.

    Raises:
      FileError: the index is damaged, or none.
      ImportError: google-crc32c is not installed.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix).removesuffix(".index")
        self._crc32c = needed("google_crc32c", "a TensorFlow checkpoint", "convert")
        index = self.prefix + ".index"
        check_regular(index, "the index of a TensorFlow checkpoint")
        try:
            if (size := os.path.getsize(index)) > _MOST_INDEX:
                raise FileError(index, f"an index of at most {_MOST_INDEX} bytes", f"{size}")
            entries = dict(self._table(Path(index).read_bytes()))
            header = _fields(entries.pop(b"", b""))
            self.shards = int(header.get(1, [0])[0])
            self.entries = {name.decode(): _entry(data) for name, data in entries.items()}
        except (LookupError, ValueError, struct.error, TypeError) as error:
            raise FileError(
                index, "the index of a TensorFlow checkpoint", f"{type(error).__name__}: {error}"
            ) from error
        except OSError as error:
            raise FileError(index, "the index of a TensorFlow checkpoint", f"{error.strerror}") from error
        if header.get(2, [0])[0] != 0:
            raise FileError(index, "a checkpoint of a little-endian machine", "one of a big-endian machine")

    def read(self, name: str) -> np.ndarray:
        """A tensor, in memory.

        Raises:
          FileError: as `column`.
        """
        found = self.column(name)
        return found.whole()

    def column(self, name: str) -> InFile:
        """A tensor, which is read once to be held against its checksum, and then as it is asked for.

        Raises:
          FileError: it is not there, is no array of numbers, or its bytes are not what was written.
        """
        entry = self.entries.get(name)
        if entry is None or entry.dtype is None:
            got = "none of that name" if entry is None else "strings or slices of a tensor"
            raise FileError(self.prefix, f"the tensor {name!r} of numbers", got)
        path = f"{self.prefix}.data-{entry.shard:05}-of-{self.shards:05}"
        count = int(np.prod(entry.shape, dtype=object))
        try:
            if count * entry.dtype.itemsize != entry.size or entry.offset + entry.size > os.path.getsize(path):
                raise FileError(path, f"{name!r} {entry.shape} {entry.dtype}", f"{entry.size} bytes at {entry.offset}")
            # What is read when it is asked for has been held against its checksum; nobody should change it meanwhile.
            data = InFile(path, entry.dtype, entry.shape, entry.offset)
            crc = self._crc_of(path, entry)
        except OSError as error:
            raise FileError(path, f"the data of {name!r}", f"{error.strerror}") from error
        if crc != entry.crc:
            raise FileError(path, f"{name!r} with the checksum {entry.crc:08x}", "other bytes", "the file is damaged")
        return data

    def _crc_of(self, path: str, entry: BundleEntry) -> int:
        crc, rest = 0, entry.size
        with open(path, "rb") as file:
            file.seek(entry.offset)
            while rest > 0 and (piece := file.read(min(rest, source.PIECE_BYTES))):
                crc, rest = self._crc32c.extend(crc, piece), rest - len(piece)
        return _masked(crc)

    def _table(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        footer = data[-_FOOTER:]
        if len(footer) < _FOOTER or struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
            raise ValueError("no footer of a table")
        _, at = _varint(footer, 0)
        _, at = _varint(footer, at)
        for _, handle in _block_entries(self._block(data, footer[at:])):
            yield from _block_entries(self._block(data, handle))

    def _block(self, data: bytes, handle: bytes) -> bytes:
        offset, at = _varint(handle, 0)
        size, _ = _varint(handle, at)
        block, trailer = data[offset : offset + size + 1], data[offset + size + 1 : offset + size + _TRAILER]
        if len(trailer) != 4 or _masked(self._crc32c.value(block)) != struct.unpack("<I", trailer)[0]:
            raise ValueError(f"a block at {offset} that is damaged")
        if block[-1] != 0:
            raise ValueError("a compressed index, which TensorFlow does not write")
        return block[:-1]


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    (restarts,) = struct.unpack("<I", block[-4:])
    end, at, key = len(block) - 4 * (restarts + 1), 0, b""
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        size, at = _varint(block, at)
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + size]
        at += own + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of a message, by number; numbers as int, and everything else as bytes."""
    out: dict[int, list[Any]] = {}
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
        else:
            size, at = _varint(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
            value, at = data[at : at + size], at + size
        out.setdefault(tag >> 3, []).append(value)
    return out


def _entry(data: bytes) -> BundleEntry:
    fields = _fields(data)
    dims = [_fields(dim).get(1, [0])[0] for shape in fields.get(2, []) for dim in _fields(shape).get(2, [])]
    number = {i: int(fields.get(i, [0])[0]) for i in (1, 3, 4, 5)}
    crc = struct.unpack("<I", fields.get(6, [bytes(4)])[0])[0]
    dtype = None if 7 in fields else _DTYPES.get(number[1])
    return BundleEntry(dtype, tuple(dims), number[3], number[4], number[5], crc)


def _masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def latest(path: str | os.PathLike[str], op: str) -> str:
    """The prefix of the checkpoint that a folder's file "checkpoint" names as the last one, or of the only one there;
    of what is no folder, itself.

    Args:
      path: of either.
      op: what it is read for, which errors name.

    Raises:
      FileError: there is none, or there are several.
    """
    folder = local(path, op)
    if not folder.is_dir():
        return os.fspath(path)
    if (folder / "checkpoint").is_file():
        with open(folder / "checkpoint", "rb") as file:
            said = os.fsdecode(file.read(_MOST_STATE))  # a path may be of any bytes
        found = re.search(r'^model_checkpoint_path: "(.*)"\r?$', said, re.M)
        if found:
            return str(folder / found[1])
    prefixes = sorted(str(index.with_suffix("")) for index in folder.glob("*.index"))
    if len(prefixes) != 1:
        raise FileError(folder, "one TensorFlow checkpoint", f"{prefixes}", "give the prefix of its files")
    return prefixes[0]


# ---- out -----------------------------------------------------------------------------------------------------


Tensor = tuple[np.dtype[Any], tuple[int, ...], Iterable[np.ndarray]]
"""Dtype, shape, and the elements in pieces."""


def tensor(array: np.ndarray) -> Tensor:
    """One that is in memory."""
    flat = as_written(array).reshape(-1)
    step = max(1, source.PIECE_BYTES // max(1, array.dtype.itemsize))
    return array.dtype, array.shape, (flat[i : i + step] for i in range(0, len(flat), step))


def write(prefix: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Writes a bundle of one data file. Both files are whole before one takes its place, the index last."""
    crc32c = needed("google_crc32c", "a TensorFlow checkpoint", "convert")
    prefix = os.fspath(prefix)
    entries = {b"": _message({1: 1, 3: _message({1: 1})})}
    with replaced(prefix + ".index") as index, replaced(prefix + ".data-00000-of-00001") as part:
        offset = 0
        with open(part, "wb") as file:
            for name, (dtype, shape, pieces) in sorted(tensors.items(), key=lambda item: item[0].encode()):
                crc = size = 0
                for piece in pieces:
                    data = raw(piece).tobytes()
                    size, crc = size + file.write(data), crc32c.extend(crc, data)
                dims = b"".join(_message({2: _message({1: n})}) for n in shape)
                entry = {1: _NUMBERS[dtype], 2: dims, 4: offset, 5: size}
                entries[name.encode()] = _message(entry) + b"\x35" + struct.pack("<I", _masked(crc))
                offset += size
        index.write_bytes(_index(entries, crc32c))


def _message(fields: Mapping[int, int | bytes]) -> bytes:
    out = b""
    for number, value in fields.items():
        if isinstance(value, bytes):
            out += _number(number << 3 | 2) + _number(len(value)) + value
        elif value:
            out += _number(number << 3) + _number(value)
    return out


def _number(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _index(entries: Mapping[bytes, bytes], crc32c: Any) -> bytes:
    out = b""

    def add(pairs: Mapping[bytes, bytes]) -> bytes:
        nonlocal out
        starts, block = [], b""
        for key, value in pairs.items():
            starts.append(len(block))
            block += _number(0) + _number(len(key)) + _number(len(value)) + key + value
        starts = starts or [0]
        block += struct.pack(f"<{len(starts) + 1}I", *starts, len(starts)) + b"\0"
        handle = _number(len(out)) + _number(len(block) - 1)
        out += block + struct.pack("<I", _masked(crc32c.value(block)))
        return handle

    data = add(entries)
    meta = add({})
    handles = meta + add({max(entries): data})
    return out + handles.ljust(_FOOTER - 8, b"\0") + struct.pack("<Q", _MAGIC)
