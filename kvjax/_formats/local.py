"""Local paths: what a user gave as the path of a file or folder, as one that this machine's file system has."""

from __future__ import annotations

import os
import re
from pathlib import Path

PathLike = str | os.PathLike[str]

# With one slash, too, which is what pathlib leaves of two. A name of one letter is no scheme.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local(path: PathLike, op: str) -> Path:
    """The path of a file or folder here. All that takes paths takes them through this: else "gs://bucket/x" would be a
    folder "gs:" below the one that the process runs in, and what is saved there would look saved.

    Args:
      path: as it was given.
      op: what it is for, which errors name.

    Raises:
      ValueError: it is of another store.
    """
    text = os.fsdecode(path)
    found = _SCHEME.match(text)
    if found is None:
        return Path(text)
    mend = "save to a local folder and copy it with the store's own tool, or mount the store as a folder"
    if found[1].lower() == "file":
        mend = "give the path alone, without 'file://'"
    raise ValueError(f"kvjax: {op}: want a path of this machine's file system, got {text!r}; {mend}")
