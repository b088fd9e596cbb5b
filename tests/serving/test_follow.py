"""Releases follow checkpoints: of deltas only what has changed is read, and every release is the table as it was."""

import os
import shutil
import subprocess
import sys

import numpy as np
import optax
import pytest

import kvjax
from kvjax.checkpoint import CheckpointError, compact, save
from kvjax.serving import Changes, FrozenTable, Releases
from kvjax.serving._contents import of_chain
from tests.support.checkpoints import trained
from tests.support.marks import slow
from tests.support.tables import AWKWARD

pytestmark = [slow]
ASKED = np.concatenate([AWKWARD, np.arange(300, 310)])


def same(frozen, table):
    np.testing.assert_array_equal(frozen.lookup(ASKED), table.lookup(ASKED))
    assert len(frozen) == len(table) and frozen.step == table.export().last_step


@pytest.mark.parametrize("missing", ["zeros", [7.0, 7.0], "init"], ids=str)
def test_what_keys_without_a_row_read_as_stays(make, tmp_path, missing):
    """By deltas, and by checkpoints that are whole."""
    table, releases = make(2, initializer=0.5), Releases(tmp_path / "model")
    for step, how in enumerate([{"cursor": "stays"}, {"since": "stays"}, {"cursor": "stays"}]):
        table = table.upsert([step], [[1.0, 1.0]])
        save(tmp_path / "saved" / str(step), [table], **how)
        release = releases.follow(tmp_path / "saved", missing=missing if step == 0 else None)
        want = {"zeros": [0.0, 0.0], "init": [0.5, 0.5]}.get(str(missing), missing)
        assert release[table.name].lookup([99]).tolist() == [want]


