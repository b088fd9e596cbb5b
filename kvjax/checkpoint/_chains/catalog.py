"""The catalog: which tables are below a directory, and the manifest that says that they are all there."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast
from urllib.parse import unquote

from kvjax._formats.atomic import flush, saying
from kvjax._formats.paths import AnyPath
from kvjax._values.arguments import is_integer
from kvjax.checkpoint._chains.locate import UNDER_WAY, said_by_step, unlisted_tables
from kvjax.checkpoint._disk.files import MOST_JSON, Files, json_at, read, read_again, read_json, write_text
from kvjax.checkpoint._disk.format import (
    FORMAT,
    MANIFEST,
    META,
    PACKED,
    UNLISTED,
    CheckpointError,
    Damaged,
    Missing,
    digest,
    entry_of,
    manifest_tables,
    shard_list,
    table_folder,
)
from kvjax.checkpoint._disk.meta import check_meta

T = TypeVar("T")


def write_manifest(directory: AnyPath, stands_for: Sequence[str] = (), saved_at: int | None = None) -> str:
    """Lists the tables below `directory`, once all processes have written what they have of them.

    Args:
      directory: of the checkpoint.
      stands_for: digests of manifests in the place of which deltas may build on this one.
      saved_at: the time now, in ns, if the checkpoint is an item of a step that says only at its end when it was begun.

    Returns:
      The digest of the manifest, which is of all that is in the checkpoint.

    Raises:
      CheckpointError: what a process has written is not here.
    """
    tables: dict[str, Any] = {}
    for folder in sorted(path.parent for path in directory.glob(f"*/{META}")):
        try:
            meta = json_at(folder / META)
            n = meta["num_shards"]
            lists = [read(folder / shard_list(i, n), MOST_JSON) for i in range(n)]
        except Damaged as error:
            raise CheckpointError(
                f"kvjax: save: {error}, in {folder}; give all processes the same path, in a folder that they share"
            ) from error
        tables[meta["name"]] = [[len(data), digest(data)] for data in lists]
        flush(folder)
    contents: dict[str, Any] = {"format": MANIFEST, "tables": tables}
    if stands_for:
        contents["stands_for"] = list(stands_for)
    if (step := _step_of_save(directory, saved_at is None)) is not None:
        contents["step"] = step
    elif saved_at is not None:
        contents["saved_at"] = saved_at
    whole = digest(_canonical(contents))
    write_text(directory / META, json.dumps({"contents": contents, "digest": whole}))
    flush(directory)
    flush(directory.parent)
    return whole


def step_of(directory: AnyPath) -> int | None:
    """What sets the Orbax step that a checkpoint is an item of apart from others: when it was begun, in ns; None where
    there is none, or not yet (``save_checkpointables`` of v1 says so last)."""
    return _times(directory)[0]


def _step_of_save(directory: AnyPath, is_said: bool) -> int | None:
    """The same while Orbax saves the step: if it `is_said` before the end, a thread of its own writes it down."""
    latest = time.monotonic() + (_MOST_SECONDS if is_said and UNDER_WAY in directory.parent.name else 0)
    while (step := step_of(directory)) is None and time.monotonic() < latest:
        time.sleep(0.002)
    return step


_MOST_SECONDS = 20


def _times(directory: AnyPath) -> tuple[int | None, int | None]:
    """When the Orbax step of an item was begun and committed, in ns, as far as that is known."""
    said = said_by_step(directory.parent)
    begun, ended = (said.get(f"{name}_timestamp_nsecs") for name in ("init", "commit"))
    return begun if is_integer(begun) else None, ended if is_integer(ended) else None


def missing_lists(directory: AnyPath, meta: Mapping[str, Any]) -> list[AnyPath]:
    """The lists of a table's shards that no process has written yet."""
    n = meta["num_shards"]
    paths = [directory / table_folder(meta["name"]) / shard_list(i, n) for i in range(n)]
    return [path for path in paths if not path.exists()]


def _stands_for(said: Any) -> list[str]:
    match [said] if isinstance(said, str) else said:  # there was one at first
        case [*digests] if all(isinstance(each, str) for each in digests):
            return digests
        case other:
            raise Damaged(f"want digests as stands_for, got {other!r:.100}")


def _canonical(contents: Any) -> bytes:
    return json.dumps(contents, sort_keys=True, separators=(",", ":")).encode()


