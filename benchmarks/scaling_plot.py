"""The picture of ``scaling.py``: what was measured, how the model fits it, and what it predicts."""

from __future__ import annotations

import argparse
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # draws to a file, on machines without a screen too
import matplotlib.pyplot as plt

INK, BLUE, ORANGE, GREY = "#22313f", "#2a6f97", "#e07a1f", "#b8c2cc"
PARTS = {
    "probe and gather": BLUE, "merge and update": "#7fb2d0", "calls and copies": GREY,
    "network, latency": "#f2b680", "network, bandwidth": ORANGE,
}  # fmt: skip
STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold",
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": "#e8ecef", "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip


def draw(
    args: argparse.Namespace, model: Any, by_devices: dict[int, list[float]], line: dict[int, dict[str, float]]
) -> None:
    """by_devices: CPU seconds a step for `args.devices`, by batch; line: predictions by number of devices."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 4, figsize=(17, 4.6), layout="constrained", width_ratios=[1, 1, 1.2, 1])
        _measured(axes[0], args, by_devices)
        _fit(axes[1], model)
        _predicted(axes[2], line)
        _volume(axes[3], line)
        figure.suptitle("A step of a sharded table: lookup and training write", x=0.01, ha="left", weight="bold")
        figure.supxlabel(_assumptions(args), x=0.01, ha="left", fontsize=8.5)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.out, dpi=110)
        plt.close(figure)


def _assumptions(args: argparse.Namespace) -> str:
    return (
        f"Measured on host devices that share this machine's cores: CPU time of all devices together, dim {args.dim}, "
        "adagrad, float32, medians of calls in turns.\n"
        f"Predicted: a core like this machine's per device, {args.piece:,} distinct keys per device and step (the "
        f"batch grows with the devices), {args.bandwidth:g} GB/s sent per device, {args.latency:g} us per collective "
        f"and level of a sum,\n{args.message:g} us per other device of an all_to_all; nothing overlaps, no congestion; "
        f"a table of {args.rows:,.0f} rows whose keys a good hash spreads."
    )


def _measured(axes: Any, args: argparse.Namespace, by_devices: dict[int, list[float]]) -> None:
    for (n, seconds), shade in zip(by_devices.items(), np.linspace(0.4, 1.0, len(by_devices)), strict=True):
        axes.plot(args.devices, 1e3 * np.array(seconds), "o-", color=BLUE, alpha=shade, label=f"{n:,} keys")
    axes.set(title="Measured: work of a step", xlabel="host devices", ylabel="CPU ms, all devices", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(args.devices, [str(d) for d in args.devices])
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:g}")
    axes.legend()


def _fit(axes: Any, model: Any) -> None:
    low, high = 1e3 * model.measured.min(), 1e3 * model.measured.max()
    axes.plot([low, high], [low, high], color=GREY)
    axes.plot(1e3 * model.measured, 1e3 * model.fitted, "o", color=ORANGE, ms=4, alpha=0.7)
    title = f"Cost model: R² {model.r2:.3f}"
    axes.set(title=title, xlabel="measured, CPU ms", ylabel="fitted, CPU ms", xscale="log", yscale="log")


def _predicted(axes: Any, line: dict[int, dict[str, float]]) -> None:
    devices = list(line)
    stacks = [[1e3 * p[part] for p in line.values()] for part in PARTS]
    axes.stackplot(devices, stacks, colors=PARTS.values(), labels=PARTS)
    _by_devices(axes, "Predicted: time of a step", "ms")
    axes.legend(loc="upper left", fontsize=8)


def _volume(axes: Any, line: dict[int, dict[str, float]]) -> None:
    several = [devices for devices in line if devices > 1]
    for name, style, label in (("sent", "-", "MiB sent in a step"), ("needed", ":", "without padding")):
        axes.plot(several, [line[d][name] / 2**20 for d in several], color=ORANGE, ls=style, lw=2, label=label)
    axes.plot(list(line), [p["memory"] / 2**30 for p in line.values()], color=BLUE, lw=2, label="GiB of memory")
    _by_devices(axes, "Predicted: per device", "")
    axes.set_yscale("log")
    axes.legend(fontsize=8)


def _by_devices(axes: Any, title: str, unit: str) -> None:
    axes.set(title=title, xlabel="devices", ylabel=unit)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 8, 64, 1024], ["1", "8", "64", "1024"])
