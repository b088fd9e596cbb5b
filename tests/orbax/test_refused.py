"""A save that is refused ends like any error: no thread of Orbax keeps the process, and the next save is whole."""

import contextlib
import subprocess
import sys

import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import kvjax
from kvjax.checkpoint import CheckpointError
from tests.support.marks import few, slow

# Folders come late, as on a disk that is busy: else the process ends in time, by luck.
PROGRAM = """
import os, sys, time
mkdir = os.mkdir

def late(path, *args, **options):
    time.sleep(0.3 * ("orbax-checkpoint-tmp" in str(path)))
    return mkdir(path, *args, **options)

os.mkdir = late
import jax.numpy as jnp, kvjax, orbax.checkpoint as ocp
from orbax.checkpoint import v1

folder, table = sys.argv[1], kvjax.get_table("t", dim=2)
old, new = kvjax.orbax.TableSave([table], delta_since="c"), kvjax.orbax.StatefulTables({"t": table}, delta_since="c")
"""
SAVES = {
    "manager": "ocp.CheckpointManager(folder).save(1, args=ocp.args.Composite(tables=old))",
    "beside a state": """
state = ocp.args.StandardSave({"w": jnp.ones(2)})
ocp.CheckpointManager(folder).save(1, args=ocp.args.Composite(state=state, tables=old))""",
    "v1": 'v1.save_checkpointables(folder + "/1", {"dense": {"w": jnp.ones(2)}, "tables": new})',
    "v1, manager": """
state = {"dense": {"w": jnp.ones(2)}, "tables": new}
v1.training.Checkpointer(folder).save_checkpointables_async(1, state)""",
}


@slow
@pytest.mark.parametrize("how", few(SAVES, "manager"))
def test_the_process_ends(how, tmp_path):
    program = [sys.executable, "-c", PROGRAM + SAVES[how], str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "want a cursor 'c' of the tables ['t']" in ended.stderr


def test_the_next_save_is_whole(make, tmp_path):
    table = make(2).upsert([7], [[1.0, 2.0]])
    with ocp.CheckpointManager(tmp_path / "v0") as manager:
        for name in ("none", None):
            with pytest.raises(CheckpointError, match="want a cursor") if name else contextlib.nullcontext():
                tables = kvjax.orbax.TableSave({"t": table}, delta_since=name)
                manager.save(1, args=ocp.args.Composite(tables=tables))
    with v1.training.Checkpointer(tmp_path / "v1") as checkpointer:
        for name in ("none", None):
            with pytest.raises(CheckpointError, match="want a cursor") if name else contextlib.nullcontext():
                tables = kvjax.orbax.StatefulTables({"t": table}, delta_since=name)
                checkpointer.save_checkpointables(1, {"tables": tables})
    for api in ("v0", "v1"):
        assert kvjax.checkpoint.verify(tmp_path / api / "1").ok
