"""Writing a frozen table: from all that it is to hold, or from another one and what has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax._values.errors import fail
from kvjax.serving._format import Codes, Description, Mapped, write
from kvjax.serving._rows import DTYPES, Error, decode, encode, to_float32
from kvjax.serving._search import SENTINEL, find, mixed, starts_of
from kvjax.serving._source import contents_of

if TYPE_CHECKING:
    from kvjax._values.prune import PruneLike

_BLOCK_BYTES = 1 << 22


def freeze(path: Path, source: Any, name: str | None, dtype: Any, prune: PruneLike | None, missing: Any) -> None:
    """`FrozenTable.write`."""
    contents = contents_of(source, name, prune)
    rows = contents.rows
    default = contents.default_row(missing)
    dtype = str(rows.values.dtype) if dtype is None else str(getattr(dtype, "__name__", dtype))
    if dtype not in DTYPES:
        mend = "see kvjax.serving.FrozenTable.write"
        raise fail(ValueError, contents.name, "freeze", f"dtype in {tuple(DTYPES)}", repr(dtype), mend)
    hashes, order = _ordered(contents.name, "freeze", rows.keys)
    dim = rows.values.shape[1]
    last = np.zeros(dim, np.float32) if default is None else default
    blocks = _Blocks(contents.name, dtype)

    def all_blocks() -> Iterator[Codes]:
        for part in _parts(len(order), dim):
            yield blocks.encode(to_float32(rows.values[order[part]]))
        yield blocks.encode(last[None])

    description = Description(
        name=contents.name, dim=dim, rows=len(rows), dtype=dtype, key_dtype=contents.key_dtype,
        step=int(rows.last_step), bits=1, steps=0, missing="init" if default is None else "row",
        initial=contents.initial, error=blocks.error(),
    )  # fmt: skip
    arrays = {} if contents.pool is None else {"pool": contents.pool}
    _write(path, description, hashes, arrays, blocks, all_blocks())


def freeze_changes(
    path: Path, old: Mapped, keys: np.ndarray, values: Any, removed: np.ndarray, step: int | None
) -> None:
    """`FrozenTable.update`: rows that have not changed are copied as they are stored."""
    description, name = old.description, old.description.name
    rows = to_float32(values)
    if rows.shape != (keys.size, description.dim):
        want = f"rows ({keys.size}, {description.dim})"
        raise fail(ValueError, name, "update", want, str(rows.shape), "give one row for each changed key")
    added, order = _ordered(name, "update", keys)
    gone = mixed(np.unique(removed.reshape(-1).view(np.uint64)))
    if np.isin(gone, added).any():
        raise fail(ValueError, name, "update", "keys that change or go", "some that do both", "leave them out of one")
    blocks = _Blocks(name, description.dtype)
    codes, scales = blocks.encode(rows[order])

    n, hashes = description.rows, old.arrays["hashes"]
    keep = np.ones(n, bool)
    for some in (added, gone):
        at, found = find(hashes, old.arrays["starts"], description.steps, some)
        keep[at[found]] = False
    kept = np.flatnonzero(keep)
    # Where each row comes from: one of the old rows, or, from n on, one of the new ones.
    places = np.searchsorted(hashes[kept], added)
    sources = np.insert(kept, places, n + np.arange(len(added)))
    merged = np.insert(hashes[kept], places, added)

    def all_blocks() -> Iterator[Codes]:
        for part in _parts(len(sources), description.dim):
            yield _pick(old, (codes, scales), sources[part])
        yield old.arrays["rows"][n:], old.arrays["scales"][n:] if "scales" in old.arrays else None

    blocks.before = description.error
    description = dataclasses.replace(
        description, rows=len(sources), step=description.step if step is None else int(step)
    )
    arrays = {name: array for name, array in old.arrays.items() if name == "pool"}
    _write(path, description, merged, arrays, blocks, all_blocks())


def _pick(old: Mapped, new: Codes, sources: np.ndarray) -> Codes:
    n, codes, scales = old.description.rows, *new
    is_new = sources >= n
    picked = old.arrays["rows"][np.where(is_new, 0, sources)]
    picked[is_new] = codes[sources[is_new] - n]
    if scales is None:
        return picked, None
    picked_scales = old.arrays["scales"][np.where(is_new, 0, sources)]
    picked_scales[is_new] = scales[sources[is_new] - n]
    return picked, picked_scales


def _write(path: Path, description: Description, hashes: np.ndarray, arrays: Any, blocks: _Blocks, rows: Any) -> None:
    starts, steps = starts_of(hashes)
    description = dataclasses.replace(description, bits=len(starts).bit_length() - 1, steps=steps)
    arrays = arrays | {"starts": starts, "hashes": np.append(hashes, SENTINEL)}
    write(path, lambda: dataclasses.replace(description, error=blocks.error()), arrays, rows)


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


def _parts(n: int, dim: int) -> Iterator[slice]:
    size = max(1, _BLOCK_BYTES // (4 * dim))
    return (slice(start, min(n, start + size)) for start in range(0, n, size))


class _Blocks:
    """Stores blocks of rows, and adds up what that changes."""

    def __init__(self, name: str, dtype: str) -> None:
        self.name, self.dtype, self._error = name, dtype, Error()
        self.before = {"largest": 0.0, "relative": 0.0}

    def encode(self, rows: np.ndarray) -> Codes:
        """Raises:
        ValueError: a row cannot be stored.
        """
        if self.dtype == "int8":
            self._check(rows[~np.isfinite(rows)])
        codes, scales = encode(rows, self.dtype)
        if self.dtype != "float32":
            stored = decode(codes, scales, self.dtype)
            self._check(rows[~np.isfinite(stored) & np.isfinite(rows)])
            self._error.add(rows, stored)
        return codes, scales

    def _check(self, lost: np.ndarray) -> None:
        if lost.size:
            raise fail(
                ValueError, self.name, "freeze", f"rows that {self.dtype} can hold", f"{lost[0]}",
                "choose another dtype, or mend the rows",
            )  # fmt: skip

    def error(self) -> dict[str, float]:
        """What a description says of it; of an update the larger of before and now."""
        error = self._error
        now = {"largest": error.largest, "relative": (error.squares / error.total) ** 0.5 if error.total else 0.0}
        return {name: float(max(now[name], self.before[name])) for name in now}
