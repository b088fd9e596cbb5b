"""A release: the tables and files of a model that belong together, in a folder that never changes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail, meant
from kvjax.serving._format import read
from kvjax.serving._frozen import FrozenTable, IdsLike

SUFFIX = ".frozen"
FILES = "files"
CHECKPOINT = "checkpoint"


@dataclasses.dataclass(frozen=True)
class Changes:
    """Changes to a table, for `Releases.update`.

    Attributes:
      keys: ``(n,)``, distinct.
      rows: ``(n, dim)``, the new rows of these keys.
      removed: ``(m,)`` keys whose rows are removed.
      step: the table's last step after the changes; None if it stays.
    """

    keys: IdsLike = ()
    rows: ArrayLike = ()
    removed: IdsLike = ()
    step: int | None = None


class Release(Mapping[str, FrozenTable]):
    """The tables of one release, by name. Take one release for each request, so that all reads of the request belong
    together.

    Attributes:
      number: 1 for the first.
      path: of its folder.
      checkpoint: digests of the checkpoint that its tables come from; () if there is none.
    """

    def __init__(self, path: Path) -> None:
        """For `Releases`."""
        self.number, self.path = int(path.name), path
        found = sorted(path.glob(f"*{SUFFIX}"))
        self._tables = {unquote(file.name.removesuffix(SUFFIX)): FrozenTable(file, read(file), True) for file in found}
        at = path / CHECKPOINT
        self.checkpoint = tuple(at.read_text().split()) if at.exists() else ()
        self._files = {unquote(file.name): file.read_bytes() for file in sorted((path / FILES).iterdir())}
        os.stat(path)  # else it went meanwhile, and some of it may not have been listed

    def __getitem__(self, name: str) -> FrozenTable:
        if name not in self._tables:
            raise fail(
                KeyError, name, "release", f"a table of release {self.number}", f"{list(self._tables)}",
                f"{meant(name, self._tables)}publish it with the others, by Releases.publish",
            )  # fmt: skip
        return self._tables[name]

    def __iter__(self) -> Any:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __bool__(self) -> bool:
        return True

    @property
    def files(self) -> dict[str, bytes]:
        """The other files, by name."""
        return dict(self._files)

    def __repr__(self) -> str:
        return f"Release({self.number}, tables={list(self._tables)}, files={list(self._files)})"
