"""DeepRec's layout: an embedding variable as tensors of a TensorFlow bundle, for each part of it.

    <name>-keys  -values  -freqs  -versions             of <name>/part_0, <name>/part_1, ... where it is partitioned
    <name>-keys_filtered  -freqs_filtered  -versions_filtered     keys that its filter has not admitted yet
    <name>-partition_offset  -partition_filter_offset    the first row of each of 1000 buckets, key % 1000

As DeepRec's embedding_var_ckpt_data.cc writes it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

import numpy as np

from kvjax._formats import bundle
from kvjax._formats.errors import FileError
from kvjax._formats.paths import local
from kvjax._formats.source import Source, Type, as_written, ranges, row_bytes

BUCKETS = 1000
_IN_MEMORY = 1 << 26
"""Bytes of rows that are put in order in memory; more are in a file meanwhile."""


def part_names(name: str, parts: int) -> list[str]:
    """Of the parts of a variable."""
    return [name] if parts == 1 else [f"{name}/part_{i}" for i in range(parts)]


def write(
    prefix: str | os.PathLike[str], name: str, source: Source, slots: Mapping[str, str], parts: int
) -> tuple[str, ...]:
    """Writes a variable. Beside pieces of rows it takes 16 bytes of memory for each, with slots 32, and while it is
    written as much of the disk as the rows have.

    Args:
      prefix: of the files.
      name: of the variable.
      source: its columns "keys", "values", "freqs" and "versions"; "has_slots" and "pinned" if it has these.
      slots: columns of its slots, by the names that they get; DeepRec has a variable for each, "<part>/<slot>".
      parts: into which it is partitioned, by ``key % 1000 % parts``.

    Returns:
      What was left out: slots that have not the shape of a row, and pins. A row without slots has none there.

    Raises:
      FileError: a key is negative: DeepRec loses those at its next save, because it takes ``key % 1000`` of C++.
    """
    prefix = local(prefix, "write")
    given = source.read(["keys"], 0, source.num_rows)["keys"]
    keys = given.view(np.int64)
    if (keys < 0).any():
        raise FileError(
            prefix, "keys from 0 to 2**63 - 1", f"{int((keys < 0).sum())} others, the first {given[keys < 0][0]}",
            "hash the ids to 63 bits, or leave these rows out with prune",
        )  # fmt: skip
    if not isinstance(parts, (int, np.integer)) or not 1 <= parts <= BUCKETS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FileError(prefix, f"1 to {BUCKETS} partitions", f"{parts}", "choose a number of these")
    row = source.types["values"][1]
    own = {slot: column for slot, column in slots.items() if source.types[column][1] == row}
    left = [f"the slot {slot!r}, which has not the shape of a row" for slot in slots if slot not in own]
    trained, pinned = (
        np.concatenate([np.zeros(0, bool), *source.pieces(name)]) if name in source.types else np.full(len(keys), none)
        for name, none in (("has_slots", True), ("pinned", False))
    )
    if pinned.any():
        left.append(f"the pins of {int(pinned.sum())} rows")
    with contextlib.ExitStack() as files:
        tensors = files.enter_context(_tensors(prefix, name, source, {"": "values"}, parts))
        if own:  # of the keys that have slots alone, as there
            with_slots = source if trained.all() else source.where(trained)
            of_slots = {f"/{slot}": column for slot, column in own.items()}
            tensors |= files.enter_context(_tensors(prefix, name, with_slots, of_slots, parts))
        bundle.write(prefix, tensors)
    return tuple(left)


@contextlib.contextmanager
def _tensors(
    prefix: Path, name: str, source: Source, variables: Mapping[str, str], parts: int
) -> Generator[dict[str, bundle.Tensor]]:
    """The tensors of variables that have the same keys: the columns of their rows, by what follows the name of a
    part."""
    keys = source.read(["keys"], 0, source.num_rows)["keys"].view(np.int64)
    buckets = (keys % BUCKETS).astype(np.int16)
    order = np.lexsort((buckets, buckets % parts))
    ends = np.searchsorted((buckets % parts)[order], np.arange(parts + 1))
    with _ordered(prefix, source.only([*variables.values(), "freqs", "versions"]), order) as columns:
        tensors: dict[str, bundle.Tensor] = {}
        for i, part in enumerate(part_names(name, parts)):
            mine = slice(int(ends[i]), int(ends[i + 1]))
            offsets = np.searchsorted(buckets[order[mine]], np.arange(BUCKETS + 1)).astype(np.int32)
            for end, values in variables.items():
                variable = part + end
                tensors |= {
                    f"{variable}-keys": bundle.tensor(keys[order[mine]]),
                    f"{variable}-values": bundle.tensor(columns[values][mine]),
                    f"{variable}-freqs": bundle.tensor(columns["freqs"][mine]),
                    f"{variable}-versions": bundle.tensor(columns["versions"][mine]),
                    f"{variable}-partition_offset": bundle.tensor(offsets),
                    f"{variable}-partition_filter_offset": bundle.tensor(np.zeros(BUCKETS + 1, np.int32)),
                }
                none = bundle.tensor(np.zeros(0, np.int64))
                tensors |= {f"{variable}-{column}_filtered": none for column in ("keys", "freqs", "versions")}
        yield tensors


@contextlib.contextmanager
def _ordered(prefix: Path, source: Source, order: np.ndarray) -> Generator[dict[str, np.ndarray]]:
    """The columns of a source with the row ``order[i]`` at i; they are read once, from the first row to the last."""
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    with _space(prefix, source.types, source.num_rows) as columns:
        widest = max(map(row_bytes, source.types.values()))
        for start, stop in ranges(source.num_rows, widest):
            for name, array in source.read(list(source.types), start, stop).items():
                columns[name][place[start:stop]] = as_written(array)
        yield columns


@contextlib.contextmanager
def _space(prefix: Path, types: Mapping[str, Type], rows: int) -> Generator[dict[str, np.ndarray]]:
    sizes = {name: rows * row_bytes(kind) for name, kind in types.items()}
    if sum(sizes.values()) <= _IN_MEMORY:
        yield {name: np.empty((rows, *shape), dtype) for name, (dtype, shape) in types.items()}
        return
    with contextlib.ExitStack() as files:
        columns: dict[str, np.ndarray] = {}
        for name, (dtype, shape) in types.items():
            file = files.enter_context(tempfile.TemporaryFile(dir=prefix.parent))
            os.posix_fallocate(file.fileno(), 0, sizes[name])  # a full disk is an error here, and not a signal later
            columns[name] = np.memmap(file, dtype, "r+", shape=(rows, *shape))
        yield columns
