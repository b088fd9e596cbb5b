"""What tests of checkpoints in stores share: a store in memory, and a table with slots."""

import numpy as np
import pytest

from tests.support import stores


@pytest.fixture
def store():
    return stores.begin()


@pytest.fixture
def table(make):
    import optax

    import kvjax  # which has to be told the backend first

    table = make(3).upsert(np.arange(40), np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32))
    return table.apply(optax.adagrad(0.1), kvjax.SparseRows(kvjax.keys(np.arange(9)), np.ones((9, 3), np.float32)))[0]
