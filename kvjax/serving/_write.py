"""Writing a frozen table: from its whole contents, or from another one, unchanged or with changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._formats.quantise import STORED, QuantisationReport, Quantiser, check_quantised, rounded, to_float32
from kvjax._values.arrays import check_all_there
from kvjax._values.errors import fail, where_of
from kvjax.serving._contents import Contents, row_of
from kvjax.serving._format import MOST_ROWS, Codes, Description, MappedFile, give, write
from kvjax.serving._search import SENTINEL, Starts, bits_of, find, mixed

if TYPE_CHECKING:
    from kvjax.serving._frozen import FrozenTable

_BLOCK_BYTES = 1 << 22
Parts = Iterator[tuple[str, np.ndarray]]
"""What `write` takes."""
Error = Callable[[], QuantisationReport | None]
"""What quantisation has changed, once all rows have been written."""


def write_whole(path: Path, contents: Contents, quantise: Any, missing: Any) -> None:
    """`FrozenTable.write`."""
    rows, what = contents.rows, where_of(contents.name, "write")
    kind, (dim,) = rows.types["values"]
    default = contents.default_row(missing)
    if quantise is not None:
        check_quantised(quantise, what)
    elif kind.name not in STORED:
        mend = "say quantise=, or make them float32"
        raise fail(ValueError, contents.name, "write", f"rows of {list(STORED)}", kind.name, mend)
    if rows.num_rows > MOST_ROWS:
        got = f"{rows.num_rows}"
        raise fail(ValueError, contents.name, "write", f"at most {MOST_ROWS} rows", got, "leave some out with prune=")
    dtype = kind.name if quantise is None else str(quantise)
    last = np.zeros(dim, np.float32) if default is None else default
    quantiser = Quantiser(dtype, what, kind.itemsize)

    def parts() -> Parts:
        size, rest, keys = _block(dim), np.zeros((0, dim), np.float32), np.zeros(0, rows.types["keys"][0])
        for piece in contents.pieces(path.parent):
            hashes, order = _ordered(contents.name, "write", piece["keys"])
            yield "hashes", hashes
            # In blocks of one size, wherever pieces end: the sums of the report are of blocks.
            for start in range(0, len(order), size):
                block = order[start : start + size]
                rest = np.concatenate([rest, to_float32(piece["values"][block], what)])
                keys = np.concatenate([keys, piece["keys"][block]])
                if len(rest) >= size:
                    yield from _stored(quantiser.encode(rest[:size], keys[:size]))
                    rest, keys = rest[size:], keys[size:]
        yield from _stored(quantiser.encode(rest, keys))
        yield from _stored(Quantiser(dtype, what).encode(last[None]))

    description = Description(
        name=contents.name, dim=dim, rows=rows.num_rows, dtype=dtype, key_dtype=contents.key_dtype,
        step=int(rows.meta["last_step"]), bits=1, steps=0, missing="init" if default is None else "row",
        initial=contents.initial, error=None,
    )  # fmt: skip
    error = quantiser.report if quantise is not None else lambda: None
    _write(path, description, contents.pool, error, parts())


def write_changes(
    path: Path, old: MappedFile, keys: np.ndarray, values: Any, removed: np.ndarray, step: int | None,
    default: np.ndarray | None,
) -> None:  # fmt: skip
    """`FrozenTable.update`: rows that have not changed are copied as they are stored."""
    description, name = old.description, old.description.name
    what = where_of(name, "update")
    check_all_there(values, what)
    rows = to_float32(values, what)
    if rows.shape != (keys.size, description.dim):
        want = f"rows ({keys.size}, {description.dim})"
        raise fail(ValueError, name, "update", want, str(rows.shape), "give one row for each changed key")
    added, order = _ordered(name, "update", keys)
    gone = mixed(np.unique(removed.reshape(-1).view(np.uint64)))
    if np.isin(gone, added).any():
        raise fail(ValueError, name, "update", "keys that change or go", "some that do both", "leave them out of one")
    quantiser = Quantiser(description.dtype, what)
    own = keys.reshape(-1)[order].view(np.uint64 if description.key_dtype.startswith("u") else np.int64)
    codes, scales = quantiser.encode(rows[order], own)

    n, hashes = description.rows, old.arrays["hashes"]
    at, found = find(hashes, old.arrays["starts"], description.steps, np.concatenate([added, gone]))
    drop = np.unique(at[found])

    def parts() -> Parts:
        size, done = _block(description.dim), 0
        for start in range(0, max(n, 1), size):
            end = min(start + size, n)
            # Of a damaged file, whose hashes are not in order, each row is taken once, too.
            next_done = len(added) if end == n else max(done, int(np.searchsorted(added, hashes[end])))
            merged, sources = _merged(hashes, start, end, drop, added[done:next_done], n + done)
            done = next_done
            yield "hashes", merged
            for some in range(0, len(sources), size):
                yield from _stored(_pick(old, (codes, scales), sources[some : some + size]))
        last = old.arrays["rows"][n:], old.arrays["scales"][n:] if "scales" in old.arrays else None
        given = None if default is None else Quantiser(description.dtype, what).encode(default[None])
        yield from _stored(last if given is None else given)

    rows_now = n - len(drop) + len(added)
    error = _after(description.error, quantiser.report(), description.rows, rows_now)
    description = dataclasses.replace(
        description, rows=rows_now, step=description.step if step is None else int(step),
        missing=description.missing if default is None else "row",
    )  # fmt: skip
    _write(path, description, old.arrays.get("pool"), lambda: error, parts())


def write_again(path: Path, table: FrozenTable, mapped: MappedFile, options: dict[str, Any]) -> None:
    """Writes a frozen table as it is, also one whose file has been replaced or removed since it was opened.

    Args:
      path: of the new file.
      table: the table.
      mapped: its file.
      options: quantise, missing, prune, name and base, as `FrozenTable.write` has them.

    Raises:
      ValueError: the options would change it.
    """
    other = options["name"] not in (None, table.name) or any(options[x] is not None for x in ("prune", "base"))
    if other or not stays(table, options["quantise"], options["missing"]):
        given = ", ".join(f"{name}=" for name, value in options.items() if value is not None)
        raise fail(
            ValueError, table.name, "write", "a frozen table as it is", f"{given}, which would change it",
            "leave that out, or write the table from what it was first written from",
        )  # fmt: skip
    give(mapped, table.path, path)


def stays(before: FrozenTable, quantise: Any, missing: Any) -> bool:
    """Whether rows that do not change are stored, and those that are not there read, as they were."""
    if quantise is not None and str(quantise) != before.dtype:
        return False
    if missing is None:
        return True
    if isinstance(missing, str) and missing == "init":
        return before.missing is None
    row = row_of(before.name, "write", missing, before.dim)
    return before.missing is not None and np.array_equal(rounded(row[None], before.dtype)[0], before.missing)


def _after(
    before: QuantisationReport | None, now: QuantisationReport | None, rows: int, merged: int
) -> QuantisationReport | None:
    """The report of an update: of the rows that stay nobody knows more than what was said of all before."""
    if now is None or (before is None and now.max == 0):
        return before
    if before is None:  # of a table that had such rows by itself
        before = now = dataclasses.replace(now, bytes_before=now.bytes_after)
        rows = now.rows
    of, n = (before, rows) if rows else (now, max(now.rows, 1))
    return dataclasses.replace(
        before,
        rows=merged,
        bytes_before=of.bytes_before // n * merged,
        bytes_after=of.bytes_after // n * merged,
        max=max(before.max, now.max),
        rms=max(before.rms, now.rms),
        cosine=min(before.cosine, now.cosine),
    )


def _merged(
    hashes: np.ndarray, start: int, end: int, drop: np.ndarray, added: np.ndarray, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of a range of rows, with new ones among them, in order, and where the row of each comes from.

    Args:
      hashes: of all rows.
      start: of the range.
      end: of the range.
      drop: positions of rows that go, in order.
      added: the new hashes, in order.
      first: where the rows of these come from; those of the old ones come from their positions.
    """
    keep = np.ones(end - start, bool)
    keep[drop[slice(*np.searchsorted(drop, [start, end]))] - start] = False
    kept = start + np.flatnonzero(keep)
    own = hashes[kept]
    places = np.searchsorted(own, added)
    return np.insert(own, places, added), np.insert(kept, places, first + np.arange(len(added)))


