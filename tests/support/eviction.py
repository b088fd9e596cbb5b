"""Tables to evict from: policies of every kind, rows with many ties, a step that trains all keys alike."""

import jax
import numpy as np
import optax

import kvjax
from kvjax import evict

REFUSED = (ValueError, MemoryError, jax.errors.JaxRuntimeError)
SGD = optax.sgd(1.0)


def train(table, keys, step=None):
    keys = np.asarray(keys, np.int64)
    return table.apply(SGD, kvjax.SparseRows(keys, np.ones((len(keys), table.dim), np.float32)), step=step)[0]


def filled(table, n=40):
    """Rows with different values, frequencies and versions, and many ties."""
    rng = np.random.default_rng(0)
    table = table.upsert(np.arange(n), rng.normal(size=(n, table.dim)).round(1))
    for step in range(1, 6):
        table = train(table, rng.integers(0, n, 15), step=step)
    return table


def many(n):
    return {
        "keys": np.arange(n), "values": np.ones((n, 1), np.float32), "freqs": np.zeros(n, np.int64),
        "versions": np.zeros(n, np.int64), "slots": {}, "has_slots": np.zeros(n, bool), "pinned": np.zeros(n, bool),
        "last_step": 0, "total": n,
    }  # fmt: skip


def first(rows):
    return rows.values[:, 0]


POLICIES = [
    evict.MaxAge(2), evict.MinFrequency(2), evict.MinNorm(1.0), evict.LeastRecent(7), evict.LeastFrequent(7),
    evict.LeastFrequent(7, half_life=1.5), evict.MinScore(0.0, first), evict.LowestScore(9, first),
    evict.MaxAge(2) & evict.MinFrequency(3), evict.MinNorm(0.5) | evict.LeastRecent(3), ~evict.MinFrequency(2),
    ~(evict.MaxAge(1) | evict.LeastFrequent(5)) & evict.MinNorm(2.0), evict.LeastRecent(0), evict.LeastRecent(10**12),
]  # fmt: skip
