"""``kvjax inspect --stats``: what it takes."""

import tracemalloc
import types

import numpy as np

from kvjax._command.inspect import distributions


def test_one_column_is_in_memory_at_a_time():
    n = 200_000
    rows = types.SimpleNamespace(column=lambda name: np.arange(n), norms=lambda: np.arange(float(n)))
    table = types.SimpleNamespace(open=lambda: rows, last_step=n)
    tracemalloc.start()
    found, not_finite = distributions(table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(found) == ["frequency", "age", "norm"] and found["age"]["max"] == n and not_finite == 0
    assert peak < 30 * n
