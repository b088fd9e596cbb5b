"""How calls gain from cores: each on 1 to N of them, beside a raw gather on as many.

    python benchmarks/cores.py [--rows 1000000] [--cores 1 2 4]       # a process for each number of cores
    python benchmarks/cores.py --smoke

Nanoseconds a key, as `growth.py` measures them, and how many times faster the call is than on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

from rich.console import Console
from rich.progress import track
from rich.table import Table


def on(cores: int, rows: int, smoke: bool) -> dict[str, float]:
    """Costs in a process that sees so many cores, as XLA's threads and malloc are made for those of the first call."""
    code = (
        f"import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}])\n"
        f"import json, growth; print(json.dumps(growth.measured({rows}, {'keys=256, turns=3' if smoke else ''})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=os.path.dirname(__file__) or ".", capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--cores", type=int, nargs="+")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    there = len(os.sched_getaffinity(0))
    counts = args.cores or [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= there]
    if max(counts) > there:
        parser.error(f"wants {max(counts)} cores, got {there}")
    rows = 1_000 if args.smoke else args.rows
    costs = {n: on(n, rows, args.smoke) for n in track(counts, "measuring", console=Console(stderr=True))}
    grid = Table("cores", *costs[counts[0]], title="ns a key, and times faster than on the fewest cores")
    for n, c in costs.items():
        grid.add_row(str(n), *(f"{c[k]:.1f}, {costs[counts[0]][k] / c[k]:.2f}" for k in c))
    Console(width=120).print(grid)


if __name__ == "__main__":
    main()
