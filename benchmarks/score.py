"""One score: what kvjax takes beside plain JAX, NumPy or itself, each pair measured in turns in one process.

    python benchmarks/score.py                       # 6 minutes on two cores
    python benchmarks/score.py --smoke               # tiny sizes, to see that it runs

A ratio above 1 is in kvjax's favour; the score is the geometric mean of the ratios. No other system is needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from pathlib import Path

from common import in_turns
from rich.console import Console
from rich.progress import track
from rich.table import Table
from score_pairs import SMOKE, Pair, Size, all_of, filled

import kvjax


@dataclasses.dataclass(frozen=True)
class Result:
    what: str
    beside: str
    ours: float  # milliseconds, or bytes
    other: float

    @property
    def ratio(self) -> float:
        return self.other / self.ours


def rest(seconds: float = 0.05) -> None:
    """Waits, without sleeping, until what the last call freed is the system's again: 290 MB take 15 ms."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def measured(pair: Pair, turns: int) -> Result:
    ours, other = in_turns({"ours": pair.ours, "other": pair.other}, turns, before=rest).values()
    return Result(pair.what, pair.beside, 1e3 * ours, 1e3 * other)


def drop_tables() -> None:
    for name in list(kvjax.tables()):
        kvjax.drop_table(name)


def memory(size: Size) -> Result:
    """Bytes a row beside its value and slots, which a table of 24 would have."""
    table = filled("bytes", 16, size.rows)
    stats = table.stats()
    beyond = sum(stats.bytes.values()) / len(table) - 16 * 4
    return Result("bytes a row beyond its value, dim 16", "24", beyond, 24.0)


def run(size: Size) -> list[Result]:
    results = []
    for several in track(all_of(size), description="measuring", console=Console(stderr=True)):
        for pair in several():
            results.append(measured(pair, size.turns))
        drop_tables()
    return [*results, memory(size)]


def score(results: list[Result]) -> float:
    return math.exp(sum(math.log(r.ratio) for r in results) / len(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    results = run(size)
    grid = Table("what", "beside", "kvjax", "other", "ratio", title="milliseconds, medians of turns")
    for r in results:
        grid.add_row(r.what, r.beside, f"{r.ours:.2f}", f"{r.other:.2f}", f"{r.ratio:.2f}")
    Console(width=110).print(grid)
    print(f"score {score(results):.2f}")
    if args.json:
        report = {"score": score(results), "results": [{**dataclasses.asdict(r), "ratio": r.ratio} for r in results]}
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
