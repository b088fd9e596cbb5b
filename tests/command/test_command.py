"""The command line: what each command prints, its exit status, and that looking at a checkpoint loads no JAX."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax._command.arguments import parser
from kvjax._command.main import main
from kvjax._command.plot import _growth
from kvjax._command.prune import rules_of
from tests.support.checkpoints import IDS, save
from tests.support.marks import slow

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def run(capsys):
    """Runs a command: ``run("inspect", folder)`` gives its status and what it printed, decoded if it is JSON."""

    def run(*args):
        status = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return status, json.loads(out) if "--json" in args and status < 2 else out + err

    return run


@pytest.fixture
def manager(make, tmp_path):
    """The root of a manager with two steps, the last of which has a table with a slot and an empty one."""
    keys, values = np.concatenate([np.arange(8), IDS[[0, 1, 3, 4]]]), np.arange(24, dtype=np.float32).reshape(12, 2) / 4
    numbers, yes = np.arange(12), np.ones(12, bool)
    rows = kvjax.Exported(keys, values, numbers % 5, numbers % 4, {"nu": values}, yes, ~yes, 3, 12)
    table = make(2, evict=kvjax.evict.MinNorm(0.1).every(1000)).load(rows)
    save(tmp_path / "manager", 1, {"user": table}, prune=kvjax.Prune(predicate=lambda rows: rows.freqs < 1))
    save(tmp_path / "manager", 12, {"user": table, "item": make(3, dtype="bfloat16")})
    return tmp_path / "manager"


def test_inspect(manager, run, make):
    for path in (manager, manager / "12", manager / "12/tables"):
        status, found = run("inspect", path, "--json", "--stats")
        tables = {table["name"]: table for table in found["tables"]}
        assert status == 0 and found["checkpoint"] == str(manager / "12/tables")
        assert tables["user"]["rows"] == 12 and tables["item"]["dtype"] == "bfloat16"
        assert tables["user"]["options"]["evict"]["rule"] == "Every" and tables["user"]["last_step"] == 3
        live = kvjax.checkpoint.restore(manager, {"user": None})["user"].export()
        stats = tables["user"]["stats"]
        assert stats["frequency"]["max"] == live.freqs.max() and stats["age"]["min"] == 0
        assert stats["norm"]["max"] == pytest.approx(np.linalg.norm(live.values, axis=1).max())
        assert tables["item"]["stats"]["norm"]["max"] == 0
    status, text = run("inspect", manager, "--table", "user")
    assert status == 0 and "Every(policy=MinNorm(norm=0.1), steps=1000)" in text and "item" not in text


@slow
@pytest.mark.parametrize("version", [1, 2, 3])
def test_checkpoints_of_all_formats(version, run, tmp_path):
    folder = GOLDEN / "checkpoint_v1"
    if version > 1:
        shutil.unpack_archive(GOLDEN / f"checkpoint_v{version}.zip", tmp_path)
        folder = next(tmp_path.rglob("shard-*")).parents[1]
    status, found = run("inspect", folder, "--json", "--stats")
    assert status == 0 and found["tables"][0]["stats"]["frequency"]["max"] > 0
    table = found["tables"][0]["name"]
    status, found = run("top", folder, "--table", table, "--json", "-n", 2)
    assert len(found["rows"]) == 2


@slow
def test_top(manager, run):
    rows = kvjax.checkpoint.restore(manager)["user"].export()
    norms = np.linalg.norm(rows.values, axis=1)
    order = {"frequency": -rows.freqs, "recent": -rows.versions, "oldest": rows.versions, "norm": -norms}
    for by, values in order.items():
        status, found = run("top", manager, "--table", "user", "--by", by, "-n", 4, "--json")
        assert [row["key"] for row in found["rows"]] == rows.keys[np.argsort(values, kind="stable")[:4]].tolist()
    status, text = run("top", manager)
    assert status == 2 and "want one table of the checkpoint, got ['item', 'user']; say which: --table" in text
    assert "4 of 12 rows" in run("top", manager, "--table", "user", "-n", "4")[1]


def test_verify_and_diff(manager, run):
    assert run("verify", manager)[0] == 0 and run("diff", manager, manager / "12")[0] == 0
    status, found = run("diff", manager / "1", manager, "--json")
    assert status == 1 and found["added"] == ["item"] and found["tables"]["user"]["added"] == 9
    assert "only in the second: item" in run("diff", manager / "1", manager)[1]
    assert run("diff", manager / "1", manager, "--table", "user", "--json")[1]["added"] == []
    status, text = run("diff", manager / "1", manager, "--table", "usr")
    assert status == 2 and "table 'usr', diff: want one of the checkpoints' tables, got none of that name" in text
    path = manager / "12/tables/user/kvjax.json"
    path.write_text(path.read_text().replace('"seed": ', '"seed": 1'))
    status, found = run("verify", manager, "--json")
    assert status == 1 and [p["path"] for p in found["problems"]] == ["user/kvjax.json"]
    assert "1 damaged" in run("verify", manager)[1]
    for command in (["inspect"], ["top", "--table", "user"]):  # which showed another seed
        status, text = run(command[0], manager, *command[1:])
        assert status == 2 and text.startswith(f"kvjax: table 'user', {command[0]}: want {path}"), text
    path.unlink()
    os.mkfifo(path)
    assert run("inspect", manager)[0] == 2  # and does not wait


def test_what_is_lost_or_cut_is_an_error(manager, run):
    folder = manager / "12/tables"
    chunk = next(folder.glob("user/shard*/freqs/c.0"))
    chunk.write_bytes((freqs := chunk.read_bytes())[:-1])
    status, text = run("inspect", manager, "--stats")
    assert status == 2 and "table 'user', inspect: want" in text and "/freqs/c.0 with" in text
    assert run("inspect", manager)[0] == 0  # which reads no rows
    chunk.write_bytes(freqs)
    values = next(folder.glob("user/shard*/values/c.0.0"))
    values.write_bytes((whole := values.read_bytes())[:-1] + b"x")
    for command in (["top", manager, "--table", "user"], ["inspect", manager, "--stats"]):
        status, text = run(*command)
        assert status == 2 and f"table 'user', {command[0]}: want" in text and "of digest" in text
    values.write_bytes(whole)
    chunk.unlink()
    os.mkfifo(chunk)
    assert run("top", manager, "--table", "user")[0] == 2  # and does not wait
    shutil.rmtree(folder / "item")
    status, text = run("inspect", manager)
    assert status == 2 and f"table 'item', inspect: want the file {folder}/item/" in text
    assert run("inspect", manager, "--table", "user")[0] == 0
    (folder / "kvjax.json").write_text("{}")
    assert "want contents and their digest" in run("inspect", manager)[1]


def test_a_rule_of_0_is_a_rule():
    args = parser().parse_args(["prune", "here", "--max-age", "0", "--top-k", "0", "--min-norm", "0"])
    assert rules_of(args) == kvjax.Prune(max_age=0, top_k=0, min_norm=0.0)
    assert rules_of(parser().parse_args(["prune", "here"])) is None


@slow
def test_prune(manager, run, tmp_path):
    status, found = run("prune", manager, "--min-frequency", 3, "--zero-rows", "--dry-run", "--json")
    rows = kvjax.checkpoint.restore(manager)["user"].export()
    assert found["user"]["by_rule"]["min_frequency"]["rows"] == (rows.freqs < 3).sum()
    kvjax.drop_table("user")
    kvjax.drop_table("item")
    status, text = run("prune", manager, tmp_path / "small", "--min-frequency", 3, "--zero-rows")
    assert status == 0 and "left out" in text and not kvjax.tables().keys() & {"user", "item"}
    kept = kvjax.checkpoint.restore(tmp_path / "small")["user"].export()
    assert set(kept.keys.tolist()) == set(rows.keys[rows.freqs >= 3].tolist())
    assert run("prune", manager, "--dry-run")[0] == 2 and run("prune", manager, "--min-norm", 1)[0] == 2


@slow
def test_convert(manager, run, tmp_path):
    status, found = run("convert", manager, tmp_path / "u.npz", "--table", "user", "--slots", "--json")
    assert status == 0 and found["rows"] == 12 and found["error"] is None
    rows = kvjax.convert.from_npz(tmp_path / "u.npz").rows
    assert "nu" in rows.slots
    status, text = run("convert", tmp_path / "u.npz", tmp_path / "again", "--table", "again")
    assert status == 0 and not kvjax.tables().keys() & {"again"}
    np.testing.assert_array_equal(kvjax.checkpoint.restore(tmp_path / "again")["again"].lookup(rows.keys), rows.values)
    status, text = run("convert", tmp_path / "u.npz", tmp_path / "v.npz", "--quantise", "int8", "--top-k", 3)
    assert status == 0 and "cosine" in text and len(np.load(tmp_path / "v.npz")["keys"]) == 3
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    args = "--from", "tfra", "--table", "items", "--dim", 3, "--json"
    assert run("convert", GOLDEN / "tfra", tmp_path / "tfra", *args)[1]["rows"] == 8
    args = "--from", "tfra", "--table", "user/emb", "--slot", "m=mu", "--slot", "v=nu"
    status, text = run("convert", GOLDEN / "tfra_slots", tmp_path / "slots", *args)
    assert status == 0 and "left out" not in text
    assert run("inspect", tmp_path / "slots", "--json")[1]["tables"][0]["slots"] == dict.fromkeys(
        ["mu", "nu"], "float32[3]"
    )
    wrongly = (
        (GOLDEN / "tfra", tmp_path / "x", "--from", "tfra"),
        (manager, "x.npz"),
        (manager, tmp_path / "x", "--slots"),
        (manager, tmp_path / "x.npz", "--table", "user", "--dim", 3),
        (tmp_path / "u.npz", tmp_path / "x", "--quantise", "int8"),
        (tmp_path / "u.npz", tmp_path / "u.npz"),
        (manager, tmp_path / "x.parqet", "--table", "user"),
    )
    for wrong in wrongly:
        status, text = run("convert", *wrong)
        assert status == 2 and text.startswith("kvjax"), text
    assert not (tmp_path / "x").exists()


def test_rows_that_are_not_finite_hide_no_others(run, make, tmp_path):
    rows = [[3.0, 4.0], [np.nan, 1.0], [np.inf, 0.0], [0.0, 1.0]]
    kvjax.checkpoint.save(tmp_path / "one", [make(2).upsert(np.arange(4), rows)])
    (found,) = run("inspect", tmp_path / "one", "--stats", "--json")[1]["tables"]
    assert found["not_finite"] == 2 and found["stats"]["norm"]["min"] == 1 and found["stats"]["norm"]["max"] == 5
    assert "2 rows have NaN or infinite elements" in run("inspect", tmp_path / "one", "--stats")[1]


@slow
def test_deltas(run, make, tmp_path):
    table = make(2).upsert(np.arange(6), np.ones((6, 2)))
    kvjax.checkpoint.save(tmp_path / "base", [table], cursor="serving")
    table = table.remove(np.array([0])).upsert(np.array([7]), [[3.0, 4.0]])
    kvjax.checkpoint.save(tmp_path / "delta", [table], since="serving")
    assert run("verify", tmp_path / "delta")[0] == 0
    status, found = run("inspect", tmp_path / "delta", "--stats", "--json")
    assert found["tables"][0]["stats"]["norm"]["max"] == 5 and found["tables"][0]["delta"]
    assert run("top", tmp_path / "delta", "--by", "norm", "--json")[1]["rows"][0]["key"] == 7
    status, found = run("convert", tmp_path / "delta", tmp_path / "delta.npz", "--json")
    assert status == 0 and found["rows"] == 6
    assert run("convert", tmp_path / "delta", tmp_path / "whole")[0] == 0
    status, found = run("diff", tmp_path / "base", tmp_path / "whole", "--json")
    assert (found["tables"]["table0"]["added"], found["tables"]["table0"]["removed"]) == (1, 1)
    status, found = run("prune", tmp_path / "delta", tmp_path / "small", "--min-norm", 4, "--json")
    assert status == 0 and found["table0"]["dropped"]["rows"] == 5
    (tmp_path / "far").mkdir()
    base, delta = (tmp_path / "base").rename(tmp_path / "far/base"), tmp_path / "delta"
    shutil.rmtree(tmp_path / "whole"), shutil.rmtree(tmp_path / "small")
    for command in (
        ("inspect", delta, "--stats"), ("top", delta), ("get", delta, 5), ("diff", delta, delta),
        ("convert", delta, tmp_path / "o.npz"), ("convert", delta, tmp_path / "whole"),
        ("prune", delta, tmp_path / "small", "--min-norm", 4),
    ):  # fmt: skip
        status, text = run(*command)
        assert status == 2 and "give its folder as --base" in text, text
        assert run(*command, "--base", base)[0] == 0


@slow
def test_plots_and_completion(manager, run, tmp_path):
    pytest.importorskip("matplotlib")
    assert run("inspect", manager, "--plot", tmp_path / "p.svg")[0] == 0
    status, text = run("inspect", manager, "--plot", tmp_path / "p.svg")
    assert status == 2 and f"want a path with nothing there, got {tmp_path}/p.svg, which exists; give" in text
    assert run("inspect", manager, "--plot", tmp_path / "p.svg", "--overwrite")[0] == 0
    assert "want --plot beside --overwrite" in run("inspect", manager, "--overwrite")[1]
    drawn = (tmp_path / "p.svg").read_text()
    assert drawn.count('id="axes_') == 8  # three distributions and the growth of two tables
    shtab = pytest.importorskip("shtab")
    for shell in {"bash", "zsh", "fish", "tcsh"} & set(shtab.SUPPORTED_SHELLS):
        status, script = run("completion", shell)
        assert status == 0 and "min-frequency" in script


def test_growth_of_deltas(make, tmp_path, capsys):
    table = make(2).upsert(np.arange(6), np.ones((6, 2)))
    kvjax.checkpoint.save(tmp_path / "0", [table], cursor="serving")
    table = table.remove(np.array([0])).upsert(np.array([7, 8]), np.ones((2, 2)))
    kvjax.checkpoint.save(tmp_path / "1", [table], since="serving")
    assert _growth(str(tmp_path), ()) == {"table0": {0: 6, 1: 7}}  # the delta has 2 rows of its own
    assert _growth(str(tmp_path / "1"), ()) == {}
    shutil.rmtree(tmp_path / "0")  # as a manager does that keeps the last few
    assert _growth(str(tmp_path), ()) == {}
    assert capsys.readouterr().err.endswith("the growth is without steps whose rows cannot be read: 1\n")


def test_a_bug_is_no_difference(run, monkeypatch):
    monkeypatch.setattr("kvjax._command.verify.run", lambda args: {}["bug"])
    status, text = run("verify", "x")
    assert status == 2 and "KeyError: 'bug'" in text


def test_errors_name_the_flags_of_the_command(manager, run, tmp_path):
    rules = ("--min-frequency", 1)
    assert run("prune", manager, tmp_path / "small", *rules)[0] == 0
    status, text = run("prune", manager, tmp_path / "small", *rules)
    assert status == 2 and "give another, or --overwrite" in text and "overwrite=True" not in text
    assert run("prune", manager, tmp_path / "small", *rules, "--overwrite")[0] == 0
    assert "say which: --table" in run("convert", manager, tmp_path / "o.npz")[1]
    assert "got a folder, which gets all" in run("convert", manager, tmp_path / "o", "--table", "user")[1]
    np.arange(3).tofile(tmp_path / "items_mht_1of1_rank0_size1-keys")
    np.ones((3, 2), np.float32).tofile(tmp_path / "items_mht_1of1_rank0_size1-values")
    for end in ("keys", "values"):
        shutil.copy(tmp_path / f"items_mht_1of1_rank0_size1-{end}", tmp_path / f"items_m_mht_1of1_rank0_size1-{end}")
    items = "convert", tmp_path, tmp_path / "new", "--from", "tfra", "--table", "items", "--dim", 2
    status, text = run(*items, "--slot", "m=mu", "--fill", "mu=1")
    assert status == 2 and "want --fill of slots that no file has, got ['mu'], which --slot takes" in text
    with pytest.raises(SystemExit, match="0"):
        run("--version")


def test_errors_of_the_system_name_the_command(manager, run, tmp_path):
    pytest.importorskip("matplotlib")
    nowhere = tmp_path / "nowhere" / "p.svg"
    status, text = run("inspect", manager, "--plot", nowhere)
    assert status == 2 and text == (
        f"kvjax: write: want a folder to write the file in, got none; make it first: {nowhere}\n"
    )
    status, text = run("inspect", manager, "--plot", tmp_path)
    assert status == 2 and "want a name that ends with one of" in text
    assert "want a name that ends with one of" in run("inspect", manager, "--plot", tmp_path / "p.what")[1]
    (tmp_path / "p.png").mkdir()
    assert "got a folder; name one in it" in run("inspect", manager, "--plot", tmp_path / "p.png")[1]


def test_the_folder_that_one_is_in(manager, run, monkeypatch):
    step = manager / str(max(int(each.name) for each in manager.iterdir() if each.name.isdecimal()))
    for folder in (manager, step, step / "tables"):
        monkeypatch.chdir(folder)
        assert run("verify", ".")[0] == 0
        assert run("top", "./", "--table", "user")[0] == 0
    assert run("verify", "..")[0] == 0


@slow
def test_letters_that_a_font_lacks_are_no_matter(make, run, tmp_path, recwarn):
    pytest.importorskip("matplotlib")
    kvjax.checkpoint.save(tmp_path / "a", {"日本": make(1)})
    assert run("inspect", tmp_path / "a", "--plot", tmp_path / "p.svg")[0] == 0
    assert run("inspect", tmp_path / "a", "--plot", tmp_path / "p.png")[0] == 0 and not recwarn.list


def test_no_command_writes_where_it_reads(manager, run, tmp_path):
    whole = tmp_path / "whole"
    assert run("convert", manager, whole)[0] == 0
    files = sorted(tmp_path.rglob("*"))
    places = [whole, whole / "sub", whole / "user/sub"]
    runs = [("prune", whole, out, "--overwrite", "--top-k", "3") for out in places]
    runs += [("convert", whole, out, "--overwrite") for out in places]
    runs += [("convert", whole, whole / "x.npz", "--table", "user")]
    for args in runs:
        status, text = run(*args)
        assert status == 2 and re.search("want (a place outside of|another place than)", text), (
            args,
            text,
        )
    assert sorted(tmp_path.rglob("*")) == files
    status, text = run("prune", whole, tmp_path / "out", "--dry-run", "--top-k", "3")
    assert status == 2 and "want OUT or --dry-run, got both" in text
    assert "got no OUT and no --dry-run" in run("prune", whole, "--top-k", "3")[1]
    assert "want a rule, as --min-norm, got none" in run("prune", whole, tmp_path / "out")[1]


def test_what_is_said_wrongly(run, capsys, tmp_path):
    text = run("inspect", tmp_path)[1]
    assert text.startswith(f"kvjax: inspect: want a checkpoint of tables, got none in {tmp_path}")
    assert f"none in {tmp_path}/nowhere, which is not there; " in run("inspect", tmp_path / "nowhere")[1]
    (tmp_path / "file").touch()
    assert (
        f"want a checkpoint of tables, got {tmp_path}/file, a file; give the folder"
        in run("inspect", tmp_path / "file")[1]
    )
    status, text = run("merge", tmp_path, tmp_path / "file", "--overwrite")  # of which OUT is one to be merged, perhaps
    assert status == 2 and "want two checkpoints or more and then OUT, got" in text
    away = run("convert", tmp_path / "nowhere", tmp_path / "out", "--table", "user")[1]
    assert "none in" in away and "which is not there; check the path" in away  # and not what OUT may be
    for args in ([], ["what"], ["top", str(tmp_path), "-n", "-1"], ["top", str(tmp_path), "-n", "ten"]):
        with pytest.raises(SystemExit) as error:
            main(args)
        text = capsys.readouterr().err
        assert error.value.code == 2 and "usage: kvjax" in text and "_count" not in text


@slow
def test_without_rich(manager, run, monkeypatch):
    for module in ("rich.box", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, module, None)
    status, text = run("inspect", manager)
    assert status == 0 and re.search(r"^user +12 +2 +float32 +int64 +3 +1 +nu ", text, re.M)


def test_commands_import_without_jax():
    code = (
        "import importlib, pkgutil, sys; import kvjax._command as c, kvjax.checkpoint, kvjax.convert\n"
        "for module in pkgutil.iter_modules(c.__path__): importlib.import_module(f'{c.__name__}.{module.name}')\n"
        "for name in {*kvjax.checkpoint.__all__} - {'save', 'restore'}: getattr(kvjax.checkpoint, name)\n"
        "kvjax.hash_keys(['a']); print({'jax', 'flax', 'orbax', 'optax', 'tensorstore'} & sys.modules.keys())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@slow
def test_no_command_loads_jax(manager, tmp_path):
    one, out = str(manager / "1"), str(tmp_path / "out")
    runs = [
        ["verify", manager], ["inspect", manager, "--stats"], ["top", manager, "--table", "user"],
        ["get", manager, "--table", "user", "--slots", "1"],
        ["diff", one, manager], ["prune", manager, "--dry-run", "--min-norm", "1"],
        ["prune", manager, out + "1", "--min-norm", "1"],
        ["convert", manager, out + ".npz", "--table", "user", "--slots"], ["convert", manager, out + "2"],
        ["convert", out + ".npz", out + "3"], ["convert", out + ".npz", out + "4.npz"],
    ]  # fmt: skip
    code = (
        "import json, sys; from kvjax._command.main import main\n"
        "for run in json.loads(sys.argv[1]):\n"
        "    assert main(run) == (run[0] == 'diff'), run\n"
        "    assert not {'jax', 'flax', 'orbax', 'optax', 'tensorstore'} & sys.modules.keys(), run\n"
    )
    argv = [sys.executable, "-c", code, json.dumps(runs, default=str)]
    out = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout  # errors show in the test's own
    assert "user" in out
    for lines in (0, 1):
        piped = subprocess.Popen([sys.executable, "-m", "kvjax", "inspect", str(manager)], stdout=subprocess.PIPE)
        for _ in range(lines):
            piped.stdout.readline()
        piped.stdout.close()  # as head does
        assert piped.wait(60) == 0
