"""Steps that fail half-way, in what XLA does between reading rows and writing them: they were nothing."""

import concurrent.futures
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few, slow
from tests.support.tables import same_tables

ADAGRAD = optax.adagrad(0.1)


class Fuse:
    """A constraint of Python's, so that there is no row program, that raises while it is `blown`."""

    def __init__(self):
        self.blown = False
        self.blows = lambda rows: True  # by which

    def __call__(self, row):
        return jax.pure_callback(self.check, jax.ShapeDtypeStruct(row.shape, row.dtype), row, vmap_method="expand_dims")

    def check(self, rows):
        if self.blown and self.blows(np.asarray(rows)):
            raise ArithmeticError("the fuse has blown")
        return np.asarray(rows)


def write(table, keys):
    rows = jnp.arange(len(keys) * table.dim, dtype=jnp.float32).reshape(-1, table.dim)
    table, _ = table.apply(ADAGRAD, kvjax.SparseRows(np.asarray(keys), rows))
    jax.block_until_ready(table.version)
    return table


@pytest.mark.parametrize("first", few([False, True], 0), ids=["trained", "first step"])
@pytest.mark.parametrize("shards", few([None, 1, 2], 0), ids=["one place", "one", "mesh"])
def test_a_step_that_fails_between_its_calls_leaves_nothing(make, mesh, first, shards):
    fuse, calm = Fuse(), Fuse()
    options: dict = {"admit": kvjax.admit.MinCount(1), "mesh": shards and mesh(shards)}
    if shards is None:
        options |= {"max_capacity": 6, "on_full": "evict"}
    table, twin = make(2, constraint=fuse, **options), make(2, constraint=calm, **options)
    if not first:
        table, twin = write(table, [1, 2, 3]), write(twin, [1, 2, 3])
    fuse.blown = True
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="the fuse has blown"):
        write(table, [2, 3, 4, 5, 6, 7])
    start = time.monotonic()
    again = table.refresh()
    assert time.monotonic() - start < 3 and int(again.version) == int(table.version)
    same_tables(again, twin)
    fuse.blown = False
    same_tables(write(table, [2, 3, 4, 5]), write(twin, [2, 3, 4, 5]))  # the old handle is the live one


@slow
def test_one_shard_that_fails_is_said(make, mesh, monkeypatch):
    """What the user's code raises on one device alone: the others have ended their part."""
    fuse = Fuse()
    fuse.blows = lambda rows: (rows == 7).any()
    table = make(1, mesh=mesh(2), constraint=fuse)
    rows = kvjax.SparseRows(kvjax.keys(np.arange(8)), jnp.ones((8, 1)).at[3].set(-7))
    fuse.blown = True
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="the fuse has blown"):
        jax.block_until_ready(table.apply(optax.sgd(1.0), rows)[0].version)
    monkeypatch.setattr("kvjax._table.live._PATIENCE", 0.1)
    with pytest.raises(RuntimeError, match=r"want shards of one version, .* restore the last checkpoint"):
        table.refresh()


@slow
def test_a_thread_that_asks_beside_training_gets_a_version(make, mesh):
    """It may come between the shards of a write."""
    table = make(1, mesh=mesh(2))
    step = jax.jit(lambda t, k: t.apply(optax.sgd(1.0), kvjax.SparseRows(k, jnp.ones((64, 1))))[0])
    keys = [kvjax.keys(np.arange(64) + i) for i in range(8)]
    now, ended, asked = step(table, keys[0]), threading.Event(), []

    def ask():
        while not ended.is_set():
            asked.append(int(now.refresh().version))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            for i in range(150):
                now = jax.block_until_ready(step(now, keys[i % 8]))
        finally:
            ended.set()
        asking.result()
    assert asked and asked == sorted(asked)
