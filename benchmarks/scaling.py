"""What a sharded table costs against devices, batch, repeated keys and skew; and what that says of 64 and 1024 devices.

    python benchmarks/scaling.py                                    # writes docs/scaling.png
    python benchmarks/scaling.py --bandwidth 12.5 --latency 10      # for another network

Host devices share the cores of one machine, so no run here can be faster on more of them. Measured is therefore the
CPU time of a lookup and of a training write, summed over the devices, calls in turns, medians; a linear cost model
is fitted to it, and gives the time of one device that has a core, and stated network figures, of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "32")  # threads, in which collectives wait for each other

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scaling_plot import draw
from scipy.optimize import nnls

import kvjax
from kvjax._sharded.exchange import RoundSizes
from kvjax.ffi import host

TX, SLOTS = optax.adagrad(0.1), 1
HEADER, INDEX = 16, 39  # bytes a row; the index takes 26 to 52

CALLS = ("lookup", "apply")
LINE = {"lookup": 8, "apply": 12}  # bytes of a key on its way to the owner; a gradient's has its count

# The terms of the cost model, and what there is one of.
TERMS = {
    "call": "a call on a device",
    "round": "a round on a device, with its collectives",
    "byte": "a byte in a round's messages, padding and what stays on the device included",
    "route": "a key of a lookup: finding its owner, placing its row",
    "probe": "a distinct key of a lookup: probing, gathering its row",
    "merge": "a key of a gradient that is merged: on the device, and again by the owner",
    "update": "a row that changes: probing, optimizer",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of `batch` keys on `devices`; `unique` of them distinct, a share `skew` of them owned by one device."""

    devices: int
    batch: int
    unique: float
    skew: float


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(d, n, u, s)
        for d in args.devices
        for n in args.batch
        for u in args.unique
        for s in (args.skew if d > 1 else [0.0])
    ]


