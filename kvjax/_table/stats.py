"""Stats: what a table holds and has done, in numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax._spec.spec import TableSpec


@dataclasses.dataclass(frozen=True)
class Stats:
    """Numbers of one table. Counts begin when the table is made in this process.

    Attributes:
      name: of the table.
      size: rows.
      capacity: rows that fit before the key index grows.
      max_capacity: the limit that the table was made with, or None.
      load: share of the cells of the key index that are taken.
      probe_mean: average number of buckets (on a GPU, cells) between a key and its home in the index, for a sample of
        keys.
      probe_longest: the largest such number for any key since the index last grew (on a GPU, in the sample).
      bytes: memory by use: "index", "values", "headers" (frequency and version), "slots", "admission". It counts the
        whole pages that rows take; with `kvjax.storage.Mmap` the reserved disk space; with `kvjax.storage.External`
        nothing for values and slots.
      pinned: the part in pinned host memory (only with `kvjax.storage.Hybrid`): "bytes" of values and slots, and
        "rows".
      pinned_share: the share of occurrences in training, of keys with rows, that belongs to rows in pinned host memory.
        This much of what a step reads and writes goes over the bus, if keys keep the same frequencies.
      slots: types of the optimizer's slots by name, such as "float32[64]".
      last_step: of training.
      hits: keys that had a row when they were looked up.
      misses: keys that had none.
      inserted: rows made.
      removed: rows removed by hand.
      admitted: keys that got a row in training.
      refused: occurrences of keys that were not admitted, whose gradients were dropped or went to the shared row.
      tracked: keys without a row that are counted one by one (`kvjax.admit.MinCount`).
      evicted: rows by reason: the policy that chose them, "restrict" or "capacity".
      over_capacity: rows made beyond `max_capacity` with ``on_full="grow"``.
      occurrences: occurrences of keys in training.
      unique_ratio: distinct keys per occurrence within steps; 1.0 if no key ever occurred twice in a step.
      exchanged_bytes: for a sharded table, what this process's devices have sent to other devices, padding included:
        "to_owners" (requested keys, and gradients with their keys) and "from_owners" (rows and other results of reads).
        Writes other than training, which send their whole batch to all devices, are not counted, nor are the few
        numbers by which devices agree.
      exchanged_keys: distinct keys that these devices requested or had gradients for, whichever shard owns them.
      rounds: rounds of exchange, one or more for each read and each training step. On a mesh of one device there is
        nothing to exchange, and only the training steps of a GPU's table are counted.
      extra_rounds: rounds beyond those that the batches would have taken with all keys distinct and evenly distributed.

    Example:
      >>> import kvjax, numpy as np
      >>> stats = kvjax.get_table("doc_stats_class", dim=4).upsert(np.arange(3), np.ones((3, 4))).stats()
      >>> stats.size, stats.inserted, stats.evicted, stats.slots
      (3, 3, {}, {})
      >>> kvjax.drop_table("doc_stats_class")
    """

    name: str
    size: int
    capacity: int
    max_capacity: int | None
    load: float
    probe_mean: float
    probe_longest: int
    bytes: dict[str, int]
    pinned: dict[str, int]
    pinned_share: float
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
    exchanged_bytes: dict[str, int]
    exchanged_keys: int
    rounds: int
    extra_rounds: int

    def flat(self) -> dict[str, int | float | str | None]:
        """All numbers in one level, for loggers: ``{"size": 3, "bytes/values": 4096, ...}``.

        Returns:
          Numbers by field; those of a dict by "field/key". ``name`` and ``slots``, which are no numbers, and a
          `max_capacity` of None are left out.

        Example:
          >>> import kvjax, numpy as np
          >>> flat = kvjax.get_table("doc_flat", dim=4).upsert(np.arange(3), np.ones((3, 4))).stats().flat()
          >>> flat["size"], flat["bytes/values"] >= 3 * 4 * 4
          (3, True)
          >>> kvjax.drop_table("doc_flat")
        """
        out: dict[str, int | float | str | None] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("bytes", "pinned", "evicted", "exchanged_bytes"):
                out |= {f"{field.name}/{key}": number for key, number in value.items()}
            elif isinstance(value, (int, float)):
                out[field.name] = value
        return out


# The C++ side has bytes by plane under these names.
_PLANES = {"index": "index", "values": "value", "headers": "header", "slots": "slot", "admission": "admission"}


def stats_of(spec: TableSpec, raises: bool = True) -> Stats:
    """The numbers of the shards of this process; what `Stats` says by a name that the C++ side has too is as it is.

    Args:
      spec: of the table.
      raises: whether to raise what other calls were refused for, which a device says late.
    """
    every: list[dict[str, Any]] = [spec.host.stats(spec.name, shard, raises) for shard in range(len(spec.shards))]
    raw = _summed([every[shard] for shard in spec.kept])
    plain = {field.name: raw[field.name] for field in dataclasses.fields(Stats) if field.name in raw}
    derived: dict[str, Any] = {
        "name": spec.name,
        "max_capacity": spec.max_capacity,
        "load": raw["size"] / max(raw["cells"], 1),
        "bytes": {plane: raw[f"{name}_bytes"] for plane, name in _PLANES.items()},
        "pinned": {what: raw[f"pinned_{what}"] for what in ("bytes", "rows")},
        "pinned_share": raw["pinned_occurrences"] / max(raw["row_occurrences"], 1),
        "slots": dict(spec.host.slots(spec.name, 0)),
        "exchanged_bytes": {way: sum(r[f"bytes_{way}"] for r in every) for way in ("to_owners", "from_owners")},
        "exchanged_keys": sum(r["exchanged_keys"] for r in every),
        "unique_ratio": raw["distinct"] / raw["occurrences"] if raw["occurrences"] else 1.0,
    }
    return Stats(**plain | derived)


def _summed(shards: list[dict[str, Any]]) -> dict[str, Any]:
    """What the shards of a table say together."""
    total = dict(shards[0])
    for raw in shards[1:]:
        total["evicted"] = {
            reason: total["evicted"].get(reason, 0) + raw["evicted"].get(reason, 0)
            for reason in total["evicted"] | raw["evicted"]
        }
        for name, number in raw.items():
            if name in ("last_step", "probe_longest", "rounds", "extra_rounds"):
                total[name] = max(total[name], number)
            elif name == "probe_mean":
                total[name] += (number - total[name]) * raw["size"] / max(total["size"] + raw["size"], 1)
            elif name not in ("evicted", "size"):
                total[name] += number
        total["size"] += raw["size"]
    return total
