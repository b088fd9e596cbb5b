"""Manifests: the file by which a folder is known as a checkpoint."""

from __future__ import annotations

from kvjax._formats.paths import AnyPath

META = "kvjax.json"
"""Its name; each table of the checkpoint has one, too."""


def has_manifest(path: AnyPath) -> bool:
    """Whether a checkpoint is at a path, where this process may look: folders beside one may be those of others."""
    try:
        return (path / META).is_file()
    except PermissionError:
        return False


def checkpoint_around(target: AnyPath) -> AnyPath | None:
    """The checkpoint that a place is in, which a new file or folder would change, as far as this process may look:
    credentials may be limited to what begins with a path."""
    return next((folder for folder in target.parents if has_manifest(folder)), None)
