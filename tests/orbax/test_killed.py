"""Saves that are killed: the latest step that is listed restores whole, and the next save goes on from there.

python -m tests.orbax.test_killed [N]      # kills of each API
"""

import itertools
import multiprocessing
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import kvjax.orbax
from tests.support.marks import slow

ROWS = 20_000
MOST = 20, 7.0
"""Kills of a test, and the seconds after which it makes no more."""


APIS = "v0", "v1", "path", "delta"


def steps_of(api, step, keys):
    """The step in which each key got its row, if `step` was the last: a delta changes a quarter of them."""
    return np.maximum(1, step - (step - keys) % 4) if api == "delta" else np.full(len(keys), step)


def save_for_ever(folder, api, begun):
    """Saves one step after the other: all elements of a row are the number of the step in which it was written."""
    keys = np.arange(ROWS)
    table = kvjax.get_table("t", dim=16)
    if api == "delta":  # and makes one checkpoint of them now and then
        step = latest(folder, api)[0]
        table = kvjax.checkpoint.restore(folder, cursor="c")["t"] if step else table.upsert(keys, np.ones((ROWS, 16)))
        while True:
            step += 1
            part = keys[step % 4 :: 4]
            table = table.upsert(part, np.full((len(part), 16), step))
            how = {"cursor": "c"} if step % 16 == 1 else {"since": "c"}
            kvjax.checkpoint.save(folder / str(step), [table], **how)
            begun.set()
            if step % 4 == 0:
                kvjax.checkpoint.compact(folder / str(step), folder / "one", overwrite=True)
    if api == "path":  # one step in the place of the other
        step = latest(folder, api)[0]
        table = table.refresh()
        while True:
            step += 1
            table = table.upsert(keys, np.full((ROWS, 16), step))
            kvjax.checkpoint.save(folder / "it", [table], overwrite=True)
            begun.set()
    if api == "v0":
        with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3)) as manager:
            step = (manager.latest_step() or 0) + 1
            while True:
                table = table.upsert(keys, np.full((ROWS, 16), step))
                manager.save(step, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": table})))
                begun.set()
                step += 1
    with v1.training.Checkpointer(folder) as checkpointer:
        step = checkpointer.latest.step + 1 if checkpointer.latest else 1
        while True:
            table = table.upsert(keys, np.full((ROWS, 16), step))
            pending = checkpointer.save_checkpointables_async(
                step, {"tables": kvjax.orbax.StatefulTables({"t": table})}
            )
            begun.set()
            pending.result()
            step += 1


def latest(folder, api):
    """The last step that is listed, and the table of it."""
    if api == "delta":
        step = max((int(path.name) for path in folder.iterdir() if path.name.isdigit()), default=0)
        if (folder / "one").exists():
            check(api, None, kvjax.checkpoint.restore(folder / "one")["t"])
        return step, kvjax.checkpoint.restore(folder)["t"] if step else None
    if api == "path":
        if not list(folder.glob("it")):
            return 0, None
        table = kvjax.checkpoint.restore(folder / "it")["t"]
        return int(table.lookup(0)[0]), table
    if api == "v0":
        with ocp.CheckpointManager(folder) as manager:
            step = manager.latest_step()
            if step is None:
                return 0, None
            args = ocp.args.Composite(tables=kvjax.orbax.TableRestore())
            return step, manager.restore(step, args=args)["tables"]["t"]
    with v1.training.Checkpointer(folder) as checkpointer:
        if checkpointer.latest is None:
            return 0, None
        return checkpointer.latest.step, checkpointer.load_checkpointables()["tables"].tables["t"]


def check(api, step, table):
    rows = table.export()
    if step is None:
        step = int(rows.values.max())
    assert len(rows) == ROWS and (rows.values == steps_of(api, step, rows.keys)[:, None]).all()


@slow
@pytest.mark.parametrize("api", APIS)
def test_the_latest_step_is_whole(api, tmp_path):
    kill(api, tmp_path, *MOST)


def kill(api, folder, times, seconds):
    rng, last, whole, longest = random.Random(api), 0, 0, 0.3
    # Processes that are forked from one that has imported everything, and has no threads yet, begin at once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.orbax.test_killed"])
    end = time.monotonic() + seconds
    for count in itertools.count(1):
        begun = context.Event()
        process = context.Process(target=save_for_ever, args=(folder, api, begun))
        process.start()
        try:
            assert begun.wait(60), process.exitcode
            time.sleep(rng.uniform(0, longest))
        finally:
            process.kill()
            process.join()
        step, table = latest(folder, api)
        assert step >= last
        if table is not None:
            check(api, step, table)
            kvjax.drop_table("t")
            whole += 1
        longest *= 0.8 if step > last else 1.3  # so that about half of them end a save, on any machine
        last = step
        enough = whole > 0 and last > 1
        if time.monotonic() > end + (0 if enough else 120) or (enough and count >= times):  # also on a busy machine
            break
    assert whole > 0 and last > 1
    return whole, last


if __name__ == "__main__":
    for api in APIS:
        with tempfile.TemporaryDirectory() as name:
            print(api, *kill(api, Path(name), int(sys.argv[1]) if len(sys.argv) > 1 else 100, 3600.0), flush=True)