def test_takes_no_jax(make, tmp_path):
    table = make(2).upsert([1, 2], np.ones((2, 2)))
    save(tmp_path / "saved/0", [table], cursor="c")
    save(tmp_path / "saved/1", [table.upsert([2, 3], np.full((2, 2), 5.0))], since="c")
    program = f"""
import sys, kvjax
releases = kvjax.serving.Releases({str(tmp_path / "model")!r})
for step in ("0", "1"):
    release = releases.follow({str(tmp_path / "saved")!r} + "/" + step)
assert not {{"jax", "flax", "orbax", "optax"}} & sys.modules.keys()
print(release[{table.name!r}].lookup([1, 2, 3])[:, 0].tolist())
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[1.0, 5.0, 5.0]\n"


def test_rows_that_a_delta_leaves_behind_are_said_to_be(make, tmp_path):
    """Those that were not trained: unless all rows were swept, and then the delta has all."""
    tx, releases = kvjax.optax.catch_up(optax.sgd(1.0, momentum=0.5)), Releases(tmp_path / "model")
    table, state = make(1), tx.init(1)

    def step(table, state, keys):
        return table.apply(tx, kvjax.SparseRows(np.array(keys), np.ones((len(keys), 1), np.float32)), state)

    table, state = step(table, state, [1, 2, 3])
    save(tmp_path / "saved/0", [table], cursor="c")
    releases.follow(tmp_path / "saved")
    table, state = step(table, state, [2, 3])
    save(tmp_path / "saved/1", [table], since="c")
    with pytest.warns(UserWarning, match=r"follow: .* may be behind, as the delta leaves some out; save what .*sweep"):
        releases.follow(tmp_path / "saved")
    save(tmp_path / "saved/1b_1", [table], since="c")
    releases.follow(tmp_path / "saved/1b_1")  # no step since
    now = kvjax.optax.sweep(table, state, tx)
    save(tmp_path / "saved/2", [now], since="c")
    same(releases.follow(tmp_path / "saved")[table.name], now)


@pytest.mark.filterwarnings("ignore:.*got none beside it")  # which a release does not need
@pytest.mark.parametrize(
    "admit", [None, kvjax.admit.MinCount(2, unadmitted=int(AWKWARD[0]))], ids=["plain", "shared row"]
)
def test_follows_deltas(admit, make, tmp_path, monkeypatch):
    """The row that unadmitted keys share is what keys without a row read as: it changes with its delta."""
    saved, releases = tmp_path / "saved", Releases(tmp_path / "model")
    table = make(2, initializer=kvjax.initializers.normal(1.0), admit=admit).upsert(AWKWARD, np.ones((8, 2)))
    other = make(1).upsert([1], [[1.0]])
    reads = []
    monkeypatch.setattr("kvjax.serving._follow.of_chain", lambda *given: reads.append(1) or of_chain(*given))
    with pytest.raises(CheckpointError, match="want a checkpoint of tables"):
        releases.follow(saved)
    with pytest.raises(ValueError, match="quantise= as one of"):
        releases.follow(saved, quantise="float32")
    for step in range(5):
        tables = {"a": table, "b": other}
        if step == 0:
            save(saved / "step_0", tables, cursor="serving")
        else:
            save(saved / f"step_{step}", tables, since="serving")
        if step == 2:
            continue  # one that nobody has followed
        if step == 3:
            shutil.rmtree(saved / "step_0")  # only a release that is far behind would need it
        release = releases.follow(saved, {"step": str(step).encode()})
        same(release["a"], table)
        assert release.files == {"step": str(step).encode()}
        assert releases.follow(saved) is release
        table = trained(table.remove(AWKWARD[step + 1 : step + 2]), optax.sgd(0.1))
        table = table.upsert(AWKWARD[:1], np.full((1, 2), float(step)))
    assert os.stat(release["b"].path).st_nlink > 1  # in which nothing has changed
    assert len(reads) == 2


def test_what_no_delta_tells_is_written_whole(make, tmp_path):
    table, releases = make(2).upsert(AWKWARD, np.ones((8, 2))), Releases(tmp_path / "model")
    save(tmp_path / "0", [table], cursor="c")
    name = table.name
    assert releases.follow(tmp_path / "0", quantise="float16")[name].dtype == "float16"
    table = table.remove(AWKWARD[:1])
    save(tmp_path / "1", [table], since="c")
    compact(tmp_path / "1", tmp_path / "whole")
    assert releases.follow(tmp_path / "whole")[name].dtype == "float16"
    save(tmp_path / "2", [table.upsert(AWKWARD[:1], np.full((1, 2), 5.0))], since="c")
    shutil.rmtree(tmp_path / "1"), shutil.rmtree(tmp_path / "0")
    release = releases.follow(tmp_path / "2")  # on what the compacted one stands for
    same(release[name], table.refresh())
    release = releases.update({name: Changes([1], [[7.0, 7.0]])})
    assert release.checkpoint == () and releases.update({}, {"x": b""}).checkpoint == ()
    back = releases.follow(tmp_path / "2", missing="zeros")  # which is not that any more
    same(back[name], table.refresh())
    assert releases.follow(tmp_path / "2", missing="zeros") is back
    assert releases.follow(tmp_path / "2", missing=[1.0, 2.0])[name].lookup([5]).tolist() == [[1.0, 2.0]]
    shutil.rmtree(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="got none beside it; give its folder as base="):
        Releases(tmp_path / "new").follow(tmp_path / "2")


def test_two_that_follow_at_once_publish_one_release(make, tmp_path):
    table, of = make(2).upsert([1], [[1.0, 2.0]]), []
    for step in range(2):
        save(tmp_path / f"c/{step}", [table.upsert([step], [[3.0, 4.0]])])
        table = table.refresh()

        def files(folder, step=step):  # called after this one has looked, and before it has the folder for itself
            of.append(Releases(tmp_path / "model").follow(tmp_path / f"c/{step}", lambda folder: {"by": b"other"}))
            return {"by": b"this"}

        of.append(Releases(tmp_path / "model").follow(tmp_path / f"c/{step}", files))
    assert [release.number for release in of] == [1, 1, 2, 2] and of[-1].files["by"] == b"other"
    assert [info.number for info in Releases(tmp_path / "model").history()] == [1, 2]


@pytest.mark.parametrize("behind", ["its look at the releases", "all looks"])
def test_one_that_is_overtaken_follows_the_newest_checkpoint(behind, make, tmp_path, monkeypatch):
    """Two follow one folder: the first has found a checkpoint when the next one is saved, which the other publishes."""
    table, saved, of = make(1).upsert([1], [[1.0]]), tmp_path / "saved", []
    save(saved / "1", [table], cursor="c")

    def overtaken(folder):
        of.append(folder.name)
        if len(of) == 1:
            save(saved / "2", [table.upsert([1], [[2.0]])], since="c")
            Releases(tmp_path / "model").follow(saved, {"by": b"other"})

    def follow(self, chain, *args, **kwargs):
        overtaken(chain.catalog.directory)
        return was(self, chain, *args, **kwargs)

    def files(folder):
        overtaken(folder)
        return {"by": b"this"}

    was = Releases._follow
    if behind != "all looks":
        monkeypatch.setattr(Releases, "_follow", follow)
    release = Releases(tmp_path / "model").follow(saved, files)
    assert (release.number, release[table.name].lookup(1).tolist(), release.files["by"]) == (1, [2.0], b"other")
    assert of[0] == "1"


def test_updates_do_not_keep_one_that_follows_from_publishing(make, tmp_path):
    """One comes each time between its look at the releases and its own one."""
    table, model, calls = make(1).upsert([1], [[1.0]]), Releases(tmp_path / "model"), []
    model.publish({table.name: table}, {"by": b"publish"})

    def files(folder):
        calls.append(folder)
        assert len(calls) < 3
        Releases(tmp_path / "model").update({table.name: Changes([1], [[9.0]])}, {"more": b"update"})
        return {"by": b"follow"}

    save(tmp_path / "saved/1", [table])
    release = model.follow(tmp_path / "saved", files)
    assert (release.number, release[table.name].lookup(1).tolist(), len(calls)) == (3, [1.0], 1)
    assert release.files == {"by": b"follow", "more": b"update"}


def test_bases_are_found_or_said(make, tmp_path):
    table = make(2).upsert(AWKWARD, np.ones((8, 2)))
    save(tmp_path / "far/base", [table], cursor="c")
    table = table.upsert([1], [[4.0, 4.0]])
    delta, base = tmp_path / "near/delta", tmp_path / "far/base"
    save(delta, [table], since="c")
    calls = {
        "write": lambda **at: FrozenTable.write(tmp_path / "t", delta, **at).lookup(ASKED),
        "export": lambda **at: kvjax.convert.export_checkpoint(delta, tmp_path / "x.npz", **at).rows,
        "diff": lambda **at: kvjax.checkpoint.diff(delta, delta, **at).same,
        "prune": lambda **at: kvjax.checkpoint.prune(delta, None, kvjax.Prune(), **at)[table.name].total.rows,
        "follow": lambda **at: len(Releases(tmp_path / "model").follow(delta, **at)[table.name]),
        "compact": lambda **at: compact(delta, tmp_path / "whole", **at),
    }
    wants = {"export": 8, "diff": True, "prune": 8, "follow": 8, "compact": None}
    for name, call in calls.items():
        with pytest.raises(CheckpointError, match="give its folder as base="):
            call()
        got = call(base=base)
        if name in wants:
            assert got == wants[name]
        else:
            np.testing.assert_array_equal(got, table.lookup(ASKED))


def test_some_tables_and_files_of_their_step(make, tmp_path):
    """What belongs to a checkpoint is found by its folder, which nobody knows before it is followed."""
    saved, releases = tmp_path / "saved", Releases(tmp_path / "model")
    table, calls = make(2), []

    def files(folder):
        calls.append(folder)
        return {"dense": (folder.parent / "dense.bin").read_bytes()}

    for step in range(3):
        table = table.upsert([step], [[1.0, step]])
        save(saved / str(step) / "tables", {"a": table, "b": make(1)}, **({"since": "f"} if step else {"cursor": "f"}))
        (saved / str(step) / "dense.bin").write_bytes(b"%d" % step)
        for _ in range(2):  # the second time there is nothing to do
            release = releases.follow(saved, files, tables=["a"])
        assert list(release) == ["a"] and release.files == {"dense": b"%d" % step}
        assert release.number == step + 1 and len(release["a"]) == step + 1
    assert calls == [saved / str(step) / "tables" for step in range(3)]
    assert sorted(releases.follow(saved)) == ["a", "b"]
    with pytest.raises(CheckpointError, match="'c', follow: want one of the checkpoint's tables"):
        releases.follow(saved, tables=["a", "c"])
    for tables, error in (("a", TypeError), (3, TypeError), ([], ValueError)):
        with pytest.raises(error, match="kvjax: follow: want tables"):
            releases.follow(saved, tables=tables)
    for files in (["x"], lambda folder: ["x"]):
        with pytest.raises(TypeError, match="releases, follow, files: want a mapping by name, got list"):
            releases.follow(saved, files, tables=["a"])
    assert sorted(releases.refresh()) == ["a", "b"]
