"""What a program says when it ends: after a failed write, in a fork, and beside threads."""

import subprocess
import sys
import types

import pytest

from kvjax import ffi
from kvjax._process import MANY_ERRORS, PROCESS
from kvjax._table import at_exit
from kvjax._table.at_exit import met

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax, kvjax
table = kvjax.get_table("t", dim=2, max_capacity=2, on_full="error")
grads, w = kvjax.SparseRows(np.arange(50_000), jnp.ones((50_000, 2))), jnp.ones((1500, 1500))

@jax.jit
def write(table, grads, w):  # not at once, so that the failure comes behind the call
    return table.apply(optax.sgd(0.1), grads.replace(rows=grads.rows + jnp.sum(w @ w @ w)))[0]

try:
    after = write(table, grads, w)
except jax.errors.JaxRuntimeError:
    raise SystemExit("at once")
"""
ENDINGS = {
    "asked": "\ntry:\n    after.size()\nexcept jax.errors.JaxRuntimeError:\n    print('met')",
    "refreshed": "\nprint(len(table.refresh()))",
    "not asked": "",
    "not asked, of a thread": "",
    "not caught": "\nafter.size()",
}


@pytest.mark.slow
@pytest.mark.cpu_table
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_failure_is_said_once(ending):
    code = PROGRAM + ENDINGS[ending]
    if ending.endswith("thread"):
        call = "thread = threading.Thread(target=write, args=(table, grads, w)); thread.start(); thread.join()"
        code = "import threading" + code.replace("after = write(table, grads, w)", call)
    program = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if program.stderr == "at once\n" or "Exception in thread" in program.stderr:
        pytest.skip("the program ran before the call came back")
    said = program.stderr.count("want at most max_capacity=2 rows, got 50000")
    assert said == (1 if ending.startswith("not") else 0), program.stderr
    assert "atexit" not in program.stderr
    assert ("no call of kvjax has met" in program.stderr) == ending.startswith("not asked")


LATE = """
import numpy as np, kvjax

def refused(name):
    table = kvjax.get_table(name, dim=1)
    live = table.upsert([7], np.ones((1, 1)))
    try:
        table.remove([7])
    except RuntimeError:
        print("at once")
    return live

try:
    refused("met").size()
except RuntimeError:
    print("met")
refused("left")
"""


def test_what_a_device_refuses_last_is_said():
    """On a device no later call has raised it."""
    program = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert program.stdout == ("met\n" if ffi.on_device() else "at once\n" * 2), program
    said = "kvjax: a write has failed that no call of kvjax has met (one of JAX may have): kvjax: table 'left', remove:"
    assert program.stderr.count(said) == program.stderr.count("no call of kvjax") == ffi.on_device(), program


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("kvjax: table 't', remove: want the live handle, got a stale one"), True),
        (RuntimeError("kvjax: table 't', stats: want the end of an eviction, got a sink that has run for 20 s"), False),
        (KeyError("kvjax: table 't', stats: want a table of this name, got none"), False),
    ],
    ids=["of a write", "beside a slow sink", "dropped by a thread"],
)
def test_what_only_the_check_is_refused_for_is_no_write(error, said, monkeypatch):
    def stats(name, shard):
        raise error

    storage = types.SimpleNamespace(backend=ffi.DEVICE)
    host = types.SimpleNamespace(version=lambda name, shard: 1, stats=stats)
    spec = types.SimpleNamespace(name="t", shards=range(1), storage=storage, host=host)
    monkeypatch.setattr(PROCESS, "all_specs", lambda: {"t": spec})
    assert at_exit._refused_late() == [error] * said


FORKED = """
import atexit, os, signal, sys
import jax, jax.numpy as jnp, numpy as np
parent = os.getpid()
atexit.register(lambda: os.getpid() == parent or os._exit(3))  # behind kvjax's, and before JAX's, which may wait
import kvjax

table, w = kvjax.get_table("t", dim=1), jnp.ones((1500, 1500))
after = jax.jit(lambda t, w: t.upsert(kvjax.keys(np.array([7])), jnp.sum(w @ w @ w @ w)[None, None]))(table, w)
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(after))
else:
    signal.alarm(30)  # or one that waits would stay
    sys.exit()
"""


@pytest.mark.slow
@pytest.mark.cpu_table
def test_a_forked_process_waits_for_no_programs():
    """What its parent's give never comes there."""
    program = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert program.stdout == "3 1\n", program


BESIDE = """
import tempfile, threading, time
import numpy as np, kvjax

table = kvjax.get_table("t", dim=16).upsert(np.arange(20_000), np.ones((20_000, 16), np.float32))
folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

def run():
    for i in range(10**9):
        CALL

threading.Thread(target=run, daemon=True).start()
time.sleep(0.3)
"""


@pytest.mark.slow
@pytest.mark.cpu_table
@pytest.mark.parametrize("call", ["kvjax.stats()", "kvjax.checkpoint.save(f'{folder.name}/{i}', [table])"])
def test_a_daemon_thread_in_a_call_is_no_crash(call):
    """Python ends such a thread where it asks for the GIL again."""
    for _ in range(3):
        program = subprocess.run([sys.executable, "-c", BESIDE.replace("CALL", call)], capture_output=True, text=True)
        assert program.returncode == 0, program.stderr
        assert "nanobind" not in program.stderr


def test_only_the_last_errors_are_remembered():
    first, *others = (ValueError(f"kvjax: {number}") for number in range(2 * MANY_ERRORS))
    for error in others:
        met(first)  # which is met again and again
        met(error)
    assert len(PROCESS.met) == MANY_ERRORS and {"kvjax: 0", f"kvjax: {2 * MANY_ERRORS - 1}"} <= PROCESS.met.keys()
