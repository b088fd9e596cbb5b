"""Simulations: how large a table must be, from a log of its keys, before any model is trained."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax import evict as policies
from kvjax._keys.buckets import buckets_of
from kvjax._keys.keys import Keys, KeysLike
from kvjax._keys.sparse_rows import SparseRows
from kvjax._keys.table_keys import keys_of
from kvjax._table.registry import drop_table, get_table
from kvjax._table.table import Table
from kvjax._values.arguments import check_progress, is_integer, is_real
from kvjax._values.integers import as_int64
from kvjax.admit import Admission
from kvjax.ffi import host


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What a table with one limit would have held and found.

    Attributes:
      max_capacity: the limit; None for a table without one.
      hit_rate: share of the occurrences of keys that had a row when their batch came. First occurrences are misses, so
        no table finds more than the one without a limit.
      rows: at the end.
      inserted: rows made. What is beyond the distinct keys are keys that came back after their rows were evicted.
      evicted: rows evicted.
      refused: occurrences of keys that were not admitted.

    Example:
      >>> import kvjax
      >>> kvjax.simulate([[1, 2], [1, 2, 3]], [None])
      [Simulated(max_capacity=None, hit_rate=0.4, rows=3, inserted=3, evicted=0, refused=0)]
    """

    max_capacity: int | None
    hit_rate: float
    rows: int
    inserted: int
    evicted: int
    refused: int


def simulate(
    batches: Iterable[KeysLike], max_capacity: Sequence[int | None], *,
    evict: policies.Policy | policies.Every | None = None, admit: Admission | None = None, sample: float = 1.0,
    progress: Callable[[int], object] | None = None, step: Iterable[int] | None = None,
) -> list[Simulated]:  # fmt: skip
    """Replays the keys of training steps with tables of several limits, to choose one before a model is trained.

    The tables are kvjax's own, with rows of one element, so limits, eviction and admission do what they do in training.
    Each batch is looked up and then trained on, as one step. With ``sample=0.01`` only a hundredth of all keys, chosen
    by a hash, is replayed with a hundredth of each limit, and all numbers are scaled up. That takes less time and
    memory, and the error is small if ten thousand keys or more are left (Waldspurger et al., "Efficient MRC
    Construction with SHARDS", FAST 2015, with its correction for keys of very high frequency). A number of rows in a
    policy, as in ``LeastRecent(1000)``, is not scaled.

    Args:
      batches: the keys of each step, as `Table.lookup` takes them, outside of JAX's transformations; for instance a
        day of a log. Duplicates count as they do in training.
      max_capacity: the limits to try; None for a table without one.
      evict: as in `kvjax.get_table`. Rows are zeros, so a policy may judge them by frequency and age, not by norm.
      admit: as there.
      sample: share of the keys to replay, more than 0 and at most 1, in steps of 1/65,536.
      progress: function that is called with the number of keys of each batch.
      step: the step of each batch, below 2**31, as in `Table.apply`, for instance the second of a clock at which it
        came; by default 1, 2, 3 and so on.

    Returns:
      One result for each limit, in their order.

    Raises:
      ValueError: a limit, the policy or the share is not possible; or a batch, or the sample of it, has more distinct
        keys than a limit has rows; or a step is not possible, or there are fewer than batches. (With `admit`, too many
        keys may be a JaxRuntimeError of the table, on a GPU a MemoryError.)
      TypeError: `batches` has something other than keys, or `progress` is not a function of a number.
      RuntimeError: a simulation is under way, as there is one at a time in a process.

    Example:
      >>> import kvjax, numpy as np
      >>> log = [np.array([1, 2, 3]), np.array([1, 2, 4]), np.array([1, 3, 5])]
      >>> for found in kvjax.simulate(log, [3, None]):
      ...     print(found.max_capacity, round(found.hit_rate, 2), found.rows, found.evicted)
      3 0.33 3 3
      None 0.44 5 0
    """
    limits, share = _limits(max_capacity), _share(sample)
    check_progress(progress, "simulate")
    _check_rules(evict, admit)
    if not _is_series(batches):
        raise TypeError(f"kvjax: simulate: want the keys of each step, got {batches!r}; give a list of arrays")
    steps = _steps(step)
    occurrences, replayed, hits = 0, 0, [0] * len(limits)
    with _tables(limits, share, evict, admit) as tables:
        for batch in batches:
            words = np.asarray(keys_of(batch, "kvjax.simulate", "int64", "simulate").words).reshape(-1, 2)
            occurrences += len(words)
            mine = words if share == 1.0 else words[_buckets(words) < share * host.NUM_BUCKETS]
            replayed += len(mine)
            if admit is None:
                _check_fits(mine, limits, share)
            keys, counts, number = *_padded(mine), next(steps)
            for i, table in enumerate(tables):
                tables[i], found = _step(table, keys, counts, number)
                hits[i] += int(found)
            if progress is not None:
                progress(len(words))
        done = [table.stats() for table in tables]
    # As many as a sample of average keys would have: what is missing or too much are hits of a few keys.
    expected = occurrences * share
    return [
        Simulated(
            max_capacity=limit,
            hit_rate=min(max((found + expected - replayed) / expected, 0.0), 1.0) if expected else 0.0,
            rows=round(of.size / share),
            inserted=round(of.inserted / share),
            evicted=round(sum(of.evicted.values()) / share),
            refused=round(of.refused / share),
        )
        for limit, found, of in zip(limits, hits, done, strict=True)
    ]


