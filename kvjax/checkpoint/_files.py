"""Files: flushed and listed as they are written, and read only if they are what was listed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvjax.checkpoint._format import Damaged, digest

MOST_JSON = 1 << 26
"""Bytes of a JSON file that nothing has said the size of."""

List = Mapping[str, tuple[int, str]]
"""Size and digest of each file, by its path below a folder, with "/" in it."""


# ---- out -----------------------------------------------------------------------------------------------------


def flush(path: Path) -> None:
    """Has the system write a file, or what files a folder has, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """Writes a file that is on the disk then, as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")  # processes may write the same one
    new.write_text(text)
    flush(new)
    new.replace(path)


def listed(folder: Path, parts: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Flushes files and folders, and lists the files.

    Args:
      folder: below which they are.
      parts: the files, and the folders of which all files are listed.
    """
    files: dict[str, tuple[int, str]] = {}
    for part in parts:
        for path in sorted((folder / part).rglob("*")) if (folder / part).is_dir() else []:
            if path.is_dir():
                flush(path)
            else:
                files[path.relative_to(folder).as_posix()] = _entry(path)
        if (folder / part).is_file():
            files[part] = _entry(folder / part)
        flush(folder / part)
    return files


def _entry(path: Path) -> tuple[int, str]:
    # TensorStore has written it and flushed it; a file is at most a chunk, which fits memory.
    data = path.read_bytes()
    return len(data), digest(data)


# ---- in ------------------------------------------------------------------------------------------------------


def read(path: Path, most: int) -> bytes:
    """The bytes of a regular file.

    Raises:
      Damaged: there is none, it is something else, or has more than `most` bytes.
    """
    try:
        # Opening a FIFO would wait for who writes it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Damaged(f"want the file {path.name}, got {error.strerror or error}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size > most:
        os.close(fd)
        got = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "no file of bytes"
        raise Damaged(f"want {path.name} as a file of at most {most} bytes, got {got}")
    with open(fd, "rb") as file:
        return file.read(most)


def read_json(data: bytes) -> Any:
    """What a JSON file says.

    Raises:
      Damaged: it is none.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"want JSON, got {type(error).__name__}: {str(error)[:100]}") from error


class Files:
    """The files below a folder, each of which is read if it is as it was listed, or if nothing was.

    Args:
      folder: of the files.
      entries: the list; None for a format that has none.
    """

    def __init__(self, folder: Path, entries: List | None) -> None:
        self.folder, self.entries = folder, entries

    def read(self, path: str, most: int) -> bytes:
        """The bytes of the file at this path.

        Raises:
          Damaged: it is not as it was listed, or has more than `most` bytes.
        """
        if self.entries is None:
            return read(self.folder / path, most)
        if path not in self.entries:
            raise Damaged(f"want {path} in the list of files, got none of that name")
        size, saved = self.entries[path]
        data = read(self.folder / path, min(size, most))
        if len(data) != size or digest(data) != saved:
            raise Damaged(f"want {path} with {size} bytes of digest {saved}, got {len(data)} of {digest(data)}")
        return data
