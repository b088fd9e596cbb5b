"""Frozen tables against what else could read rows: live tables, gathers without a search, and a dict of Python's.
The C header, where there is a compiler, is called through ctypes, which takes some microseconds of each call.

    python benchmarks/serving.py [--rows 1000000] [--dim 16] [--json FILE]

Each batch is asked of each reader in turn, so that a busy machine slows all of them alike; medians and the 99th
percentile of wall-clock time. The gathers are given row numbers, so they are what no search could beat.
"""

import argparse
import ctypes
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvjax
from kvjax.serving import FrozenTable

BATCHES = (1, 64, 4096, 65_536)
HEADER = Path(__file__).parents[1] / "examples/frozen_table.h"


def c_reader(path: Path, dim: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """`examples/frozen_table.h`, built as it says."""
    built = path.with_suffix(".so")
    options = ["-O2", "-ffp-contract=off", "-shared", "-fPIC", "-DFROZEN_API=", "-x", "c"]
    subprocess.run(["cc", *options, str(HEADER), "-o", str(built), "-lm"], check=True)
    library, pointer = ctypes.CDLL(str(built)), ctypes.c_void_p
    library.frozen_open.restype = pointer
    library.frozen_lookup.argtypes = [pointer, pointer, ctypes.c_size_t, pointer, pointer]
    table = library.frozen_open(str(path).encode(), None, ctypes.c_size_t(0))

    def read(keys: np.ndarray, at: np.ndarray) -> np.ndarray:
        rows = np.empty((len(keys), dim), np.float32)
        library.frozen_lookup(table, keys.ctypes.data, len(keys), rows.ctypes.data, None)
        return rows

    return read


def export_of(rows: int, dim: int) -> kvjax.Exported:
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-(2**63), 2**63 - 1, rows + 10))
    rng.shuffle(keys)
    keys, zeros = keys[:rows], np.zeros(rows, np.int64)
    values = rng.normal(size=(rows, dim)).astype(np.float32)
    return kvjax.Exported(keys, values, zeros, zeros, {}, zeros > 0, zeros > 0, 0, rows)


def readers(export: kvjax.Exported, folder: Path) -> dict:
    """Functions of keys ``(n,)`` and of their row numbers."""
    frozen = {str(q): FrozenTable.write(folder / str(q), export, quantise=q, missing="zeros") for q in (None, "int8")}
    arrays, lookup = frozen["None"].as_jax(), jax.jit(lambda table, keys: table.lookup(keys))
    table, dense = kvjax.get_table("benchmark", dim=export.values.shape[1]).load(export), jnp.asarray(export.values)
    take = jax.jit(lambda dense, at: jnp.take(dense, at, axis=0))
    numbers = dict(zip(export.keys.tolist(), export.values, strict=True))
    c = {} if shutil.which("cc") is None else {"C header": c_reader(folder / "None", export.values.shape[1])}
    return {
        "FrozenTable, float32": lambda keys, at: frozen["None"].lookup(keys),
        **c,
        "FrozenTable, int8": lambda keys, at: frozen["int8"].lookup(keys),
        "as_jax, jit": lambda keys, at: jax.block_until_ready(lookup(arrays, kvjax.keys(keys))),
        "live table, jit": lambda keys, at: jax.block_until_ready(lookup(table, kvjax.keys(keys))),
        "jnp.take of row numbers, jit": lambda keys, at: jax.block_until_ready(take(dense, at.astype(np.int32))),
        "dict of rows": lambda keys, at: np.stack([numbers[key] for key in keys.tolist()]),
        "gather of row numbers": lambda keys, at: export.values[at],
    }


def measure(export: kvjax.Exported, folder: Path, repeats: int) -> list[dict]:
    found, rng = [], np.random.default_rng(1)
    asked = readers(export, folder)
    for batch in BATCHES:
        seconds = {name: [] for name in asked}
        for i in track(range(-3, repeats), f"batches of {batch}"):
            at = rng.integers(0, len(export), batch)
            keys, want = export.keys[at], export.values[at]
            for name, read in asked.items():
                started = time.perf_counter()
                rows = read(keys, at)
                if i >= 0:
                    seconds[name].append(time.perf_counter() - started)
                elif name != "FrozenTable, int8":
                    np.testing.assert_array_equal(rows, want)
        for name, each in seconds.items():
            p50, p99 = np.percentile(each, [50, 99])
            found.append({"reader": name, "batch": batch, "p50": p50, "p99": p99, "keys_per_second": batch / p50})
    return found


def files(export: kvjax.Exported, folder: Path) -> dict[str, float]:
    """Processor seconds of what is done with whole files."""
    frozen, out = None, {}
    changed = export.keys[: len(export) // 100]
    steps = {
        "write": lambda: FrozenTable.write(folder / "t", export, missing="zeros"),
        "open": lambda: FrozenTable.open(folder / "t"),
        "verify": lambda: FrozenTable.open(folder / "t").verify(),
        "update 1 % of the rows": lambda: frozen.update(changed, np.zeros((len(changed), frozen.dim))),
    }
    for name, step in steps.items():
        started = time.process_time()
        frozen = step() or frozen
        out[name] = time.process_time() - started
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--smoke", action="store_true", help="a second, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.repeats = 2000, 5
    export = export_of(args.rows, args.dim)
    with tempfile.TemporaryDirectory() as folder:
        whole = files(export, Path(folder))
        found = measure(export, Path(folder), args.repeats)
    console = Console(width=100)
    table = Table("reader", "batch", "us, p50", "us, p99", "M keys/s", title=f"{args.rows:,} rows of {args.dim}")
    for r in found:
        times = (f"{1e6 * r[p]:.1f}" for p in ("p50", "p99"))
        table.add_row(r["reader"], f"{r['batch']}", *times, f"{r['keys_per_second'] / 1e6:.2f}")
    console.print(table)
    console.print("processor seconds:", ", ".join(f"{name} {seconds:.4f}" for name, seconds in whole.items()))
    if args.json:
        args.json.write_text(json.dumps({"readers": found, "files": whole}, indent=1) + "\n")


if __name__ == "__main__":
    main()