def _pick(old: MappedFile, new: Codes, sources: np.ndarray) -> Codes:
    n, codes, scales = old.description.rows, *new
    is_new = sources >= n
    picked = old.arrays["rows"][np.where(is_new, 0, sources)]
    picked[is_new] = codes[sources[is_new] - n]
    if scales is None:
        return picked, None
    picked_scales = old.arrays["scales"][np.where(is_new, 0, sources)]
    picked_scales[is_new] = scales[sources[is_new] - n]
    return picked, picked_scales


def _write(path: Path, description: Description, pool: np.ndarray | None, error: Error, parts: Parts) -> None:
    """Writes a file of parts that have all hashes, in order, and all rows."""
    description = dataclasses.replace(description, bits=bits_of(description.rows))
    counted, steps = Starts(description.rows), 0

    def all_parts() -> Parts:
        nonlocal steps
        for name, part in parts:
            if name == "hashes":
                counted.add(part)
            yield name, part
        yield "hashes", np.array([SENTINEL])
        starts, steps = counted.finish()
        yield "starts", starts
        if pool is not None:
            yield "pool", pool

    write(path, lambda: dataclasses.replace(description, steps=steps, error=error()), all_parts())


def _stored(codes: Codes) -> Parts:
    rows, scales = codes
    yield "rows", rows
    if scales is not None:
        yield "scales", scales


def _ordered(name: str, op: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of keys in order, and where they stood."""
    hashes = mixed(np.ascontiguousarray(keys).reshape(-1).view(np.uint64))
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    again = np.flatnonzero(hashes[1:] == hashes[:-1])
    if len(again):
        got = f"{keys.reshape(-1)[order[again[0]]]} twice"
        raise fail(ValueError, name, op, "distinct keys", got, "give each key once")
    return hashes, order


def _block(dim: int) -> int:
    """How many rows are encoded at a time."""
    return max(1, _BLOCK_BYTES // (4 * dim))
