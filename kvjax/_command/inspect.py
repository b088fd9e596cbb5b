"""``kvjax inspect``: the tables of a checkpoint, and how frequencies, ages and norms of their rows are distributed."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from kvjax._command.output import print_json, print_table, progress, size
from kvjax._command.saved import SavedTable, tables_of
from kvjax._formats.paths import AnyPath
from kvjax.checkpoint._chains.chain import Chain, unreplaced

_QUANTILES = {"min": 0, "10%": 10, "median": 50, "90%": 90, "99%": 99, "max": 100}


def run(args: argparse.Namespace) -> int:
    """Prints them."""
    if args.overwrite and not args.plot:
        raise ValueError("kvjax inspect: want --plot beside --overwrite, got none; leave it out, or say --plot FILE")
    folder, about = unreplaced(args.checkpoint, args.base, "inspect", lambda chain: _read(chain, args))
    if args.json:
        print_json({"checkpoint": str(folder), "tables": about})
        return 0
    columns = ("table", "rows", "dim", "dtype", "keys", "last step", "shards", "slots", "on disk")
    columns += ("delta",) if any(said["delta"] for said in about) else ()
    print_table(
        str(folder), columns,
        [(t["name"], t["rows"], t["dim"], t["dtype"], t["key_dtype"], t["last_step"], t["num_shards"],
          list(t["slots"]), size(t["bytes"]), t["delta"])[: len(columns)] for t in about],
    )  # fmt: skip
    for said in about:
        if args.table:
            made = {key: said[key] for key in ("seed", "initializer", "trainable", "rounding")}
            print_table(f"{said['name']}: made with", ("option", "value"), [*(made | said["options"]).items()])
        if args.stats:
            print_table(
                f"{said['name']}: rows", ("", *_QUANTILES), [(name, *q.values()) for name, q in said["stats"].items()]
            )
            if said["not_finite"]:
                print(f"{said['not_finite']} rows have NaN or infinite elements, and no norm")
    return 0


def _read(chain: Chain, args: argparse.Namespace) -> tuple[AnyPath, list[dict[str, Any]]]:
    """Where the checkpoint is, and what there is to say of its tables."""
    tables = tables_of(chain, args.table)
    about = [_about(table) for table in tables]
    if args.stats:
        with progress("reading rows", args.json):
            for table, said in zip(tables, about, strict=True):
                said["stats"], said["not_finite"] = distributions(table)
    if args.plot:
        from kvjax._command.plot import plot

        plot(args.plot, args.checkpoint, tables, args.base, args.overwrite)
    return chain.catalog.directory, about


def _about(table: SavedTable) -> dict[str, Any]:
    meta = table.meta
    fields = (
        "name", "rows", "dim", "dtype", "key_dtype", "last_step", "num_shards", "seed", "initializer", "trainable",
        "rounding", "format",
    )  # fmt: skip
    set_options = {name: value for name, value in meta["options"].items() if value is not None}
    return {field: meta[field] for field in fields} | {
        "options": set_options,
        "slots": dict(meta["slots"]),
        "bytes": table.bytes,
        "delta": "delta" in meta,
    }


def distributions(table: SavedTable) -> tuple[dict[str, dict[str, float]], int]:
    """Quantiles of frequency, age and norm over all rows; 0 for an empty table. And how many rows have no norm, because
    an element is not finite; they are left out of its quantiles."""
    rows = table.open()  # of which one column is in memory at a time
    found = {
        "frequency": _quantiles(rows.column("freqs")),
        "age": _quantiles(table.last_step - rows.column("versions")),
    }
    norms = rows.norms()
    finite = np.isfinite(norms)
    return found | {"norm": _quantiles(norms[finite])}, int((~finite).sum())


def _quantiles(array: np.ndarray) -> dict[str, float]:
    if not len(array):
        return dict.fromkeys(_QUANTILES, 0.0)
    found = np.percentile(array, list(_QUANTILES.values()), method="closest_observation").tolist()
    return dict(zip(_QUANTILES, found, strict=True))
