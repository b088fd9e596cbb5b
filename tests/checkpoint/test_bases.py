"""What deltas build on: it is replaced by nothing unsaid, and `verify` misses it where it is gone."""

import itertools
import json
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import kvjax
from kvjax._command.main import main
from kvjax._process import PROCESS
from kvjax.checkpoint import CheckpointError, compact, diff, prune, restore, save, verify
from kvjax.checkpoint._chains.catalog import Catalog
from kvjax.convert import export_checkpoint, import_checkpoint
from kvjax.serving import Releases
from tests.support.marks import few
from tests.support.tables import same_rows

RULE = kvjax.Prune(min_norm=2.0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"  # beside which no other test has saved the same, or bases would be found there


@pytest.fixture
def chain(make, folder):
    """0, with the deltas 1 and 2 on it, and the table."""
    table = make(1).upsert(np.arange(9), np.arange(9.0)[:, None])
    save(folder / "0", {"t": table}, cursor="c")
    for i in (1, 2):
        table = table.upsert([i], [[-1.0]])
        save(folder / f"{i}", {"t": table}, since="c")
    return table


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_base_is_replaced(chain, folder):
    whole, far = files(folder), folder / "far/away"
    np.savez(folder.parent / "rows.npz", keys=np.arange(2), values=np.ones((2, 1), np.float32))
    for out in ("0", "1"):
        for op, call in (
            ("prune", lambda out: prune(folder / "2", out, RULE, overwrite=True)),
            ("compact", lambda out: compact(folder / "2", out, overwrite=True)),
            ("import", lambda out: import_checkpoint(folder.parent / "rows.npz", out, table="t", overwrite=True)),
        ):
            with pytest.raises(CheckpointError, match=rf"kvjax: {op}: want .*/{out}: .*/2 builds? on it"):
                call(folder / out)
        assert main(["prune", str(folder / "2"), str(folder / out), "--overwrite", "--zero-rows"]) == 2
        assert main(["convert", str(folder / "2"), str(folder / out), "--overwrite"]) == 2
        for name in ("x.npz", "t/x.npz"):
            with pytest.raises(CheckpointError, match=r"export: want a place outside of checkpoints"):
                export_checkpoint(folder / "2", folder / out / name)
        with pytest.raises(CheckpointError, match=r"import: want a place outside of checkpoints"):
            import_checkpoint(folder.parent / "rows.npz", folder / out / "sub", table="t")
    assert files(folder) == whole
    prune(folder / "1", folder / "2", RULE, overwrite=True)  # on which nothing builds
    for i in (1, 2):
        far.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}").rename(far / f"{i}")
    with pytest.raises(CheckpointError, match=r"/0: .*/far/away/1 builds on it"):
        compact(far / "1", folder / "0", base=folder / "0", overwrite=True)
    assert restore(far / "1", {"t": chain}, base=folder)["t"].lookup([1, 2])[:, 0].tolist() == [-1.0, 2.0]


def test_a_base_that_is_elsewhere_too_may_be_replaced(chain, folder):
    shutil.copytree(folder / "0", folder / "copy")
    prune(folder / "2", folder / "0", RULE, overwrite=True)
    assert len(restore(folder / "2", {"t": chain})["t"]) == 9
    compact(folder / "1", folder / "whole")
    shutil.rmtree(folder / "copy")
    prune(folder / "2", folder / "1", RULE, overwrite=True)  # "whole" stands for it
    assert restore(folder / "2", {"t": chain.refresh()})["t"].lookup([1, 2])[:, 0].tolist() == [-1.0, -1.0]


def test_folders_of_others_beside_are_passed_over(chain, folder, monkeypatch):
    """In which this process may not look, as in those of other users below /home."""
    is_file = Path.is_file

    def refused(path):
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    (folder / "theirs").mkdir()
    monkeypatch.setattr(Path, "is_file", refused)
    assert len(restore(folder / "2", {"t": chain})["t"]) == 9
    save(folder / "2", {"t": chain.refresh()}, overwrite=True)
    with pytest.raises(CheckpointError, match="/1 builds on it"):
        compact(folder / "2", folder / "0", overwrite=True)


