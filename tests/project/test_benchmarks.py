"""Benchmarks run in tiny sizes anywhere; that of GPUs says what it wants where there is no GPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvjax
from tests.support.marks import slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu.py"
sys.path.insert(0, str(BENCHMARKS))
import gpu  # noqa: E402


def run(*args, script=SCRIPT):
    command = [sys.executable, str(script), *map(str, args)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@slow
def test_smoke(tmp_path):
    done = run("--smoke", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    finds = [("find", dim) for dim in (8, 32, 64)]
    wanted = sorted(2 * [*finds, ("lookup_or_insert", 32), ("apply", 64)])  # at two loads
    assert sorted((call["call"], call["dim"]) for call in report["calls"]) == wanted
    for figures in (*report["calls"], report["tiers"], report["step"]):
        numbers = [x for x in figures.values() if not isinstance(x, str)]
        assert all(math.isfinite(x) and x > 0 for x in numbers), figures
    assert "lookup_or_" in done.stdout and "static arrays" in done.stdout


@slow
def test_score(tmp_path):
    report, plot = tmp_path / "score.json", tmp_path / "speed.png"
    done = run("--smoke", "--json", report, "--plot", plot, script=BENCHMARKS / "score.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    got = json.loads(report.read_text())
    ratios = [r["ratio"] for r in got["results"]]
    assert len(ratios) == 10 and math.isclose(got["score"], math.prod(ratios) ** (1 / len(ratios)))
    assert f"score {got['score']:.2f}" in done.stdout and plot.stat().st_size > 5_000


def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "measures tables on a GPU" in done.stderr and "--smoke" in done.stderr


@slow
def test_both_steps_train_the_same():
    """What is timed against each other: the same losses and rows, with ids that repeat and that come late."""
    size, tx, rng = gpu.SMOKE, optax.adam(0.01, eps=0.1), np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        our_step, mine = gpu.ours(size, tx)
        mine[0]["net"]["out"] += 1  # so that the first step changes rows
        static_step, theirs = gpu.static(gpu.rows_of(mine[0]["tables"], size), tx)
        theirs[0]["net"]["out"] += 1
        labels = jnp.asarray(rng.integers(0, 2, size.samples), jnp.float32)
        for _ in range(4):
            ids = rng.integers(0, size.rows, (gpu.TABLES, size.samples))
            ids[:, :9] = 5
            mine, loss = our_step(mine, [kvjax.keys(kvjax.hash_keys(i)) for i in ids], labels)
            theirs, want = static_step(theirs, [jnp.asarray(i, jnp.int32) for i in ids], labels)
            np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, want in zip(gpu.rows_of(mine[0]["tables"], size), theirs[0]["tables"], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
