"""Plots: distributions of frequencies, ages and norms, and the growth over steps."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax._command.output import check_new
from kvjax._command.saved import SavedTable, tables_of
from kvjax._formats.atomic import replaced
from kvjax._formats.errors import needed
from kvjax._formats.paths import anywhere
from kvjax.checkpoint._chains.catalog import Catalog
from kvjax.checkpoint._chains.chain import Chain
from kvjax.checkpoint._chains.locate import steps_at
from kvjax.checkpoint._chains.new import check_outside
from kvjax.checkpoint._disk.format import CheckpointError

_BARS = 40


def plot(
    path: str | os.PathLike[str], checkpoint: str, tables: Sequence[SavedTable], base: Sequence[str] | None,
    overwrite: bool,
) -> None:  # fmt: skip
    """Draws a row of panels for each table.

    Args:
      path: of the picture; its ending says the format.
      checkpoint: as it was given: below a manager's root, or a folder of numbered checkpoints, there are others, too.
      tables: of the last one.
      base: where to look for what deltas build on.
      overwrite: whether it may take the place of what is there.

    Raises:
      ValueError: there is no picture with this ending, or it would be in a checkpoint, or something is there.
      OSError: there can be no file.
    """
    check_outside(anywhere(path, "inspect --plot").resolve(), "inspect --plot")
    figure_of = needed("matplotlib.figure", "--plot", "cli").Figure
    known, form = sorted(figure_of().canvas.get_supported_filetypes()), Path(path).suffix.removeprefix(".")
    if form not in known:
        raise ValueError(f"kvjax inspect --plot: want a name that ends with one of {known}, got {os.fspath(path)}")
    check_new(anywhere(path, "inspect --plot"), overwrite, "inspect --plot")
    with replaced(path) as part, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font does not have
        _draw(figure_of, tables, _growth(checkpoint, base)).savefig(part, format=form)


def _draw(figure_of: Any, tables: Sequence[SavedTable], growth: dict[str, dict[int, int]]) -> Any:
    panels = 4 if growth else 3
    figure = figure_of(figsize=(4 * panels, 3 * max(1, len(tables))), layout="constrained")
    axes = figure.subplots(max(1, len(tables)), panels, squeeze=False)
    for line, table in zip(axes, tables, strict=False):
        rows = table.open()
        columns = {
            "frequency": rows.column("freqs"),
            "age, steps": table.last_step - rows.column("versions"),
            "norm": rows.norms(),
        }
        for axis, (name, array) in zip(line, columns.items(), strict=False):
            _histogram(axis, array, logarithmic=name == "frequency")
            axis.set(xlabel=name, ylabel="rows", title=f"{table.name}: {name}")
        if growth:
            steps = growth.get(table.name, {})
            line[-1].plot(list(steps), list(steps.values()), marker=".")
            line[-1].set(xlabel="step", ylabel="rows", ylim=(0, None), title=f"{table.name}: growth")
    return figure


def _histogram(axis: Any, array: np.ndarray, logarithmic: bool) -> None:
    """Of a column; whole numbers are in the middle of their bars."""
    array = array[np.isfinite(array)]
    low, high = (float(array.min()), float(array.max())) if len(array) else (0.0, 1.0)
    if logarithmic:
        bins = np.concatenate([[-0.5], np.geomspace(0.5, max(1.5, high + 0.5), _BARS)])
        axis.set_xscale("symlog", linthresh=1)
    elif array.dtype.kind in "iu":
        step = math.ceil((high - low + 1) / _BARS)
        bins = np.arange(low - 0.5, high + step, step)
    else:
        bins = np.linspace(low, max(high, low + 1e-6), _BARS)
    axis.hist(array, bins=bins)
    axis.set_yscale("symlog")


def _growth(checkpoint: str, base: Sequence[str] | None) -> dict[str, dict[int, int]]:
    """Rows of each table by step, of the steps that can be read: a manager that keeps the last few has deltas of which
    the base is gone."""
    out: dict[str, dict[int, int]] = {}
    lost: set[int] = set()
    for step, folders in steps_at(checkpoint):
        for folder in folders:
            try:
                rows = {table.name: table.all_rows for table in tables_of(Chain(Catalog(folder, "inspect"), base))}
            except CheckpointError:
                lost.add(step)
                continue
            for name, number in rows.items():
                out.setdefault(name, {})[step] = number
    if lost:
        steps = ", ".join(map(str, sorted(lost)))
        print(f"kvjax inspect --plot: the growth is without steps whose rows cannot be read: {steps}", file=sys.stderr)
    return out
