"""Changes of a table from one checkpoint to another, for programs that follow training."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import cast

import numpy as np

from kvjax._values.exported import Exported
from kvjax.checkpoint._chains.chain import Chain, only_table, unreplaced
from kvjax.checkpoint._chains.chain_rows import ChainRows
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._rows import pieces_of, warn_of_slots


class TableDelta:
    """What has changed of a table from one checkpoint to another, as `changes` finds it.

    Attributes:
      table: its name.
      since: the digest of the checkpoint from which these are the changes. None if these are all rows of the table,
        which replace everything before.
      checkpoint: digests of the checkpoint that was read. A compacted one also has those of the deltas for which it
        stands, one of an early format has none.
      step: the table's last step.
      removed: ``(m,)`` int64 (uint64 for a table of unsigned keys), keys that may have had a row and have none, sorted
        by (bucket, key).

    Example:
      >>> import kvjax, tempfile
      >>> table = kvjax.get_table("doc_table_delta", dim=1).upsert([7, 8], [[1.0], [2.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.checkpoint.save(folder + "/0", [table], cursor="index")
      ...     table = table.remove([7]).upsert([9], [[3.0]])
      ...     kvjax.checkpoint.save(folder + "/1", [table], since="index")
      ...     delta = kvjax.checkpoint.changes(folder + "/1")
      >>> delta.table, delta.step, delta.whole, delta.removed.tolist()
      ('doc_table_delta', 0, False, [7])
      >>> kvjax.drop_table("doc_table_delta")
    """

    def __init__(self, found: ChainRows, checkpoint: tuple[str, ...], since: str | None, slots: bool) -> None:
        """For `changes`. If `since` is of the checkpoint itself, nothing has changed."""
        self.table, self.checkpoint, self.step = found.name, checkpoint, int(found.meta["last_step"])
        self.since, self._found, self._slots = since, found, slots
        warn_of_slots(found, slots, "changes")
        same = since is None or since in checkpoint
        removed = np.zeros(0, np.int64) if same else found.removed()
        self.removed: np.ndarray = removed.view(found.types["keys"][0])

    @property
    def whole(self) -> bool:
        """Whether these are all rows of the table."""
        return self.since is None

    def rows(self) -> Generator[Exported]:
        """The new and changed rows, in pieces as from `kvjax.checkpoint.rows`. Some may be unchanged: every row that
        has been written is among them.

        Returns:
          A generator of `kvjax.Exported`; their columns are ``(n, ...)`` of each piece. `slots` of `changes` says
          whether they have the optimizer's slots.

        Raises:
          CheckpointError: they are damaged, or another checkpoint has taken their place.

        Example:
          >>> import kvjax, tempfile
          >>> table = kvjax.get_table("doc_delta_rows", dim=1).upsert([7, 8], [[1.0], [2.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     kvjax.checkpoint.save(folder + "/0", [table], cursor="index")
          ...     table = table.remove([7]).upsert([9], [[3.0]])
          ...     kvjax.checkpoint.save(folder + "/1", [table], since="index")
          ...     for piece in kvjax.checkpoint.changes(folder + "/1").rows():
          ...         print(piece.keys.tolist(), piece.values.tolist())
          [9] [[3.0]]
          >>> kvjax.drop_table("doc_delta_rows")
        """
        none = np.zeros(0, np.uint64) if self.since in self.checkpoint else None
        return pieces_of(self._found, self._slots, none)

    def __repr__(self) -> str:
        since = "whole" if self.since is None else f"since={self.since!r}"
        return f"TableDelta({self.table!r}, step={self.step}, {since}, removed={len(self.removed)})"


def changes(
    path: PathLike, table: str | None = None, *, since: Collection[str] | None = None, slots: bool = False,
    base: PathLike | Sequence[PathLike] | None = None,
) -> TableDelta:  # fmt: skip
    """What has changed of a table in a delta: its changed rows, in pieces, and its removed keys. It makes no table.

    A whole checkpoint has all rows and no removed keys, and `TableDelta.whole` says so: a program that follows deltas
    must then replace everything. `kvjax.checkpoint.save` also writes all rows in place of a delta if the table does not
    know what has changed. Beside a piece of rows, 8 bytes for each removed key are in memory.

    Args:
      path: folder of a delta, of a step of an Orbax ``CheckpointManager``, or of the manager (its last step is read); a
        folder of numbered checkpoints means the last one. It may be in a store.
      table: name of the table; by default the only one.
      since: digests of the checkpoint that you have, as ``TableDelta.checkpoint`` gave them. The result is then the
        changes of all deltas since that checkpoint, or the whole table, with what the delta builds on, if the deltas do
        not lead back to it. ``()`` for no checkpoint. By default the changes of this one delta, and what it builds on
        need not be there.
      slots: whether to also read the optimizer's slots. The rows of early deltas may have none, or fewer than those of
        later ones: a row gets them when an optimizer first trains it.
      base: where to look for the checkpoints that a delta builds on, as in `restore`.

    Returns:
      `TableDelta`; its rows are read when `TableDelta.rows` is asked for them.

    Raises:
      CheckpointError: there is no checkpoint, or one that is read is not there or damaged.
      ValueError: there is no such table, or there are several and `table` is not given.
      TypeError: `since` is not a collection of digests.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> folder = tempfile.TemporaryDirectory()
      >>> table = kvjax.get_table("doc_changes", dim=1).upsert(np.array([7, 8]), [[1.0], [2.0]])
      >>> kvjax.checkpoint.save(folder.name + "/0", [table], cursor="index")
      >>> table = table.remove([7]).upsert([9], [[3.0]])
      >>> kvjax.checkpoint.save(folder.name + "/1", [table], since="index")
      >>> delta = kvjax.checkpoint.changes(folder.name + "/1")
      >>> delta.removed.tolist(), [piece.keys.tolist() for piece in delta.rows()], delta.whole
      ([7], [[9]], False)
      >>> kvjax.drop_table("doc_changes")
      >>> folder.cleanup()
    """
    if since is not None and not _are_digests(since):
        raise TypeError(
            f"kvjax: changes: want since= as a collection of digests, got {since!r:.100}; give what "
            "TableDelta.checkpoint was, or () for none"
        )
    return unreplaced(path, base, "changes", lambda chain: _changes(chain, only_table(chain, table), since, slots))


def _are_digests(since: object) -> bool:
    if isinstance(since, str | bytes) or not isinstance(since, Collection):
        return False
    return all(isinstance(one, str) for one in cast("Collection[object]", since))


def _changes(chain: Chain, name: str, since: Collection[str] | None, slots: bool) -> TableDelta:
    own = chain.catalog.digests
    saved = chain.catalog.open(name)[0].get("delta")
    base = () if saved is None else (saved["since"],)
    if since is not None and (same := set(since) & set(own)):
        return TableDelta(ChainRows(chain, name, base), own, min(same), slots)
    found = ChainRows(chain, name, base if since is None else since)
    return TableDelta(found, own, found.since, slots)
