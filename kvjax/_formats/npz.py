"""npz: NumPy's archive of arrays, which anything with NumPy reads."""

from __future__ import annotations

import json
import os
import zipfile

import ml_dtypes
import numpy as np

from kvjax._formats.atomic import written
from kvjax._formats.errors import FileError
from kvjax._formats.source import Source, raw

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
        archive.writestr(META, json.dumps(meta))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of an archive by name, and what `write` was told of them, if it was kvjax's.

    Raises:
      FileError: it is no such archive, or needs pickle.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name != META}
            meta = json.loads(archive[META]) if META in archive.files else {}
    except Exception as error:  # zipfile's and NumPy's, which have no common one
        raise FileError(path, "an npz archive of plain arrays", f"{type(error).__name__}: {error}") from error
    meta = {str(key): str(value) for key, value in meta.items()} if isinstance(meta, dict) else {}
    for name in filter(None, meta.pop(_BFLOAT16, "").split(",")):
        if name not in arrays or arrays[name].dtype != np.uint16:
            raise FileError(path, f"the bits of bfloat16 as uint16 in {name!r}", "something else")
        arrays[name] = arrays[name].view(ml_dtypes.bfloat16)
    return arrays, meta