class Bench:
    """One table per number of devices, and its two compiled calls per size of a batch."""

    def __init__(self, devices: int, args: argparse.Namespace):
        self.dim, ids = args.dim, kvjax.hash_keys(np.arange(args.filled))
        mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
        self.split = NamedSharding(mesh, PartitionSpec("x"))
        self.table = kvjax.get_table(f"scaling{devices}", dim=args.dim, mesh=mesh)
        self.table = self.table.upsert(kvjax.keys(ids), np.zeros((len(ids), args.dim), np.float32))
        owned = host.owners(ids, devices) == 0
        self.pools = ids, ids[owned]
        self.look = jax.jit(lambda table, keys: table.lookup(keys))
        self.write = jax.jit(lambda table, keys, rows: table.apply(TX, kvjax.SparseRows(keys, rows), ())[0])

    def batch(self, case: Case, rng: np.random.Generator) -> tuple[Any, Any]:
        everyone, hot = self.pools
        distinct = max(1, round(case.batch * case.unique))
        some = rng.choice(everyone, distinct, replace=False)
        few = rng.choice(hot, min(distinct, len(hot)), replace=False)
        from_hot = rng.random(case.batch) < case.skew
        at = rng.permutation(case.batch) % distinct
        keys = np.where(from_hot, few[at % len(few)], some[at])
        put = lambda x: jax.device_put(x, self.split)  # noqa: E731
        return jax.tree.map(put, kvjax.keys(keys)), put(jnp.ones((case.batch, self.dim)))

    def call(self, name: str, keys: Any, rows: Any) -> None:
        if name == "lookup":
            self.look(self.table, keys).block_until_ready()
        else:
            self.table = jax.block_until_ready(self.write(self.table, keys, rows))

    def times(self, keys: Any, rows: Any) -> dict[str, tuple[float, float]]:
        """CPU and wall seconds of each call."""
        out = {}
        for name in CALLS:
            cpu, wall = time.process_time(), time.perf_counter()
            self.call(name, keys, rows)
            out[name] = time.process_time() - cpu, time.perf_counter() - wall
        return out

    def amounts(self, case: Case, keys: Any, rows: Any) -> dict[str, dict[str, float]]:
        """How much there is of each term, by the table's own counts; and the bytes that travel."""
        out, before = {}, self.table.stats()
        for name in CALLS:
            self.call(name, keys, rows)
            after = self.table.stats()
            rounds, distinct = after.rounds - before.rounds, after.exchanged_keys - before.exchanged_keys
            sent = sum(after.exchanged_bytes.values()) - sum(before.exchanged_bytes.values())
            byte = case.devices * rounds * message_bytes(name, case.batch // case.devices, case.devices, self.dim)
            assert sent * case.devices == byte * (case.devices - 1)
            changed = len(np.unique(np.asarray(keys.words), axis=0))
            out[name] = amounts_of(name, case.devices, rounds * case.devices, byte, case.batch, distinct, changed)
            out[name]["sent"] = sent
            before = after
        return out


def message_bytes(name: str, n: int, devices: int, dim: int) -> int:
    """Of what one device with a piece of n keys makes in one round."""
    capacity = RoundSizes.of(n, devices, 4 * dim).capacity
    return devices * (LINE[name] * (capacity + 1) + 4 * dim * capacity)


def amounts_of(
    name: str, calls: int, rounds: int, byte: int, keys: int, distinct: float, changed: float
) -> dict[str, float]:
    """distinct: keys of each device, summed; changed: distinct keys of all."""
    own = {"lookup": {"route": keys, "probe": distinct}, "apply": {"merge": keys + distinct, "update": changed}}
    return {"call": calls, "round": rounds, "byte": byte} | own[name]


@dataclasses.dataclass
class Model:
    """Seconds per unit of each term, and how well they give what was measured."""

    seconds: dict[str, float]
    r2: float
    measured: np.ndarray
    fitted: np.ndarray

    @classmethod
    def fit(cls, amounts: list[dict[str, float]], seconds: list[float]) -> Model:
        """Least squares of relative errors; no term costs less than nothing."""
        a, y = np.array([[row.get(term, 0.0) for term in TERMS] for row in amounts]), np.array(seconds)
        x = nnls(a / y[:, None], np.ones(len(y)))[0]
        r2 = 1 - np.sum((a @ x - y) ** 2) / np.sum((y - y.mean()) ** 2)
        return cls(dict(zip(TERMS, x, strict=True)), float(r2), y, a @ x)

    def cost(self, amounts: dict[str, float]) -> dict[str, float]:
        return {term: self.seconds[term] * amount for term, amount in amounts.items()}


def predict(model: Model, devices: int, unique: float, args: argparse.Namespace) -> dict[str, float]:
    """One step of one of many devices: seconds by part, bytes it sends, bytes it keeps.

    A piece of the batch is `args.piece` keys, whatever the number of devices; keys are spread by a good hash, and
    no two devices have the same.
    """
    n, dim, others, distinct = args.piece, args.dim, devices - 1, unique * args.piece
    capacity, even = RoundSizes.of(n, devices, 4 * dim).capacity, distinct / devices
    rounds = max(1, math.ceil(min(distinct, even + 4 * math.sqrt(even)) / capacity))
    messages = {name: rounds * message_bytes(name, n, devices, dim) for name in CALLS}
    costs = [model.cost(amounts_of(name, 1, rounds, messages[name], n, distinct, distinct)) for name in CALLS]
    compute = {term: sum(cost.get(term, 0.0) for cost in costs) for term in TERMS}
    sent = sum(messages.values()) * others / devices
    exchanges = 2 * 2 * rounds * (args.latency + others * args.message) if others else 0.0
    agreements = 2 * args.latency * math.ceil(math.log2(devices))
    row = 4 * dim * (1 + SLOTS) + HEADER + INDEX
    return {
        "probe and gather": compute["route"] + compute["probe"],
        "merge and update": compute["merge"] + compute["update"],
        "calls and copies": compute["call"] + compute["round"] + compute["byte"],
        "network, latency": 1e-6 * (exchanges + agreements),
        "network, bandwidth": sent / (args.bandwidth * 1e9),
        "sent": sent,
        "needed": others / devices * distinct * sum(LINE[name] + 4 * dim for name in CALLS),
        "memory": args.rows / devices * row + 2 * max(messages.values()) / rounds + 2 * n * 4 * dim,
    }


def seconds_of(prediction: dict[str, float]) -> float:
    return sum(value for name, value in prediction.items() if name not in ("sent", "needed", "memory"))


def measure(args: argparse.Namespace, console: Console) -> tuple[list[Case], dict[Case, Any], dict[Case, Any]]:
    rng, benches = np.random.default_rng(0), {d: Bench(d, args) for d in args.devices}
    todo = cases(args)
    batches = {case: benches[case.devices].batch(case, rng) for case in todo}
    amounts = {
        case: benches[case.devices].amounts(case, *batches[case]) for case in track(todo, "compiling", console=console)
    }
    times: dict[Case, Any] = {case: [] for case in todo}
    for _ in track(range(args.turns), "measuring", console=console):
        for case in todo:
            times[case].append(benches[case.devices].times(*batches[case]))
    medians = {
        case: {name: np.median([turn[name] for turn in turns], axis=0) for name in CALLS}
        for case, turns in times.items()
    }
    return todo, amounts, medians


def table_of_cases(todo: list[Case], amounts: Any, medians: Any) -> Table:
    table = Table(title="measured: ms of CPU a call, all devices together, and of wall time on shared cores")
    for name in ("devices", "batch", "unique", "skew", "rounds", "KiB sent", "lookup", "wall", "apply", "wall"):
        table.add_column(name, justify="right")
    for case in todo:
        rounds = [amounts[case][name]["round"] // case.devices for name in CALLS]
        sent = sum(amounts[case][name]["sent"] for name in CALLS)
        ms = [f"{1e3 * t:.2f}" for name in CALLS for t in medians[case][name]]
        table.add_row(
            *map(str, (case.devices, case.batch, case.unique, case.skew)), f"{rounds[0]}+{rounds[1]}",
            f"{sent / 1024:,.0f}", *ms,
        )  # fmt: skip
    return table


def table_of_terms(model: Model) -> Table:
    table = Table(title=f"fitted: ns of CPU, R² {model.r2:.3f} over {len(model.measured)} medians")
    table.add_column("term")
    table.add_column("of")
    table.add_column("ns", justify="right")
    for term, what in TERMS.items():
        table.add_row(term, what, f"{1e9 * model.seconds[term]:,.2f}")
    return table


def table_of_predictions(predictions: dict[tuple[int, float], dict[str, float]]) -> Table:
    table = Table(
        title="predicted: a step of one device, milliseconds; MiB it sends, and would without padding; GiB it keeps"
    )
    parts = [name for name in next(iter(predictions.values())) if name not in ("sent", "needed", "memory")]
    for name in ("devices", "unique", *parts, "step", "sent", "needed", "memory"):
        table.add_column(name, justify="right")
    for (devices, unique), p in predictions.items():
        table.add_row(
            str(devices), str(unique), *(f"{1e3 * p[name]:.2f}" for name in parts), f"{1e3 * seconds_of(p):.2f}",
            f"{p['sent'] / 2**20:.2f}", f"{p['needed'] / 2**20:.2f}", f"{p['memory'] / 2**30:.2f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batch", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--unique", type=float, nargs="+", default=[1.0, 0.25, 0.05], help="distinct keys per key")
    parser.add_argument(
        "--skew", type=float, nargs="+", default=[0.0, 0.5], help="share of the keys that one device owns"
    )
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--filled", type=int, default=400_000, help="rows of the measured tables")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--predict", type=int, nargs="+", default=[1, 8, 64, 1024])
    parser.add_argument("--piece", type=int, default=16384, help="keys of a device in the predicted step")
    parser.add_argument("--rows", type=float, default=1e9, help="of the predicted table")
    parser.add_argument("--bandwidth", type=float, default=25.0, help="GB/s that a device sends")
    parser.add_argument("--latency", type=float, default=10.0, help="us of a collective, and of each level of a sum")
    parser.add_argument("--message", type=float, default=0.5, help="us more for each other device of an all_to_all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs/scaling.png")
    args, console = parser.parse_args(), Console(width=150)
    todo, amounts, medians = measure(args, console)
    console.print(table_of_cases(todo, amounts, medians))
    observed = [(amounts[case][name], float(medians[case][name][0])) for case in todo for name in CALLS]
    model = Model.fit([a for a, _ in observed], [t for _, t in observed])
    console.print(table_of_terms(model))
    predictions = {(d, u): predict(model, d, u, args) for d in args.predict for u in args.unique}
    console.print(table_of_predictions(predictions))
    by_devices = {
        n: [sum(float(medians[Case(d, n, 1.0, 0.0)][name][0]) for name in CALLS) for d in args.devices]
        for n in args.batch
    }
    line = {d: predict(model, d, args.unique[0], args) for d in (2**k for k in range(11))}
    draw(args, model, by_devices, line)
    console.print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
