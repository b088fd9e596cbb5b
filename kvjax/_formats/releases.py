"""Releases: the names of their folders, by which those who may not write there know them."""

from __future__ import annotations

import re
from pathlib import Path

from kvjax._formats.paths import AnyPath


def is_release_name(text: str) -> bool:
    """Whether the folder of a release may have this name: its number."""
    return re.fullmatch(r"[0-9]{8}|[1-9][0-9]{8,17}", text) is not None


def releases_around(target: AnyPath) -> Path | None:
    """The folder of releases of which one is, or would be, at a place or around it. Releases are never in a store."""
    if not isinstance(target, Path):
        return None
    numbered = (folder.parent for folder in (target, *target.parents) if is_release_name(folder.name))
    return next((folder for folder in numbered if (folder / "current").is_file() and any(folder.glob("*/info"))), None)
