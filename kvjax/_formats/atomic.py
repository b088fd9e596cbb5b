"""Files that are there as a whole and on the disk, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Generator[Path]:
    """Another path beside this one; what is written there takes its place when the body has ended well, and is gone
    when it has not."""
    whole = Path(path)
    part = whole.with_name(f".{whole.name[:200]}.{secrets.token_hex(8)}.part")
    try:
        yield part
        flush(part)
        os.replace(part, whole)
        flush(whole.parent)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def written(path: str | os.PathLike[str]) -> Generator[IO[bytes]]:
    """A file to write, which takes the place of `path` when the body has ended well."""
    with replaced(path) as part, open(part, "wb") as file:
        yield file


def flush(path: str | os.PathLike[str]) -> None:
    """Has the system write a file, or the names in a folder, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
