"""What a table holds and has done, in numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax._spec import TableSpec
from kvjax.ffi import host


@dataclasses.dataclass(frozen=True)
class Stats:
    """Numbers of one table; counts are since it was made in this process.

    Attributes:
      name: of the table.
      size: rows.
      capacity: rows that fit before the key index grows.
      max_capacity: the limit that the table was made with, or None.
      load: share of the places of the key index that are taken.
      probe_mean: places between a key and its home in the index, on average (of a sample).
      probe_longest: the same, the longest (of the sample).
      bytes: memory by plane: "index", "values", "headers" (frequency and version), "slots", "admission".
      slots: types of the optimizer's slots by name, "float32[64]".
      last_step: of training.
      hits: keys that lookups have found.
      misses: keys that they have not.
      inserted: rows made.
      removed: rows removed by hand.
      admitted: keys that training gave a row.
      refused: occurrences of keys that were not admitted, whose gradients were dropped or went to the shared row.
      tracked: keys without a row that are counted one by one (`kvjax.admit.MinCount`).
      evicted: rows by reason: the policy that chose them, "restrict" or "capacity".
      over_capacity: rows made beyond `max_capacity` with ``on_full="grow"``.
      occurrences: of keys in training.
      unique_ratio: distinct keys of each step per occurrence; 1.0 if no key ever came twice in a step.
    """

    name: str
    size: int
    capacity: int
    max_capacity: int | None
    load: float
    probe_mean: float
    probe_longest: int
    bytes: dict[str, int]
    slots: dict[str, str]
    last_step: int
    hits: int
    misses: int
    inserted: int
    removed: int
    admitted: int
    refused: int
    tracked: int
    evicted: dict[str, int]
    over_capacity: int
    occurrences: int
    unique_ratio: float

    def flat(self) -> dict[str, Any]:
        """All numbers in one level, for loggers: ``{"size": 3, "bytes/values": 2097152, ...}``."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("bytes", "evicted"):
                out |= {f"{field.name}/{key}": number for key, number in value.items()}
            elif isinstance(value, (int, float)):
                out[field.name] = value
        return out


_PLANES = ("index", "value", "header", "slot", "admission")
_PLAIN = ("size", "capacity", "probe_mean", "probe_longest", "last_step", "hits", "misses", "inserted", "removed",
          "admitted", "refused", "tracked", "evicted", "over_capacity", "occurrences")  # fmt: skip


def stats_of(spec: TableSpec) -> Stats:
    raw = host.stats(spec.name)
    planes = {"value": "values", "header": "headers", "slot": "slots"}
    return Stats(
        name=spec.name,
        max_capacity=spec.max_capacity,
        load=raw["size"] / max(raw["places"], 1),
        bytes={planes.get(plane, plane): raw[f"{plane}_bytes"] for plane in _PLANES},
        slots=dict(host.slots(spec.name)),
        unique_ratio=raw["distinct"] / raw["occurrences"] if raw["occurrences"] else 1.0,
        **{name: raw[name] for name in _PLAIN},
    )
