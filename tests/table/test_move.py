"""A table may move to another storage between two steps: everything goes with it, and training goes on the same."""

import dataclasses
import re
import tracemalloc

import jax
import numpy as np
import optax
import pytest

import kvjax
from kvjax import ffi
from tests.support import lowering
from tests.support.marks import few
from tests.support.tables import KEYS, same_rows, same_tables, step, trained

pytestmark = pytest.mark.cpu_table

Device, Host, Mmap = kvjax.storage.Device, kvjax.storage.Host, kvjax.storage.Mmap
FAILED = (ValueError, RuntimeError, KeyError)


# ---- storages of one backend -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_of", few([None, 4, "replicated"], 0))
def test_training_goes_on_the_same(mesh_of, make, mesh, tmp_path, promotion):
    place = {} if mesh_of is None else {"mesh": mesh(4), "replicated": mesh_of == "replicated"}
    options = {"dim": 3, "initializer": kvjax.initializers.normal(0.1), "seed": 5} | place
    one, table = (trained(make(**options).pin(KEYS[:3])) for _ in range(2))
    for storage in (Mmap(tmp_path), Host(huge_pages=True), Host()):
        table = table.to(storage)
        assert table.spec.storage == storage and table.spec.placement == one.spec.placement
        same_tables(one, table)
        one, table = trained(one, seed=1), trained(table, seed=1)
        same_tables(one, table)


