"""A release: the tables and files of a model that belong together, in a folder that never changes."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail, meant
from kvjax._values.numbers import is_integer, is_real
from kvjax.serving._format import damaged, read
from kvjax.serving._frozen import FrozenTable
from kvjax.serving._reads import IdsLike

SUFFIX = ".frozen"
FILES = "files"
CHECKPOINT = "checkpoint"
INFO = "info"


class PausedError(RuntimeError):
    """The error of a write to releases that are paused: the current release stays until `Releases.resume`."""


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


@dataclasses.dataclass(frozen=True)
class ReleaseInfo:
    """What is known of a release without a look at its tables.

    Attributes:
      number: of the release.
      published: when it became the current release, in UTC.
      checkpoint: digests of the checkpoint that its tables come from; () if there is none.
      source: the folder of that checkpoint when it was followed; None if there is none.
      again: the number of the release that it is again, after a rollback; None if it is a release of its own.
      prune: the rule by which `Releases.follow` has left rows out, in words; None if there was none.
    """

    number: int
    published: datetime.datetime
    checkpoint: tuple[str, ...]
    source: str | None
    again: int | None
    prune: str | None = None

    @property
    def original(self) -> int:
        """The number of the release that first had these tables and files."""
        return self.number if self.again is None else self.again


def info_of(path: Path) -> ReleaseInfo:
    """What the folder of a release says.

    Raises:
      FrozenError: it is damaged.
      FileNotFoundError: it is not there.
    """
    at, said = path / CHECKPOINT, path / INFO
    checkpoint = tuple(at.read_text().split()) if at.exists() else ()
    seconds, source, again, prune = os.stat(path).st_mtime, None, None, None
    if said.exists():
        data = said.read_bytes()
        try:
            found = json.loads(data)
            seconds, source, again = found["published"], found["source"], found["again"]
            prune = found.get("prune")  # early ones have none
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(said, "open", "what is known of a release, in JSON", f"{data!r:.100}") from error
        good = is_real(seconds) and abs(seconds) < _MOST_SECONDS and isinstance(source, str | None)
        if not good or not (again is None or is_integer(again)) or not isinstance(prune, str | None):
            raise damaged(said, "open", "what is known of a release", f"{found!r:.100}")
    published = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return ReleaseInfo(int(path.name), published, checkpoint, source, again, prune)


_MOST_SECONDS = 1e11  # to the year 5138, which datetime can say


class Release(Mapping[str, FrozenTable]):
    """The tables of one release, by name. Take one release for each request, so that all reads of the request belong
    together.

    Attributes:
      number: 1 for the first.
      path: of its folder.
      checkpoint: digests of the checkpoint that its tables come from; () if there is none.
      info: what else is known of it.
    """

    def __init__(self, path: Path) -> None:
        """For `Releases`."""
        self.number, self.path = int(path.name), path
        found = sorted(path.glob(f"*{SUFFIX}"))
        self._tables = {unquote(file.name.removesuffix(SUFFIX)): FrozenTable(file, read(file), True) for file in found}
        self.info = info_of(path)
        self.checkpoint = self.info.checkpoint
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
