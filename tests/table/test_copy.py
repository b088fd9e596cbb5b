"""A copy of a table is one of its own: the same now and under the same training, and untouched by the other's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._table import loads
from tests.support.engines import Memory
from tests.support.marks import few
from tests.support.tables import KEYS, same_tables, trained


@pytest.fixture
def copied():
    """Copies tables, and drops the copies."""
    yield lambda table, **options: table.copy("copy", **options)
    if "copy" in kvjax.tables():
        kvjax.drop_table("copy")


@pytest.mark.parametrize("mesh_of", few([None, 4, "replicated"], 0))
@pytest.mark.parametrize("admit", few([kvjax.admit.MinCount(3), kvjax.admit.Sketch(3, halve_every=4)], 0))
def test_both_go_on_as_the_table_would(mesh_of, admit, make, mesh, copied, promotion):
    place = {} if mesh_of is None else {"mesh": mesh(4), "replicated": mesh_of == "replicated"}
    options = {"dim": 3, "admit": admit, "initializer": kvjax.initializers.normal(0.1), "seed": 5} | place
    one, table = (trained(make(**options).pin(KEYS[:3]), 3) for _ in range(2))
    copy = copied(table)
    assert dataclasses.replace(copy.spec, name=table.name) == table.spec and copy.spec.seed == table.spec.seed
    same_tables(one, copy)
    table = trained(table, seed=2)
    same_tables(one, copy)  # which the table's training has not touched
    one, copy = trained(one, seed=1), trained(copy, seed=1)
    same_tables(one, copy)
    one = trained(one.load(table.snapshot()), seed=3)
    same_tables(one, trained(table.refresh(), seed=3))  # nor has the copy's the table


@pytest.mark.cpu_table
def test_storages_and_sinks(make, copied, tmp_path):
    seen, engine = [], Memory()
    table = make(dim=2, storage=kvjax.storage.External(engine)).upsert(KEYS, np.ones((len(KEYS), 2)))
    table = table.on_evict(lambda keys, *rest: seen.extend(keys.tolist()))
    with pytest.raises(ValueError, match=r"engine"):
        table.copy("copy")
    assert "copy" not in kvjax.tables()
    copy = copied(table, storage=kvjax.storage.Mmap(tmp_path))
    assert copy.spec.storage == kvjax.storage.Mmap(tmp_path) and len(copy.restrict(5)) == 5
    assert not seen and len(table) == len(KEYS) == len(table.refresh())


@pytest.mark.cpu_table
def test_of_views_of_following_handles_and_of_none(make, copied):
    tx, grads = kvjax.optax.catch_up(optax.sgd(1.0, momentum=0.5)), jnp.ones((1, 2))
    table, state = make(2), tx.init(2)
    for key in (7, 8):
        table, state = table.apply(tx, kvjax.SparseRows(np.array([key]), grads), state)
    copy = copied(kvjax.optax.caught_up(table, state, tx))
    assert copy.view is None and copy.lookup([7, 8])[:, 0].tolist() == [-1.5, -1.0]
    kvjax.drop_table("copy")
    copy = copied(kvjax.optax.sweep(table, state, tx).live())
    assert not copy.follows and copy.lookup([7, 8])[:, 0].tolist() == [-1.5, -1.0]
    kvjax.drop_table("copy")
    assert len(copied(make(2))) == 0


@pytest.mark.cpu_table
def test_what_cannot_be_copied_leaves_nothing(make, copied, monkeypatch):
    old = make(2)
    table = old.upsert([1], np.ones((1, 2)))
    for call, kind, said in (
        (lambda: old.copy("copy"), RuntimeError, "stale"),
        (lambda: table.copy(table.name), ValueError, "copy: want a name that no table has"),
        *((lambda name=name: table.copy(name), ValueError, "copy: want a name in UTF-8") for name in (3, "", "\ud800")),
        (lambda: table.copy("copy", storage="disk"), TypeError, "one of kvjax.storage"),
        (lambda: jax.jit(lambda t: t.copy("copy").version)(table), (TypeError, RuntimeError), "copy"),
    ):
        with pytest.raises(kind, match=said):
            call()
        assert "copy" not in kvjax.tables()

    def full(*_):
        raise MemoryError("full")

    monkeypatch.setattr(loads, "checked", full)
    with pytest.raises(MemoryError, match="full"):
        table.copy("copy")
    assert "copy" not in kvjax.tables() and len(table) == 1
