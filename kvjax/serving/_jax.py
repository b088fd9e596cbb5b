"""A frozen table as arrays of JAX: the search of `_search.py` on pairs of 32-bit words, in plain JAX.

Where buckets are short, as they are unless keys were chosen to collide, one window of hashes is fetched for each key
and compared as a whole: a binary search would wait for memory in each of its steps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._keys.keys import KeysLike
from kvjax._keys.masks import mask_of
from kvjax._keys.salt import mixed
from kvjax._keys.table_keys import keys_of
from kvjax._keys.words import integers_of
from kvjax._lookup.readable import FrozenReadable
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._values.arguments import integer_in
from kvjax._values.arrays import ArrayLike, one_program
from kvjax._values.errors import fail
from kvjax._values.lookups import Missing
from kvjax.serving._contents import no_initial, row_of
from kvjax.serving._format import FrozenError, MappedFile
from kvjax.serving._initial import Initial
from kvjax.serving._search import Starts

_AT_ONCE = 2**20  # hashes
_WIDEST = 32  # hashes; in a table of random keys the longest bucket has about 10


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenArrays(FrozenReadable):
    """A frozen table on a device; made by `FrozenTable.as_jax`.

    Attributes:
      hashes: ``(n + 1, 2)`` uint32, the low word first. n: rows, or the capacity.
      starts: ``(2**bits,)`` uint32.
      rows: ``(n + 1, dim)`` as they are stored.
      scales: ``(n + 1,)`` float32, of int8 only.
      size: ``()`` int32, how many rows there are, with a capacity only. What is behind them repeats the last.
      pool: ``(p, dim)`` float32, of a pool of initial rows only.
      name: of the table.
      steps: of a search.
      window: how many hashes from the start of a bucket have all of it; 0 where that is too many.
      initial: how initial rows are made; None if nobody knows.
      as_initial: whether keys without a row read as their initial row; else they read as the last row.
      key_dtype: of the table.
    """

    hashes: jax.Array
    starts: jax.Array
    rows: jax.Array
    scales: jax.Array | None
    size: jax.Array | None
    pool: jax.Array | None
    name: str = dataclasses.field(metadata={"static": True})
    steps: int = dataclasses.field(metadata={"static": True})
    window: int = dataclasses.field(metadata={"static": True})
    initial: Initial | None = dataclasses.field(metadata={"static": True})
    as_initial: bool = dataclasses.field(metadata={"static": True})
    key_dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def dim(self) -> int:
        return self.rows.shape[1]

    @property
    def said(self) -> str:
        static = [f.name for f in dataclasses.fields(self) if f.metadata.get("static")]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in static)

    @property
    def _last(self) -> int:
        return self.rows.shape[0] - 1

    def __len__(self) -> int:
        return self._last if self.size is None else int(self.size)

    def __bool__(self) -> bool:  # as that of a table
        return True

    def __repr__(self) -> str:
        room = "" if self.size is None else f", capacity={self._last}"
        return f"FrozenArrays({self.name!r}, dim={self.dim}, dtype={self.rows.dtype}{room})"

    @overload
    def lookup(
        self, keys: KeysLike, *, mask: ArrayLike | None = None, pad_id: int | None = None,
        missing: Missing | None = None, return_found: Literal[False] = False,
    ) -> jax.Array: ...  # fmt: skip

    @overload
    def lookup(
        self, keys: KeysLike, *, mask: ArrayLike | None = None, pad_id: int | None = None,
        missing: Missing | None = None, return_found: Literal[True],
    ) -> tuple[jax.Array, jax.Array]: ...  # fmt: skip

    def lookup(
        self,
        keys: KeysLike,
        *,
        mask: ArrayLike | None = None,
        pad_id: int | None = None,
        missing: Missing | None = None,
        return_found: bool = False,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """`FrozenTable.lookup` in JAX. Random initial rows may differ in the last bit of float32, because compilers
        fuse operations.

        Args:
          keys: ``(...)``, as all methods of `kvjax.Table` take them.
          mask: ``(...)`` bool, false for padding, whose rows are zeros.
          pad_id: a key that is padding wherever it stands.
          missing: what a key without a row reads as: "init", "zeros", or a row ``(dim,)``.
          return_found: whether to also return which keys have a row.

        Returns:
          Rows ``(..., dim)`` float32, or ``(rows, found)`` with found ``(...)`` bool.
        """
        own = keys_of(keys, self.name, self.key_dtype, "lookup")
        words = jnp.asarray(own.words)
        valid = mask_of(own, mask, pad_id, self.name, self.key_dtype, "lookup")

        def run(self: FrozenArrays, words: jax.Array, valid: Any) -> Any:
            return self._rows_of(words, valid, missing), ()

        rows, found = as_auto(run, sharding_of(words, words.ndim - 1), self, words, valid)[0]
        return (rows, found) if return_found else rows

    def _rows_of(self, words: jax.Array, valid: jax.Array | None, missing: Any) -> tuple[jax.Array, jax.Array]:
        at, found, hashes = self._find(words)
        at = jnp.where(found, at, self._last)
        rows = self.rows[at].astype(jnp.float32)
        if self.scales is not None:
            rows *= self.scales[at][..., None]
        as_initial = self.as_initial if missing is None else isinstance(missing, str) and missing == "init"
        if as_initial:
            rows = self._with_initial(rows, found, words, hashes)
        elif missing is not None:
            rows = jnp.where(found[..., None], rows, row_of(self.name, "lookup", missing, self.dim))
        if valid is not None:
            rows, found = jnp.where(valid[..., None], rows, jnp.float32(0)), found & valid
        return rows, found

    @one_program()
    def _find(self, words: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        hashes = mixed(words)
        low, high = hashes[..., 0], hashes[..., 1]
        bits = self.starts.shape[0].bit_length() - 1
        at = self.starts[high >> (32 - bits)].astype(jnp.int32)
        at, found = (self._compare if self.window else self._search)(at, low, high)
        return at, found & (at < (self._last if self.size is None else self.size)), hashes

    def _compare(self, at: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first hash of a bucket that is equal, and whether there is one."""
        # Whatever comes before a bucket is equal to none of its keys.
        at = jnp.minimum(at, self._last + 1 - self.window)
        axes = lax.GatherDimensionNumbers((at.ndim, at.ndim + 1), (), (0,))
        there = lax.gather(self.hashes, at[..., None], axes, (self.window, 2), mode="clip")
        equal = (there[..., 0] == low[..., None]) & (there[..., 1] == high[..., None])
        return at + jnp.argmax(equal, -1).astype(jnp.int32), jnp.any(equal, -1)

    def _search(self, at: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first hash that is not below, and whether it is equal."""
        for step in reversed(range(self.steps)):
            there = jnp.take(self.hashes, at + (2**step - 1), axis=0, mode="clip")
            below = (there[..., 1] < high) | ((there[..., 1] == high) & (there[..., 0] < low))
            at += below.astype(jnp.int32) << step
        at = jnp.minimum(at, self._last)
        there = self.hashes[at]
        return at, (there[..., 0] == low) & (there[..., 1] == high)

    def _with_initial(self, rows: jax.Array, found: jax.Array, words: jax.Array, hashes: jax.Array) -> jax.Array:
        if self.initial is None:
            raise no_initial(self.name)
        return _with_initial(self.initial, rows, found, words, hashes, self.pool)


@functools.partial(jax.jit, static_argnums=0)  # or each call outside of jit would make branches, and compile them
def _with_initial(
    initial: Initial, rows: jax.Array, found: jax.Array, words: jax.Array, hashes: jax.Array, pool: jax.Array | None
) -> jax.Array:
    """The rows ``(..., dim)``, and the initial ones of keys that were not found."""

    def some(rows: jax.Array) -> jax.Array:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            keys64, hashes64 = (integers_of(pair, jnp.uint64) for pair in (words, hashes))
            made = initial.rows(jnp, keys64, hashes64, rows.shape[-1], pool).astype(jnp.float32)
            # XLA may compute with more bits than it is asked for, and leave out the rounding.
            made = lax.optimization_barrier(made.astype(initial.dtype)).astype(jnp.float32)
            return jnp.where(found[..., None], rows, made)

    return lax.cond(found.all(), lambda rows: rows, some, rows)


def _window_of(starts: np.ndarray, rows: int, capacity: int | None) -> int:
    longest = int(np.diff(starts, append=np.uint32(rows)).max())
    # In steps of four, and with a capacity at least that of a full table of random keys, so that not every release of a
    # table is another program.
    window = max(-(-longest // 4) * 4, 1 if capacity is None else 12)
    return 0 if longest > _WIDEST else min(window, (rows if capacity is None else capacity) + 1)


def _with_room(x: np.ndarray, rows: int, capacity: int) -> np.ndarray:
    """``(capacity + 1, ...)`` of ``(rows + 1, ...)``: the last one as often as there is room."""
    room = np.empty((capacity + 1, *x.shape[1:]), x.dtype)
    room[:rows], room[rows:] = x[:rows], x[rows]
    return room


def arrays_of(mapped: MappedFile, capacity: int | None) -> FrozenArrays:
    """A mapped file on the default device. capacity: rows that the arrays have room for."""
    description, arrays = mapped.description, mapped.arrays
    rows, most = description.rows, 2**30
    if rows >= most:
        raise fail(
            ValueError, description.name, "as_jax", "fewer than 2**30 rows", f"{rows}",
            "read it by FrozenTable.lookup, on the host",
        )  # fmt: skip
    if not (capacity is None or integer_in(rows, most - 1)(capacity)):
        raise fail(
            ValueError, description.name, "as_jax", f"capacity=None, or an integer from {rows}, its rows, to 2**30 - 1",
            repr(capacity), "let it be what the largest release will have",
        )  # fmt: skip
    capacity = None if capacity is None else int(capacity)  # NumPy's have no bit_length
    parts = {name: arrays[name] for name in ("hashes", "rows", "scales") if name in arrays}
    starts, steps = arrays["starts"], description.steps
    if capacity is not None:
        finer = Starts(capacity)
        for begin in range(0, rows, _AT_ONCE):
            some = np.asarray(parts["hashes"][begin : min(begin + _AT_ONCE, rows)])
            if (some[1:] < some[:-1]).any():
                raise FrozenError(
                    f"kvjax: table {description.name!r}, as_jax: want the hashes of a frozen table in order, "
                    "got others; the file is damaged: verify() it, and write it again"
                )
            finer.add(some)
        starts, steps = finer.finish()
        parts = {name: _with_room(x, rows, capacity) for name, x in parts.items()}
    if description.dtype == "bfloat16":
        parts["rows"] = parts["rows"].view(jnp.bfloat16)
    window = _window_of(starts, rows, capacity)
    return FrozenArrays(
        hashes=jnp.asarray(parts["hashes"].view(np.uint32).reshape(-1, 2)),
        starts=jnp.asarray(starts),
        rows=jnp.asarray(parts["rows"]),
        scales=jnp.asarray(parts["scales"]) if "scales" in parts else None,
        size=None if capacity is None else jnp.asarray(rows, jnp.int32),
        pool=jnp.asarray(arrays["pool"]) if "pool" in arrays else None,
        name=description.name,
        steps=steps if capacity is None or not window else 0,  # which a window does without
        window=window,
        initial=description.initial,
        as_initial=description.missing == "init",
        key_dtype=description.key_dtype,
    )
