"""Which checkpoint a path means: the last one is never passed over in silence because something of it is lost."""

import shutil

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from kvjax._command.main import main
from kvjax.checkpoint import CheckpointError, restore, save, verify
from kvjax.serving import Releases
from tests.support import checkpoints


def lose_manifest(tables):
    (tables / "kvjax.json").unlink()


def lose_manifest_and_what_tables_are(tables):
    for path in tables.rglob("kvjax.json"):
        path.unlink()


def lose_all(tables):
    shutil.rmtree(tables)


def lose_what_is_in_it(tables):
    shutil.rmtree(tables)
    tables.mkdir()


LOSSES = [lose_manifest, lose_manifest_and_what_tables_are, lose_all, lose_what_is_in_it]
LOST = {lose_all: "want a checkpoint of tables, got none in", lose_what_is_in_it: "want a checkpoint of tables"}


def assert_said(folder, tables, lose, tmp_path, capsys):
    """By every way of reading the last checkpoint of a folder."""
    text = f"{LOST.get(lose, 'the manifest that lists all tables')}.*"
    text = f"{tables}.*{text}|{text}{tables}"
    for read in (restore, Releases(tmp_path / "model").follow):
        with pytest.raises(CheckpointError, match=text):
            read(folder)
    (problem,) = verify(folder).problems
    assert problem.path == "kvjax.json" and str(tables) in problem.problem
    assert main(["inspect", str(folder)]) == 2 and str(tables) in capsys.readouterr().err


@pytest.mark.parametrize("lose", LOSSES)
def test_a_step_that_has_lost_its_tables(lose, make, tmp_path, capsys):
    table, folder = make(1).upsert(np.arange(3), np.ones((3, 1))), tmp_path / "manager"
    for step in (1, 2):
        checkpoints.save(folder, step, {"t": table})
    with ocp.CheckpointManager(folder) as manager:  # a step that never had tables
        manager.save(3, args=ocp.args.Composite(other=ocp.args.StandardSave({"x": jnp.ones(2)})))
    tables = folder / "2/tables"
    shutil.copytree(tables.parent, folder / "4.orbax-checkpoint-tmp")
    lose_manifest(folder / "4.orbax-checkpoint-tmp/tables")  # one that nobody has finished
    assert len(restore(folder, {"t": table})["t"]) == 3 and verify(folder).path == tables
    lose(tables)
    assert_said(folder, tables, lose, tmp_path, capsys)
    assert verify(folder / "1").ok


@pytest.mark.parametrize("lose", LOSSES[:2])
def test_a_numbered_checkpoint_that_has_lost_its_manifest(lose, make, tmp_path, capsys):
    table, folder = make(1).upsert(np.arange(3), np.ones((3, 1))), tmp_path / "numbered"
    for step in ("9", "10"):
        save(folder / step, {"a/b": table, "t": table})
    lose(folder / "10")
    assert_said(folder, folder / "10", lose, tmp_path, capsys)
    save(folder / "10", {"t": table}, overwrite=True) if lose is lose_manifest else shutil.rmtree(folder / "10")
    assert verify(folder).ok


def test_the_folder_of_one_table(make, tmp_path, capsys):
    save(tmp_path / "one", {"t": make(1)})
    for read in (restore, verify):
        with pytest.raises(CheckpointError, match=rf"got {tmp_path}/one/t, the folder of one .*; give {tmp_path}/one,"):
            read(tmp_path / "one/t")
    assert main(["inspect", str(tmp_path / "one/t")]) == 2 and "the folder of one" in capsys.readouterr().err