def test_rows_go_a_piece_at_a_time(make, tmp_path, promotion, monkeypatch, request):
    """A copy of all of them on the way would be a third table: of one that moves into a file, for want of memory."""
    monkeypatch.setattr("kvjax._formats.source.PIECE_BYTES", 1 << 16)
    request.addfinalizer(lambda: kvjax.drop_table("copy"))
    keys = np.arange(10_000)
    table, _ = make(64).apply(optax.adam(0.1), kvjax.SparseRows(keys, np.ones((10_000, 64), np.float32)))
    want = table.pin(keys[::9]).export(slots=True)
    table = table.refresh()
    monkeypatch.setattr("kvjax._table.contents.snapshot", pytest.fail)  # which would be all of them
    tracemalloc.start()
    moved = table.copy("copy").to(Mmap(tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    monkeypatch.undo()
    assert peak < 0.3 * sum(array.nbytes for array in want.columns().values())
    same_rows(moved.export(slots=True), want)


@pytest.mark.parametrize("admit", [kvjax.admit.MinCount(3, unadmitted=7), kvjax.admit.Sketch(3, halve_every=4)])
@pytest.mark.parametrize("over_mesh", few([False, True], 0))
def test_counts_of_admission_move_too(admit, over_mesh, make, mesh, tmp_path):
    options = {"dim": 3, "admit": admit, "seed": 5} | ({"mesh": mesh(4)} if over_mesh else {})
    one, table = trained(make(**options), 3), trained(make(**options), 3).to(Mmap(tmp_path))
    assert any(array.any() for array in one.snapshot().admission.values())
    same_tables(one, table)
    same_tables(trained(one, 3, seed=1), trained(table, 3, seed=1))


def test_the_sink_and_the_other_arguments_stay(make, tmp_path):
    seen = []
    table = make(dim=2, capacity=100, checkpoint=False).upsert(KEYS, np.ones((len(KEYS), 2)))
    old = table.on_evict(lambda keys, *rest: seen.extend(keys.tolist()))
    table = old.to(Mmap(tmp_path))
    assert dataclasses.replace(old.spec, storage=Mmap(tmp_path)) == table.spec
    assert len(table.restrict(5)) == 5 and len(seen) == len(KEYS) - 5


def test_handles_from_before_are_stale(make, tmp_path):
    old = make(dim=2).upsert(KEYS, np.ones((len(KEYS), 2)))
    new = old.to(Mmap(tmp_path))
    live = kvjax.get_table(old.name, dim=2)  # where it is
    assert live.spec == new.spec and live.version == new.version
    with pytest.raises(FAILED, match="stale one"):
        jax.block_until_ready(old.lookup(KEYS))
    with pytest.raises(FAILED, match="stale one"):
        jax.block_until_ready(old.upsert(KEYS, np.zeros((len(KEYS), 2))).version)
    again = old.refresh()  # as the error says
    assert again.spec == new.spec and again.version == new.version
    with pytest.raises(RuntimeError, match=r"that table moved to storage Mmap.*table.refresh\(\)"):
        old.to(Host())
    with pytest.raises(ValueError, match=r"it is elsewhere: leave storage= out.*table.to\(storage\)"):
        kvjax.get_table(old.name, dim=2, storage=Host())
    assert "stale" in repr(old) and len(new) == len(KEYS)


def test_a_failure_leaves_the_table_as_it_was(make, tmp_path):
    table = trained(make(dim=2, initializer=1.0))
    before = table.snapshot().rows
    for storage, error, message in (
        (Mmap(tmp_path / "none"), ValueError, "none"),
        ("mmap", TypeError, "to: want one of kvjax.storage, got 'mmap'"),
        (None, TypeError, "to: want one of kvjax.storage, got None"),
    ):
        with pytest.raises(error, match=message):
            table.to(storage)
        same_rows(before, table.snapshot().rows)
        assert kvjax.get_table(table.name).spec == table.spec
    stale, table = table, table.clear_slots()
    for op, call in {"to": lambda: stale.to(Mmap(tmp_path)), "copy": lambda: stale.copy("copy")}.items():
        with pytest.raises(FAILED, match=f"^kvjax: table '{table.name}', {op}: .*stale one"):
            call()
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda t: t.to(Mmap(tmp_path)))(table)
    with pytest.raises(ValueError, match="inside it"):
        kvjax.value_and_grad(lambda t: t.to(Mmap(tmp_path)).lookup(1).sum())(table)
    assert len(trained(table)) == len(before)


# ---- another backend -------------------------------------------------------------------------------------------


def test_there_and_back(make, elsewhere, promotion):
    options = {"dim": 3, "initializer": kvjax.initializers.normal(0.1), "seed": 5}
    one, table = trained(make(**options)), trained(make(**options))
    seen = []
    table = table.on_evict(lambda keys, *rest: seen.extend(keys.tolist()))
    handles = [table]
    for storage in (Device(), kvjax.storage.Hybrid(5), Host(), Device()):
        handles.append(handles[-1].to(storage))
        assert handles[-1].spec.storage == storage and handles[-1].shape == one.shape
        same_tables(one, handles[-1])
        assert kvjax.tables()[table.name].version == handles[-1].version
        for old in handles[:-1]:
            assert re.search("stale|dropped", repr(old))
            with pytest.raises(FAILED, match=r"stale one|this platform|another of its name"):
                jax.block_until_ready(old.lookup(KEYS))
    versions = [int(handle.version) for handle in handles]
    assert versions == sorted(set(versions))
    back = handles[-1].to(Host())
    same_tables(trained(one, seed=1), trained(back, seed=1))
    back = back.refresh()
    assert len(back.restrict(1)) == 1 and len(seen) == len(one.refresh()) - 1


def test_a_program_of_the_other_platform_says_where_tables_go(make, elsewhere):
    table = make(dim=2).upsert(KEYS, np.ones((len(KEYS), 2))).to(Device())
    calls = (lambda t: t.lookup(KEYS), lambda t: t.clear().version, lambda t: step(t, kvjax.keys(KEYS)).version)
    for call in calls:
        for run in (call, jax.jit(call)):
            with pytest.raises(FAILED, match=r"of this name on this platform, got none;.*table\.to\(storage\)"):
                jax.block_until_ready(run(table))
    assert len(table.refresh()) == len(KEYS)


def test_a_write_meanwhile_stops_the_move(make, elsewhere, monkeypatch):
    table = make(dim=2).upsert(KEYS, np.ones((len(KEYS), 2)))
    adopt = elsewhere.adopt
    written = []

    def adopt_late(*args):
        written.append(table.clear_slots())
        jax.block_until_ready(written)
        adopt(*args)

    monkeypatch.setattr(elsewhere, "adopt", adopt_late, raising=False)
    with pytest.raises(RuntimeError, match="to: want a table that nobody writes meanwhile"):
        table.to(Device())
    assert kvjax.get_table(table.name).spec.storage == Host()
    assert len(written[0]) == len(KEYS)
    monkeypatch.setattr(elsewhere, "adopt", adopt)
    assert len(written[0].to(Device())) == len(KEYS)  # the name is free there


def test_a_table_made_anew_in_the_other_backend_has_later_versions(elsewhere):
    old = kvjax.get_table("anew", dim=2, storage=Device())
    assert old.spec.storage == Device() and len(old) == 0
    kvjax.drop_table("anew")
    new = kvjax.get_table("anew", dim=2)
    assert new.spec.storage == Host() and int(new.version) > int(old.version)
    with pytest.raises(FAILED, match="stale one"):
        jax.block_until_ready(new.__class__(old.version, new.spec).lookup(1))
    with pytest.raises(KeyError, match="drop_table: want a table of this name, got none"):
        kvjax.drop_table("other")


def test_without_the_backend(make):
    if ffi.trouble(ffi.DEVICE) is None:
        pytest.skip("it is here")
    table = make(dim=2)
    why = r"want the backend 'cuda' for storage=Device\(\), got kvjax.backends.*(not built|no GPU).*storage.Host"
    with pytest.raises(RuntimeError, match=f"get_table: {why}"):
        kvjax.get_table("none", dim=2, storage=Device())
    with pytest.raises(RuntimeError, match=f"to: {why}"):
        table.to(Device())
    assert "none" not in kvjax.tables() and len(table) == 0


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_new_table_is_where_programs_run(on_gpu, elsewhere, monkeypatch):
    assert kvjax.get_table("here", dim=2).spec.storage == Host()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if on_gpu else "cpu")
    assert kvjax.get_table("new", dim=2).spec.storage == (Device() if on_gpu else Host())
    assert kvjax.get_table("here", dim=2).spec.storage == Host()


def test_a_step_is_one_pass(make, elsewhere, promotion):
    keys, state = kvjax.keys(np.arange(5000)), kvjax.optax.rowwise(lowering.TX).init(64)
    here, there = make(dim=64), make(dim=64, storage=Device())
    texts = [lowering.lowered(lowering.step, t, state, keys, platform="cuda") for t in (here, there)]
    assert ["stablehlo.while" in text for text in texts] == [False, False]
    assert [lowering.targets(text) for text in texts] == 2 * [lowering.CALLS_OF_STEP]
