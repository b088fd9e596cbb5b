"""Saves and restores of several processes whose calls are not the same: tables in another order, or another call."""

import re
import warnings

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import kvjax
from tests.support import processes
from tests.support.marks import slow

ROWS = {"b": 8, "a": 8, "c": 24}  # two of one size, which a count of rows does not tell apart


def everywhere():
    return jax.make_mesh((jax.device_count(),), ("x",))


def in_own_order(names):
    """Another order in each process, as a set of names has."""
    return sorted(names, reverse=jax.process_index() == 1)


def filled(name, mesh=None):
    table, keys = kvjax.get_table(name, dim=1, mesh=mesh), kvjax.keys(np.arange(ROWS[name]))
    for _ in range(1 + sorted(ROWS).index(name)):
        table, _ = table.apply(optax.adagrad(0.1), kvjax.SparseRows(keys, jax.numpy.ones((ROWS[name], 1))))
    return table


def contents(table):
    return len(table), table.stats().last_step, table.version_of([1]).tolist(), table.lookup([1])[:, 0].tolist()


def raised(kind, call):
    with pytest.raises(kind) as info:
        call()
    return str(info.value)


def orders(folder):
    tables = {name: filled(name, everywhere()) for name in ROWS}
    mine = {name: tables[name] for name in in_own_order(tables)}
    kvjax.checkpoint.save(f"{folder}/save", mine.values(), cursor="c")
    kvjax.checkpoint.save(f"{folder}/delta", mine, since="c")
    with ocp.CheckpointManager(f"{folder}/v0") as manager:
        manager.save(0, args=ocp.args.Composite(tables=kvjax.orbax.TableSave(mine)))
    with v1.training.Checkpointer(f"{folder}/v1") as checkpointer:
        checkpointer.save_checkpointables(0, {"tables": kvjax.orbax.StatefulTables(mine)})
    for table in tables.values():
        table.clear()
    again = kvjax.checkpoint.restore(f"{folder}/save", dict.fromkeys(mine))
    assert list(again) == sorted(ROWS)  # in one order, for loops of the user's
    sizes = {name: table.size(all_processes=True) for name, table in again.items()}
    assert sizes == ROWS, sizes
    print("done")


@slow
def test_tables_in_another_order_in_each_process(tmp_path):
    assert all("done" in output for output in processes.run(orders, str(tmp_path)))
    want = {name: contents(filled(name)) for name in ROWS}
    for path in ("save", "delta", "v0/0", "v1/0"):
        for name in ROWS:
            kvjax.drop_table(name)
        assert kvjax.checkpoint.verify(tmp_path / path).ok, path
        got = {name: contents(table) for name, table in kvjax.checkpoint.restore(tmp_path / path).items()}
        assert got == want, path


def other_calls(folder):
    me = jax.process_index()
    a, b = (filled(name, everywhere()) for name in "ab")
    save, restore, bad = kvjax.checkpoint.save, kvjax.checkpoint.restore, f"{folder}/bad"
    # Another set of tables, and other arguments: the same error in both, and nothing is written.
    lacks = raised(ValueError, lambda: save(bad, [a] if me else [a, b]))
    assert re.match(r"kvjax: table 'b', save: want it in the call of each process .* \[0, 1\], got it in \[0\];", lacks)
    said = raised(ValueError, lambda: save(bad, [a], cursor="c" if me else None))
    assert "got cursor None in process 0 and cursor 'c' in process 1" in said
    save(f"{folder}/one", [a], cursor="c")
    said = raised(ValueError, lambda: save(bad, [a], since=None if me else "c"))
    assert "got since 'c' in process 0 and since None in process 1" in said
    said = raised(ValueError, lambda: save(bad, [a], overwrite=me == 1))
    assert "got overwrite False in process 0 and overwrite True in process 1" in said
    said = raised((TypeError, RuntimeError), lambda: save(bad, a if me else [a]))
    assert "want tables, or tables by name, got Table" in said
    said = raised(ValueError, lambda: save(bad, [a]) if me else restore(f"{folder}/one", {"a": a}))
    assert "got operation 'restore' in process 0 and operation 'save' in process 1" in said
    said = raised(ValueError, lambda: kvjax.reshard(a.refresh(), everywhere() if me else None))
    assert "got new placement None in process 0" in said
    print("done")


