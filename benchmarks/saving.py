"""Saving while training goes on: what it takes from the rate of steps, how long it blocks, how much memory it needs.

    python benchmarks/saving.py [--rows N] [--dim D] [--batch B] [--uniform] [--saves S] [--folder F]

Adam's slots; keys by Zipf's law (exponent 1.05) or uniform. Windows of steps with a save and without take turns, so
that both meet the same neighbours on the machine. The processor's time for a step tells how much of it the save took
where others use the machine, too. Windows without a save ask for its end and for the memory as those with one do: that
alone takes some percent of so short steps. Memory is that of the process which is no
file's (RssAnon), every 50 ms, above what it was when the save began.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from common import anonymous, zipf

import kvjax

TX = optax.adam(1e-3)


class Peak:
    """The most memory between its making and `end`."""

    def __init__(self) -> None:
        self.first = self.most = anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.most = max(self.most, anonymous())

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.most - self.first


@jax.jit
def step(table: kvjax.Table, keys: kvjax.Keys, grads: jax.Array) -> kvjax.Table:
    return table.apply(TX, kvjax.SparseRows(keys, grads))[0]


class Training:
    """Steps on a table that has all its rows, by some batches in turn.

    Args:
      args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        rng, shape = np.random.default_rng(0), (64, args.batch)
        self.table = kvjax.get_table("t", dim=args.dim, initializer=kvjax.initializers.normal(0.01))
        self._grads = jnp.asarray(rng.normal(size=(args.batch, args.dim)), jnp.float32)
        for at in range(0, args.rows, args.batch):
            self.table = step(self.table, kvjax.keys(np.arange(at, at + args.batch) * 11), self._grads)
        len(self.table)
        self.held = sum(self.table.stats().bytes.values())
        ranks = rng.integers(0, args.rows, shape) if args.uniform else zipf(rng, args.rows, shape)
        self._batches = [kvjax.keys(some * 11) for some in ranks]
        self._turn = 0

    def steps(self, keep_on: Callable[[], bool]) -> tuple[float, float, float]:
        """Steps a second, ms of the processor for one, and the longest one in ms, while keep_on()."""
        begun, cpu, count, longest = time.perf_counter(), time.process_time(), 0, 0.0
        while count == 0 or keep_on():
            at = time.perf_counter()
            self.table = step(self.table, self._batches[self._turn % 64], self._grads)
            jax.block_until_ready(self.table)
            self._turn, count, longest = self._turn + 1, count + 1, max(longest, time.perf_counter() - at)
        cpu = time.process_time() - cpu
        return count / (time.perf_counter() - begun), 1e3 * cpu / count, 1e3 * longest


def without_a_save(training: Training, manager: ocp.CheckpointManager, seconds: float) -> tuple[float, float, float]:
    """What `Training.steps` gives of a window without a save."""
    end, peak = time.perf_counter() + seconds, Peak()
    try:
        return training.steps(lambda: manager.is_saving_in_progress() or time.perf_counter() < end)
    finally:
        peak.end()


def measure_save(training: Training, manager: ocp.CheckpointManager, number: int, window: float) -> None:
    """A save beside steps, between two windows of these alone."""
    alone, cost, _ = without_a_save(training, manager, window)
    peak, begun = Peak(), time.perf_counter()
    manager.save(number, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": training.table})))
    blocked = time.perf_counter() - begun
    beside, cost_beside, longest = training.steps(manager.is_saving_in_progress)
    lasted, more = time.perf_counter() - begun, peak.end()
    manager.wait_until_finished()
    after, cost_after, _ = without_a_save(training, manager, window)
    rate = beside * (1 - blocked / lasted)
    lost = 1 - rate / ((alone + after) / 2)
    print(
        f"save of {lasted:5.1f} s: blocked {1e3 * blocked:4.0f} ms, longest step {longest:4.0f} ms; "
        f"steps/s {alone:6.1f} before, {rate:6.1f} beside, {after:6.1f} after: {100 * lost:5.1f}% lost; "
        f"processor {cost:.2f}, {cost_beside:.2f}, {cost_after:.2f} ms a step; "
        f"memory {more / 1e6:4.0f} MB, {100 * more / training.held:.1f}% of the table",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--uniform", action="store_true")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument(
        "--window", type=float, default=10.0,
        help="seconds without a save before and after each; in shorter ones rates differ by some percent by themselves",
    )  # fmt: skip
    parser.add_argument("--folder", default=".")
    args = parser.parse_args()
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    before = anonymous()
    training = Training(args)
    print(f"table: {training.held / 1e6:.0f} MB; process {(anonymous() - before) / 1e6:.0f} MB", flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        with ocp.CheckpointManager(Path(folder).resolve(), options=options) as manager:
            without_a_save(training, manager, args.window / 5)
            for number in range(args.saves):
                measure_save(training, manager, number, args.window)


if __name__ == "__main__":
    main()
