"""Paths: what a user gave as the path of a file or folder, as one of this machine's file system or of a store."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

if TYPE_CHECKING:
    from kvjax._formats.stores import StorePath

PathLike = str | os.PathLike[str]
AnyPath: TypeAlias = "Path | StorePath"

# With one slash, too, which is what pathlib leaves of two. A name of one letter is no scheme.
_URL = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


def anywhere(path: PathLike, op: str) -> AnyPath:
    """The path of a file or folder here, or in a store: ``s3://bucket/run``.

    All that takes paths takes them through this or through `local`: else "s3://bucket/run" would be a folder "s3:" of
    this machine, and what is saved there would look saved.

    Args:
      path: as it was given.
      op: what it is for, which errors name.

    Raises:
      ValueError: it is of a store that fsspec does not know, or begins with "~".
      ImportError: the package that knows the store is not installed.
    """
    text = _text(path, op)
    found = _URL.fullmatch(text)
    if found is None:
        return _here(text, op)
    from kvjax._formats.stores import store_path  # and fsspec, which local paths do without

    return store_path(text, found[1], found[2], op)


def local(path: PathLike, op: str) -> Path:
    """As `anywhere`, of what has to be here: files that are mapped into memory, or read from their middle.

    Raises:
      ValueError: it is of a store, or begins with "~".
    """
    text = _text(path, op)
    found = _URL.fullmatch(text)
    if found is None:
        return _here(text, op)
    mend = "copy it with the store's own tool, or mount the store as a folder"
    if found[1].lower() == "file":
        mend = "give the path alone, without 'file://'"
    raise ValueError(f"kvjax: {op}: want a path of this machine's file system, got {text!r}; {mend}")


def kept(path: PathLike, op: str) -> Path:
    """As `local`, of what is opened again later: the same file then, if the process has changed its folder since.

    Raises:
      ValueError: as `local`.
    """
    return local(path, op).absolute()


def _text(path: PathLike, op: str) -> str:
    anything = cast("object", path)
    if not isinstance(anything, (str, bytes, os.PathLike)):
        raise TypeError(f"kvjax: {op}: want a path, got {type(anything).__name__}; give a string, or a pathlib.Path")
    text = os.fsdecode(cast("PathLike", anything))
    if not text:
        raise ValueError(f"kvjax: {op}: want a path, got an empty one; give '.' for the folder that the process is in")
    if "\0" in text:
        raise ValueError(f"kvjax: {op}: want a path, got {text!r}, which has a zero byte; give one without")
    return text


def _here(text: str, op: str) -> Path:
    if text == "~" or text.startswith("~/"):
        raise ValueError(
            f"kvjax: {op}: want a path, got {text!r}, of which only shells know the folder; give "
            f"os.path.expanduser(path), or './{text}' for a folder of that name"
        )
    return Path(text)
