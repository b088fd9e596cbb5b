"""Merges of checkpoints: tables that were trained apart become one, some buckets at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from kvjax._formats.choices import MERGE_RULES, MergeRule
from kvjax._formats.paths import AnyPath, anywhere
from kvjax._formats.source import concat, offsets_of, row_bytes
from kvjax._keys.buckets import buckets_of, by_bucket
from kvjax._values.arguments import is_real
from kvjax._values.exported import SLOT
from kvjax._values.integers import as_int64
from kvjax._values.key_sets import NONE, among, runs_of
from kvjax._values.snapshot import Columns, take, waiting_of
from kvjax.checkpoint._ancestor import ANCESTOR, changed
from kvjax.checkpoint._chains.chain import Chain, all_unreplaced
from kvjax.checkpoint._chains.chain_rows import ChainRows, cuts
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._chains.new import check_free, new_checkpoint
from kvjax.checkpoint._merged_counts import Seen
from kvjax.checkpoint._rewrite import write_table
from kvjax.ffi import host

_MAY_DIFFER = {"format", "rows", "num_shards", "shards", "extras", "num_buckets", "last_step", "slots"}


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """What a merge has made of a table.

    Attributes:
      rows: number of rows in the merged table.
      of: number of rows in each checkpoint; 0 if it has no such table.
      shared: number of keys for which more than one checkpoint has a row; with an ancestor, a row that differs from the
        ancestor's.

    Example:
      >>> import kvjax, tempfile
      >>> table = kvjax.get_table("doc_merge_report", dim=1).upsert([7, 8], [[1.0], [2.0]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     kvjax.checkpoint.save(folder + "/0", [table])
      ...     table = table.remove([7]).upsert([9], [[3.0]])
      ...     kvjax.checkpoint.save(folder + "/1", [table])
      ...     merged = kvjax.checkpoint.merge([folder + "/0", folder + "/1"], folder + "/both")
      >>> merged["doc_merge_report"]
      MergeReport(rows=3, of=(2, 2), shared=1)
      >>> kvjax.drop_table("doc_merge_report")
    """

    rows: int
    of: tuple[int, ...]
    shared: int


def merge(
    paths: Sequence[PathLike], out: PathLike, rule: MergeRule = "newest", *, ancestor: PathLike | None = None,
    weights: Sequence[float] | None = None, base: PathLike | Sequence[PathLike] | None = None, overwrite: bool = False,
) -> dict[str, MergeReport]:  # fmt: skip
    """Makes one checkpoint of several, whose tables were trained separately: in several regions, say, or on parts of
    the data. It makes no tables, and needs no memory for all rows. The checkpoints themselves are not changed.

    A row that only one checkpoint has is copied. For a key that several have, the rule says which row it gets:

    * "newest": the row with the greatest row version, as a whole: with its slots and its frequency. Among equal
      versions, the later path wins.
    * "mean": the mean of the rows. Slots of real numbers are averaged over the rows that have slots; of integers
      (counts of steps), the greatest is taken. Frequencies are added, also the counts of checkpoints where the key
      waits for admission, and the greatest row version is taken.
    * "frequency": the same, but rows are weighted by their frequencies, as in federated averaging
      (https://arxiv.org/abs/1602.05629). If these are all 0, the weights are equal.

    A row that is pinned anywhere is pinned. Counts of keys that wait for admission are added, or for "newest" the
    greatest is taken; a key with a row does not wait. A table that only some checkpoints have is merged from these. If
    a merged table has more rows than its limit, a restore refuses it: `prune` it with ``top_k=`` first.

    Tables that continued from one checkpoint are merged with that checkpoint as `ancestor`. The rule then applies only
    to rows that differ, to the bit, from the ancestor's: a row that only one table has changed is taken from that
    table. A row that a table has removed or evicted is removed, unless another table has changed or pinned it. In a
    mean, frequencies and counts of waiting keys are those of the ancestor plus what each table has added, and in
    "frequency" rows are weighted by their occurrences since the ancestor. (How often a `Sketch` has seen a key before
    it had a row is not known: these occurrences count in each table, and cells that were halved count as they are.) If
    a table has pinned or unpinned a key, its choice is taken. A table that only the ancestor lacks is merged as without
    an ancestor, and a path that lacks a table has removed nothing.

    Args:
      paths: folders of checkpoints, of steps of an Orbax ``CheckpointManager``, or of managers (their last steps are
        read). Tables of the same name need the same options; the seed is one of them, so that keys without a row read
        the same everywhere.
      out: folder of the new checkpoint, where nothing is yet, and not inside another checkpoint.
      rule: which row a key gets that several checkpoints have.
      ancestor: the checkpoint from which all of `paths` started, as a path like theirs. By default they have none, or
        it counts once in each of them.
      weights: one for each path, positive: how much its rows weigh in a mean. By default 1 each.
      base: where to look for the checkpoints that deltas build on, as in `restore`.
      overwrite: replace an existing checkpoint, if it is not one of those that are read, and nothing builds on it.

    Returns:
      What was merged for each table, by name.

    Raises:
      CheckpointError: a checkpoint is not there, or damaged, or `out` is taken, in a checkpoint, or one that others
        build on.
      ValueError: tables of one name have other options or slots, the ancestor has a later step than a path or none of
        the tables, there are no paths, or the rule or the weights are not valid.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> folder = tempfile.TemporaryDirectory()
      >>> for region, row in ("asia", 1.0), ("europe", 3.0):
      ...     table = kvjax.get_table("doc_merge", dim=1, seed=1).upsert([7, len(region)], [[row], [row]])
      ...     kvjax.checkpoint.save(f"{folder.name}/{region}", [table])
      ...     kvjax.drop_table("doc_merge")
      >>> paths = [f"{folder.name}/{region}" for region in ("asia", "europe")]
      >>> kvjax.checkpoint.merge(paths, folder.name + "/world", "mean")
      {'doc_merge': MergeReport(rows=3, of=(2, 2), shared=1)}
      >>> kvjax.checkpoint.restore(folder.name + "/world")["doc_merge"].lookup([7, 4, 6]).tolist()
      [[2.0], [1.0], [3.0]]
      >>> kvjax.drop_table("doc_merge")
      >>> folder.cleanup()
    """
    weigh = _checked(paths, rule, weights)
    target = anywhere(out, "merge").resolve()

    def body(chains: list[Chain]) -> dict[str, MergeReport]:
        for chain in chains:
            check_free(target, overwrite, "merge", chain)
        own, ancestors = chains[: len(paths)], chains[len(paths) :]
        for each in ancestors:
            _check_ancestor(each, own)
        return _merge(own, ancestors, target, overwrite, rule, weigh)

    return all_unreplaced([*paths, *([] if ancestor is None else [ancestor])], base, "merge", body)


def _checked(paths: Sequence[PathLike], rule: str, weights: Sequence[float] | None) -> list[float]:
    """The weights of the paths, one each.

    Raises:
      ValueError: an argument has no meaning.
    """
    if not isinstance(cast("object", paths), Sequence) or isinstance(paths, (str, bytes)) or not paths:
        raise ValueError(f"kvjax: merge: want the paths of checkpoints, got {paths!r:.100}; give a list of them")
    if rule not in MERGE_RULES:
        raise ValueError(f"kvjax: merge: want a rule of {list(MERGE_RULES)}, got {rule!r}; choose one")
    if weights is None:
        return [1.0] * len(paths)
    if rule == "newest":
        raise ValueError(
            "kvjax: merge: want no weights with the rule 'newest', which takes one row as it is, got some; leave them "
            "out, or say 'mean' or 'frequency'"
        )
    found = list(weights) if isinstance(cast("object", weights), Iterable) else []
    if len(found) != len(paths) or not all(is_real(w) and 0 < w < math.inf for w in found):
        raise ValueError(
            f"kvjax: merge: want {len(paths)} weights, a positive number for each, got {weights!r:.100}; give these"
        )
    return [float(w) for w in found]


def _check_ancestor(ancestor: Chain, chains: Sequence[Chain]) -> None:
    names = sorted({name for chain in chains for name in chain.names})
    if not set(names) & set(ancestor.names):
        raise ValueError(
            f"kvjax: merge: want an ancestor that has a table of {names}, got one with {sorted(ancestor.names)}; give "
            "the checkpoint that all were trained on from, or leave ancestor= out"
        )


def _merge(
    chains: Sequence[Chain], ancestors: Sequence[Chain], target: AnyPath, overwrite: bool, rule: MergeRule,
    weigh: Sequence[float],
) -> dict[str, MergeReport]:  # fmt: skip
    merged: dict[str, _Merged] = {}
    for name in dict.fromkeys(name for chain in chains for name in chain.names):
        having = [i for i, chain in enumerate(chains) if name in chain.names]
        tables = [ChainRows(chains[i], name) for i in having]
        ancestor = next((ChainRows(chain, name) for chain in ancestors if name in chain.names), None)
        merged[name] = _Merged(tables, ancestor, rule, [weigh[i] for i in having], having)
    with new_checkpoint(target, overwrite, "merge", chains[0]) as folder:
        return {name: each.write(folder, len(chains)) for name, each in merged.items()}


class _Merged:
    """A table of several checkpoints.

    Args:
      tables: the rows of each that has it.
      ancestor: the rows that they began with, if that is known.
      rule: what a key gets that several have.
      weigh: the weight of each.
      having: which of the paths have it.

    Raises:
      ValueError: they do not fit each other.
    """

    def __init__(
        self, tables: Sequence[ChainRows], ancestor: ChainRows | None, rule: MergeRule, weigh: Sequence[float],
        having: Sequence[int],
    ) -> None:  # fmt: skip
        self._rule: MergeRule = rule
        self._tables, self._ancestor, self._weigh, self._having = tables, ancestor, weigh, having
        self._name = tables[0].name
        self._read = tables if ancestor is None else [ancestor, *tables]
        for table in self._read:
            table.check_sizes()
        for table in tables:
            table.warn_if_behind("merge")
        with_slots = [table for table in tables if table.meta["slots"]]
        self._whole = (with_slots or tables)[0]
        self._check_alike(with_slots)
        self._compared: list[str] = []
        if ancestor is not None:
            self._check_earlier(ancestor)
            # Where one was saved without slots, or with another optimizer's, nobody knows whether they have changed.
            all_slots = all(table.meta["slots"] == self._whole.meta["slots"] for table in self._read)
            names = ["values", "freqs", "versions", *(["has_slots"] if all_slots else [])]
            self._compared = [*names, *(n for n in self._whole.types if n.startswith(SLOT) and all_slots)]

    def _check_earlier(self, ancestor: ChainRows) -> None:
        before, steps = ancestor.meta["last_step"], [table.meta["last_step"] for table in self._tables]
        if min(steps) < before:
            raise ValueError(
                f"kvjax: table {self._name!r}, merge: want an ancestor from which all checkpoints were trained on, got "
                f"one of step {before} for those of steps {steps}; give the checkpoint that they began with"
            )

    def _check_alike(self, with_slots: Sequence[ChainRows]) -> None:
        metas = [table.meta for table in self._read]
        fields = {field for meta in metas for field in meta} - _MAY_DIFFER
        found = {field: [meta.get(field) for meta in metas] for field in sorted(fields)}
        found["slots"] = [table.meta["slots"] for table in with_slots]
        found = {field: said for field, said in found.items() if any(each != said[0] for each in said)}
        if found:
            got = "; ".join(f"{field}: {' and '.join(f'{each}' for each in said)}" for field, said in found.items())
            raise ValueError(
                f"kvjax: table {self._name!r}, merge: want tables with the same options, got others ({got:.500}); make "
                "the tables that are trained apart with the same options, seed= included"
            )
        pools = [table.pool() for table in self._read]
        if any(not np.array_equal(pool[name], pools[0][name]) for pool in pools for name in pool):
            raise ValueError(
                f"kvjax: table {self._name!r}, merge: want tables with the same pool of initial rows, got others; make "
                "them with the same one"
            )

    def write(self, directory: AnyPath, paths: int) -> MergeReport:
        """Writes it."""
        counts, shared, pinned = np.zeros(host.NUM_BUCKETS, np.int64), 0, [np.zeros(0, bool)]
        before = {} if self._ancestor is None else self._ancestor.counts()
        seen = Seen(
            [table.counts() for table in self._tables], before, self._whole.meta.get("options", {}).get("admit")
        )
        admission = seen.of_others(self._rule)
        waiting = admission.get("pending_keys", NONE)
        of_waiting, waits = buckets_of(waiting), np.ones(len(waiting), bool)
        width = None if self._compared else sum(row_bytes(self._whole.types[name]) for name in _NEEDED)
        for first, last in cuts(self._read, width):
            columns, again = self._piece(first, last, ["keys", "pinned"], seen)
            counts += np.bincount(buckets_of(columns["keys"]), minlength=host.NUM_BUCKETS)
            shared += again
            pinned.append(columns["pinned"])
            here = slice(*np.searchsorted(of_waiting, [first, last]))
            waits[here] = ~among(waiting[here], np.sort(as_int64(columns["keys"])))
        if len(waiting):
            admission |= take(waiting_of(admission), waits)
        whole = {"offsets": offsets_of(counts)} | admission
        if any(part.any() for part in pinned):
            whole["pinned"] = np.concatenate(pinned)
        names = [name for name in self._whole.types if name != "pinned"]
        pieces = (self._piece(*some, names, seen)[0] for some in cuts(self._read))
        step = max(table.meta["last_step"] for table in self._tables)
        write_table(directory, self._whole, {"last_step": step}, whole, names, pieces, "merge")
        sizes = dict(zip(self._having, (table.num_rows for table in self._tables), strict=True))
        return MergeReport(int(whole["offsets"][-1]), tuple(sizes.get(i, 0) for i in range(paths)), shared)

    def _piece(self, first: int, last: int, names: Sequence[str], seen: Seen) -> tuple[dict[str, np.ndarray], int]:
        """The columns of the rows of some buckets, sorted by (bucket, key), and how many keys have several rows."""
        needed = (*_NEEDED, "pinned", *self._compared) if self._ancestor else _NEEDED
        types = {name: kind for name, kind in self._whole.types.items() if name in (*needed, *names)}
        parts: list[dict[str, np.ndarray]] = []
        for table in self._read:
            same = table.meta["slots"] == self._whole.meta["slots"]  # an ancestor may have another optimizer's
            found = table.between(first, last, [name for name in types if same or not name.startswith(SLOT)])
            n = len(found["keys"])
            parts.append({name: found.get(name, np.zeros((n, *kind[1]), kind[0])) for name, kind in types.items()})
        rows, part = concat(parts), np.repeat(np.arange(len(parts)), [len(found["keys"]) for found in parts])
        keys = as_int64(rows["keys"])
        order = np.argsort(keys, kind="stable")  # so the rows of a key are in the order of the paths
        if self._ancestor is not None:
            part += ANCESTOR  # its rows come first
        rows["since"], known, counts = seen.of_rows(rows, part, order)
        if self._ancestor is not None:
            order, pinned = changed(rows, part, order, len(self._tables), self._compared)
            rows["pinned"][order] = pinned
        begins, sizes = runs_of(keys[order])
        several = sizes > 1
        at, of = order[np.repeat(several, sizes)], sizes[several]  # the rows of keys that have more than one
        ends = np.cumsum(of)
        by_version = np.lexsort((rows["versions"][at], np.repeat(np.arange(len(of)), of)))
        newest = order[begins]
        newest[several] = at[by_version[ends - 1]]
        sort = by_bucket(keys[newest])[0]
        out = take({name: rows[name] for name in names}, newest[sort])
        if len(of):
            place = np.flatnonzero(several[sort])  # of these keys in the result; and which of them is there
            which = (np.cumsum(several) - 1)[sort[place]]
            for name, merged in self._merged(take(rows, at), part[at], ends - of, of).items():
                if name in out:
                    out[name][place] = merged[which].astype(out[name].dtype)
        if "freqs" in out and self._rule != "newest":
            out["freqs"] = counts[np.searchsorted(known, keys[newest[sort]])]
        return out, len(of)

    def _merged(self, rows: Columns, part: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of keys of several rows, where these are not those of the newest row.

        Args:
          rows: those of a key follow each other.
          part: which checkpoint each is of.
          starts: the first row of each key.
          sizes: how many each has.
        """
        out = {"pinned": np.logical_or.reduceat(rows["pinned"], starts)} if "pinned" in rows else {}
        return out if self._rule == "newest" else out | self._mean(rows, part, starts, sizes)

    def _mean(self, rows: Columns, part: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> dict[str, np.ndarray]:
        """As `_merged`, of a mean."""
        weights = np.array(self._weigh)[part]
        counts = rows["since"] if self._rule == "frequency" else np.ones(len(part), np.int64)
        seen = np.repeat(np.add.reduceat(counts, starts) > 0, sizes)
        weights = weights * np.where(seen, counts, 1)
        out = {
            "versions": np.maximum.reduceat(rows["versions"], starts),
            "has_slots": np.logical_or.reduceat(rows["has_slots"], starts),
        }
        if "values" in rows:
            out["values"] = _weighted(rows["values"], weights, starts, sizes)
        trained = rows["has_slots"]
        # Of rows with slots that were all seen 0 times, these weigh the same.
        of_slots = weights * trained
        none = np.repeat(np.add.reduceat(of_slots, starts) == 0, sizes)
        of_slots = np.where(none, np.array(self._weigh)[part] * trained, of_slots)
        for name, column in rows.items():
            if not name.startswith(SLOT):
                continue
            if column.dtype.kind in "biu":
                out[name] = np.maximum.reduceat(column, starts)
            else:
                out[name] = _weighted(column, of_slots, starts, sizes)
        return out


_NEEDED = ("keys", "versions", "freqs", "has_slots")
"""The columns which say what row a key gets."""


def _weighted(column: np.ndarray, weights: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The weighted means ``(m, ...)`` of runs of rows, float64; 0 where nothing weighs."""
    total = np.add.reduceat(weights, starts)
    shares = (weights / np.repeat(np.where(total > 0, total, 1), sizes)).reshape(-1, *[1] * (column.ndim - 1))
    out = column[starts] * shares[starts]
    for i in range(1, int(sizes.max())):  # as many as checkpoints
        has = sizes > i
        out[has] += column[starts[has] + i] * shares[starts[has] + i]
    return out
