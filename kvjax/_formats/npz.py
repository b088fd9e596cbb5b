"""npz: NumPy's archive of arrays, which anything with NumPy reads."""

from __future__ import annotations

import json
import os
import zipfile
from typing import cast

import ml_dtypes
import numpy as np

from kvjax._formats.atomic import written
from kvjax._formats.errors import FileError
from kvjax._formats.source import Column, Source, raw, row_bytes

WHAT = "an npz file"
META = "kvjax.json"
"""The member that has `Source.meta`; NumPy shows it as bytes."""
_BFLOAT16 = "bfloat16"
"""NumPy's format has no bfloat16: its bits are uint16, and the metadata names the columns."""


def write(path: str | os.PathLike[str], source: Source) -> None:
    """Writes a member for each column, and `Source.meta` as JSON."""
    meta = dict(source.meta)
    if cut := [name for name, (dtype, _) in source.types.items() if dtype.name == _BFLOAT16]:
        meta[_BFLOAT16] = ",".join(cut)
    with written(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, (dtype, _) in source.types.items():
            kind = np.dtype(np.uint16) if dtype.name == _BFLOAT16 else dtype
            header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": source.shape(name)}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for piece in source.pieces(name):
                    member.write(raw(piece))
        archive.writestr(zipfile.ZipInfo(META), json.dumps(meta))  # by its name alone it would get the time of day


def columns(path: str | os.PathLike[str]) -> tuple[dict[str, Column], dict[str, str]]:
    """The arrays of an archive by name, and what `write` was told of them, if it was kvjax's.

    They are read when they are asked for: fast from the first row to the last, and held against their checksums at the
    end.

    Raises:
      FileError: it is no such archive, or needs pickle; so does reading from it.
    """
    try:
        archive = zipfile.ZipFile(path)  # which is open as long as one of its columns is
        _check_listed(path, len(archive.infolist()))
        names = {name.removesuffix(".npy"): name for name in archive.namelist()}
        meta = json.loads(archive.read(names[META])) if META in names else {}
        members = {name: _Member(path, archive, full) for name, full in names.items() if name != META}
        arrays: dict[str, Column] = {name: each.by_rows() for name, each in members.items()}
    except (FileError, PermissionError):
        raise
    except Exception as error:  # zipfile's and NumPy's, which have no common one
        raise _none(path, error) from error
    meta = {str(key): str(value) for key, value in meta.items()} if isinstance(meta, dict) else {}
    for name in filter(None, meta.pop(_BFLOAT16, "").split(",")):
        if name not in arrays or arrays[name].dtype != np.uint16:
            raise FileError(path, f"the bits of bfloat16 as uint16 in {name!r}", "something else")
        cast("_Member | _ByColumns", arrays[name]).dtype = np.dtype(ml_dtypes.bfloat16)
    return arrays, meta


def _check_listed(path: str | os.PathLike[str], found: int) -> None:
    """Whether as many members were found as the end of the archive says, which zipfile does not ask: a wrong length in
    the list would hide those behind it."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - _MOST_END, 0))
        end = file.read()
    at = end.rfind(b"PK\x05\x06")
    said = int.from_bytes(end[at + 10 : at + 12], "little")
    if said not in (found, 0xFFFF):  # the latter if there are too many for this field
        raise ValueError(f"{said} members, of which {found} are listed")


_MOST_END = 22 + 0xFFFF  # bytes of the record at the end, with a comment


def _none(path: str | os.PathLike[str], error: Exception) -> FileError:
    return FileError(path, "an npz archive of plain arrays", f"{type(error).__name__}: {error}")


_MOST_OF_A_BYTE = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}
"""Bytes that one of a file can unpack to, by the way of packing; only of the ways that NumPy has."""


class _Member:
    """An array of an archive, read in order; going back begins anew."""

    def __init__(self, path: str | os.PathLike[str], archive: zipfile.ZipFile, name: str) -> None:
        self._path, self._archive, self._name = path, archive, name
        self._begin()
        self.dtype, self.shape = self._stored.newbyteorder("="), self._shape
        size = row_bytes((self._stored, self._shape[1:])) * (self._shape[0] if self._shape else 1)
        member = self._archive.getinfo(name)
        there = member.file_size - self._file.tell()
        if size != there:  # before anything is allocated for it
            raise FileError(path, f"{name!r} with {size} bytes of rows", f"{there}")
        most = _MOST_OF_A_BYTE.get(member.compress_type)
        if most is not None and there > most * (whole := os.path.getsize(path)):  # the archive's list is forged
            raise FileError(path, f"{name!r} of at most {most * whole} bytes in a file of {whole}", f"{there}")

    def _begin(self) -> None:
        self._file = self._archive.open(self._name)
        version = np.lib.format.read_magic(self._file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        self._shape, fortran, self._stored = read(self._file)
        if self._stored.hasobject:
            raise _none(self._path, ValueError("objects"))
        self._by_columns, self._row = fortran and len(self._shape) > 1, 0

    def by_rows(self) -> Column:
        """The array; in memory, if it is stored by columns, as a transposed one is."""
        if not self._by_columns:
            return self
        self.shape = self.shape[::-1]
        return _ByColumns(self)

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        out = np.empty((max(stop - start, 0), *self.shape[1:]), self._stored)
        try:
            if start < self._row:
                self._begin()
            size = row_bytes((self._stored, self.shape[1:]))
            self._file.seek((start - self._row) * size, os.SEEK_CUR)
            to = out.reshape(-1).view(np.uint8).data
            at = 0
            while at < len(to):  # zipfile gives as much as it likes, and its check at the end
                part = self._file.read(min(len(to) - at, 1 << 20))
                if not part:
                    raise EOFError(f"{at} bytes of {len(to)}")
                to[at : at + len(part)] = part
                at += len(part)
            self._row = max(start, stop)
        except Exception as error:  # as above
            raise _none(self._path, error) from error
        return out.view(self.dtype) if self._stored.isnative else out.astype(self.dtype)


class _ByColumns:
    """An array that is stored by columns: in memory from its first row that is asked for to its last.

    Args:
      stored: its transpose.
    """

    def __init__(self, stored: _Member) -> None:
        self._stored, self.dtype, self.shape = stored, stored.dtype, stored.shape[::-1]
        self._whole: np.ndarray | None = None

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        if start >= stop:
            return np.zeros((0, *self.shape[1:]), self.dtype)
        if self._whole is None:
            self._whole = self._stored[:].T
        found = np.ascontiguousarray(self._whole[start:stop]).view(self.dtype)
        if stop == self.shape[0]:
            self._whole = None
        return found
