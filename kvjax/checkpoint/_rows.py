"""Rows of a checkpoint for programs of the user's, some at a time: all of them, or those of some keys."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvjax._formats import source
from kvjax._formats.source import ahead, concat
from kvjax._values.behind import SWEEP, can_be_behind, warn_behind
from kvjax._values.exported import SLOT, Exported
from kvjax._values.integers import as_int64
from kvjax._values.key_sets import among
from kvjax._values.key_width import whole_bits
from kvjax._values.snapshot import take
from kvjax.checkpoint._chains.chain import only_table, unreplaced
from kvjax.checkpoint._chains.chain_rows import ChainRows, cuts, ranges_of
from kvjax.checkpoint._chains.locate import PathLike

if TYPE_CHECKING:
    from kvjax._keys.keys import KeysLike


def rows(
    path: PathLike, table: str | None = None, *, keys: KeysLike | None = None, slots: bool = False,
    base: PathLike | Sequence[PathLike] | None = None,
) -> Generator[Exported]:  # fmt: skip
    """Reads the rows of a table on disk in pieces, without making a table; those of a delta with what it builds on.

    Pieces are in the order of `kvjax.Table.export`, by (bucket, key), and have about 64 MiB each; one is read while
    another is used. There is always one, which may have no rows. What is read is checked as in a restore.

    Args:
      path: folder of a checkpoint, of a step of an Orbax ``CheckpointManager``, or of the manager (its last step is
        read); it may be in a store.
      table: name of the table; by default the only one.
      keys: ``(...)`` keys whose rows are read, as lookups take them; by default all. Only the chunks (of 4 MiB) that
        may hold them are read. A key that has no row is in no piece.
      slots: whether to also read the optimizer's slots.
      base: where to look for the checkpoints that a delta builds on, as in `restore`.

    Returns:
      A generator of pieces. The ``total`` of a piece is its own number of rows.

    Raises:
      CheckpointError: a checkpoint is not there, damaged, or replaced while it is read.
      ValueError: there is no such table, or there are several and `table` is not given.
      TypeError: the keys are not integers, or JAX may have cut them to 32 bits.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> table = kvjax.get_table("doc_rows", dim=2).upsert(np.array([7, 8]), [[1.0, 2.0], [3.0, 4.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> kvjax.checkpoint.save(folder.name + "/one", [table])
      >>> sum(len(piece) for piece in kvjax.checkpoint.rows(folder.name + "/one"))
      2
      >>> (piece,) = kvjax.checkpoint.rows(folder.name + "/one", "doc_rows", keys=[8, 9])
      >>> piece.keys.tolist(), piece.values.tolist()
      ([8], [[3.0, 4.0]])
      >>> kvjax.drop_table("doc_rows")
      >>> folder.cleanup()
    """
    found = unreplaced(path, base, "rows", lambda chain: ChainRows(chain, only_table(chain, table)))
    where = f"table {found.name!r}, rows"
    bits = None if keys is None else whole_bits(keys, found.meta["key_dtype"], where)
    warn_of_slots(found, slots, "rows")
    return pieces_of(found, slots, bits)


def warn_of_slots(found: ChainRows, slots: bool, op: str) -> None:
    """Says that a call leaves out the slots by which rows could catch up."""
    if not slots and can_be_behind(dict(found.meta["slots"])):
        mend = f"{SWEEP} the save (a delta then has all rows), or take slots=True"
        warn_behind(found.name, op, mend=mend)


def pieces_of(found: ChainRows, slots: bool, keys: np.ndarray | None) -> Generator[Exported]:
    """Rows in pieces.

    Args:
      found: the rows.
      slots: whether to read slots.
      keys: ``(...)`` uint64 as the table has them, of rows to read; None for all.
    """
    names = [name for name in found.types if slots or not name.startswith(SLOT)]
    if keys is None:
        parts = (found.between(first, last, names) for first, last in cuts([found]))
    else:
        parts = _of_keys(found, np.unique(keys.view(np.int64)), names)
    step, kind = int(found.meta["last_step"]), found.meta["key_dtype"]
    return ahead(Exported.of_columns({name: part[name] for name in names}, step, key_dtype=kind) for part in parts)


def _of_keys(found: ChainRows, keys: np.ndarray, names: list[str]) -> Iterator[dict[str, np.ndarray]]:
    """The columns of the rows of some keys ``(m,)`` int64, distinct and sorted."""
    none = {name: np.zeros((0, *found.types[name][1]), found.types[name][0]) for name in names}
    parts, size, given = [none], 0, False
    for first, last in ranges_of(found, keys):
        part = found.between(first, last, names)
        part = take({name: part[name] for name in names}, among(as_int64(part["keys"]), keys))
        parts.append(part)
        size += sum(array.nbytes for array in part.values())
        if size >= 4 * source.PIECE_BYTES:
            yield concat(parts)
            parts, size, given = [none], 0, True
    if size or not given:
        yield concat(parts)
