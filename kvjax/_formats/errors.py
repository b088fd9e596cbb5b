"""Errors of files of other formats: what was wanted of one, and what it is."""

from __future__ import annotations

import importlib
import os
from typing import Any

DAMAGED = "the files are damaged, incomplete, or of something else"
"""What to think of, where nothing else is known."""


class FileError(ValueError):
    """A file that is not what it should be.

    Args:
      file: which.
      want: what it should be.
      got: what it is.
      mend: what to do.

    Attributes:
      parts: these four.

    Example:
      >>> import kvjax, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     try:
      ...         kvjax.convert.from_npz(folder + "/none.npz")
      ...     except kvjax.convert.FileError as error:
      ...         print(str(error).split(", got ")[1])
      nothing at that path; give the path of one
    """

    def __init__(self, file: str | os.PathLike[str], want: str, got: str, mend: str = DAMAGED) -> None:
        super().__init__(f"kvjax: {os.fspath(file)}: want {want}, got {got}; {mend}")
        self.parts = os.fspath(file), want, got, mend

    def __reduce__(self) -> Any:  # of a worker, whose pool would wait for it forever
        return FileError, self.parts, self.__dict__


def of_file(error: FileError, copy: str | os.PathLike[str], file: str | os.PathLike[str]) -> FileError:
    """An error of a copy of a file as one of that file; any other as it is."""
    saved, *parts = error.parts
    return FileError(file, *parts) if saved == os.fspath(copy) else error


def needed(module: str, of: str, extra: str) -> Any:
    """A module of an optional extra.

    Raises:
      ImportError: it is not installed, or does not load.
    """
    root = module.split(".")[0]
    package = root.replace("_", "-")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name not in (root, module):
            raise ImportError(
                f"kvjax: {of}: want {package}, got one that does not load ({error}); see to that, or install it anew"
            ) from error
        raise ImportError(
            f"kvjax: {of}: want {package}, got no such module; pip install {package}, or kvjax[{extra}]"
        ) from error