class Catalog:
    """The tables below a directory; nothing is read before it is asked for, so that processes can do so together.

    Args:
      directory: of the checkpoint.
      op: what it is read for, which errors name.
    """

    def __init__(self, directory: AnyPath, op: str = "restore") -> None:
        self.directory, self.op = directory, op

    @property
    def digest(self) -> str | None:
        """Of the manifest, by which deltas name what they build on; None where there is none, or it is damaged."""
        return next(iter(self.digests), None)

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest, and that of a checkpoint which this one stands for."""
        try:
            return () if self._manifest is None else self._manifest[0]
        except (CheckpointError, PermissionError):  # what is beside a checkpoint may be of others
            return ()

    def replaced(self) -> bool:
        """Whether another checkpoint has taken the place of this one since its manifest was read."""
        return self.digest is not None and Catalog(self.directory).digest not in (None, self.digest)

    @property
    def _lists(self) -> dict[str, list[tuple[int, str]]] | None:
        """Size and digest of the lists of each table; None where there is no manifest.

        Raises:
          CheckpointError: the manifest is damaged.
        """
        return None if self._manifest is None else self._manifest[1]

    @functools.cached_property
    def _manifest(self) -> tuple[tuple[str, ...], dict[str, list[tuple[int, str]]]] | None:
        try:
            with saying(self.op, self.directory / META, reads=True):
                return read_again(self.directory, self._read_manifest)
        except Missing:
            return None
        except Damaged as error:
            raise CheckpointError(f"kvjax: {self.op}: {error}, in {self.directory / META}; {_DAMAGED}") from error

    @functools.cached_property
    def _folders(self) -> dict[str, str]:
        if self._lists is not None:
            return {name: table_folder(name) for name in self._lists}
        try:
            return {unquote(path.name): path.name for path in unlisted_tables(self.directory)}
        except Damaged as error:
            mend = _LOST if self.directory.exists() else "nothing is there: check the path"
            raise CheckpointError(f"kvjax: {self.op}: {error}; {mend}") from error

    @property
    def names(self) -> list[str]:
        """Of the tables."""
        return sorted(self._folders)

    def folder(self, name: str) -> AnyPath:
        """Where a table is."""
        return self.directory / self._folders[name]

    def open(self, name: str) -> tuple[dict[str, Any], Files]:
        """What a table is, checked, and its files.

        Raises:
          CheckpointError: it is not there, of another format, or damaged.
        """
        if name not in self._folders:
            raise CheckpointError(
                f"kvjax: table {name!r}, {self.op}: want one of the checkpoint's tables, got none of that name; the "
                f"checkpoint holds {self.names}: "
                + ("leave it out, or restore one of these into it" if self.op == "restore" else "name one of these")
            )
        return self.checked(name, lambda: self._open(name))

    def metas(self) -> dict[str, dict[str, Any]]:
        """What each table is, by name, as kvjax.json says it."""
        return {name: self.open(name)[0] for name in self.names}

    def checked(self, name: str, body: Callable[[], T]) -> T:
        """What body() reads of a table.

        Raises:
          CheckpointError: for what is damaged.
        """
        try:
            return body()
        except Damaged as error:
            mend = _REPLACED if self.replaced() else _DAMAGED
            raise CheckpointError(
                f"kvjax: table {name!r}, {self.op}: {error} in {self.folder(name)}; {mend}"
            ) from error

    def _open(self, name: str) -> tuple[dict[str, Any], Files]:
        folder = self.folder(name)
        if self._lists is None:
            files = Files(folder, None)
            return check_meta(read_json(files.read(META, MOST_JSON)), (UNLISTED,), name), files
        entries: dict[str, tuple[int, str]] = {}
        lists = self.lists(name)
        for path in lists:
            entries |= self.listed(name, path).entries or {}
        files = Files(folder, entries)
        meta = check_meta(read_json(files.read(META, MOST_JSON)), (FORMAT, PACKED), name)
        if meta["num_shards"] != len(lists):
            raise Damaged(f"want {len(lists)} shards, got {meta['num_shards']}")
        return meta, files

    def lists(self, name: str) -> dict[str, tuple[int, str]]:
        """Size and digest of each list of a table's files, by its path below the table's folder."""
        lists = (self._lists or {})[name]
        return {shard_list(shard, len(lists)): entry for shard, entry in enumerate(lists)}

    def listed(self, name: str, path: str) -> Files:
        """The files that one list of a table lists.

        Raises:
          Damaged: the list is not as it was written.
        """
        folder = self.folder(name)
        return Files(folder, _entries(read_json(Files(folder, self.lists(name)).read(path, MOST_JSON)), path))

    def _read_manifest(self) -> tuple[tuple[str, ...], dict[str, list[tuple[int, str]]]]:
        found = read_json(read(self.directory / META, MOST_JSON))
        try:
            whole = digest(_canonical(found["contents"]))
            if found["digest"] != whole:
                raise Damaged(f"want what has the digest {str(found['digest'])[:20]!r}, got {whole}")
        except (KeyError, TypeError, UnicodeEncodeError, RecursionError) as error:
            raise Damaged(f"want contents and their digest, got {type(error).__name__} of {error}") from error
        contents, tables = manifest_tables(found)
        self._check_step(contents)
        return (whole, *_stands_for(contents.get("stands_for", []))), tables

    def _check_step(self, contents: Mapping[str, Any]) -> None:
        """Whether this was saved with the step that it is an item of, as far as both say when."""
        begun, ended = _times(self.directory)
        if begun is None:
            return
        got, at = None, cast("Any", contents.get("saved_at"))
        if contents.get("step", begun) != begun:
            got = f"begun at {contents['step']!r:.100}"
        elif ended is not None and is_integer(at) and not begun - _SLACK < at < ended + _SLACK:
            got = f"that was saved at {at}"
        if got is not None:
            raise Damaged(
                f"want what was saved with the step {self.directory.parent}, begun at {begun} ns, got the item of one "
                f"{got}; to restore it by itself, move it out of the step"
            )


_SLACK = 10**9
"""Nanoseconds by which a clock may be set back during a save."""

_DAMAGED = "the checkpoint is damaged, or a later kvjax has written it: restore an older one"
_LOST = "the checkpoint is damaged, or was not saved to its end: restore an older one, by its own path"
_REPLACED = "another checkpoint has taken the place of this one meanwhile: do it again"


def _entries(found: Any, path: str) -> dict[str, tuple[int, str]]:
    if not isinstance(found, dict):
        raise Damaged(f"want a list of files in {path}, got {type(found).__name__}")
    return {name: entry_of(entry) for name, entry in found.items()}
