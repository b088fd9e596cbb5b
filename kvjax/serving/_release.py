"""A release: the tables and files of a model that belong together, in a folder that never changes."""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote

from kvjax._formats.atomic import saying
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail, meant
from kvjax.serving._format import FrozenError, contents, read
from kvjax.serving._frozen import FrozenTable
from kvjax.serving._info import FILES, SUFFIX, info_of
from kvjax.serving._reads import IdsLike


class PausedError(RuntimeError):
    """The error of a write to releases that are paused: the current release stays until `Releases.resume`.

    Example:
      >>> import tempfile, kvjax
      >>> from kvjax.serving import PausedError, Releases
      >>> user = kvjax.get_table("doc_paused_error", dim=1).upsert([1], [[1.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     releases = Releases(folder)
      ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
      ...     _ = releases.rollback(1)
      ...     try:
      ...         releases.publish({"user": user})
      ...     except PausedError:
      ...         print("paused")
      paused
      >>> kvjax.drop_table("doc_paused_error")
    """


@dataclasses.dataclass(frozen=True)
class Changes:
    """Changes to a table, for `Releases.update`.

    Attributes:
      keys: ``(n,)``, distinct.
      rows: ``(n, dim)``, the new rows of these keys.
      removed: ``(m,)`` keys whose rows are removed.
      step: the table's last step after the changes; None if it stays.
      missing: what keys without a row read as after the changes, "zeros" or a row ``(dim,)``; None if it stays. If
        unadmitted keys share a row that has changed, give that row here, too: a frozen table does not know its key.

    Raises:
      TypeError, ValueError: from `Releases.update`, as `FrozenTable.update`; nothing is checked before.

    Example:
      >>> import tempfile, kvjax
      >>> from kvjax.serving import Changes, Releases
      >>> user = kvjax.get_table("doc_changes_class", dim=1).upsert([1], [[1.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     releases = Releases(folder)
      ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
      ...     second = releases.update({"user": Changes([2], [[9.0]], removed=[1])})
      >>> second["user"].lookup([1, 2])[:, 0].tolist()
      [0.0, 9.0]
      >>> kvjax.drop_table("doc_changes_class")
    """

    keys: IdsLike = ()
    rows: ArrayLike = ()
    removed: IdsLike = ()
    step: int | None = None
    missing: Literal["zeros"] | ArrayLike | None = None


def check_by_name(op: str, tables: object, files: object) -> None:
    """Whether tables and files are by name; there need not be files.

    Raises:
      TypeError: they are something else.
    """
    for what, given in ((op, tables), (f"{op}, files", {} if files is None else files)):
        if not isinstance(given, Mapping):
            raise TypeError(
                f"kvjax: releases, {what}: want a mapping by name, got {type(given).__name__}; give {{name: ...}}"
            )
        for name in cast("Mapping[object, object]", given):
            if not isinstance(name, str):
                raise TypeError(f"kvjax: releases, {what}: want names, got {name!r}; give a string for each")


def check_changes(changes: Mapping[str, object]) -> None:
    """Whether what is changed in each table is `Changes`.

    Raises:
      TypeError: something is not.
    """
    for name, change in changes.items():
        if not isinstance(change, Changes):
            want, mend = "a kvjax.serving.Changes", "give Changes(keys, rows, removed=)"
            raise fail(TypeError, name, "update", want, type(change).__name__, mend)


class Release(Mapping[str, FrozenTable]):
    """The tables of one release, by name. Take one release for each request, so that all reads of the request belong
    together.

    Attributes:
      number: 1 for the first.
      path: of its folder.
      checkpoint: digests of the checkpoint that its tables come from; () if there is none.
      info: what else is known of it.

    Raises:
      KeyError: from ``release[name]``: it has no such table.

    Example:
      >>> import tempfile, kvjax
      >>> from kvjax.serving import Releases
      >>> user = kvjax.get_table("doc_release", dim=1).upsert([1], [[1.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     releases = Releases(folder)
      ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
      >>> first, first["user"].lookup(1).tolist()
      (Release(1, tables=['user'], files=['bias']), [1.0])
      >>> kvjax.drop_table("doc_release")
    """

    def __init__(self, path: Path) -> None:
        """For `Releases`."""
        self.number, self.path = int(path.name), path
        self.info = info_of(path)
        if self.info.damaged is not None:
            raise FrozenError(self.info.damaged)
        self.checkpoint = self.info.checkpoint
        places = self.info.digests
        if places is None:
            places = [str(file.relative_to(path)) for file in [*path.glob(f"*{SUFFIX}"), *(path / FILES).iterdir()]]
        self._tables: dict[str, FrozenTable] = {}
        self._files: dict[str, bytes] = {}
        try:
            with saying("open", reads=True):
                for place in sorted(places):
                    self._open(place)
        finally:
            os.stat(path)  # else it went meanwhile, and some of it may not have been there

    def _open(self, place: str) -> None:
        """Opens a table, or reads another file, of a path in the folder."""
        file = self.path / place
        wanted = None if self.info.digests is None else self.info.digests[place]
        if not file.exists():
            raise self._damaged(place, "the file that it was published with", "none")
        if file.parent == self.path:
            mapped = read(file)
            digest = mapped.digest
            self._tables[unquote(file.name.removesuffix(SUFFIX))] = FrozenTable(file, mapped, True)
        else:
            data = contents(file)
            digest = zlib.crc32(data)
            self._files[unquote(file.name)] = data
        if wanted not in (None, digest):
            raise self._damaged(place, f"CRC-32 {wanted:08x}, as it was published", f"{digest:08x}")

    def _damaged(self, place: str, want: str, got: str) -> Exception:
        mend = "open another release, or publish one"
        return FrozenError(f"kvjax: release {str(self.path)!r}, open: {place}: want {want}, got {got}; {mend}")

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
        """The other files of the release, their bytes by name.

        Example:
          >>> import tempfile, kvjax
          >>> from kvjax.serving import Releases
          >>> user = kvjax.get_table("doc_release_files", dim=1).upsert([1], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     releases = Releases(folder)
          ...     first = releases.publish({"user": user}, {"bias": b"0.5"})
          >>> first.files
          {'bias': b'0.5'}
          >>> kvjax.drop_table("doc_release_files")
        """
        return dict(self._files)

    def __repr__(self) -> str:
        return f"Release({self.number}, tables={list(self._tables)}, files={list(self._files)})"
