"""What is left of tables, and of what users gave them, once they are gone."""

import gc
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._process import PROCESS
from kvjax._table import lifetime
from tests.support.marks import slow


def resident():
    """MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@jax.jit
def step(table, keys):
    return table.apply(optax.sgd(1.0), kvjax.SparseRows(keys, jnp.ones((*keys.shape, table.dim))))[0]


def test_programs_of_dropped_tables_are_cleared(monkeypatch):
    monkeypatch.setattr(lifetime, "MANY", 3)
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(len(PROCESS.outlived)))
    PROCESS.outlived.clear()
    for number in (0, 1, 0, 1, 0):  # which find their programs again
        kvjax.get_table(f"lifetime{number}", dim=1)
        kvjax.drop_table(f"lifetime{number}")
    assert not cleared
    for number in range(7):
        kvjax.get_table(f"lifetime{number}", dim=2)
        kvjax.drop_table(f"lifetime{number}")
    assert cleared == [0, 0, 0]


def test_score_functions_count_too(monkeypatch):
    monkeypatch.setattr(lifetime, "MANY", 3)
    cleared = []
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    PROCESS.outlived.clear()
    for bound in range(3):
        policy = kvjax.evict.MinScore(bound, lambda rows, bound=bound: rows.freqs)
        policy.text(), policy.text()
    kvjax.get_table("lifetime", dim=1)
    kvjax.drop_table("lifetime")
    assert cleared == [1]


@slow
@pytest.mark.parametrize("how", ["jit", "eager"])
def test_memory_is_flat(how, monkeypatch):
    """For as many tables as there is time for: each compiles its programs, 20 to 80 ms of them."""
    monkeypatch.setattr(lifetime, "MANY", 16)
    keys, sizes = kvjax.keys(np.arange(4)), []
    for number in range(int(os.environ.get("KVJAX_TEST_TABLES", 128))):
        table = kvjax.get_table(f"lifetime{number}", dim=4)
        if how == "jit":
            table = jax.block_until_ready(step(table, keys))
        else:
            table.lookup(keys), table.upsert(keys, np.ones((4, 4)))
        kvjax.drop_table(table.name)
        if number % 16 == 15:
            gc.collect()
            sizes.append(resident())
    assert max(sizes[-2:]) - sizes[1] < 0.5 * (len(sizes) - 2) * 16, sizes  # MiB; it was 1.6 to 3 a table


@slow
def test_two_thousand_tables_leave_nothing():
    """Made, filled, read and dropped by calls that compile nothing: what is left is that of the tables themselves."""
    rows = kvjax.get_table("lifetime", dim=16).upsert(kvjax.keys(np.arange(1000)), np.ones((1000, 16))).export()
    kvjax.drop_table("lifetime")
    sizes = []
    for number in range(2000):
        table = kvjax.get_table(f"lifetime{number}", dim=16, admit=kvjax.admit.MinCount(2)).load(rows)
        table.on_evict(print)
        assert len(table) == table.stats().size == len(table.export().keys) == 1000
        kvjax.drop_table(table.name)
        if number % 500 == 499:
            gc.collect()
            sizes.append(resident())
    assert sizes[-1] - sizes[0] < 16, sizes  # MiB; the rows of 1500 tables are 100
