"""Files of columns: the module of each format, and a folder of such files, read as one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from kvjax._formats import npz, parquet, safetensors
from kvjax._formats.columns import Concatenated, Lazy
from kvjax._formats.errors import FileError
from kvjax._formats.regular import check_regular
from kvjax._formats.source import Column, Source


class Format(Protocol):
    """The module of a format."""

    @property
    def WHAT(self) -> str: ...

    @staticmethod
    def write(path: str | os.PathLike[str], source: Source, /) -> None: ...

    @staticmethod
    def columns(path: str | os.PathLike[str], /) -> tuple[Mapping[str, Column], dict[str, str]]: ...


FORMATS: Mapping[str, Format] = {"safetensors": safetensors, "npz": npz, "parquet": parquet}
"""By the names of `FILE_FORMATS`."""


def last_step_of(meta: Mapping[str, str]) -> int | None:
    """What the metadata says of the table's last step; None if it says none that a table can have."""
    step = meta.get("last_step", "")
    return int(step) if step.isdecimal() and int(step) < 2**63 else None


def columns_of(format: str, path: Path) -> tuple[Mapping[str, Column], dict[str, str]]:
    """The columns of a file, or of all files of the format in a folder, one file's rows after the other's; and what
    their metadata says."""
    module = FORMATS[format]
    if not path.is_dir():
        check_regular(path, module.WHAT)
        return module.columns(path)
    files = sorted(file for file in path.glob(f"*.{format}") if not file.name.startswith((".", "_")))
    if not files:
        raise FileError(path, f"{module.WHAT}, or a folder of such", f"a folder without any *.{format}", "give another")
    if below := next(path.glob(f"*/**/*.{format}"), None):
        want, mend = "files in one folder", "give the folder that has all, or move them into one"
        raise FileError(path, want, f"another below, {below.relative_to(path)}", mend)
    for file in files:
        check_regular(file, module.WHAT)
    parts, said = zip(*map(module.columns, files), strict=True)

    def joined(name: str) -> Column:
        columns = [part[name] for part in parts]
        columns = [column for column in columns if not column.shape or column.shape[0]] or columns[:1]
        if not all(column.shape for column in columns):
            return columns[0]  # which is none of rows
        if len(kinds := {(column.dtype, column.shape[1:]) for column in columns}) > 1:
            raise FileError(path, f"one type of {name!r} in all files", f"{sorted(map(str, kinds))}")
        return Concatenated(columns)

    names = [name for name in parts[0] if all(name in part for part in parts)]
    if others := sorted({name for part in parts for name in part} - set(names)):
        raise FileError(path, "the same columns in all files", f"{others} in some", "give files of one table")
    meta = {key: value for key, value in said[0].items() if all(each.get(key) == value for each in said)}
    if len(kinds := {each["key_dtype"] for each in said if "key_dtype" in each}) > 1:
        raise FileError(path, "files of one table", f"those of tables of {sorted(kinds)}", "read them one by one")
    steps = list(map(last_step_of, said))
    for kind in kinds:  # of which there is one, if any
        meta["key_dtype"] = kind
    if None not in steps:
        meta["last_step"] = str(max(filter(None, steps), default=0))
    return Lazy(names, joined), meta
