"""Backends: which compiled modules a process takes its tables from."""

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

import kvjax

BUILT = importlib.util.find_spec("kvjax.ffi._emulated") is not None

# Enough of the emulated device table to see who is asked: the one of the CPU, but for what its storage is called.
STAND_IN = """
from kvjax.ffi import _cpu
from kvjax.ffi._cpu import *

def handlers():
    return {"kvjax_lookup": _cpu.handlers()["kvjax_lookup"]}

def create(name, options, **where):
    print("asked for", options["storage"])
    _cpu.create(name, options | {"storage": "host"}, **where)
"""


def run(program, path="", **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *sys.path])} | environment,
    )  # fmt: skip


def test_backends():
    assert kvjax.backends()["cpu"] == "loaded"
    assert kvjax.backends().keys() == {"cpu", "cuda"}
    kvjax.backends().clear()
    assert kvjax.backends()


@pytest.mark.skipif(BUILT, reason="it is built")
def test_the_emulated_table_has_to_be_built():
    done = run("import kvjax; kvjax.get_table", KVJAX_EMULATED="1")
    assert done.returncode != 0
    assert (
        "ImportError: kvjax: KVJAX_EMULATED=1 wants" in done.stderr and "cmake.define.KVJAX_EMULATED=ON" in done.stderr
    )


@pytest.mark.skipif(BUILT, reason="the real one is built")
def test_with_the_emulated_table_every_table_is_one(tmp_path):
    folder = tmp_path / "kvjax" / "ffi"
    folder.mkdir(parents=True)
    (folder / "_emulated.py").write_text(STAND_IN)
    program = """
        import numpy as np, optax, kvjax
        from kvjax.ffi import _emulated, host, module
        assert module("cpu") is module("cuda") is _emulated is not host
        assert kvjax.backends()["cpu"] == "loaded" and kvjax.backends()["cuda"] == "emulated"
        a = kvjax.get_table("a", dim=2, initializer=1.0)
        b = kvjax.get_table("b", dim=2, storage=kvjax.storage.Host())
        a, _ = a.apply(optax.sgd(1.0), kvjax.SparseRows(np.arange(3), np.ones((3, 2), np.float32)))
        print(a, b, a.spec.storage, a.lookup(2).tolist())
    """
    done = run(program, tmp_path, KVJAX_EMULATED="1", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    asked_a, asked_b, last = done.stdout.splitlines()
    assert (asked_a, asked_b) == ("asked for device", "asked for host")
    assert last.startswith("Table('a', dim=2, dtype=float32, rows=3, version=1) Table('b'")
    assert last.endswith("Device() [0.0, 0.0]")
