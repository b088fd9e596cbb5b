"""A table may move to other devices between two steps: everything goes with it, and training goes on the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.support.marks import few_rows, slow
from tests.support.tables import KEYS, by_low_bits, same_rows, same_tables, trained

ROUTES = [
    ("one place", "4"), ("4", "one place"), ("8", "1"), ("axis", "partitioner"), ("another", "8"), ("4", "replicated"),
]  # fmt: skip


@slow
@pytest.mark.parametrize(("here", "there"), few_rows(ROUTES, 3))
def test_training_goes_on_the_same(here, there, make, places, promotion):
    options = {"dim": 3, "initializer": kvjax.initializers.normal(0.1), "seed": 5}
    one, table = make(**options), make(**options, **places[here])
    table = table.pin(KEYS[:3])
    one = trained(one.pin(KEYS[:3]))
    table = kvjax.reshard(trained(table), **places[there])
    assert table.spec.placement == make(**options, **places[there]).spec.placement
    same_tables(one, table)
    same_tables(trained(one, seed=1), trained(table, seed=1))


@slow
@pytest.mark.parametrize(
    ("admit", "there"),
    few_rows(
        [(a, there) for a in (kvjax.admit.MinCount(3, unadmitted=7), kvjax.admit.Sketch(3, halve_every=4))
         for there in ("4", "one place")],
        1,
    ),
)  # fmt: skip
def test_counts_of_admission_move_too(admit, there, make, places):
    options = {"dim": 3, "admit": admit, "seed": 5}
    one, table = make(**options), make(**options, **places["8" if there == "4" else "4"])
    one, table = trained(one, 3), kvjax.reshard(trained(table, 3), **places[there])
    assert any(array.any() for array in one.snapshot().admission.values())
    same_tables(one, table)
    same_tables(trained(one, 3, seed=1), trained(table, 3, seed=1))


@pytest.mark.cpu_table
@pytest.mark.parametrize(
    ("here", "there"),
    few_rows(
        [("4", "one place"), ("one place", "4"), ("replicated", "one place"), ("4", "8"), ("4", "replicated"),
         ("axis", "8")],
        2,
    ),
)  # fmt: skip
def test_rows_go_a_piece_at_a_time(here, there, make, places, monkeypatch):
    """A copy of all of them on the way would be a third table."""
    monkeypatch.setattr("kvjax._formats.source.PIECE_BYTES", 1 << 16)
    keys = np.arange(5_000)
    table = make(16, **places[here]).upsert(keys, np.ones((5_000, 16), np.float32)).pin(keys[::9])
    want = table.export(slots=True)
    with monkeypatch.context() as patched:
        patched.setattr("kvjax._table.contents.snapshot", pytest.fail)  # which would be all of them
        moved = kvjax.reshard(table, **places[there])
    same_rows(moved.export(slots=True), want)
    np.testing.assert_array_equal(moved.contains(keys), np.ones(5_000, bool))  # each where it is looked for


@pytest.mark.cpu_table  # has limits over a mesh
def test_a_load_that_does_not_fit_says_how_many_rows_it_has(make, mesh):
    table = make(dim=2, mesh=mesh(2), max_capacity=20, on_full="error")
    with pytest.raises(MemoryError, match="load: want at most max_capacity=20 rows, got 100; make the table"):
        table.load(make(dim=2).upsert(np.arange(100), np.ones((100, 2))).export())
    assert len(table) == 0


def test_the_wire_the_sink_and_the_other_arguments_stay(make, mesh):
    seen = []
    table = make(dim=2, mesh=mesh(4), wire="bfloat16", capacity=100, checkpoint=False)
    table = table.upsert(KEYS, np.ones((len(KEYS), 2)))
    table = table.on_evict(lambda keys, *rest: seen.extend(keys.tolist()))
    before = table.spec
    table = kvjax.reshard(table, mesh(2))
    assert table.spec.placement.wire == "bfloat16"
    table = kvjax.reshard(kvjax.reshard(table, None), mesh(2), wire="bfloat16")  # one place has none to keep
    assert table.spec.placement.wire == "bfloat16"
    assert dataclasses.replace(before, placement=table.spec.placement) == table.spec
    table = table.pin(KEYS[5:]).evict(kvjax.evict.MinFrequency(1))
    assert len(table) == len(KEYS) - 5 and sorted(seen) == sorted(KEYS[:5])  # len waits for the eviction
    table = kvjax.reshard(table.on_evict(None), None).unpin(KEYS).evict(kvjax.evict.MinFrequency(1))
    assert len(table) == 0 and len(seen) == 5


def test_handles_from_before_are_stale(make, mesh):
    old = make(dim=2, mesh=mesh(4)).upsert(KEYS, np.ones((len(KEYS), 2)))
    new = kvjax.reshard(old, mesh(2))
    assert kvjax.get_table(old.name).spec == new.spec and kvjax.get_table(old.name).version == new.version
    for use in (lambda: old.lookup(KEYS), lambda: old.upsert(KEYS, np.zeros((len(KEYS), 2))).version, old.size):
        with pytest.raises((ValueError, RuntimeError), match=r"stale one|mesh that the table was made with|its mesh"):
            jax.block_until_ready(use())
    again = old.refresh()  # as the error says
    assert again.spec == new.spec
    np.testing.assert_array_equal(again.upsert(7, np.full(2, 3.0)).lookup(7), np.full(2, 3.0))
    back = kvjax.reshard(old.refresh(), mesh(4))
    with pytest.raises((ValueError, RuntimeError), match="stale one"):
        jax.block_until_ready(old.lookup(KEYS))
    assert len(back) == len(KEYS)
    assert "stale" in repr(old)


def test_errors_say_where_a_table_is(make, places):
    shown = {
        "one place": "one place",
        "4": r"4 shards over mesh {'x': 4}",
        "axis": r"4 shards over mesh {'data': 2, 'model': 4} along 'model'",
        "partitioner": r"4 shards over mesh {'x': 4} by by_low_bits",
        "replicated": r"a copy on each device over mesh {'x': 4}",
    }
    for name, text in shown.items():
        table = kvjax.reshard(make(dim=2, **places["8"]), **places[name])
        with pytest.raises(ValueError, match=rf"got placement 8 shards over mesh {{'x': 8}} \(not {text}\); it has"):
            kvjax.get_table(table.name, dim=2, **places["8"])
    table = make(dim=2, **places["4"])
    live = table.live()
    kvjax.reshard(table, **places["partitioner"])
    moved = "that table moved to placement 4 shards .* by by_low_bits .*; get its handle by table.refresh"
    with pytest.raises(RuntimeError, match=moved):
        live.lookup(KEYS)
    mesh, one, other = places["4"]["mesh"], lambda keys, n: by_low_bits(keys, n), lambda keys, n: by_low_bits(keys, n)
    table = make(dim=2, mesh=mesh, partitioner=one)
    with pytest.raises(ValueError, match=r"by <lambda> on other devices or by another function; define it once"):
        kvjax.get_table(table.name, dim=2, mesh=mesh, partitioner=other)


def test_a_shard_that_a_move_has_taken_is_said(make, mesh):
    """To a call of another thread that has looked where the table is, and asks its shards meanwhile."""
    table = make(dim=2, mesh=mesh(2))
    kvjax.reshard(table, None)
    want = r"export: want one of the 1 shards of this process, got shard 1 of another place, .* use kvjax.get_table"
    with pytest.raises(KeyError, match=want):
        table.spec.host.export_table(table.name, 1, 0, False, "export")


def test_a_failure_leaves_the_table_as_it_was(make, mesh):
    table = trained(make(dim=2, mesh=mesh(4), initializer=1.0))
    before = table.snapshot().rows
    for arguments, message in (
        ({"mesh": mesh(2), "axis": "y"}, "axis of the mesh's"),
        ({"mesh": mesh(2), "partitioner": lambda keys, n: jnp.full(keys.shape, n, jnp.int32)}, "shards in 0..1, got 2"),
        ({"mesh": None, "partitioner": by_low_bits}, "mesh= or devices= beside partitioner="),
    ):
        with pytest.raises(ValueError, match=f"(reshard|partitioner): want.*{message}"):
            kvjax.reshard(table, **arguments)
        same_rows(before, table.snapshot().rows)
        assert kvjax.get_table(table.name).spec == table.spec
    stale, table = table, table.clear_slots()
    with pytest.raises((ValueError, RuntimeError), match="stale one"):
        kvjax.reshard(stale, mesh(2))
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda t: kvjax.reshard(t, mesh(2)))(table)
    assert len(trained(table)) == len(before)


def test_a_table_made_anew_does_not_take_the_place_over(make, mesh):
    table = kvjax.reshard(make(dim=2), mesh(4))
    kvjax.drop_table(table.name)
    assert kvjax.get_table(table.name, dim=2).spec.placement is None
