"""kvjax beside other embedding tables: lookups and whole training steps, in turns, on this machine.

    python benchmarks/rivals.py                                  # kvjax and nn.Embed
    python benchmarks/rivals.py --python torch=PATH TFRA=PATH    # and those whose interpreters are given
    python benchmarks/rivals.py ... --plot docs/rivals.png

A step is a lookup, a loss, its gradients, and Adam on the rows of the batch (on all rows with `nn.Embed`, which can do
no other). kvjax and TFRA are given random 63-bit ids and add the rows as they are trained. `nn.Embed` and torch are
given row numbers, and arrays that have all rows from the start. Each system has a process of its own; these take turns
of a few calls each, so that what else the machine does meets all. Medians of all calls.

An interpreter for TFRA: Python 3.11 with ``tensorflow==2.16.2 tensorflow-recommenders-addons==0.8.1
tf-keras==2.16.0 'numpy<2'`` (the second without its dependencies, and with ``packaging typeguard``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

SYSTEMS = Path(__file__).with_name("rivals_systems.py")
CASES = [("lookup", "uniform"), ("lookup", "zipf"), ("step", "uniform"), ("step", "zipf")]


class Child:
    """A system in its process."""

    def __init__(self, name: str, python: str, args: argparse.Namespace) -> None:
        self.name = name
        command = [python, str(SYSTEMS), name, str(args.rows), str(args.dim), str(args.batch)]
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._answer()

    def call(self, what: str, keys: str, calls: int) -> list[float]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {keys} {calls}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # what libraries print
                return json.loads(line)
        raise SystemExit(f"rivals: {self.name} ended with {self._process.wait()}; its last lines are above")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--calls", type=int, default=8, help="of each kind in a turn (of nn.Embed's steps, one)")
    parser.add_argument("--python", nargs="*", default=[], metavar="SYSTEM=PATH", help="interpreters of torch, TFRA")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--plot", type=Path, help="file for a picture")
    args = parser.parse_args()
    pythons = {"kvjax": sys.executable, "nn.Embed": sys.executable, **dict(p.split("=", 1) for p in args.python)}
    children: list[Child] = []
    seconds: dict[str, dict[str, list[float]]] = {}
    try:
        for name, python in pythons.items():
            children.append(Child(name, python, args))
        for child in children:  # compiles
            seconds[child.name] = {f"{what}, {keys}": [] for what, keys in CASES}
            for what, keys in CASES:
                child.call(what, keys, 1)
        for _ in track(range(args.turns), "turns", console=Console(stderr=True)):
            for what, keys in CASES:
                for child in children:
                    calls = 1 if child.name == "nn.Embed" and what == "step" else args.calls
                    seconds[child.name][f"{what}, {keys}"] += child.call(what, keys, calls)
    finally:
        for child in children:
            child.end()
    found = {
        name: {case: args.batch / statistics.median(each) / 1e6 for case, each in cases.items()}
        for name, cases in seconds.items()
    }
    show(found, args)
    if args.json:
        args.json.write_text(json.dumps({"rows": args.rows, "dim": args.dim, "batch": args.batch, "found": found}))
    if args.plot:
        from rivals_plot import draw

        draw(found, args)


def show(found: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    title = f"Millions of keys a second, medians; {args.rows:,} rows of dim {args.dim}, {args.batch:,} keys a call"
    table = Table("", *found, title=title)
    for case in found["kvjax"]:
        table.add_row(case, *(f"{of[case]:.3g}" for of in found.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
