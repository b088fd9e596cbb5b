"""The results of ``two_tower.py``: exported tables, their digest, a picture and a closing table."""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

import matplotlib
import numpy as np
from rich.table import Table as RichTable
from two_tower_devices import is_first, whole

import kvjax

matplotlib.use("Agg")  # draws to a file, on machines without a screen too
import matplotlib.pyplot as plt

INK, BLUE, ORANGE, GREY = "#22313f", "#2a6f97", "#e07a1f", "#b8c2cc"


def export(tables: dict[str, kvjax.Table], folder: pathlib.Path, min_frequency: int) -> dict[str, Any]:
    """Writes each table without its rarest rows; the digest is of every row, so that equal runs can be told.

    A row seen once has hardly left its initial value, which a lookup of an absent key computes anyway.
    """
    digest, report = hashlib.sha256(), {"frequencies": {}, "kept": {}, "bytes": 0}
    for name, table in sorted(tables.items(), reverse=True):  # user, item
        full = whole(table.export())
        for array in (full.keys, full.values, full.freqs, full.versions):
            digest.update(np.ascontiguousarray(array).tobytes())
        kept = full.take(kvjax.Prune(min_frequency=min_frequency).mask(full))
        report["frequencies"][name] = full.freqs
        report["kept"][name] = (len(kept.keys), len(full.keys))
        if is_first():
            path = folder / f"{name}.npz"
            np.savez(path, keys=kept.keys, values=kept.values, freqs=kept.freqs)
            report["bytes"] += path.stat().st_size
    return report | {"digest": digest.hexdigest()}


def export_dense(params: Any, seen: dict[str, np.ndarray], folder: pathlib.Path) -> dict[str, Any]:
    """The same of `nn.Embed`, which cannot be pruned: a row's id is its place."""
    digest, report = hashlib.sha256(), {"frequencies": {}, "kept": {}, "bytes": 0}
    for name, ids in seen.items():
        rows = np.asarray(params[name]["embedding"])
        digest.update(rows.tobytes())
        path = folder / f"{name}.npz"
        np.savez(path, values=rows)
        report["frequencies"][name] = np.bincount(ids, minlength=len(rows))
        report["kept"][name] = (len(rows), len(rows))
        report["bytes"] += path.stat().st_size
    return report | {"digest": digest.hexdigest()}


def draw(history: dict[str, list], frequencies: dict[str, Any], title: str, path: pathlib.Path) -> None:
    """Loss, table growth and the frequency distribution, side by side."""
    style = {
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold",
        "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK,
        "ytick.color": INK,
        "axes.grid": True, "grid.color": "#e8ecef", "axes.axisbelow": True, "legend.frameon": False,
    }  # fmt: skip
    step, colours = np.array(history["step"]), {"user": BLUE, "item": ORANGE}
    with plt.rc_context(style):
        figure, (loss, growth, frequency) = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
        _draw_loss(loss, step, np.array(history["loss"]))
        for name, colour in colours.items():
            rows = history[name]
            growth.plot(step, rows, color=colour, lw=2, label=f"{name}s, {rows[-1]:,} in the end")
            counts = np.sort(frequencies[name])[::-1]
            frequency.loglog(np.arange(1, counts.size + 1), counts, color=colour, lw=2, label=f"{name}s")
        growth.set(title="Table growth", xlabel="step", ylabel="rows", ylim=(0, None), xlim=(0, None))
        growth.legend()
        growth.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        frequency.set(title="Frequency distribution", xlabel="rank of the id", ylabel="times seen")
        frequency.legend()
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=12)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _draw_loss(axes: Any, step: np.ndarray, loss: np.ndarray) -> None:
    width = max(1, loss.size // 25)
    smooth = np.convolve(loss, np.ones(width) / width, mode="valid")
    axes.plot(step, loss, color=GREY, lw=0.8, label="one batch")
    axes.plot(step[(width - 1) // 2 :][: smooth.size], smooth, color=BLUE, lw=2, label=f"mean of {width}")
    axes.set(title="Loss", xlabel="step", ylabel="in-batch softmax", xlim=(0, None))
    axes.legend()


def closing_table(summary: dict[str, Any]) -> RichTable:
    table = RichTable(title=f"two-tower on {summary['data']} ({summary['tables']})", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right", style="bold")
    rows = " + ".join(f"{n:,} {name}s" for name, n in summary["rows"].items())
    kept = " + ".join(f"{kept:,} of {total:,} {name}s" for name, (kept, total) in summary["kept"].items())
    for what, value in {
        "Recall@20": f"{summary['recall']:.4f}  (most popular first: {summary['popular'][0]:.4f})",
        "NDCG@20": f"{summary['ndcg']:.4f}  (most popular first: {summary['popular'][1]:.4f})",
        "last loss": f"{summary['loss'][-1]:.3f}",
        "seconds per step, median": f"{summary['seconds_per_step']:.4f}",
        "keys per second": f"{summary['keys_per_second']:,.0f}",
        "rows in the tables": rows,
        "rows exported": kept,
        "bytes exported": f"{summary['bytes']:,}",
        "seconds in all": f"{summary['seconds']:.0f}",
    }.items():
        table.add_row(what, value)
    return table
