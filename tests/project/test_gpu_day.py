"""The script for the first minutes on a GPU: it goes on after failures, keeps to limits, and goes on where it was."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu_day.sh"
STEPS = "install machine cpp figures quick slow memory_cpp memory_tests profile"

# Of the day that may run this suite itself.
VARIABLES = {"STEPS", "WORKERS", "TESTS", "MINUTES", "SECONDS_OF_STEPS", "STATE", "PACK"}

# A Python that does what a step of the day would, and at once: what it is asked for decides how it ends.
PYTHON = """#!/bin/bash
echo "asked for $*"
case "$*" in
  *"-m slow"*) echo "[gw1] [ 12%] FAILED tests/slow.py::test_it "; exec sleep 60 ;;
  *"-m interrupted"*) trap "echo FAILED tests/interrupted.py::test_it - Because; exit 2" INT; sleep 60 & wait ;;
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
        env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        env |= {name: str(value) for name, value in (defaults | variables).items()}
        done = subprocess.run([SCRIPT, out], env=env, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        assert sum(1 for _ in out.iterdir()) <= 8 and all(path.is_file() for path in out.iterdir())
        return done.stdout, (out / "summary.md").read_text()

    return run


@slow
def test_a_day(day):
    output, summary = day()
    assert [line.split()[1] for line in output.splitlines() if line.startswith("== ")] == STEPS.split()
    for step in ("install", "machine", "cpp", "figures", "memory_cpp", "profile"):
        assert f"| {step} | passed |" in summary, summary
    assert "| quick | failed (1) |" in summary and "FAILED tests/some.py::test_it" in summary
    assert "| slow | stopped after 1 s |" in summary and "1 FAILED tests/slow.py::test_it" in summary
    assert "a table of figures" in summary and "Not yet run" not in summary
    assert len(summary.splitlines()) < 90
    output, again = day()
    assert "== " not in output and again == summary  # nothing is done twice


@slow
def test_pytest_is_interrupted_before_it_is_killed(day):
    _, summary = day(STEPS="quick", TESTS="-m interrupted")
    assert "| quick | stopped after 1 s |" in summary and "tests/interrupted.py::test_it - Because" in summary


@slow
def test_plugins_of_the_machine_stay_out(day, tmp_path):
    """One that warns, where a warning is an error, would end the suite before its first test."""
    info = tmp_path / "site/loud-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[pytest11]\nloud = loud\n")
    loud = 'import warnings\ndef pytest_configure(config):\n    warnings.warn("xdist")\n'
    (tmp_path / "site/loud.py").write_text(loud)
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    (tmp_path / "conftest.py").write_text('def pytest_addoption(parser): parser.addoption("--backend")\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    tests = f"-c {tmp_path}/pytest.ini {tmp_path}/test_it.py"
    path = f"{tmp_path}/site:{os.environ.get('PYTHONPATH', '')}"
    _, summary = day(
        PYTHON=sys.executable, PYTHONPATH=path, STEPS="quick", TESTS=tests, SECONDS_OF_STEPS=240, WORKERS=1
    )
    assert "| quick | passed |" in summary, summary


def test_it_goes_on_where_it_was(day):
    _, first = day(MINUTES=0)  # one step fits into any call
    assert "| install | passed |" in first and "| machine |" not in first
    assert f"Not yet run: {STEPS.removeprefix('install ')}. Call it again." in first
    output, second = day(STEPS="install machine cpp")
    assert "== install" not in output and "| machine | passed |" in second and "| cpp | passed |" in second


def test_it_goes_on_on_another_machine(day, tmp_path):
    day(STEPS="install machine figures")
    shutil.rmtree(tmp_path / "state")
    output, summary = day(STEPS="install machine figures cpp")
    ran = [line.split()[1] for line in output.splitlines() if line.startswith("== ")]
    assert ran == ["install", "cpp"]  # the one because what it has installed is not here
    assert "a table of figures" in summary and summary.count("| install |") == 1
    logs = (tmp_path / "out/logs.txt").read_text()
    assert "==== machine.log" in logs and "==== cpp.log" in logs


def test_the_pack_is_of_the_same_commit(day, tmp_path):
    pack = tmp_path / "pack"
    pack.mkdir()
    (pack / "commit").write_text("0123456789ab\n")
    _, summary = day(BACKEND="cuda", STEPS="machine", PACK=pack)
    assert "pack of 0123456789ab" in summary and "WARNING: what is installed is of commit 0123456789ab" in summary


def test_the_profile_is_of_the_kernels_that_matter(day, tmp_path):
    ncu = tmp_path / "bin/ncu"
    ncu.parent.mkdir()
    ncu.write_text(
        """#!/bin/bash
echo "asked for $*"
echo "==PROF== Profiling LookupRows"
echo "  void kvjax::device::Kernel<kvjax::device::ReadRows<int>::lambda>(int) (4, 1, 1)x(256, 1, 1)"
echo "    dram__bytes.sum       Mbyte      12.5"
"""
    )
    ncu.chmod(0o755)
    _, summary = day(BACKEND="cuda", STEPS="profile", PATH=f"{ncu.parent}:{os.environ['PATH']}")
    assert "\nReadRows\n dram__bytes.sum Mbyte 12.5\n" in summary and "LookupRows" not in summary.split("asked")[0]
    asked = (tmp_path / "state/profile.log").read_text()
    assert "--launch" not in asked and "--only kernels" in asked
    kernels = re.search(r"--kernel-id ::regex:(\S+):3 ", asked)[1].split("|")
    sources = "".join(path.read_text() for path in (ROOT / "kvjax/ffi/device").glob("*.h"))
    assert len(kernels) == 6 and all(re.search(rf"\bvoid {name}\(", sources) for name in kernels)


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