def test_no_base_of_steps_is_replaced(chain, folder):
    for i in range(3):
        (folder / f"steps/{i}").mkdir(parents=True)
        (folder / f"{i}").rename(folder / f"steps/{i}/tables")
    with pytest.raises(CheckpointError, match=r"/steps/1/tables, .*/steps/2/tables build on it"):
        prune(folder / "steps/2/tables", folder / "steps/0/tables", RULE, overwrite=True)
    assert len(restore(folder / "steps", {"t": chain})["t"]) == 9


def test_a_save_over_a_base_warns(chain, folder):
    with pytest.warns(UserWarning, match=r"kvjax: save: want .*/0: .*/1, .*/2 build on what this save has replaced"):
        save(folder / "0", {"t": chain}, cursor="c", overwrite=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shutil.rmtree(folder / "1"), shutil.rmtree(folder / "2")
        for _ in range(2):
            save(folder / "0", {"t": chain}, cursor="c", overwrite=True)
            save(folder / "alone", {"t": chain}, overwrite=True)
        save(folder / "1", {"t": chain}, since="c")
        save(folder / "alone", {"t": chain}, overwrite=True)
    assert len(restore(folder / "1", {"t": chain})["t"]) == 9


def restored(table, path):
    kvjax.drop_table(table.name)
    return restore(path)["t"].export()


def test_a_save_reads_no_more_of_a_long_chain(make, folder, monkeypatch):
    """But for a base that is another than it was, which it reads again, and says."""
    table, opened, numbers = make(1).upsert(np.arange(9), np.arange(9.0)[:, None]), Counter(), itertools.count(1)
    save(folder / "0", {"t": table}, cursor="c")
    real = Catalog.open
    monkeypatch.setattr(Catalog, "open", lambda self, name: opened.update([count]) or real(self, name))
    for count in itertools.islice(numbers, 9):
        table = table.upsert([count], [[-1.0]])
        save(folder / f"{count}", {"t": table}, since="c")
    assert opened[1] <= 2 and opened[9] == opened[4] == 1
    shutil.copytree(folder / "4", folder.parent / "4")  # as from a backup: the same bytes in other files
    shutil.rmtree(folder / "4")
    (folder.parent / "4").rename(folder / "4")
    for count in itertools.islice(numbers, 2):
        save(folder / f"{count}", {"t": table}, since="c")
    assert opened[10] > 10 and opened[11] == 1
    (folder / "3").rename(folder.parent / "3")
    for count in itertools.islice(numbers, 2):  # the second would look no further, had the first been content
        with pytest.warns(UserWarning, match="no delta that builds on it restores"):
            save(folder / f"{count}", {"t": table}, since="c")
    (folder.parent / "3").rename(folder / "3")
    for count in itertools.islice(numbers, 2):
        save(folder / f"{count}", {"t": table}, since="c")
    assert opened[15] == 1
    same_rows(table.export(), restored(table, folder / "15"))


def test_a_base_that_comes_back_is_found_where_it_was(chain, folder, monkeypatch):
    """Also by a cursor that was put at a relative path, when the process works elsewhere."""
    (folder / "bases").mkdir()
    for number in "01":
        (folder / number).rename(folder / "bases" / number)
    monkeypatch.chdir(folder)
    table = restore("2", {"t": chain}, base="bases", cursor="c")["t"]
    monkeypatch.chdir(folder.parent)
    save(folder / "3", {"t": table}, since="c")
    (folder / "bases").rename(folder.parent / "away")
    with pytest.warns(UserWarning, match="no delta that builds on it restores"):
        save(folder / "4", {"t": table}, since="c")
    (folder.parent / "away").rename(folder / "bases")
    save(folder / "5", {"t": table}, since="c")
    assert verify(folder / "5", base=folder / "bases")


def test_verify_misses_what_a_delta_builds_on(chain, folder, capsys):
    digests = [json.loads((folder / f"{i}/kvjax.json").read_text())["digest"] for i in range(3)]
    far, calls = folder.parent / "far/away", ["verify", str(folder / "2")]
    far.mkdir(parents=True)
    assert all(verify(folder / f"{i}").ok for i in range(3)) and main(calls) == 0
    for lost, of in ((0, 1), (1, 2)):
        (folder / f"{lost}").rename(far / f"{lost}")
        if lost == 0:
            save(folder / "0", {"t": chain})  # another, in its place
        found = verify(folder / "2")
        (missing,) = found.missing
        assert not found.ok and found.problems == () and missing.digest == digests[lost] and missing.tables == ("t",)
        want = (
            rf"kvjax: table 't', verify: want the checkpoint of digest {digests[lost]}, on which the delta in .*/{of} "
        )
        assert re.search(want + r"builds, got none beside it; give its folder as base=$", missing.problem)
        assert verify(folder / "2", alone=True).ok and verify(folder / "2", base=far).ok
        capsys.readouterr()
        assert (main(calls), main([*calls, "--alone"]), main([*calls, "--base", str(far)])) == (1, 0, 0)
        text = capsys.readouterr().out
        assert digests[lost] in text and "give its folder as --base" in text and "as written, 1 lost" in text
        assert main([*calls, "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert (said["ok"], said["problems"], said["missing"][0]["digest"]) == (False, [], digests[lost])
        shutil.move(far / f"{lost}", shutil.rmtree(folder / f"{lost}", ignore_errors=True) or folder / f"{lost}")
    meta = folder / "1/t/kvjax.json"
    meta.write_text(meta.read_text()[:-1])
    (missing,) = verify(folder / "2").missing
    assert missing.digest == digests[1] and "the checkpoint is damaged" in missing.problem
    (file,) = verify(folder / "1").problems  # and of this one itself nothing is asked
    assert file.path == "t/kvjax.json" and verify(folder / "1").missing == ()


def has_delta(path, name):
    return "delta" in json.loads((path / name / "kvjax.json").read_text())


def save_by(api, folder, i, tables, cursor=None, since=None):
    """A save, and the folder of its tables."""
    if api == "save":
        save(folder / f"{i}", tables, cursor=cursor, since=since)
        return folder / f"{i}"
    if api == "v0":
        with ocp.CheckpointManager(folder) as manager:
            args = kvjax.orbax.TableSave(tables, cursor=cursor, delta_since=since)
            manager.save(i, args=ocp.args.Composite(tables=args))
    else:
        with v1.training.Checkpointer(folder) as checkpointer:
            state = kvjax.orbax.StatefulTables(tables, cursor=cursor, delta_since=since)
            checkpointer.save_checkpointables(i, {"tables": state})
    return folder / f"{i}/tables"


@pytest.mark.parametrize("api", few(["save", "v0", "v1"], "save"))
def test_a_table_that_comes_later(api, make, folder):
    """It is whole in the first delta that has it, and a delta in those after that."""
    a, b, releases = make(1).upsert([1, 2, 3], np.ones((3, 1))), make(2), Releases(folder.parent / "model")
    first = save_by(api, folder, 0, {"a": a}, cursor="c")
    releases.follow(folder)
    steps, wants = [], []
    for i in (1, 2, 3):
        a, b = a.upsert([i], [[10.0 * i]]).remove([i - 1]), b.upsert([i, 7], np.full((2, 2), i))
        steps.append(save_by(api, folder, i, {"a": a, "b": b}, since="c"))
        assert (has_delta(steps[-1], "a"), has_delta(steps[-1], "b")) == (True, i > 1)
        wants.append([table.lookup(np.arange(9))[:, 0].tolist() for table in (a, b)])
        if i != 2:
            release = releases.follow(folder)
            assert [release[name].lookup(np.arange(9))[:, 0].tolist() for name in "ab"] == wants[-1]
    for path, want in zip(steps, wants, strict=True):
        found = restore(path, {"a": a.refresh(), "b": b.refresh()})
        assert [found[name].lookup(np.arange(9))[:, 0].tolist() for name in "ab"] == want
        assert verify(path).ok
    compact(steps[-1], folder.parent / "whole")
    assert diff(steps[-1], folder.parent / "whole").same and diff(first, steps[0]).added == ("b",)
    report = prune(steps[-1], folder.parent / "few", kvjax.Prune(min_norm=4.0))
    assert (report["a"].dropped.rows, report["b"].dropped.rows) == (0, 2)
    (lost,) = [each for each in PROCESS.cursors if each[0] == "c"]
    assert lost == ("c", ("a", "b"))  # it has moved
    shutil.rmtree(steps[0].parent if api != "save" else steps[0])
    (missing,) = verify(steps[-1]).missing
    assert missing.tables == ("a", "b")
    with pytest.raises(CheckpointError, match="want the checkpoint of digest"):
        restore(steps[-1], {"a": a.refresh(), "b": b.refresh()})


def test_a_restore_and_then_another_table(chain, make, folder):
    PROCESS.cursors.clear()
    table, more = restore(folder, {"t": chain}, cursor="c")["t"], make(3).upsert([1], np.ones((1, 3)))
    save(folder / "3", {"t": table, "more": more}, since="c")
    assert has_delta(folder / "3", "t") and not has_delta(folder / "3", "more")
    assert verify(folder / "3").ok


def test_a_cursor_that_a_failed_save_was_to_move(chain, make, folder, monkeypatch):
    more = make(3).upsert([1], np.ones((1, 3)))
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvjax.checkpoint._tables.save.write_manifest", lambda folder: (_ for _ in ()).throw(OSError("full"))
        )
        with pytest.raises(OSError, match="full"):
            save(folder / "3", {"t": chain, "more": more}, since="c")
    table = chain.upsert([3], [[-1.0]])
    save(folder / "3", {"t": table}, since="c")  # as it was
    assert has_delta(folder / "3", "t") and len(PROCESS.cursors) == 1
    want = table.lookup([1, 2, 3])[:, 0].tolist()
    assert restore(folder / "3", {"t": table})["t"].lookup([1, 2, 3])[:, 0].tolist() == want == [-1.0] * 3


def test_which_cursor_it_is(chain, make, folder):
    """Of two, none of which has all tables of the other, none is chosen; and a delta leaves out no table."""
    more = make(3).upsert([1], np.ones((1, 3)))
    save(folder / "more", {"more": more}, cursor="c")
    for tables in ({"t": chain, "more": more}, {"other": more}):
        with pytest.raises(
            CheckpointError, match=r"want a cursor 'c' .*got 'c' of \['more'\], 'c' of \['t'\]; save all"
        ):
            save(folder / "3", tables, since="c")
    save(folder / "3", {"t": chain, "more": more}, cursor="c")
    save(folder / "4", {"t": chain, "more": more, "again": more}, since="c")
    assert [has_delta(folder / "4", name) for name in ("t", "more", "again")] == [True, True, False]
    assert sorted(key[1] for key in PROCESS.cursors) == [("again", "more", "t"), ("more",), ("t",)]


def test_a_delta_does_not_replace_what_it_builds_on(chain, folder):
    whole = files(folder)
    for place in ("2", "0"):
        with pytest.raises(
            CheckpointError, match=f"want another path than that of what a delta since 'c' .*/{place}; "
        ):
            save(folder / place, {"t": chain}, since="c", overwrite=True)
    assert files(folder) == whole
    restore(folder / "2", {"t": chain}, cursor="new")  # as a new process has it
    for place in ("2", "1", "0"):
        with pytest.raises(CheckpointError, match=f"what a delta since 'new' .*/{place}; "):
            save(folder / place, {"t": chain.refresh()}, since="new", overwrite=True)
    chain = chain.refresh()
    restore(folder / "2", {"t": chain}, cursor="c")
    chain = chain.refresh()
    save(folder / "3", {"t": chain}, since="c")
    assert len(restore(folder / "3", {"t": chain})["t"]) == 9


def test_nothing_is_saved_into_a_checkpoint_or_over_what_is_in_its_folder(chain, folder):
    with pytest.raises(CheckpointError, match=r"save: want a place outside of checkpoints, got .*/0/1, which is in "):
        save(folder / "0/1", {"t": chain})
    (folder.parent / "other").mkdir()
    save(folder.parent / "other/1", {"t": chain})
    (folder.parent / "other/1").rename(folder / "2/1")  # as releases before this one let it be saved
    (folder / "2/notes.txt").write_text("mine")
    whole = files(folder)
    for call in (
        lambda: save(folder / "2", {"t": chain}, overwrite=True),
        lambda: compact(folder / "1", folder / "2", overwrite=True),
    ):
        with pytest.raises(CheckpointError, match=r"a checkpoint alone to replace, got .*/2, .* '1', 'notes.txt', too"):
            call()
    assert files(folder) == whole
    (folder / "1/t/notes.txt").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"a checkpoint alone to replace, got .*/1, in which there is 't/notes.txt'"
    ):
        save(folder / "1", {"t": chain}, overwrite=True)
