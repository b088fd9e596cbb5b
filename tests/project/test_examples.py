"""The examples run, resume after a kill to the same result, and read what they say they read."""

import asyncio
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from kvjax._values.exported import Exported
from kvjax.serving import Releases
from tests.support import processes
from tests.support.marks import few, slow

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import criteo  # noqa: E402
import ctr  # noqa: E402
import graph  # noqa: E402
import search  # noqa: E402
import sequence  # noqa: E402
import serve  # noqa: E402
import two_tower  # noqa: E402
import two_tower_data  # noqa: E402


def run(script, *args, code=0):
    """What a script prints. It does so as it goes on, or one that is killed would have said nothing."""
    command = [sys.executable, str(EXAMPLES / script), "--smoke", *map(str, args)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        timer = threading.Timer(300, process.kill)
        timer.start()
        first, rest = os.read(process.stdout.fileno(), 1 << 16), process.stdout.read()
        timer.cancel()
        process.wait()
        errors.seek(0)
        assert process.returncode == code, (first + rest)[-2000:].decode() + errors.read()[-2000:].decode()
    assert rest, "all of it came at once"
    return (first + rest).decode()


def summary_of(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return {k: v for k, v in summary.items() if "second" not in k}


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run("two_tower.py", "--out", folder)
    assert (folder / "two_tower.png").stat().st_size > 10_000
    return summary_of(folder)


@slow
def test_two_tower_resumes_to_the_same_result(on_one_device, tmp_path):
    assert "step 90 of" in run("two_tower.py", "--out", tmp_path, "--kill-at", 90, code=1)
    assert "resumed at step 80" in run("two_tower.py", "--out", tmp_path)
    assert on_one_device == summary_of(tmp_path)
    assert on_one_device["recall"] > 1.5 * on_one_device["popular"][0]


@slow
def test_a_graph_needs_no_rows_for_nodes_that_are_gone(tmp_path):
    run("graph.py", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    whole, limited = found["all_nodes"], found["with_limit"]
    assert whole["auc"] > 0.8 and limited["auc"] > whole["auc"] - 0.02
    assert limited["rows"] <= 2 * found["limit"] < whole["rows"] and limited["evicted"] > 0
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 50)
    np.savez(tmp_path / "edges.npz", source=ids[np.arange(2048) % 50], target=ids[np.arange(2048) // 41])
    run("graph.py", "--data", tmp_path / "edges.npz", "--max-capacity", 0, "--json", tmp_path / "of_file.json")
    assert json.loads((tmp_path / "of_file.json").read_text())["all_nodes"]["rows"] == 100


@slow
def test_the_next_item_follows_from_those_so_far(tmp_path):
    run("sequence.py", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["model"]["hit_rate"] > 1.15 * found["popularity"]["hit_rate"] and found["rows"] <= 600
    item = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 90).repeat(4)
    ptr = np.array([0, 2, *range(4, 361, 4)], np.uint32)  # as small as a file may have it
    np.savez(tmp_path / "users.npz", ptr=ptr, item=item)
    printed = run("sequence.py", "--data", tmp_path / "users.npz", "--length", 5, "--json", tmp_path / "of_file.json")
    assert "89 users; 2 have fewer than three items" in printed
    assert json.loads((tmp_path / "of_file.json").read_text())["rows"] <= 90


@slow
def test_titles_are_found_by_queries_that_share_no_word_with_them(tmp_path):
    run("search.py", "--json", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tf_idf"] < 0.95 < found["table"]["recall"] and found["frozen"]["recall"] > 0.95
    assert found["frozen"]["rows"] < found["table"]["rows"] and found["waiting"] > 0
    lines = [f"{color} shirt\thue number {i}" for i, color in enumerate(("red", "green", "blue", "black"))] * 40
    (tmp_path / "clicks.tsv").write_text("\n".join(lines))
    run("search.py", "--data", tmp_path / "clicks.tsv", "--json", tmp_path / "of_file.json")
    assert json.loads((tmp_path / "of_file.json").read_text())["table"]["recall"] == 1.0
    (tmp_path / "clicks.tsv").write_text("red shirt\n")
    with pytest.raises(SystemExit, match="want lines of a query, a tab and a title; line 1 of"):
        search.read(tmp_path / "clicks.tsv")


@slow
def test_serve_updates_while_it_answers(tmp_path):
    printed = run("serve.py", "--out", tmp_path)
    assert Releases(tmp_path / "releases").current().number == 3
    assert "answers of releases [1" in printed and "no request failed" in printed, printed
    assert "exported program" in printed and "FrozenTable, float32" in printed


def test_a_server_goes_on_with_the_last_whole_release_and_counts(tmp_path, capsys):
    releases, trainer = Releases(tmp_path), Releases(tmp_path)
    server, request = serve.Server(releases), {"type": "http.request"}

    def asked(*messages, path="/"):
        parts, sent = iter(messages), []

        async def receive():
            return next(parts)

        async def send(message):
            sent.append(message)

        asyncio.run(server({"type": "http", "path": path}, receive, send))
        return (sent[0]["status"], sent[1]["body"]) if sent else None

    def posted(keys):
        body = json.dumps({"keys": keys, "dense": [[0.0] * 13]}).encode()
        return asked(
            {"type": "http.request", "body": body[:9], "more_body": True}, {"type": "http.request", "body": body[9:]}
        )

    def metrics():
        return dict(line.rsplit(" ", 1) for line in asked(request, path="/metrics")[1].decode().splitlines())

    status, body = posted([[1]])
    assert status == 503 and b"want a release" in body
    assert metrics()['kvjax_requests_total{status="503"}'] == "1"
    zeros, layers = np.zeros(2, np.int64), io.BytesIO()
    ads = Exported(np.arange(2), np.ones((2, 3), np.float32), zeros, zeros, {}, zeros > 0, zeros > 0, 7, 2)
    np.savez(layers, kernel0=np.ones((16, 2)), bias0=np.zeros(2), kernel1=np.ones((2, 1)), bias1=np.zeros(1))
    other = 'a"b\\'
    trainer.publish({"ads": ads, other: ads}, {"dense.npz": layers.getvalue()}, missing="zeros")
    server.refresh()
    status, body = posted([[0, 1, serve.PAD, 2**40]])
    assert status == 200 and json.loads(body) == {"release": 1, "p": [pytest.approx(1 / (1 + np.exp(-4)))]}
    for no_key in (1.5, "1", 2**70):
        assert posted([[no_key]])[0] == 400  # and not that of another
    status, body = posted([[0], [1]])
    assert status == 400 and b'want {\\"keys\\": [[...]], \\"dense\\": [[...]]}' in body
    assert asked(request | {"more_body": True}, {"type": "http.disconnect"}) is None
    (tmp_path / "current").write_bytes(b"00000009")
    server.refresh()
    server.refresh()
    printed = capsys.readouterr().err
    assert printed.count("want the files of the current release") == 1 and posted([[0]])[0] == 200
    said = metrics()
    published, refreshed = (said.pop(f"kvjax_{of}_timestamp_seconds") for of in ("release_published", "refreshed"))
    assert float(published) <= float(refreshed)
    assert {name: int(value) for name, value in said.items()} == {
        "kvjax_release": 1, 'kvjax_table_step{table="ads"}': 7, 'kvjax_rows{table="ads"}': 2,
        r'kvjax_table_step{table="a\"b\\"}': 7, r'kvjax_rows{table="a\"b\\"}': 2,
        "kvjax_keys_total": 4, "kvjax_missing_keys_total": 1, "kvjax_failed_refreshes_total": 2,
        'kvjax_requests_total{status="200"}': 2, 'kvjax_requests_total{status="400"}': 4,
        'kvjax_requests_total{status="503"}': 1,
    }  # fmt: skip


def alike(a, b):
    """The same training on other devices: sums of gradients are in another order, and nothing else differs."""
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-4)
    for name in ("recall", "ndcg"):
        assert round(a[name], 3) == round(b[name], 3)
    assert [a[name] for name in ("rows", "kept", "steps")] == [b[name] for name in ("rows", "kept", "steps")]


@slow
def test_two_tower_on_four_devices_resumes_on_two(on_one_device, tmp_path):
    run("two_tower.py", "--out", tmp_path, "--devices", 4, "--kill-at", 90, code=1)
    assert "resumed at step 80" in run("two_tower.py", "--out", tmp_path, "--devices", 2)
    alike(summary_of(tmp_path), on_one_device)


@slow
def test_two_tower_in_two_processes(on_one_device, tmp_path):
    first, second = processes.run(EXAMPLES / "two_tower.py", "--smoke", f"--out={tmp_path}")
    summary = summary_of(tmp_path)
    alike(summary, on_one_device)
    assert summary["devices"] == 2 and "Recall@20" in first and "Recall@20" not in second


@slow
def test_two_tower_dense(tmp_path):
    run("two_tower.py", "--out", tmp_path, "--dense")
    assert summary_of(tmp_path)["tables"] == "flax.linen.Embed"


@slow
@pytest.mark.parametrize("tables", few(["one", "many"], "one"))
def test_ctr(tables, tmp_path):
    assert "step 140 of 140  loss" in run("ctr.py", "--tables", tables, "--json", tmp_path / "summary.json")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["lift_share"] > 0.7 and summary["table_rows"] > 1000


@slow
def test_ctr_with_fewer_rows(tmp_path):
    run("ctr.py", "--admit", 2, "--max-capacity", 4000, "--json", tmp_path / "summary.json")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["lift_share"] > 0.7 and 3900 < summary["table_rows"] <= 4000
    assert summary["rows_evicted"] > 0 and summary["keys_waiting"] > 0 and 0 < summary["occurrences_refused"] < 0.2


@slow
def test_ctr_reads_a_log_as_it_was_written(tmp_path):
    """The same log from memory and from a gzipped file gives the same scores; a log without labels is predicted."""
    run("ctr.py", "--rows", 3000, "--save-log", tmp_path / "log.tsv.gz", "--json", tmp_path / "a.json")
    lines = [line.split("\t", 1)[1] for line in _lines(tmp_path / "log.tsv.gz")[:5]]
    (tmp_path / "unlabelled.tsv").write_text("".join(lines))
    predict = ("--predict", tmp_path / "unlabelled.tsv", tmp_path / "clicks.txt")
    run("ctr.py", "--data", tmp_path / "log.tsv.gz", "--json", tmp_path / "b.json", *predict)
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert (a["auc"], a["log_loss"]) == (b["auc"], b["log_loss"])
    clicks = [float(x) for x in (tmp_path / "clicks.txt").read_text().split()]
    assert len(clicks) == 5 and all(0 < p < 1 for p in clicks)


def _lines(path):
    import gzip

    return gzip.open(path, "rt").readlines()


def test_criteo_format(tmp_path):
    """Missing values, negative integers and hexadecimal categories."""
    fields = ["1", "", "-3", "7", *[""] * 10, "05db9164", "", "ffffffff", *["0"] * 23]
    path = tmp_path / "log.tsv"
    path.write_text("\t".join(fields) + "\n")
    (rows,) = list(criteo.File(path).batches(0, 1, 4))
    assert rows.label.tolist() == [1.0] and rows.cats.shape == (1, 26)
    assert rows.cats[0, :4].tolist() == [0x05DB9164, -1, 0xFFFFFFFF, 0]
    assert np.isfinite(criteo.log_dense(rows.dense)).all() and rows.dense.shape == (1, 13)


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("log.csv", b"1,2,3\n", "line 1: want 40 tab separated fields, got 1; One impression"),
        ("log.tsv", b"2" + b"\t" * 39 + b"\n", "line 1: the label is 0 or 1"),
        ("log.gz", b"1\t2\n", "want a gzipped file, as its name says, got: Not a gzipped file"),
        ("empty", b"", "want rows to train on and rows to test on; 0 of 0"),
        ("unlabelled", b"\t" * 38 + b"\n", "labels"),
        (None, b"", "none: want a log in the Criteo format, got: No such file"),
    ],
)
def test_a_log_of_another_shape(name, content, says, tmp_path, monkeypatch):
    if name:
        (tmp_path / name).write_bytes(content * 20)
    monkeypatch.setattr(sys, "argv", ["ctr.py", "--batch", "8", "--data", str(tmp_path / (name or "none"))])
    with pytest.raises(SystemExit, match=says):
        ctr.main()
    with pytest.raises(SystemExit, match=says if content or not name else "8 rows or more"):
        serve.main()


@pytest.mark.parametrize(
    "arrays, says",
    [
        (None, "want an .npz file with num_users"),
        ({"test_ptr": None}, "want an .npz file with num_users"),
        ({"train_ptr": [0, 1]}, r"want train_ptr \(num_users \+ 1,\)"),
        ({"test_item": [0, 7, 0]}, "want test_item from 0 to num_items - 1, got 0 to 7"),
        ({}, None),
    ],
)
def test_two_tower_on_another_file(arrays, says, tmp_path):
    path = tmp_path / "split.npz"
    whole = {"num_users": 2, "num_items": 3, "train_ptr": [0, 1, 3], "test_ptr": [0, 1, 3]}
    whole |= {"train_item": [0, 1, 2], "test_item": [0, 1, 2]} | (arrays or {})
    np.savez(path, **{name: array for name, array in whole.items() if array is not None})
    if arrays is None:
        path.write_bytes(b"no archive")
    if says is None:
        assert two_tower_data.gowalla(path).users.shape == (3,)
    else:
        with pytest.raises(SystemExit, match=says):
            two_tower_data.gowalla(path)


@pytest.mark.parametrize(
    "module, content, says",
    [
        (graph, {"source": [1.5], "target": [2]}, "want integers as source, got float64"),
        (graph, {"source": [1, 2], "target": [2]}, r"want a source and a target for each edge .*\(2,\), \(1,\)"),
        (sequence, {"ptr": [0, 3], "item": [1.5, 2, 3]}, "want integers as item, got float64"),
        (sequence, {"ptr": [0, 2], "item": [1, 2]}, "want a user of four items or more, got none of 0"),
        (search, "", "want 20 clicks or more, got 0"),
    ],
)
def test_ids_that_are_none_and_files_without_rows(module, content, says, tmp_path, monkeypatch):
    path = tmp_path / "data.npz"
    path.write_text(content) if module is search else np.savez(path, **content)
    monkeypatch.setattr(sys, "argv", [module.__name__, "--data", str(path)])
    with pytest.raises(SystemExit, match=says):
        module.main()


@pytest.mark.parametrize(
    "wrong, says",
    [
        (["--processes", "2"], "several processes want --coordinator"),
        (["--process", "1"], "--process from 0 to --processes - 1"),
        (["--batch", "100000"], "want 100000 interactions or more, got"),
    ],
)
def test_two_tower_with_arguments_that_it_would_not_heed(wrong, says, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["two_tower.py", "--smoke", *wrong])
    with pytest.raises(SystemExit, match=says):
        two_tower.main()


@pytest.mark.parametrize("module", [ctr, graph, search, sequence])
def test_a_file_that_cannot_be_written_is_said_before_the_work(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module.__name__, "--smoke", "--json", str(tmp_path / "none" / "x.json")])
    with pytest.raises(SystemExit):
        module.main()
    assert "want a file in a folder that is there, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, flag, default", [(serve.arguments, "batch", 64), (ctr.parse_arguments, "rows", 20_000)]
)
def test_smoke_leaves_what_is_given(arguments, flag, default, monkeypatch):
    for given, value in (([], default), ([f"--{flag}", "70000"], 70_000)):
        monkeypatch.setattr(sys, "argv", ["example.py", "--smoke", *given])
        assert getattr(arguments(), flag) == value


@pytest.mark.parametrize("dropout", ["1.5", "1", "-0.1", "nan", "much"])
def test_dropout_is_a_share(dropout, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sequence.py", f"--dropout={dropout}"])
    with pytest.raises(SystemExit):
        sequence.main()
    assert "want a number from 0 to below 1" in capsys.readouterr().err


def test_a_folder_with_files_is_no_place_for_another_run(tmp_path, monkeypatch):
    (tmp_path / "current").touch()
    monkeypatch.setattr(sys, "argv", ["serve.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="want a new folder or an empty one"):
        serve.main()
