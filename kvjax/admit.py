"""Admission: which keys get a row in training.

Only `Table.apply` counts a key without a row, and the step whose occurrences reach the count gives it its row. Until
then its gradients are dropped (`Stats.refused` counts them), or go to a row that all such keys share.

A gradient trains the row that it was taken at. So if keys without a row do not read as their initial row
(``unadmitted`` is not "init"), a key reads as its initial row as soon as one more occurrence would admit it, in
training and in evaluation, and the step with that occurrence admits it. The occurrences of a step then count from the
next step on, and the first row that is ever trained is the initial one. `Table.frequency` of a waiting key is its
count. The frequency of a row that unadmitted keys share counts the occurrences of all of them.

Rows made by hand (`Table.upsert`, `Table.lookup_or_insert`, ...) need no admission.

Counts are saved in checkpoints. They do not depend on the order of keys in a batch.

Example:
  >>> import kvjax
  >>> kvjax.admit.MinCount(3, unadmitted="zeros")
  MinCount(count=3, unadmitted='zeros', max_age=None, max_waiting=None)
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from kvjax._values.arguments import integer_in, is_integer, is_real
from kvjax._values.errors import check_choice
from kvjax.ffi import host

__all__ = ["MinCount", "Probability", "Sketch"]


def __dir__() -> list[str]:
    return sorted(__all__)


def _check_steps(admission: Admission, *names: str) -> None:
    for name in names:
        value = getattr(admission, name)
        good = value is None or integer_in(1, 2**63 - 1)(value)
        check_choice(admission, good, f"an integer {name} >= 1 and below 2**63, or None", value)


def _check_unadmitted(admission: Admission) -> None:
    value = admission.unadmitted
    key = integer_in(-(2**63), 2**64 - 1)(value)
    check_choice(admission, key or value in ("init", "zeros"), "unadmitted 'init', 'zeros' or a 64-bit key", value)


@dataclasses.dataclass(frozen=True)
class MinCount:
    """Admits a key on its k-th occurrence in training, exactly.

    Keys that wait take 16 to 24 bytes each, as in the index of a table. They are forgotten by windows of steps: at the
    end of a window, the keys that have not occurred in it are forgotten, and start from 0 if they come back.

    Attributes:
      count: occurrences, 1 <= k < 2**30 - 2; with ``count="batch"`` of the table, steps in which the key occurs.
      unadmitted: what a key without a row reads as: "init" (its initial row), "zeros", or a key, whose row all
        unadmitted keys share and train. That row is never evicted.
      max_age: steps of a window: a key is forgotten after at least this many and less than twice as many steps without
        an occurrence. None for never.
      max_waiting: a window ends early if more keys than this would wait, so that at most this many keys, and those of
        one batch, wait. Each shard has its share of the limit, so which keys are forgotten depends on the number of
        shards; with only `max_age` it does not. None for no limit.

    Raises:
      ValueError: an argument is out of range; of a `count` of 2**30 - 2 or more, `kvjax.get_table` says so.

    Source: DeepRec's CounterFilter, TFPlus' enter_threshold.

    Example:
      >>> import kvjax, optax, jax.numpy as jnp, numpy as np
      >>> table = kvjax.get_table("doc_min_count", dim=1, admit=kvjax.admit.MinCount(2))
      >>> for _ in range(3):
      ...     table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([7]), jnp.ones((1, 1))))
      ...     print(len(table), table.lookup(7).tolist(), int(table.frequency(7)))
      0 [0.0] 1
      1 [-1.0] 2
      1 [-2.0] 3
      >>> kvjax.drop_table("doc_min_count")
    """

    count: int
    unadmitted: Literal["init", "zeros"] | int = "init"
    max_age: int | None = None
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        check_choice(self, is_integer(self.count) and self.count >= 1, "an integer count >= 1", self.count)
        _check_unadmitted(self)
        _check_steps(self, "max_age", "max_waiting")

    def own_options(self) -> dict[str, Any]:
        # Checked where a table is made: checkpoints of larger ones can be read. The rest of a word are marks.
        check_choice(self, self.count < 2**30 - 2, "a count below 2**30 - 2", self.count)
        forgets = {"max_age": int(self.max_age or 0), "max_waiting": int(self.max_waiting or 0)}
        return {"kind": "min_count", "threshold": int(self.count)} | forgets


@dataclasses.dataclass(frozen=True)
class Sketch:
    """Admits a key once a count-min sketch says that it has occurred k times, in memory that does not grow.

    The estimate is never too low, so a key is admitted at its k-th occurrence at the latest; it may be admitted sooner
    if other keys share all its cells. A key has four cells of 16 bits, all in the part of its bucket, with conservative
    update. An evicted key is remembered until its cells have been halved to 0. The frequency of an admitted key begins
    at the estimate, which is exact unless other keys share all its cells or the key has had a row before.

    Attributes:
      count: occurrences, 1 <= k < 65536.
      size: bytes of the sketch, 2**21 (2 MiB) or more; the largest power of two within it is used. Give it 20 bytes or
        more for each key that comes between two halvings: of random keys that came once each, a count of 2 admitted
        17 % at 5 bytes a key, 2.4 % at 10, 1.4 % at 21 (of 2 MiB) and 0.04 % at 42.
      halve_every: steps after which all counts are halved, so that only keys that are frequent now are admitted.
      unadmitted: see `MinCount`.

    Raises:
      ValueError: an argument is out of range.

    Source: Cormode, Muthukrishnan, "An improved data stream summary: the count-min sketch", 2005; conservative update:
    Estan, Varghese, SIGCOMM 2002; ageing: TinyLFU (Einziger, Friedman, Manes, 2017).

    Example:
      >>> import kvjax
      >>> kvjax.admit.Sketch(5, halve_every=10_000)
      Sketch(count=5, size=16777216, halve_every=10000, unadmitted='init')
    """

    count: int
    size: int = 2**24
    halve_every: int | None = None
    unadmitted: Literal["init", "zeros"] | int = "init"

    def __post_init__(self) -> None:
        check_choice(self, integer_in(1, 2**16 - 1)(self.count), "an integer count in 1..65535", self.count)
        check_choice(self, integer_in(2**21, 2**35)(self.size), "size in 2**21..2**35 bytes", self.size)
        _check_steps(self, "halve_every")
        _check_unadmitted(self)

    @property
    def cells(self) -> int:
        """Cells of 16 bits in a virtual bucket's part of the sketch."""
        return 2 ** ((int(self.size) // 2 // host.NUM_BUCKETS).bit_length() - 1)

    def own_options(self) -> dict[str, Any]:
        halve_every = int(self.halve_every or 0)
        own = {"threshold": int(self.count), "cells": self.cells, "halve_every": halve_every}
        return {"kind": "sketch"} | own


@dataclasses.dataclass(frozen=True)
class Probability:
    """Admits a fixed share of all keys, chosen by a hash of the key and the table's seed.

    The same keys are admitted in every run and on every shard, whenever they occur.

    Attributes:
      p: share of the keys, 0 <= p <= 1.
      unadmitted: see `MinCount`.

    Raises:
      ValueError: an argument is out of range.

    Example:
      >>> import kvjax
      >>> kvjax.admit.Probability(0.1, unadmitted=-1)
      Probability(p=0.1, unadmitted=-1)
    """

    p: float
    unadmitted: Literal["init", "zeros"] | int = "init"

    def __post_init__(self) -> None:
        p: Any = self.p
        check_choice(self, is_real(p) and 0 <= p <= 1, "0 <= p <= 1", p)
        _check_unadmitted(self)

    def own_options(self) -> dict[str, Any]:
        return {"kind": "probability", "probability": float(self.p)}


Admission = MinCount | Sketch | Probability

RULES: dict[str, type[Admission]] = {kind.__name__: kind for kind in (MinCount, Probability, Sketch)}
"""What checkpoints hold of admissions, by name."""
