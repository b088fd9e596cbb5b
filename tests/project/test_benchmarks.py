"""Benchmarks run in tiny sizes anywhere; that of GPUs says what it wants where there is no GPU."""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "gpu.py"
sys.path.insert(0, str(BENCHMARKS))
import gpu  # noqa: E402
import gpu_step  # noqa: E402


def run(*args, script=SCRIPT):
    command = [sys.executable, str(script), *map(str, args)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


@slow
def test_smoke(tmp_path):
    done = run("--smoke", "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert [(call["call"], call["keys"], call["dim"]) for call in report["calls"]] == [
        (case.call, case.keys, case.dim) for case in gpu.CASES
    ]
    for figures in (*report["calls"], report["tiers"], report["step"], report["deltas"]):
        numbers = [x for name, x in figures.items() if not isinstance(x, str | bool) and name != "goal"]
        assert all(math.isfinite(x) and x > 0 for x in numbers), figures
    assert "lookup_or_" in done.stdout and "static with unique" in done.stdout
    again = run("--show", tmp_path / "gpu.json")
    assert again.returncode == 0 and again.stdout in done.stdout


@slow
def test_simulate_in_tiny():
    done = run("--keys", 20000, "--steps", 8, "--batch", 64, script=BENCHMARKS / "simulate.py")
    assert done.returncode == 0 and "off by 0.0, 0.0, 0.0, 0.0 points" in done.stdout, done.stderr[-2000:]


@slow
def test_optimizers_in_tiny():
    done = run("--quick", "--only", "adagrad", "segments", script=BENCHMARKS / "optimizers.py")
    assert done.returncode == 0 and "adagrad" in done.stdout and "by hand" in done.stdout, done.stderr[-2000:]


@slow
@pytest.mark.skipif(shutil.which("c++") is None or platform.machine() != "x86_64", reason="builds kernels for x86")
def test_kernels_by_hand_do_what_their_transforms_do():
    done = run("--smoke", script=BENCHMARKS / "transforms.py")
    assert done.returncode == 0 and "amsgrad" in done.stdout, done.stderr[-2000:]


@slow
def test_quality_in_tiny():
    tiny = ["--examples", "2400", "--epochs", "1", "--seeds", "1", "--dim", "3", "--rates", "1"]
    done = run("clicks", *tiny, script=BENCHMARKS / "quality.py")
    assert done.returncode == 0 and "catch_up(adam)" in done.stdout and "stochastic" in done.stdout, done.stderr[-2000:]


@slow
def test_rivals_in_tiny(tmp_path):
    tiny = ["--rows", "2000", "--dim", "4", "--batch", "64", "--turns", "2", "--calls", "1"]
    picture = tmp_path / "rivals.png"
    done = run(*tiny, "--plot", picture, script=BENCHMARKS / "rivals.py")
    assert done.returncode == 0 and "step, zipf" in done.stdout, done.stderr[-2000:]
    assert picture.stat().st_size > 10_000


@slow
def test_frozen_tables_in_tiny():
    done = run("--smoke", script=BENCHMARKS / "serving.py")
    assert done.returncode == 0 and "FrozenTable, int8" in done.stdout, done.stderr[-2000:]
    assert shutil.which("cc") is None or "C header" in done.stdout


@slow
def test_features_in_tiny(tmp_path):
    done = run("--smoke", "--devices", "1", "--json", tmp_path / "features.json", script=BENCHMARKS / "features.py")
    assert done.returncode == 0 and "one by one" in done.stdout, done.stderr[-2000:]
    assert len(json.loads((tmp_path / "features.json").read_text())["steps"]) == 2


@slow
def test_exports_in_tiny():
    done = run("--rows", "1000", "--turns", "3", script=BENCHMARKS / "exports.py")
    assert done.returncode == 0 and "gather, fresh" in done.stdout, done.stderr[-2000:]


@slow
def test_experiments_begin_anew_and_ids_stay_whole():
    done = run(script=BENCHMARKS / "experiments.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_bytes_are_those_of_a_perfect_kernel():
    """A row read and written; of a step value, slot and gradient: 1,280 a row of dim 64."""
    assert gpu.Case("lookup", 8).bytes == 64
    assert gpu.Case("apply", 64).bytes == 1280


@slow
@pytest.mark.parametrize(
    ("script", "args", "said"),
    [
        ("bags", "--dims 4 --rows 2000 --bags 16 --turns 5", "gradient"),
        ("checkpoints", "--rows 2000 --dim 4 --folder {}", "merge, mean"),
        ("deltas", "--rows 2000 --dim 4 --batch 64 --chain 12", "as link"),
        ("eviction", "--rows 2000 --keys 64 --dim 4 --queued 2 --devices 2", "LeastFrequent"),
        ("lifecycle", "--rows 2000 --keys 64 --dim 4 --calls 2", "MaxAge"),
        ("prefetch", "--rows 500 --dim 4 --batch 64 --devices 2", "2 devices"),
        ("refused", "--dense 1000 --keys 64 --steps 16", "keep"),
        ("saving", "--rows 2000 --dim 4 --batch 64 --saves 1 --window 0.2 --folder {}", "lost"),
        (
            "scaling",
            "--devices 1 2 --batch 64 --unique 1 --dim 4 --filled 500 --turns 2 --predict 1 2 --out {}/x.png",
            "picture",
        ),
        ("shapes", "--shapes 1", "grad of lookup_bag"),
        ("storage", "--rows 2000 --dim 4 --folder {}", "Mmap"),
        ("table", "--rows 500 --batch 64 --dims 4", "dense"),
        ("two_tower", "--rows 500 --batch 32 --features 4", "500"),
    ],
)
def test_every_other_one_runs(script, args, said, mesh, tmp_path):
    if "--devices" in args:
        mesh(2)  # or it is skipped
    done = run(*args.format(tmp_path).split(), script=BENCHMARKS / f"{script}.py")
    assert done.returncode == 0 and said in done.stdout and "nan" not in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("keys", ["known", "missing", "zipf"])
def test_batches_are_what_they_are_called(keys):
    rows, size = 1024, gpu.SMOKE
    words = np.asarray(gpu.batches_of(gpu.Case("lookup", 8, keys), rows, size))
    ids = words.reshape(-1, 2).copy().view(np.uint64)[:, 0].view(np.int64).reshape(words.shape[:2])
    there = np.isin(ids, kvjax.hash_keys(np.arange(rows)))
    assert (not there.any()) if keys == "missing" else there.all()
    distinct = len(np.unique(ids[0]))
    assert distinct < 0.8 * size.batch if keys == "zipf" else distinct == size.batch


@slow
def test_score(tmp_path):
    report = tmp_path / "score.json"
    done = run("--smoke", "--json", report, script=BENCHMARKS / "score.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    got = json.loads(report.read_text())
    ratios = [r["ratio"] for r in got["results"]]
    assert len(ratios) == 10 and math.isclose(got["score"], math.prod(ratios) ** (1 / len(ratios)))
    assert f"score {got['score']:.2f}" in done.stdout


@slow
def test_growth_and_cores_in_tiny(tmp_path):
    done = run("--smoke", "--plot", tmp_path / "growth.png", script=BENCHMARKS / "growth.py")
    assert done.returncode == 0 and "step / update" in done.stdout, done.stderr[-2000:]
    assert (tmp_path / "growth.png").stat().st_size > 5_000
    done = run("--smoke", "--cores", "1", script=BENCHMARKS / "cores.py")
    assert done.returncode == 0 and "raw gather" in done.stdout, done.stderr[-2000:]


def test_a_case_that_fails_leaves_the_figures_of_others(monkeypatch, capsys):
    saved = []
    report = {"device": "none", "jax": "0", "date": "today"}

    def measure(case, size):
        kvjax.get_table("gpu", dim=2)
        if case.keys == "zipf":
            raise RuntimeError("no memory [left]")
        kvjax.drop_table("gpu")
        figures = ("load", "wall_seconds", "seconds", "billion_keys_per_second", "ratio", "copy_bytes_per_second")
        return dict.fromkeys(figures, 0.5) | {"bytes": case.bytes}

    monkeypatch.setattr(gpu, "measure_calls", measure)
    monkeypatch.setitem(gpu.PARTS, "step", lambda size: 1 / 0)
    whole = gpu.measure_all(["calls", "step"], gpu.SMOKE, report, lambda: saved.append(json.dumps(report)))
    assert not whole and not kvjax.tables()
    errors = [call.get("error") for call in report["calls"]]
    assert len(errors) == len(gpu.CASES) and errors.count("RuntimeError: no memory [left]") == 3
    assert len(saved) == len(errors) + 1 and [len(json.loads(s)["calls"]) for s in saved[:3]] == [1, 2, 3]
    capsys.readouterr()
    gpu.show(json.loads(saved[-1]))
    shown = capsys.readouterr().out
    assert "call apply, keys zipf, dim 64" in shown and "no memory [left]" in shown and "ZeroDivisionError" in shown
    assert "ratio <= 1.5" in shown
    goals = [case.goal is not None for case in gpu.CASES]
    assert goals == sorted(goals, reverse=True)


@slow
def test_calls_for_a_profiler():
    done = run("--smoke", "--only", "kernels")
    assert done.returncode == 0, done.stderr[-2000:]


@slow
def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "measures tables on a GPU" in done.stderr and "--smoke" in done.stderr


@slow
@pytest.mark.parametrize("unique", [False, True])
def test_both_steps_train_the_same(unique):
    """What is timed against each other: the same losses and rows, with ids that repeat and that come late."""
    size, tx, rng = gpu.SMOKE, optax.adam(0.01, eps=0.1), np.random.default_rng(0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        our_step, mine = gpu_step.ours(size, tx)
        mine[0]["net"]["out"] += 1  # so that the first step changes rows
        static_step, theirs = gpu_step.static(gpu_step.rows_of(mine[0]["tables"], size), tx, unique)
        theirs[0]["net"]["out"] += 1
        labels = jnp.asarray(rng.integers(0, 2, size.samples), jnp.float32)
        for _ in range(4):
            ids = rng.integers(0, size.rows, (gpu_step.TABLES, size.samples))
            ids[:, :9] = 5
            mine, loss = our_step(mine, [kvjax.keys(kvjax.hash_keys(i)) for i in ids], labels)
            theirs, want = static_step(theirs, [jnp.asarray(i, jnp.int32) for i in ids], labels)
            np.testing.assert_allclose(loss, want, rtol=1e-5)
    for got, want in zip(gpu_step.rows_of(mine[0]["tables"], size), theirs[0]["tables"], strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
