"""What commands print for other programs, and where it goes."""

import errno
import json
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import numpy as np

import kvjax
from kvjax._command.main import main
from kvjax._command.output import print_json
from tests.support.marks import slow


@slow
def test_a_stream_that_is_closed_or_has_no_such_letters(tmp_path):
    kvjax.checkpoint.save(tmp_path / "a", [kvjax.get_table("command_\u00fc", dim=1)])
    command, env = (
        [sys.executable, "-m", "kvjax", "inspect", str(tmp_path / "a")],
        {**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert b"command_\\xfc" in subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


@slow
def test_a_full_disk_is_one_sentence(tmp_path):
    kvjax.checkpoint.save(tmp_path / "a", [kvjax.get_table("command_full", dim=1)])
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "kvjax", "inspect", str(tmp_path / "a")]
        run = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert run.returncode != 0 and "kvjax: inspect: " in run.stderr and "Traceback" not in run.stderr


@slow
def test_the_status_does_not_depend_on_who_reads(tmp_path):
    kvjax.checkpoint.save(tmp_path / "a", [kvjax.get_table("command_unread", dim=1)])
    (tmp_path / "a/command_unread/kvjax.json").write_bytes(b"")
    for command in (["verify", str(tmp_path / "a")], ["verify", "--json", str(tmp_path / "a")], ["--help"]):
        run = subprocess.Popen(
            [sys.executable, "-m", "kvjax", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        run.stdout.close()  # as `| true` does
        assert (run.wait(60), run.stderr.read()) == (int(command != ["--help"]), "")
        run.stderr.close()


def test_errors_of_the_system_have_the_mend_of_what_was_done(tmp_path, monkeypatch, capsys):
    saved = tmp_path / "a"
    kvjax.checkpoint.save(saved, [kvjax.get_table("command_refused", dim=1)])
    assert main(["convert", str(saved), str(tmp_path / "a.npz")]) == 0

    def refuse(path, *args, **options):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("kvjax._formats.atomic._new_part", refuse)
    assert main(["convert", str(saved), str(tmp_path / "b.npz")]) == 2
    assert "write: Permission denied; let this process write there" in capsys.readouterr().err
    monkeypatch.setattr("kvjax._formats.npz.columns", refuse)
    assert main(["convert", str(tmp_path / "a.npz"), str(tmp_path / "c")]) == 2
    assert "convert: Permission denied; let this process read it: " in capsys.readouterr().err
    monkeypatch.setattr("kvjax.checkpoint._verify.verify", lambda *args, **options: bytearray(2**62))
    assert main(["verify", str(saved)]) == 2
    assert "kvjax: verify: want memory, got none (MemoryError); free memory" in capsys.readouterr().err


@slow
def test_output_for_programs(capsys):
    print_json({"a": float("nan"), 1: np.float32(2), "b": (np.arange(2), True, None, Path("x"), kvjax.Prune(top_k=1))})
    found = json.loads(capsys.readouterr().out)
    assert found["a"] is None and found["1"] == 2 and found["b"][:4] == [[0, 1], True, None, "x"]
    assert found["b"][4]["top_k"] == 1
    script = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]["kvjax"]
    assert script == f"{main.__module__}:{main.__name__}"


def test_warnings_are_one_line_of_no_source(monkeypatch, capsys):
    def run(_):
        warnings.simplefilter("default")
        warnings.warn("kvjax: table 't', prune: give table= or not", stacklevel=1)
        return 0

    monkeypatch.setattr("kvjax._command.top.run", run)
    assert main(["top", "checkpoint"]) == 0
    assert capsys.readouterr().err == "warning: kvjax: table 't', prune: give --table or not\n"