_LOCK = threading.Lock()  # of the names of the tables, which are always the same, so that programs are made once
_TX = optax.sgd(0.0)


def _is_series(given: object) -> bool:
    """Whether there are several, to go through; NumPy's and JAX's arrays of one number say that they are such."""
    return isinstance(given, Iterable) and getattr(given, "ndim", 1) != 0 and not isinstance(given, str)


def _limits(max_capacity: Any) -> list[int | None]:
    if not _is_series(max_capacity):
        raise TypeError(
            f"kvjax: simulate: want a list of limits as max_capacity=, got {max_capacity}; give [{max_capacity}]"
        )
    limits: list[Any] = list(max_capacity)
    for limit in limits:
        if limit is not None and (not is_integer(limit) or limit < 1):
            raise ValueError(
                f"kvjax: simulate: want limits in max_capacity= as integers >= 1 or None, got {limit!r}; "
                "count rows, and give None for a table without a limit"
            )
    return limits


def _check_rules(evict: Any, admit: Any) -> None:
    """Whether eviction and admission are such, and do not ask for what rows are."""
    for name, given, kind in (("evict", evict, (policies.Policy, policies.Every)), ("admit", admit, Admission)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"kvjax: simulate: want {name}= of kvjax.{name} or None, got {given!r}; see kvjax.{name}")
    policy = policies.policy_of(evict)
    if policy is not None and policy.reads_rows() and not policy.calls_python():
        raise ValueError(
            f"kvjax: simulate: want evict= that judges rows by frequency or age, got {evict!r}; rows are zeros here"
        )


def _steps(step: Any) -> Iterator[np.int32 | None]:
    """The step of each batch; None for the one that a table takes by itself."""
    if step is None:
        return itertools.repeat(None)
    if not _is_series(step):
        raise TypeError(f"kvjax: simulate: want step= with the step of each batch, got {step!r}; give a list of steps")
    return _numbers(np.asarray(step) if hasattr(step, "__array__") else step)  # of Arrow's column, numbers


def _numbers(steps: Iterable[Any]) -> Iterator[np.int32]:
    for number in steps:
        if not is_integer(number) or not 0 <= number < 2**31:
            raise ValueError(
                f"kvjax: simulate: want steps as integers from 0 to 2**31 - 1 in step=, got {number!r}; count "
                "steps from 1, or give seconds of a clock"
            )
        yield np.int32(number)
    raise ValueError("kvjax: simulate: want a step for each batch in step=, got fewer; give as many as batches")


def _share(sample: Any) -> float:
    if not is_real(sample) or not 0 < sample <= 1:
        raise ValueError(f"kvjax: simulate: want sample= as more than 0 and at most 1, got {sample!r}; 1 replays all")
    return max(1, round(float(sample) * host.NUM_BUCKETS)) / host.NUM_BUCKETS


def _rows(limit: int, share: float) -> int:
    return max(1, round(limit * share))


def _check_fits(words: np.ndarray, limits: Sequence[int | None], share: float) -> None:
    """Whether a table of each limit can hold the keys of a batch, ``(n, 2)``."""
    least = min((limit for limit in limits if limit is not None), default=None)
    if least is None or len(words) <= _rows(least, share):
        return
    distinct = len(np.unique(as_int64(words)))
    if distinct > _rows(least, share):
        sampled = "" if share == 1.0 else f" in a sample of {share:.3g}, for which the limit is {_rows(least, share)}"
        raise ValueError(
            f"kvjax: simulate: want limits in max_capacity= that hold all keys of a batch, got {least} and a batch of "
            f"{distinct} distinct keys{sampled}; leave that limit out, or give smaller batches"
        )


def _buckets(words: np.ndarray) -> np.ndarray:
    return buckets_of(as_int64(words).reshape(-1))


def _padded(words: np.ndarray) -> tuple[Keys, np.ndarray]:
    """Keys of one of a few sizes, as each size is a program of its own, and which of them count."""
    size = max(64, 1 << (len(words) - 1).bit_length())
    padded = np.zeros((size, 2), np.uint32)
    padded[: len(words)] = words
    return Keys(padded, False), (np.arange(size) < len(words)).astype(np.int32)


@contextlib.contextmanager
def _tables(limits: Sequence[int | None], share: float, evict: Any, admit: Any) -> Generator[list[Table]]:
    if not _LOCK.acquire(blocking=False):
        raise RuntimeError(
            "kvjax: simulate: want one simulation at a time, got one that is under way; wait for its end"
        )
    made: list[Table] = []
    try:
        for i, limit in enumerate(limits):
            options: dict[str, Any] = {"evict": evict}
            if limit is not None:
                options |= {"max_capacity": _rows(limit, share), "on_full": "evict"}
            elif not isinstance(evict, policies.Every):  # what evicts when a table is full
                options = {}
            made.append(get_table(f"kvjax.simulate/{i}", dim=1, admit=admit, **options))
        yield made
    finally:
        for table in made:
            drop_table(table.name)
        _LOCK.release()


@jax.jit
def _step(table: Table, keys: Keys, counts: jax.Array, step: jax.Array | None) -> tuple[Table, jax.Array]:
    hits = jnp.sum(table.contains(keys) & (counts > 0))
    grads = jnp.zeros((*keys.shape, 1), jnp.float32)
    return table.apply(_TX, SparseRows(keys, grads, counts), step=step)[0], hits
