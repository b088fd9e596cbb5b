"""Merges: contents loaded over those that a table has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax._formats.source import Source, Type, concat
from kvjax._spec.spec import TableSpec
from kvjax._table.loads import Loading
from kvjax._values.errors import fail, warn
from kvjax._values.integers import as_int64
from kvjax._values.key_sets import among, overlaid_counts
from kvjax._values.snapshot import Snapshot
from kvjax.evict import policy_of


def merged(spec: TableSpec, op: str, below: Snapshot, above: Loading) -> Loading:
    """Contents over those of a table: of a key that is in both, the row of `above`, of which pieces are in memory.

    Args:
      spec: of the table.
      op: for errors.
      below: what this process has of the table.
      above: what fits the table; in several processes, of the shards of this one.

    Raises:
      ValueError: both have slots, but not the same.
    """
    slots = below.slot_types or above.slot_types
    if above.slot_types and dict(slots) != dict(above.slot_types):
        want, got = f"rows with the slots {dict(slots)}", f"{dict(above.slot_types)}"
        raise fail(ValueError, spec.name, op, want, got, "give none (slots=False), or table.clear_slots() before")
    keys = np.sort(np.concatenate([np.zeros(0, np.int64), *map(as_int64, above.rows.pieces("keys"))]))
    columns = below.rows.columns()
    rest = Source.of(columns, {}).where(~among(as_int64(columns["keys"]), keys))
    # Rows that come without slots get fresh ones, whatever their optimizer has left.
    come = above.rows if above.slot_types else above.rows.only([x for x in above.rows.types if x != "has_slots"])
    _warn_of_ages(spec, op, rest.num_rows, above.last_step - below.rows.last_step)
    rows = _one_after_the_other(come, rest)
    last_step, admission = max(below.rows.last_step, above.last_step), above.admission
    if admission:  # else the table keeps its own
        counts = overlaid_counts([(below.admission, None), (admission, keys)])
        admission = {name: array[:0] for name, array in admission.items()} | counts
    return Loading(rows, last_step, dict(slots), admission)


def _warn_of_ages(spec: TableSpec, op: str, rows: int, steps: int) -> None:
    """Says so if the rows that stay become older by some steps, and the table evicts old ones."""
    policy = policy_of(spec.evict)
    if rows and steps > 0 and policy is not None and policy.limits_age():
        warn(
            f"kvjax: table {spec.name!r}, {op}: want rows of a table that has done no more steps beside evict="
            f"{spec.evict}, got some that are {steps} steps ahead; the {rows:,} rows that stay are older by these now, "
            "and may be evicted by the next step. Rows from another table can be given the steps of this one first: "
            "docs/restarts.md, Rows under other keys"
        )


def _one_after_the_other(one: Source, other: Source) -> Source:
    """The rows of both. What one lacks of the other's columns is zeros."""
    types = one.types | other.types

    def read(names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
        parts: list[dict[str, np.ndarray]] = []
        for source, begin in ((one, 0), (other, one.num_rows)):
            low, high = max(start - begin, 0), min(stop - begin, source.num_rows)
            if low < high:
                found = source.read([name for name in names if name in source.types], low, high)
                lacks = {name: _zeros(types[name], high - low) for name in names if name not in found}
                signed = {"keys": found["keys"].view(types["keys"][0])} if "keys" in found else {}
                parts.append({name: (found | lacks | signed)[name] for name in names})
        return concat(parts) if parts else {name: _zeros(types[name], 0) for name in names}

    return Source(types, one.num_rows + other.num_rows, read, {})


def _zeros(kind: Type, n: int) -> np.ndarray:
    return np.zeros((n, *kind[1]), kind[0])
