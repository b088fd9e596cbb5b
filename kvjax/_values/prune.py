"""Pruning: which rows an export or a checkpoint leaves out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np

from kvjax._values.arguments import is_integer, is_real
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail
from kvjax._values.exported import Exported
from kvjax._values.integers import as_bits, as_int64
from kvjax._values.key_sets import NONE, among
from kvjax._values.key_width import check_whole, own_bits, own_key
from kvjax._values.snapshot import Columns, take, waiting_of


@dataclasses.dataclass(frozen=True)
class PrunedRows:
    """Rows that something leaves out.

    Attributes:
      rows: how many.
      bytes: of their columns.
      norm: the sum of their Euclidean norms, without rows that have a NaN or an infinity.
    """

    rows: int
    bytes: int
    norm: float


@dataclasses.dataclass(frozen=True)
class PruneReport:
    """What pruning would leave out, counted without doing it.

    Attributes:
      total: all rows.
      dropped: those that are left out.
      by_rule: what each rule leaves out by itself; other rules may leave out the same rows. ``top_k`` is counted among
        the rows that pass all other rules.
      waiting: keys without a row whose counts are left out (``remove=``); 0 in the report of an export, which has none.
      norm_lost: the share of the sum of norms that is left out, 0 to 1, without rows that have a NaN or an infinity.
    """

    total: PrunedRows
    dropped: PrunedRows
    by_rule: Mapping[str, PrunedRows]
    waiting: int = 0

    @property
    def norm_lost(self) -> float:
        return self.dropped.norm / self.total.norm if self.total.norm else 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Prune:
    """Which rows an export leaves out. A row is kept if it passes every test that is set.

    The row that unadmitted keys share (``unadmitted=`` of an admission) is kept, too, and `remove` may not name it. In
    a frozen table, keys without a row read as that row.

    Attributes:
      min_frequency: keep rows whose keys occurred at least this often.
      max_age: keep rows written within this many steps of the table's last step.
      min_norm: keep rows whose Euclidean norm is at least this; a row with a NaN is not kept.
      zero_rows: leave out rows that are exactly zero.
      predicate: a function from `kvjax.Exported` to ``(n,)`` bool, true for rows that pass. If rows are read in pieces,
        it is called for each piece.
      top_k: of the rows that pass, keep only this many, the most frequent; ties go to the row that was written later,
        then to the first in the export. Of a table over several processes, an export counts the rows of its own
        process, and a save or a checkpoint those of all.
      keep: keys ``(m,)`` that are kept whatever the tests say, as lookups of the table take them; not a JAX array that
        may have been cut, as for `kvjax.keys`. `mask` and `report`, which know only an export, take them as they are.
      remove: keys ``(m,)`` of which nothing is kept, neither a row nor, in a checkpoint, the count of a key that waits
        for one; given as those of `keep`. A sketch of counts stays as it is.

    Raises:
      ValueError: a number is negative or of another kind, or `zero_rows` is not a bool, or a key is in `keep` and in
        `remove`.
      TypeError: `predicate` is not a function, or `keep` or `remove` is not integers or may have been cut to 32 bits.

    Example:
      >>> import kvjax
      >>> kvjax.Prune(min_frequency=2, max_age=1000)
      Prune(min_frequency=2, max_age=1000)
    """

    min_frequency: int | None = None
    max_age: int | None = None
    min_norm: float | None = None
    zero_rows: bool = False
    top_k: int | None = None
    keep: ArrayLike | None = None
    predicate: Callable[[Exported], np.ndarray] | None = None
    remove: ArrayLike | None = None

    def __post_init__(self) -> None:
        for name in ("min_frequency", "max_age", "top_k", "min_norm"):
            value = getattr(self, name)
            kind, is_one = ("a finite number", is_real) if name == "min_norm" else ("an integer", is_integer)
            if value is not None and not (is_one(value) and value >= 0):
                mend = "None is for no such test"
                raise fail(ValueError, None, "Prune", f"{kind} >= 0 as {name}", repr(value), mend)
        if not isinstance(self.zero_rows, (bool, np.bool_)):  # pyright: ignore[reportUnnecessaryIsInstance]
            mend = "True leaves out rows that are exactly zero"
            raise fail(ValueError, None, "Prune", "True or False as zero_rows", repr(self.zero_rows), mend)
        if self.predicate is not None and not callable(self.predicate):
            want = "kvjax.Prune, or a function from an export to a mask"
            mend = "give one of these, which is for all tables"
            raise fail(TypeError, None, "prune", want, f"{self.predicate!r:.100}", mend)
        for name in KEY_SETS:
            check_whole(getattr(self, name), f"Prune({name}=)")
        _check_apart(self.key_sets, None)

    def __eq__(self, other: object) -> bool:
        return self._asked() == other._asked() if isinstance(other, Prune) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._asked())

    def _asked(self) -> tuple[object, ...]:
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        asked |= {name: keys.tobytes() for name, keys in self.key_sets.items()}
        return tuple(asked.values())

    @functools.cached_property
    def key_sets(self) -> dict[str, np.ndarray]:
        """The keys of ``keep`` and ``remove``, ``(m,)`` int64 each, sorted; without what is not given."""
        given = {name: keys for name in KEY_SETS if (keys := getattr(self, name)) is not None}
        return {name: np.unique(as_int64(as_bits(keys, f"Prune({name}=)"))) for name, keys in given.items()}

    @property
    def reads_rows(self) -> bool:
        """Whether the values of rows decide, and not only what stands beside them."""
        return self.min_norm is not None or bool(self.zero_rows) or self.predicate is not None

    def mask(self, rows: Exported) -> np.ndarray:
        """Which rows are kept.

        Args:
          rows: an export of n rows.

        Returns:
          ``(n,)`` bool.

        Raises:
          ValueError: `predicate` returns something other than ``(n,)`` bool.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_mask", dim=1).upsert(np.arange(3), [[0.0], [1.0], [2.0]])
          >>> rows = table.export()
          >>> sorted(rows.keys[kvjax.Prune(min_norm=1.5, keep=[0]).mask(rows)].tolist())
          [0, 2]
          >>> kvjax.drop_table("doc_mask")
        """
        return self.chosen(self.passing(rows), rows.keys, rows.freqs, rows.versions)

    def passing(self, rows: Exported) -> np.ndarray:
        """Which rows pass all tests that ask about a row alone, ``(n,)`` bool: all but ``top_k`` and ``keep``.

        Args:
          rows: an export, or a piece of it, of n rows.
        """
        return _all_of(self.tests(rows), len(rows))

    def chosen(self, keep: np.ndarray, keys: np.ndarray, freqs: np.ndarray, versions: np.ndarray) -> np.ndarray:
        """Which rows are kept of those that pass.

        Args:
          keep: ``(n,)`` bool, those that pass.
          keys: ``(n,)``, of all rows.
          freqs: ``(n,)`` int64.
          versions: ``(n,)`` int64.

        Returns:
          ``(n,)`` bool.
        """
        keep = keep.copy()
        if self.top_k is not None and keep.sum() > self.top_k:
            candidates = np.flatnonzero(keep)
            order = np.lexsort((-versions[candidates], -freqs[candidates]))
            keep[:] = False
            keep[candidates[order[: self.top_k]]] = True
        if "keep" in self.key_sets:
            keep |= among(as_int64(keys), self.key_sets["keep"])
        return keep

    def forgets(self, admission: Columns) -> np.ndarray:
        """Of which waiting keys no count is kept, ``(m,)`` bool.

        Args:
          admission: counts of keys without a row, by the names of `ADMISSION_COLUMNS`.
        """
        return among(as_int64(admission.get("pending_keys", NONE)), self.key_sets.get("remove", NONE))

    def counts_kept(self, admission: Columns) -> dict[str, np.ndarray]:
        """What is kept of these counts."""
        forgotten = self.forgets(admission)
        return dict(admission) | (take(waiting_of(admission), ~forgotten) if forgotten.any() else {})

    def report(self, rows: Exported) -> PruneReport:
        """What would be left out of an export: a dry run.

        Args:
          rows: the export.

        Returns:
          Rows, bytes and norms that are left out, in all and by rule.

        Raises:
          TypeError, ValueError: it does not have the form of what a table gives, or `predicate` returns something other
            than ``(n,)`` bool.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_report", dim=1).upsert(np.arange(4), [[0.0], [1.0], [2.0], [3.0]])
          >>> report = kvjax.Prune(min_norm=1.5, zero_rows=True).report(table.export())
          >>> report.dropped.rows, report.by_rule["zero_rows"].rows, round(report.norm_lost, 3), len(table)
          (2, 1, 0.167, 4)
          >>> kvjax.drop_table("doc_report")
        """
        rows = rows.checked(None, "Prune.report")
        size = sum(array.nbytes for array in rows.columns().values()) // max(len(rows), 1)
        return self.judged(self.tests(rows), norms_of(rows.values), size, rows.keys, rows.freqs, rows.versions)[1]

    def judged(
        self, tests: Mapping[str, np.ndarray], norms: np.ndarray, row_bytes: int, keys: np.ndarray, freqs: np.ndarray,
        versions: np.ndarray,
    ) -> tuple[np.ndarray, PruneReport]:  # fmt: skip
        """Which of n rows are kept, ``(n,)`` bool, and what the others are, from what is known of all.

        Args:
          tests: as `tests` gives them, each ``(n,)`` bool.
          norms: ``(n,)``.
          row_bytes: of all columns of a row.
          keys: ``(n,)``; these and what follows matter to ``top_k`` and ``keep`` alone.
          freqs: ``(n,)`` int64.
          versions: ``(n,)`` int64.
        """

        def pruned(dropped: np.ndarray) -> PrunedRows:
            n = int(dropped.sum())
            return PrunedRows(n, n * row_bytes, float(norms[dropped & finite].sum()))

        every, finite = np.ones(len(norms), bool), np.isfinite(norms)
        passing = _all_of(tests, len(norms))
        keep = self.chosen(passing, keys, freqs, versions)
        by_rule = {name: ~test for name, test in tests.items()}
        if self.top_k is not None:
            by_rule["top_k"] = passing & ~dataclasses.replace(self, keep=None).chosen(passing, keys, freqs, versions)
        return keep, PruneReport(
            total=pruned(every),
            dropped=pruned(~keep),
            by_rule={name: pruned(dropped) for name, dropped in by_rule.items()},
        )

    def tests(self, rows: Exported) -> dict[str, np.ndarray]:
        """Of each test that asks about a row alone and is set, the rows that pass: ``(n,)`` bool.

        Args:
          rows: an export, or a piece of it, of n rows.
        """
        tests: dict[str, np.ndarray] = {}
        if self.min_frequency is not None:
            tests["min_frequency"] = rows.freqs >= self.min_frequency
        if self.max_age is not None:
            tests["max_age"] = rows.last_step - rows.versions <= self.max_age
        if self.min_norm is not None:
            tests["min_norm"] = norms_of(rows.values) >= self.min_norm
        if self.zero_rows:
            tests["zero_rows"] = (rows.values != 0).any(axis=1)
        if self.predicate is not None:
            tests["predicate"] = _asked(self.predicate, rows)
        if "remove" in self.key_sets:
            tests["remove"] = ~among(as_int64(rows.keys), self.key_sets["remove"])
        return tests

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self)
                 if getattr(self, f.name) is not f.default]  # fmt: skip
        return f"Prune({', '.join(given)})"


KEY_SETS = ("keep", "remove")
"""The fields that are sets of keys."""

PruneLike: TypeAlias = Prune | Callable[[Exported], np.ndarray]


def as_rule(prune: PruneLike) -> Prune:
    """The rule, or a function that is all of it."""
    return prune if isinstance(prune, Prune) else Prune(predicate=prune)


def rule_for(prune: PruneLike, name: str, key_dtype: str, shared: int | None) -> Prune:
    """The rule for the rows of a table, which has the keys to ``keep`` and ``remove`` in its own form.

    Args:
      prune: the rule, or a function that is all of it.
      name: of the table.
      key_dtype: of the table.
      shared: key of the row that unadmitted keys share, which stays whatever the rule says: it is a part of the model;
        None if there is none, or nobody knows it.

    Raises:
      TypeError: it is neither.
      ValueError: the shared row, or one to keep, is to be removed.
    """
    rule = as_rule(prune)
    own = {field: own_bits(keys, key_dtype, "prune").view(np.int64) for field, keys in rule.key_sets.items()}
    _check_apart(own, name)
    if shared is not None:
        stays = np.array([own_key(shared, key_dtype)], np.uint64).view(np.int64)
        if "remove" in own and np.isin(stays, own["remove"]).any():
            raise fail(
                ValueError, name, "prune", "remove= without the key of the row that unadmitted keys share",
                f"{shared} in it", "leave that key out; that row is a part of the model",
            )  # fmt: skip
        own["keep"] = np.concatenate([own.get("keep", stays[:0]), stays])
    return dataclasses.replace(rule, **own) if own else rule


def _check_apart(sets: Mapping[str, np.ndarray], name: str | None) -> None:
    """Whether no key is to be kept and to be removed."""
    both = np.intersect1d(sets.get("keep", NONE), sets.get("remove", NONE))
    if len(both):
        raise fail(
            ValueError, name, "prune", "a key in keep= or in remove=", f"{len(both)} in both, as {both[0]}",
            "leave it out of one of them",
        )  # fmt: skip


def norms_of(values: np.ndarray) -> np.ndarray:
    """The Euclidean norm of each row: ``(n, dim)`` to ``(n,)`` float64. With a NaN it is NaN."""
    values = values.astype(np.float32, copy=False)
    return np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))


def _all_of(tests: Mapping[str, np.ndarray], n: int) -> np.ndarray:
    """Which of n rows pass all tests, ``(n,)`` bool."""
    return np.logical_and.reduce([np.ones(n, bool), *tests.values()])


def _asked(predicate: Callable[[Exported], np.ndarray], rows: Exported) -> np.ndarray:
    given: object = predicate(rows)
    # NumPy takes a list of nothing for one of floats.
    mask = np.asarray(given, bool if isinstance(given, list | tuple) and not given else None)
    if mask.dtype != bool or mask.shape != (len(rows),):
        raise fail(
            ValueError, None, "prune", f"a function that gives ({len(rows)},) bool", f"{mask.shape} {mask.dtype}",
            "return which of the rows pass",
        )  # fmt: skip
    return mask
