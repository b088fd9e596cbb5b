"""The script for the first minutes on a GPU: it goes on after failures, keeps to limits, and goes on where it was."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_day.sh"
STEPS = "install machine cpp figures quick slow memory_cpp memory_tests profile"

# A Python that does what a step of the day would, and at once: what it is asked for decides how it ends.
PYTHON = """#!/bin/bash
echo "asked for $*"
case "$*" in
  *"-m slow"*) exec sleep 60 ;;
  "-m pytest "*) echo "FAILED tests/some.py::test_it - AssertionError"; exit 1 ;;
  *--show*) echo "a table of figures" ;;
  *--json*) echo "{}" > "${@: -1}" ;;
esac
"""


@pytest.fixture
def day(tmp_path):
    """Runs the script, by default with a stand-in for Python; returns its output and the summary."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def run(**variables):
        out = tmp_path / "out"
        defaults = {"PYTHON": python, "BACKEND": "emulated", "STATE": tmp_path / "state", "SECONDS_OF_STEPS": 1}
        env = os.environ | {name: str(value) for name, value in (defaults | variables).items()}
        done = subprocess.run([SCRIPT, out], env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        assert sum(1 for _ in out.iterdir()) <= 8 and all(path.is_file() for path in out.iterdir())
        return done.stdout, (out / "summary.md").read_text()

    return run


def test_a_day(day):
    output, summary = day()
    assert [line.split()[1] for line in output.splitlines() if line.startswith("== ")] == STEPS.split()
    for step in ("install", "machine", "cpp", "figures", "memory_cpp", "profile"):
        assert f"| {step} | passed |" in summary, summary
    assert "| quick | failed (1) |" in summary and "FAILED tests/some.py::test_it" in summary
    assert "| slow | stopped after 1 s |" in summary
    assert "a table of figures" in summary and "Not yet run" not in summary
    assert len(summary.splitlines()) < 90
    output, again = day()
    assert "== " not in output and again == summary  # nothing is done twice


def test_it_goes_on_where_it_was(day):
    _, first = day(MINUTES=0)  # one step fits into any call
    assert "| install | passed |" in first and "| machine |" not in first
    assert f"Not yet run: {STEPS.removeprefix('install ')}. Call it again." in first
    output, second = day(STEPS="install machine cpp")
    assert "== install" not in output and "| machine | passed |" in second and "| cpp | passed |" in second


@slow
def test_the_rehearsal(day):
    """With what there is: tables on host threads, where they are built, and tiny sizes."""
    built = importlib.util.find_spec("kvjax.ffi._emulated") is not None
    _, summary = day(
        PYTHON=sys.executable, BACKEND="emulated" if built else "cpu", SECONDS_OF_STEPS=200, WORKERS=1,
        TESTS="tests/ops/test_lowering.py", STEPS="install machine cpp figures quick memory_tests profile",
    )  # fmt: skip
    assert summary.count("| passed |") == 7, summary
    assert "lookup_or_insert" in summary


def test_the_limits_are_those_of_a_lent_machine():
    """Ten minutes a call, and half an hour in all."""
    text = SCRIPT.read_text()
    limits = {}
    for line in text.splitlines():
        for part in line.split(";;"):
            if "echo" in part and ")" in part:
                names, _, seconds = part.partition(")")
                for name in names.split("|"):
                    if name.strip() in STEPS.split():
                        limits[name.strip()] = int(seconds.split()[1])
    assert limits.keys() == set(STEPS.split())
    assert sum(limits.values()) <= 28 * 60 and max(limits.values()) <= 9 * 60
