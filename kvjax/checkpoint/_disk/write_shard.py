"""Shards, as they are written: arrays piece by piece, and the list of their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._formats.atomic import flush, saying
from kvjax._formats.paths import AnyPath
from kvjax.checkpoint._disk.arrays import ArrayWriter
from kvjax.checkpoint._disk.files import FileEntry, write_text
from kvjax.checkpoint._disk.format import (
    META,
    POOL,
    CheckpointError,
    array_folder,
    shard_folder,
    shard_list,
    table_folder,
)
from kvjax.checkpoint._disk.pace import Pace, Spent

if TYPE_CHECKING:
    from kvjax._table.frozen import FrozenRows


def write_shard(
    directory: AnyPath, meta: dict[str, Any], number: int, kinds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    pieces: Iterable[Mapping[str, np.ndarray]], frozen: FrozenRows | None = None, op: str = "save",
) -> None:  # fmt: skip
    """Writes one shard of a table below `directory`, and lists it.

    Args:
      directory: of the checkpoint.
      meta: what kvjax.json says; the first shard also writes that, and the initializer's pool.
      number: of the shard.
      kinds: dtype and shape of each array.
      pieces: their rows, in order; not each piece need have some of each.
      frozen: what has those of the other arrays, which are copied straight to where they are written from.
      op: what it is written for, which errors name.
    """
    with saying(f"table {meta['name']!r}, {op}"):
        _write_shard(directory, meta, number, kinds, pieces, frozen, op)


def _write_shard(
    directory: AnyPath, meta: dict[str, Any], number: int, kinds: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    pieces: Iterable[Mapping[str, np.ndarray]], frozen: FrozenRows | None, op: str,
) -> None:  # fmt: skip
    first, spent = number == 0, Spent()
    folder, shard = directory / table_folder(meta["name"]), shard_folder(number, meta["num_shards"])
    names = {name: name if name == POOL else f"{shard}/{array_folder(name)}" for name in kinds if first or name != POOL}
    folders = {path: kinds[name] for name, path in names.items()}
    try:
        if not isinstance(folder, Path) and (folder / shard).exists():
            raise FileExistsError
        for path in folders:
            (folder / path).mkdir(parents=True)
    except FileExistsError as error:
        raise CheckpointError(
            f"kvjax: table {meta['name']!r}, {op}: want a folder without it, got {folder}; save to another"
        ) from error
    writers: dict[str, ArrayWriter] = {}
    entries: dict[str, FileEntry] = {}
    try:
        for path, (dtype, shape) in folders.items():  # each of which begins to write
            writers[path] = ArrayWriter(folder / path, dtype, shape, spent)
        for piece in pieces:
            for name, rows in piece.items():
                if name in names:
                    writers[names[name]].add(rows)
        if frozen is not None:
            _copy_frozen(frozen, {name: writers[names[name]] for name in frozen.types}, Pace(spent))
        for path, writer in writers.items():
            entries |= {f"{path}/{name}": entry for name, entry in writer.end().items()}
    finally:  # where one has failed, nobody writes any more when the caller hears of it
        for writer in writers.values():
            writer.wait()
    if first:
        entries[META] = write_text(folder / META, json.dumps(meta, indent=1, sort_keys=True))
    listed = dict(sorted(entries.items()))
    write_text(folder / shard_list(number, meta["num_shards"]), json.dumps(listed, indent=0))
    for path in [*folders, shard, ""]:
        flush(folder / path)


def _copy_frozen(frozen: FrozenRows, writers: Mapping[str, ArrayWriter], pace: Pace) -> None:
    while rows := frozen.copy_next({name: writer.space() for name, writer in writers.items()}, pace.pause):
        for writer in writers.values():
            writer.fill(rows)
