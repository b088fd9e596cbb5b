"""Tables through Orbax's v1 API."""

import asyncio
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import kvjax.orbax
from kvjax.checkpoint._disk.format import CheckpointError
from tests.support import processes
from tests.support.checkpoints import IDS, assert_equal, save, trained
from tests.support.marks import slow


def test_tables_beside_a_state(make, tmp_path):
    one, other = trained(make(3)), make(2).upsert(IDS, np.ones((5, 2)))
    want = one.export(slots=True), other.export(slots=True)
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        state = kvjax.orbax.StatefulTables({"one": one, "other": other})
        pending = checkpointer.save_checkpointables_async(3, {"tables": state, "dense": {"w": jnp.ones(2)}})
        one = trained(one)  # while it is written
        pending.result()
        meta = checkpointer.checkpointables_metadata(3).metadata["tables"]
        assert meta["one"]["rows"] == 5 and meta["other"]["dim"] == 2
        # Into tables that are here, by their handles; into new ones, without a word.
        state = kvjax.orbax.StatefulTables({"one": one, "other": other})
        checkpointer.load_checkpointables(3, {"tables": state})
        assert_equal(state.tables["one"].export(slots=True), want[0])
        for table in (one, other):
            kvjax.drop_table(table.name)
        found = checkpointer.load_checkpointables(3, {"tables": None})
    assert list(found["tables"].tables) == ["one", "other"] == list(kvjax.tables())
    assert_equal(found["tables"].tables["one"].export(slots=True), want[0])
    assert_equal(found["tables"].tables["other"].export(slots=True), want[1])


@slow
def test_what_v0_has_saved_v1_reads(make, tmp_path):
    table = trained(make(3))
    save(tmp_path, 4, {"t": table})
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        found = checkpointer.load_checkpointables(4)["tables"]
    assert_equal(found.tables["t"].export(slots=True), table.export(slots=True))


@slow
def test_an_item_of_another_step_is_refused(make, tmp_path, monkeypatch):
    """Also where Orbax says only at the end of a save when the step was begun."""
    table = make(2)
    monkeypatch.setattr("kvjax.checkpoint._chains.catalog._SLACK", 0)  # for saves of the same second
    for step in "12":
        table = table.upsert(IDS, np.full((5, 2), int(step)))
        ocp.save_checkpointables(tmp_path / step, {"tables": kvjax.orbax.StatefulTables({"t": table})})
    found = ocp.load_checkpointables(tmp_path / "1")["tables"].tables["t"]
    assert (found.lookup(IDS) == 1).all()
    (tmp_path / "2/tables").rename(tmp_path / "alone")
    (tmp_path / "1/tables").rename(tmp_path / "2/tables")
    with pytest.raises(CheckpointError, match=r"want what was saved with the step .* that was saved at"):
        ocp.load_checkpointables(tmp_path / "2")
    found = kvjax.checkpoint.restore(tmp_path / "alone")["t"]
    assert (found.lookup(IDS) == 2).all()


@slow
def test_damage_is_refused_in_our_words(make, tmp_path):
    table = trained(make(3))
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(0, {"tables": kvjax.orbax.StatefulTables({"t": table})})
        (path,) = tmp_path.glob("0/tables/t/shard-*/values/c.0.0")
        path.write_bytes(path.read_bytes()[::-1])
        with pytest.raises(CheckpointError, match="table 't', restore: want"):
            checkpointer.load_checkpointables(0)


def in_three_processes(folder):
    """Each has a third of the rows; all save and restore them, a delta too, and process 0 alone a table of its own."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = np.arange(1000)
    table = kvjax.get_table("t", dim=2, mesh=mesh).upsert(keys, np.stack([keys, keys], 1).astype(np.float32))
    alone = kvjax.get_table("alone", dim=1).upsert(keys[:3], np.ones((3, 1)))
    with ocp.training.Checkpointer(folder) as checkpointer:
        for step in range(2):
            how = {"delta_since": "c"} if step else {"cursor": "c"}
            state = kvjax.orbax.StatefulTables({"t": table, "alone": alone}, **how)
            pending = checkpointer.save_checkpointables_async(step, {"tables": state})
            table = table.add(keys[:500], np.ones((500, 2)))
            pending.result()
        state = kvjax.orbax.StatefulTables({"t": table.clear(), "alone": alone.clear()})
        checkpointer.load_checkpointables(1, {"tables": state})
    rows = state.tables["t"].export()
    assert 200 < len(rows) < 500 and len(state.tables["alone"]) == 3
    np.testing.assert_array_equal(rows.values[:, 0], rows.keys + (rows.keys < 500))


@slow
def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(TypeError, match="kvjax: save: want tables, or tables by name, got int"):
        kvjax.orbax.StatefulTables(5)
    for other in (None, 3):
        with pytest.raises(TypeError, match="kvjax: save: want"):
            asyncio.run(kvjax.orbax.StatefulTables({"t": other}).save(types.SimpleNamespace(path=tmp_path)))


@slow
def test_several_processes(tmp_path):
    processes.run(in_three_processes, str(tmp_path), n=3, devices=1)
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        for step in (0, 1):
            tables = checkpointer.load_checkpointables(step)["tables"].tables
            rows = tables["t"].export()
            assert len(rows) == 1000
            np.testing.assert_array_equal(rows.values[:, 1], rows.keys + step * (rows.keys < 500))
    meta = json.loads((tmp_path / "1/tables/t/kvjax.json").read_text())
    assert meta["rows"] == 500 and len(meta["shards"]) == 3 and "delta" in meta