@slow
def test_a_call_that_is_another_in_one_process_is_refused_in_all(tmp_path):
    assert all("done" in output for output in processes.run(other_calls, str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def other_checkpoints(folder):
    me, restore = jax.process_index(), kvjax.checkpoint.restore
    a, b, zero = *(filled(name, everywhere()) for name in "ab"), kvjax.get_table("0", dim=1)
    for path, tables in (("one", [a]), ("two", [a, b]), ("three", [zero, a])):
        kvjax.checkpoint.save(f"{folder}/{path}", tables)
    # A checkpoint that one process does not see, or sees another of: of tables that are given, by name, and all.
    for tables in ({"a": a}, {"a": None}, None):
        unseen = raised(
            RuntimeError if me == 0 else kvjax.checkpoint.CheckpointError,
            lambda tables=tables: restore(f"{folder}/nothing" if me else f"{folder}/one", tables),
        )
        assert "want a checkpoint of tables, got none" in unseen
    assert "got checkpoint" in raised(ValueError, lambda: restore(f"{folder}/{'two' if me else 'one'}", {"a": a}))
    lacks = raised(ValueError, lambda: restore(f"{folder}/two", {"a": a} if me else {"a": a, "b": b}))
    assert "table 'b', restore: want it in the call of each process" in lacks
    # One table is in one place, and fails in one process.
    raised((ValueError, RuntimeError), lambda: restore(f"{folder}/three", {"0": wide() if me else None, "a": a}))
    assert a.refresh().size(all_processes=True) == ROWS["a"]
    assert restore(f"{folder}/two", {"a": a, "b": b})["b"].size(all_processes=True) == ROWS["b"]
    if me == 1:  # alone, of what is of no other process
        assert restore(f"{folder}/three", {"0": "alone"})["0"].name == "alone"
    print("done")


def wide():
    return kvjax.get_table("wide", dim=2)


@slow
def test_a_checkpoint_that_one_process_does_not_see_is_restored_in_none(tmp_path):
    assert all("done" in output for output in processes.run(other_checkpoints, str(tmp_path)))


def copies(folder):
    me = jax.process_index()
    local = jax.make_mesh((1,), ("x",), devices=jax.local_devices())
    same = [filled("a"), filled("b", local), kvjax.get_table("none", dim=1, mesh=everywhere())]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvjax.checkpoint.save(f"{folder}/same", same)
    for number, mesh in enumerate((None, local)):
        rows = kvjax.get_table(f"rows{number}", dim=1, mesh=mesh).upsert(np.arange(1 + me), np.ones((1 + me, 1)))
        keys = kvjax.get_table(f"keys{number}", dim=1, mesh=mesh).upsert([5 + me], np.ones((1, 1)))
        steps = filled("c", mesh)  # three
        if me == 1:
            steps, _ = steps.apply(optax.adagrad(0.1), kvjax.SparseRows(kvjax.keys([1]), np.ones((1, 1))))
        for table, got in ((rows, "1 rows after step 0 in process 0 and 2 rows after step 0 in process 1"),
                           (keys, "0 and 1 rows after step 0 of other keys in process 1"),
                           (steps, "rows after step 3 in process 0 and .* rows after step 4 in")):  # fmt: skip
            if table is keys and kvjax.ffi.on_device():  # where keys are not compared
                continue
            with pytest.warns(UserWarning, match=f"table '{table.name}', save: .*{got}.*not saved.*mesh="):
                kvjax.checkpoint.save(f"{folder}/{table.name}{number}", [table, *same[2:]])
        kvjax.drop_table("c")
    print("done")


@slow
def test_rows_of_other_processes_that_are_not_saved_are_told(tmp_path):
    assert all("done" in output for output in processes.run(copies, str(tmp_path)))
    assert kvjax.checkpoint.restore(tmp_path / "rows00")["rows0"].export().keys.tolist() == [0]
