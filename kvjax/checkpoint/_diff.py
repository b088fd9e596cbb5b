"""Differences between two checkpoints, found a few buckets at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from kvjax._values.arguments import is_integer
from kvjax._values.errors import fail
from kvjax._values.snapshot import same_bits
from kvjax.checkpoint._chains.chain import Chain, all_unreplaced, chosen_tables
from kvjax.checkpoint._chains.chain_rows import ChainRows, cuts
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._disk.format import CheckpointError

_IGNORED = {"format", "rows", "num_shards", "shards", "extras", "num_buckets", "name"}


@dataclasses.dataclass
class TableDiff:
    """How a table differs between two checkpoints.

    Attributes:
      rows: number of rows in each of the two.
      added: rows that only the second has.
      removed: rows that only the first has.
      changed: rows of both that differ in some column.
      columns: how many of these differ in each column: "values", "freqs", "versions", "slot.<name>", ...
      largest: for each column of numbers, the largest difference between two elements; infinite if one is not finite.
      fields: what else is said of the tables and differs, such as options, slots or the last step: (first, second) by
        name.
      examples: a few keys that were "added", "removed" and "changed".

    Example:
      >>> import kvjax, tempfile
      >>> table = kvjax.get_table("doc_table_diff", dim=1).upsert([7, 8], [[1.0], [2.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.checkpoint.save(folder + "/0", [table])
      ...     table = table.remove([7])
      ...     kvjax.checkpoint.save(folder + "/1", [table])
      ...     diff = kvjax.checkpoint.diff(folder + "/0", folder + "/1")
      >>> table_diff = diff.tables["doc_table_diff"]
      >>> table_diff.rows, table_diff.removed, table_diff.examples["removed"]
      ((2, 1), 1, [7])
      >>> kvjax.drop_table("doc_table_diff")
    """

    rows: tuple[int, int]
    added: int = 0
    removed: int = 0
    changed: int = 0
    columns: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    largest: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    fields: dict[str, tuple[object, object]] = dataclasses.field(default_factory=dict[str, tuple[object, object]])
    examples: dict[str, list[int]] = dataclasses.field(default_factory=dict[str, list[int]])

    @property
    def same(self) -> bool:
        """Whether there is no difference.

        Example:
          >>> import kvjax, tempfile
          >>> table = kvjax.get_table("doc_table_diff_same", dim=1).upsert([7, 8], [[1.0], [2.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     kvjax.checkpoint.save(folder + "/0", [table])
          ...     table = table.remove([7])
          ...     kvjax.checkpoint.save(folder + "/1", [table])
          ...     diff = kvjax.checkpoint.diff(folder + "/0", folder + "/1")
          >>> diff.tables["doc_table_diff_same"].same
          False
          >>> kvjax.drop_table("doc_table_diff_same")
        """
        return not (self.added or self.removed or self.changed or self.fields)


@dataclasses.dataclass(frozen=True)
class Diff:
    """The differences of two checkpoints.

    Attributes:
      tables: differences of the tables that both have, by name.
      added: names of the tables that only the second has.
      removed: names of those that only the first has.

    Example:
      >>> import kvjax, tempfile
      >>> table = kvjax.get_table("doc_diff_class", dim=1).upsert([7, 8], [[1.0], [2.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.checkpoint.save(folder + "/0", [table])
      ...     table = table.remove([7])
      ...     kvjax.checkpoint.save(folder + "/1", [table])
      ...     diff = kvjax.checkpoint.diff(folder + "/0", folder + "/1")
      >>> list(diff.tables), diff.added, diff.removed, diff.same
      (['doc_diff_class'], (), (), False)
      >>> kvjax.drop_table("doc_diff_class")
    """

    tables: Mapping[str, TableDiff]
    added: tuple[str, ...]
    removed: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether there are no differences, neither of tables nor in which there are."""
        return not self.added and not self.removed and all(table.same for table in self.tables.values())


def diff(
    a: PathLike,
    b: PathLike,
    *,
    tables: Collection[str] | None = None,
    examples: int = 5,
    base: PathLike | Sequence[PathLike] | None = None,
) -> Diff:
    """Compares two checkpoints, row by row and bit by bit. It makes no tables, and needs no memory for all rows.

    Args:
      a: folder of a checkpoint, of a step of an Orbax ``CheckpointManager``, or of the manager (its last step is read).
      b: folder of the checkpoint to compare it with.
      tables: names of those to compare; by default all.
      examples: how many keys of each kind to return.
      base: where to look for the checkpoints that deltas build on, as in `restore`.

    Returns:
      What was added, removed and changed from `a` to `b`. Counts of keys without a row are not compared.

    Raises:
      CheckpointError: a checkpoint is missing or damaged, or neither has a table of a name in `tables`.
      ValueError: `examples` is no number of keys, or `tables` an empty list.
      TypeError: `tables` is no list of names.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> table = kvjax.get_table("doc_diff", dim=2).upsert(np.array([7, 8]), [[1.0, 2.0], [3.0, 4.0]])
      >>> folder = tempfile.TemporaryDirectory()
      >>> kvjax.checkpoint.save(folder.name + "/one", [table])
      >>> table = table.remove(np.array([7])).upsert(np.array([8, 9]), [[3.0, 4.5], [0.0, 0.0]])
      >>> kvjax.checkpoint.save(folder.name + "/two", [table])
      >>> found = kvjax.checkpoint.diff(folder.name + "/one", folder.name + "/two").tables["doc_diff"]
      >>> found.added, found.removed, found.columns, found.examples["changed"]
      (1, 1, {'values': 1}, [8])
      >>> kvjax.drop_table("doc_diff")
      >>> folder.cleanup()
    """
    chosen = chosen_tables(tables, "diff")
    if not (is_integer(examples) and examples >= 0):
        raise fail(ValueError, None, "diff", "examples= as an integer >= 0", f"{examples!r}", "0 returns no keys")
    return all_unreplaced([a, b], base, "diff", lambda both: _diff(both[0], both[1], chosen, examples))


def _diff(one: Chain, other: Chain, chosen: frozenset[str] | None, examples: int) -> Diff:
    for name in chosen or ():
        if name not in one.names and name not in other.names:
            held = sorted({*one.names, *other.names})
            raise CheckpointError(
                f"kvjax: table {name!r}, diff: want one of the checkpoints' tables, got none of that name; they "
                f"hold {held}"
            )
    first, second = ([name for name in c.names if chosen is None or name in chosen] for c in (one, other))
    return Diff(
        {name: _diff_table(one, other, name, examples) for name in first if name in second},
        added=tuple(name for name in second if name not in first),
        removed=tuple(name for name in first if name not in second),
    )


def _diff_table(one: Chain, other: Chain, name: str, examples: int) -> TableDiff:
    tables = [ChainRows(chain, name) for chain in (one, other)]
    metas = [table.meta for table in tables]
    found = TableDiff((tables[0].num_rows, tables[1].num_rows))
    for field in sorted((metas[0].keys() | metas[1].keys()) - _IGNORED):
        said = tuple(meta.get(field) for meta in metas)
        if said[0] != said[1]:
            found.fields[field] = (said[0], said[1])
    for first, last in cuts(tables):
        a, b = (table.between(first, last) for table in tables)
        _add(found, a, b, examples)
    return found


def _add(found: TableDiff, a: dict[str, np.ndarray], b: dict[str, np.ndarray], examples: int) -> None:
    """Adds the differences of the rows of some buckets, whose keys are distinct."""
    words = [columns["keys"].view(np.int64) for columns in (a, b)]
    _, in_a, in_b = np.intersect1d(words[0], words[1], assume_unique=True, return_indices=True)
    gone, come = np.ones(len(words[0]), bool), np.ones(len(words[1]), bool)
    gone[in_a] = come[in_b] = False
    other = np.zeros(len(in_a), bool)
    for name in (name for name in a if name in b and name != "keys"):
        old, new = a[name][in_a], b[name][in_b]
        old, new = (array.reshape(len(array), math.prod(array.shape[1:])) for array in (old, new))
        differs = _differ(old, new)
        if differs.any():
            found.columns[name] = found.columns.get(name, 0) + int(differs.sum())
            other |= differs
            if old.shape == new.shape and old.dtype.kind != "b":
                # Python's integers of 64 bits have differences that float64 holds closely enough.
                apart = np.abs(new[differs].astype(np.float64) - old[differs].astype(np.float64))
                apart[~np.isfinite(apart)] = np.inf  # also of what is NaN on one side, or has other bits of NaN
                found.largest[name] = max(found.largest.get(name, 0.0), float(apart.max()))
    found.removed += int(gone.sum())
    found.added += int(come.sum())
    found.changed += int(other.sum())
    for kind, keys in (("added", b["keys"][come]), ("removed", a["keys"][gone]), ("changed", a["keys"][in_a][other])):
        have = found.examples.setdefault(kind, [])
        have += keys[: max(examples - len(have), 0)].tolist()


def _differ(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Which rows ``(n, ...)`` of two columns are not the same: to the bit, or as numbers if their types differ."""
    if old.shape != new.shape:
        return np.ones(len(old), bool)
    if old.dtype != new.dtype:
        x, y = old.astype(np.float64), new.astype(np.float64)
        return ((x != y) & ~(np.isnan(x) & np.isnan(y))).any(axis=1)
    return ~same_bits(old, new)
