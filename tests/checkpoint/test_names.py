"""A table of a checkpoint under another name here; what errors of a restore tell to do does it."""

import re

import numpy as np
import orbax.checkpoint as ocp
import pytest

import kvjax
from kvjax.checkpoint import CheckpointError, diff, prune, restore, save
from tests.support.checkpoints import assert_equal, trained


def test_a_table_is_made_under_another_name(make, tmp_path):
    table = trained(make(3, seed=7))
    save(tmp_path / "one", {"saved": table})
    want = table.export(slots=True)
    here = restore(tmp_path / "one", {"saved": "here"})["saved"]
    assert here.name == "here" and "saved" not in kvjax.tables() and here.spec.seed == 7
    assert_equal(here.export(slots=True), want)
    again = restore(tmp_path / "one", {"saved": "here"})["saved"]  # into the one that is there
    assert again.name == "here" and int(again.version) > int(here.version)
    dense, _ = kvjax.orbax.split({"model": here})
    assert kvjax.orbax.combine(dense, {"saved": again})["model"].name == "here"
    with pytest.raises(ValueError, match="want one table of the checkpoint to load into it, got 'other' and 'saved'"):
        save(tmp_path / "two", {"saved": again, "other": table})
        restore(tmp_path / "two", {"saved": "here", "other": "here"})
    with pytest.raises(ValueError, match="want a name in UTF-8"):
        restore(tmp_path / "one", {"saved": ""})
    with ocp.CheckpointManager(tmp_path / "manager") as manager:
        manager.save(1, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"saved": again})))
        args = ocp.args.Composite(tables=kvjax.orbax.TableRestore({"saved": "elsewhere"}))
        assert_equal(manager.restore(1, args=args)["tables"]["saved"].export(slots=True), want)
        assert "elsewhere" in kvjax.tables()


def test_a_restore_that_fails_leaves_no_table_behind(make, tmp_path):
    save(tmp_path / "one", {"a": make(2), "b": make(2)})
    other = make(3)
    with pytest.raises(ValueError, match="want a table with dim 2"):
        restore(tmp_path / "one", {"a": "here", "b": other})
    assert "here" not in kvjax.tables()


def test_the_mend_of_another_seed_is_one(make, tmp_path):
    """Under the same name, and under another one."""
    table = trained(make(3, seed=7))
    save(tmp_path / "one", {"a": table, table.name: table})
    want, other = table.export(slots=True), make(3, seed=8)
    with pytest.raises(ValueError, match="own_initializer=True") as error:
        restore(tmp_path / "one", {"a": other})
    (mend,) = re.findall(r"drop_table\('(\w+)'\) first, and restore\(\.\.\., (\{.*?\})\) makes it", str(error.value))
    assert mend == (other.name, f"{{'a': '{other.name}'}}")
    kvjax.drop_table(mend[0])
    assert_equal(restore(tmp_path / "one", {"a": mend[0]})["a"].export(slots=True), want)
    kvjax.drop_table(table.name)
    kvjax.get_table(table.name, dim=3, seed=8)
    with pytest.raises(ValueError, match=rf"drop_table\('{table.name}'\) first, and the restore makes it"):
        restore(tmp_path / "one", {table.name: None})
    kvjax.drop_table(table.name)
    assert_equal(restore(tmp_path / "one", {table.name: None})[table.name].export(slots=True), want)


def test_the_mend_of_a_lower_limit_is_one(make, tmp_path):
    table = make(2, seed=1).upsert(np.arange(5), np.ones((5, 2)))
    save(tmp_path / "one", {"t": table})
    small = make(2, seed=1, max_capacity=3, on_full="error")
    mend = r"or restore what kvjax.checkpoint.prune\(path, out, kvjax.Prune\(top_k=3\)\) makes of the checkpoint"
    with pytest.raises((ValueError, MemoryError), match=mend):
        restore(tmp_path / "one", {"t": small})
    prune(tmp_path / "one", tmp_path / "two", kvjax.Prune(top_k=3))
    assert len(restore(tmp_path / "two", {"t": small})["t"]) == 3


@pytest.mark.parametrize("tables", ["us", ["u", 7], iter(["us"]), 7, []])
def test_tables_are_names(tables, make, tmp_path):
    """A text is not one name for each of its letters; what is read again must still be there."""
    table = make(1).upsert(np.arange(2), np.ones((2, 1)))
    save(tmp_path / "one", {"us": table, "u": table, "s": table})
    for op, call in (
        ("prune", lambda: prune(tmp_path / "one", tmp_path / "two", kvjax.Prune(top_k=1), tables=tables)),
        ("diff", lambda: diff(tmp_path / "one", tmp_path / "one", tables=tables)),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^kvjax: {op}: want tables "):
            call()
    assert not (tmp_path / "two").exists()
    assert list(prune(tmp_path / "one", None, kvjax.Prune(top_k=1), tables={"us", "s"})) == ["s", "us"]
    with pytest.raises(CheckpointError, match="table 'user', prune"):
        prune(tmp_path / "one", None, kvjax.Prune(top_k=1), tables=["user"])
