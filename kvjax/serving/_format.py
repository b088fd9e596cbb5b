"""The format: a frozen table is one file, little-endian, which is mapped and never changed.

    0                   b"kvjaxFT2", and zeros up to 64
    starts              (2**bits,) uint32: the first hash of each bucket, which the upper bits of a hash choose
    hashes              (n + 1,) uint64, in order, and 2**64 - 1
    rows                (n + 1, dim) in the stored dtype; the last one is what keys without a row read as
    scales              (n + 1,) float32, of int8 only
    pool                (p, dim) float32, of a pool of initial rows only
    description         JSON: the fields of `Description`, and the CRC-32 of each array
    the last 16 bytes   uint32 length and uint32 CRC-32 of the description, b"kvjaxFTe"

Each array begins at a multiple of 64, at the first one behind what is before it; so sizes follow from the description,
and must be those of the file. The file is written beside its place, flushed, and renamed: who has mapped the one from
before keeps it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import shutil
import stat
import struct
import zlib
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvjax._formats.atomic import flush, saying, written
from kvjax._formats.choices import QUANTISED
from kvjax._formats.quantise import STORED, QuantisationReport
from kvjax._formats.regular import Identity, identity_of, opened
from kvjax._formats.source import row_bytes
from kvjax._values.arguments import integer_in, is_name, is_real
from kvjax._values.distributions import DISTRIBUTIONS
from kvjax._values.errors import fail
from kvjax._values.key_width import KEY_DTYPES
from kvjax.serving._initial import KINDS, Initial

MAGIC, END = b"kvjaxFT2", b"kvjaxFTe"
_ALIGN = 64
_TAIL = struct.Struct("<II8s")
_MOST_JSON = 1 << 20
_MOST_DIM = 1 << 24
MOST_ROWS = 2**32 - 2
_PIECE = 1 << 24


class FrozenError(ValueError):
    """The error for a file that is not a frozen table, or is damaged.

    Example:
      >>> import pathlib, tempfile, kvjax
      >>> path = pathlib.Path(tempfile.mkdtemp(), "t.frozen")
      >>> _ = path.write_bytes(b"something else")
      >>> try:
      ...     kvjax.serving.FrozenTable.open(path)
      ... except kvjax.serving.FrozenError:
      ...     print("not a frozen table")
      not a frozen table
    """


@dataclasses.dataclass(frozen=True)
class Description:
    """What a file says of its table.

    Attributes:
      name: of the table.
      dim: width of a row.
      rows: how many keys have one.
      dtype: of the stored rows, a key of `STORED`.
      key_dtype: "int64", "uint64", "int32" or "uint32".
      step: the table's last step.
      bits: of a hash that choose its bucket.
      steps: of a search.
      missing: what keys without a row read as: "init", or "row", the last one.
      initial: how initial rows are made; None if nobody knows.
      error: what quantisation has changed; None for rows that are as they were.
    """

    name: str
    dim: int
    rows: int
    dtype: str
    key_dtype: str
    step: int
    bits: int
    steps: int
    missing: str
    initial: Initial | None
    error: QuantisationReport | None

    def arrays(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Dtype and shape of each array, in the order of the file."""
        n = self.rows + 1
        found: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            "starts": (np.dtype("<u4"), (2**self.bits,)),
            "hashes": (np.dtype("<u8"), (n,)),
            "rows": (STORED[self.dtype], (n, self.dim)),
        }
        if self.dtype == "int8":
            found["scales"] = (np.dtype("<f4"), (n,))
        if self.initial is not None and self.initial.pool:
            found["pool"] = (np.dtype("<f4"), (self.initial.pool, self.dim))
        return found

    def places(self) -> tuple[dict[str, tuple[int, int]], int]:
        """First byte and size of each array, and where the description begins."""
        at, found = _ALIGN, {}
        for name, (dtype, shape) in self.arrays().items():
            size = row_bytes((dtype, shape))
            found[name] = (at, size)
            at = -(-(at + size) // _ALIGN) * _ALIGN
        return found, at

    def to_json(self, digests: dict[str, int]) -> bytes:
        described = dataclasses.asdict(self)
        if self.initial is not None and not self.initial.segments:
            del described["initial"]["segments"]  # which an earlier kvjax does not know
        return json.dumps(described | {"crc32": digests}, sort_keys=True).encode()

    @classmethod
    def of_json(cls, data: bytes) -> tuple[Description, dict[str, int]]:
        """What `to_json` was called with.

        Raises:
          _Unfit: it is something else.
        """
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _Unfit("JSON", f"{error!s:.100}") from error
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or found.keys() != fields | {"crc32"}:
            raise _Unfit("the fields of a frozen table", f"{found!r:.200}")
        for field, good in _FIELDS.items():
            if not good(found[field]):
                raise _Unfit(f"{field} as a table can have it", f"{found[field]!r:.100}")
        digests = found.pop("crc32")
        initial, error = found.pop("initial"), found.pop("error")
        if found["missing"] == "init" and initial is None:
            raise _Unfit("an initializer beside missing='init'", "none")
        segments = tuple(map(tuple, initial.get("segments", ()))) if initial is not None else ()
        if segments and segments[-1][0] != found["dim"]:
            raise _Unfit(f"segments of rows of width {found['dim']}", f"{segments!r:.100}")
        description = cls(
            **found, initial=None if initial is None else Initial(**initial | {"segments": segments}),
            error=None if error is None else QuantisationReport(**error),
        )  # fmt: skip
        if digests.keys() != description.arrays().keys():
            raise _Unfit(f"digests of {list(description.arrays())}", f"{list(digests)!r:.100}")
        return description, digests


class _Unfit(Exception):
    """What was wanted, and what was got."""


def _is_stored(x: Any) -> bool:
    return isinstance(x, str) and x in STORED


def _is_initial(x: Any) -> bool:
    if x is None:
        return True
    if not isinstance(x, dict):
        return False
    fields = {field.name for field in dataclasses.fields(Initial)}
    if x.keys() != (fields if x.get("kind") == "segments" else fields - {"segments"}):
        return False
    pool = integer_in(1, 2**32 - 1)(x["pool"]) if x["kind"] == "pool" else x["pool"] == 0
    numbers = is_real(x["a"]) and is_real(x["b"]) and integer_in(0, 2**64 - 1)(x["seed"])
    made = x["kind"] in KINDS and (x["kind"] != "segments" or _are_segments(x["segments"]))
    return made and bool(pool) and numbers and _is_stored(x["dtype"]) and x["dtype"] != "int8"


def _are_segments(x: Any) -> bool:
    if not isinstance(x, list) or not x or not all(isinstance(each, list) and len(each) == 4 for each in x):
        return False
    ends = [end for end, *_ in x]
    increase = all(map(integer_in(1, _MOST_DIM), ends)) and all(a < b for a, b in itertools.pairwise(ends))
    return increase and all(kind in DISTRIBUTIONS and is_real(a) and is_real(b) for _, kind, a, b in x)


def _is_report(x: Any) -> bool:
    fields: dict[str, Any] = dict.fromkeys(("rows", "bytes_before", "bytes_after"), integer_in(0, 2**63 - 1))
    fields |= dict.fromkeys(("max", "rms", "cosine"), is_real)
    known = isinstance(x, dict) and x.keys() == {"dtype", *fields} and x["dtype"] in QUANTISED
    return known and all(good(x[field]) for field, good in fields.items())


_FIELDS: dict[str, Any] = {
    "name": is_name,
    "dim": integer_in(1, _MOST_DIM),
    "rows": integer_in(0, MOST_ROWS),
    "dtype": _is_stored,
    "key_dtype": lambda x: x in KEY_DTYPES,
    "step": integer_in(-(2**63), 2**63 - 1),
    "bits": integer_in(1, 32),
    "steps": integer_in(0, 32),
    "missing": lambda x: x in ("init", "row"),
    "initial": _is_initial,
    "error": lambda x: x is None or _is_report(x),
    "crc32": lambda x: isinstance(x, dict) and all(map(integer_in(0, 2**32 - 1), x.values())),
}


# ---- out -----------------------------------------------------------------------------------------------------


Codes = tuple[np.ndarray, np.ndarray | None]
"""Rows and scales as they are stored."""


def write(path: Path, describe: Callable[[], Description], parts: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes a file, as a whole or not at all; nothing else changes.

    Args:
      path: of the file, which is replaced.
      describe: gives the `Description` once all parts have been written; before that, all but its steps and its error.
      parts: the arrays of the file by name, some of an array at a time, in any order but their own.
    """
    description = describe()
    places, end = description.places()
    at, digests = {name: start for name, (start, _) in places.items()}, dict.fromkeys(places, 0)
    dtypes = {name: dtype for name, (dtype, _) in description.arrays().items()}
    with written(path) as file:
        file.write(MAGIC)
        for name, part in parts:
            data: Any = np.ascontiguousarray(part, dtypes[name]).reshape(-1).view(np.uint8)
            digests[name] = zlib.crc32(data, digests[name])
            file.seek(at[name])  # what is left out between two arrays is zeros
            at[name] += file.write(data)
        assert at == {name: sum(place) for name, place in places.items()}
        file.seek(end)
        data = describe().to_json(digests)
        file.write(data + _TAIL.pack(len(data), zlib.crc32(data), END))


def share(old: Path, new: Path) -> None:
    """Gives a file another name, or a copy where the file system has no links."""
    try:
        os.link(old, new)
    except OSError:
        shutil.copyfile(old, new)
        flush(new)  # as the file that would have been linked is


def give(mapped: MappedFile, old: Path, new: Path) -> None:
    """Gives a file that is mapped another name, where nothing has that; else a copy, as a whole or not at all. The path
    that it had may be another file's by now, or nobody's."""
    with contextlib.suppress(OSError):
        fd, found = opened(old)
        try:
            if identity_of(found) == mapped.identity:
                # This very file, whatever takes its path meanwhile. Without src_dir_fd, which an absolute path ignores,
                # Python would have the link in /proc itself linked.
                os.link(f"/proc/self/fd/{fd}", new, src_dir_fd=fd)
                flush(new.parent)
                return
        finally:
            os.close(fd)
    with written(new) as file, memoryview(mapped.whole) as data:
        for start in range(0, len(data), _PIECE):
            file.write(data[start : start + _PIECE])


# ---- in ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MappedFile:
    """A file, mapped.

    Attributes:
      description: what it says of its table.
      arrays: its arrays, which are read from the disk as they are used.
      digests: CRC-32 of each.
      digest: CRC-32 of the description, which has the others.
      identity: changes when another file takes the place.
      whole: all of its bytes.
    """

    description: Description
    arrays: dict[str, np.ndarray]
    digests: dict[str, int]
    digest: int
    identity: Identity
    whole: mmap.mmap


def read(path: Path) -> MappedFile:
    """Maps a file, after a look at its sizes and its description.

    Raises:
      FrozenError: it is no frozen table, or not whole.
      OSError: it cannot be opened.
    """
    with finding(path, "open"), saying("open", reads=True):
        fd, found = opened(path)
    try:
        if stat.S_ISDIR(found.st_mode):
            mend = "a folder of releases is read by Releases(path).current(), a checkpoint by FrozenTable.write"
            raise fail(FrozenError, str(path), "open", "a file that FrozenTable.write has made", "a folder", mend)
        if not stat.S_ISREG(found.st_mode):
            raise _Unfit("a file of bytes", "something else")
        size = found.st_size
        head = os.pread(fd, len(MAGIC), 0)
        tail = os.pread(fd, _TAIL.size, max(size - _TAIL.size, 0))
        if head != MAGIC:
            raise _Unfit(f"a file that begins with {MAGIC!r}", f"{head!r}")
        if size < _ALIGN + _TAIL.size or _TAIL.unpack(tail)[2] != END:
            raise _Unfit(f"a file that ends with {END!r}", f"{tail[-len(END) :]!r}")
        length, digest, _ = _TAIL.unpack(tail)
        if length > min(_MOST_JSON, size - _ALIGN - _TAIL.size):
            raise _Unfit("a description within the file", f"one of {length} bytes in a file of {size}")
        at = size - _TAIL.size - length
        data = os.pread(fd, length, at)
        if zlib.crc32(data) != digest:
            raise _Unfit(f"a description of CRC-32 {digest:08x}", f"{zlib.crc32(data):08x}")
        description, digests = Description.of_json(data)
        places, end = description.places()
        if at != end:
            raise _Unfit(f"arrays of {end} bytes", f"{at}")
        whole = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    except _Unfit as error:
        raise damaged(path, "open", *error.args) from error
    finally:
        os.close(fd)
    arrays = {
        name: np.frombuffer(whole, dtype, places[name][1] // dtype.itemsize, places[name][0]).reshape(shape)
        for name, (dtype, shape) in description.arrays().items()
    }
    return MappedFile(description, arrays, digests, digest, identity_of(found), whole)


def contents(path: Path, most: int | None = None) -> bytes:
    """The bytes of a regular file beside frozen tables.

    Args:
      path: of the file.
      most: bytes that it may have; None for any number.

    Raises:
      FrozenError: it is something else, or has more.
      OSError: it cannot be opened.
    """
    fd, found = opened(path)
    try:
        regular = stat.S_ISREG(found.st_mode)
        if not regular or found.st_size > (found.st_size if most is None else most):
            want = "a file of bytes" if most is None else f"a file of at most {most} bytes"
            got = f"{found.st_size} bytes" if regular else "something else"
            raise fail(FrozenError, None, str(path), want, got, "put the file there that was written, or remove this")
        with open(fd, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(fd)


@contextlib.contextmanager
def finding(path: Path, op: str) -> Generator[None]:
    """Has the body say what it wants where there is no file."""
    try:
        yield
    except FileNotFoundError as error:
        error.strerror = f"kvjax: {op}: want a file that FrozenTable.write has made, got none; give its path"
        error.filename = str(path)
        raise


def check(path: Path, mapped: MappedFile) -> None:
    """Whether all bytes are those that were written.

    Raises:
      FrozenError: some are not.
    """
    for name, array in mapped.arrays.items():
        found = 0
        data: Any = array.reshape(-1).view(np.uint8)
        for start in range(0, len(data), _PIECE):
            found = zlib.crc32(data[start : start + _PIECE], found)
        if found != mapped.digests[name]:
            raise damaged(path, "verify", f"{name} of CRC-32 {mapped.digests[name]:08x}", f"{found:08x}")


def damaged(path: Path, op: str, want: str, got: str) -> Exception:
    mend = "the file is no frozen table, is damaged, or a later kvjax has written it: write it again"
    return fail(FrozenError, str(path), op, want, got, mend)
