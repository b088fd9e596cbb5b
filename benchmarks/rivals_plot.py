"""The picture of ``rivals.py``: keys a second of each system, a group of bars for each kind of call."""

from __future__ import annotations

import argparse

import matplotlib
import matplotlib.ticker
import numpy as np

matplotlib.use("Agg")  # draws to a file, on machines without a screen too
import matplotlib.pyplot as plt
from scaling_plot import BLUE, GREY, ORANGE, STYLE

COLORS = {"kvjax": BLUE, "TFRA": ORANGE, "torch": "#f2b680", "nn.Embed": GREY}
KNOWN = {"TFRA": "TFRA (any id)", "torch": "torch sparse (fixed size)", "nn.Embed": "nn.Embed (fixed size)"}


def draw(found: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    cases = list(found["kvjax"])
    names = [name for name in COLORS if name in found]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
        for i, name in enumerate(names):
            at = np.arange(len(cases)) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            label = KNOWN.get(name, f"{name} (any id)")
            bars = axes.bar(
                at, [found[name][case] for case in cases], 0.76 / len(names), color=COLORS[name], label=label
            )
            axes.bar_label(bars, fmt="{:.3g}", fontsize=8, padding=2)
        title = f"{args.rows:,} rows of dim {args.dim}, {args.batch:,} keys a call, Adam"
        axes.set(title=title, ylabel="million keys a second", yscale="log")
        axes.set_xticks(range(len(cases)), [case.replace("step", "training step") for case in cases])
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axes.legend(ncols=len(names), loc="upper right", fontsize=8)
        axes.margins(y=0.2)
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.plot, dpi=110)
        plt.close(figure)
