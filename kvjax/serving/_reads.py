"""Reads of a frozen table, by NumPy alone: rows, bags of them, and all of it."""

from __future__ import annotations

import sys
from typing import Any, Literal, overload

import numpy as np

from kvjax._formats.quantise import decode, rounded, to_float32
from kvjax._values.arrays import ArrayLike, HasArray, check_all_there
from kvjax._values.bags import OP as BAGS
from kvjax._values.bags import Combiner, check_combiner, check_empty
from kvjax._values.errors import fail, where_of
from kvjax._values.key_width import whole_bits
from kvjax._values.lookups import Missing, check_mask, check_pad, clip_norm
from kvjax.serving._bags import combined, places_of
from kvjax.serving._contents import no_initial, row_of
from kvjax.serving._format import MappedFile
from kvjax.serving._search import find, mixed, unmixed

IdsLike = HasArray | int | list[Any] | tuple[Any, ...]
"""Integers ``(...)``: `kvjax.Keys`, NumPy's, Python's, nested sequences of them, or JAX's."""


class FrozenReads:
    """The calls of `kvjax.serving.FrozenTable` that read it."""

    def __init__(self, mapped: MappedFile) -> None:
        """For `FrozenTable`."""
        description, arrays = mapped.description, mapped.arrays
        self.name, self.dim, self.dtype, self.step = (
            description.name, description.dim, description.dtype, description.step,
        )  # fmt: skip
        self._hashes, self._starts, self._steps = arrays["hashes"], arrays["starts"], description.steps
        self._rows, self._scales = arrays["rows"], arrays.get("scales")
        self._initial, self._pool = description.initial, arrays.get("pool")
        self._key_dtype = description.key_dtype
        scales = None if self._scales is None else self._scales[-1:]
        row = decode(self._rows[-1:], scales, self.dtype)[0]
        self.missing = None if description.missing == "init" else row

    @overload
    def lookup(
        self, keys: IdsLike, *, mask: ArrayLike | None = None, pad_id: int | None = None,
        missing: Missing | None = None, return_found: Literal[False] = False,
    ) -> np.ndarray: ...  # fmt: skip

    @overload
    def lookup(
        self, keys: IdsLike, *, mask: ArrayLike | None = None, pad_id: int | None = None,
        missing: Missing | None = None, return_found: Literal[True],
    ) -> tuple[np.ndarray, np.ndarray]: ...  # fmt: skip

    def lookup(
        self,
        keys: IdsLike,
        *,
        mask: ArrayLike | None = None,
        pad_id: int | None = None,
        missing: Missing | None = None,
        return_found: bool = False,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Reads rows, as `kvjax.Table.lookup` does, from any thread.

        Args:
          keys: ``(...)``.
          mask: ``(...)`` bool, false for padding, whose rows are zeros.
          pad_id: a key that marks padding wherever it occurs.
          missing: what a key without a row reads as: "init" (its initial row), "zeros", or a row ``(dim,)``. By default
            as given when the file was written.
          return_found: whether to also return which keys have a row.

        Returns:
          Rows ``(..., dim)`` float32, or ``(rows, found)`` with found ``(...)`` bool.

        Raises:
          TypeError: the keys are not integers, may have been cut to 32 bits, or are traced by JAX (see
            `FrozenTable.as_jax`); or the mask is not bool.
          ValueError: the mask has another shape, `missing` is none of these, or the initial rows are not known.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_frozen_lookup", dim=1, initializer=0.5).upsert([7], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     frozen = kvjax.serving.FrozenTable.write(folder + "/t.frozen", table)
          >>> rows, found = frozen.lookup([[7, 9, -1]], pad_id=-1, return_found=True)
          >>> rows[..., 0].tolist(), found.tolist()
          ([[1.0, 0.5, 0.0]], [[True, False, False]])
          >>> kvjax.drop_table("doc_frozen_lookup")
        """
        bits = self._bits(keys, "lookup")
        valid = self._valid(keys, bits, mask, pad_id, "lookup")
        valid = None if valid is None else valid.reshape(-1)
        rows, found = self._rows_of(bits.reshape(-1), missing, "lookup", valid)
        if valid is not None:
            rows[~valid] = 0
            found &= valid
        rows = rows.reshape(*bits.shape, self.dim)
        return (rows, found.reshape(bits.shape)) if return_found else rows

    def lookup_bag(
        self,
        keys: IdsLike,
        *,
        lengths: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        num_segments: int | None = None,
        mask: ArrayLike | None = None,
        pad_id: int | None = None,
        weights: ArrayLike | None = None,
        combiner: Combiner = "mean",
        max_norm: float | None = None,
        empty: ArrayLike | None = None,
        missing: Missing | None = None,
    ) -> np.ndarray:
        """Reads rows and combines them into bags, as `kvjax.lookup_bag` does, from any thread.

        Rows are added in float32, in their order in the call. So bags of rows that are not quantised are those
        of ``kvjax.lookup_bag(..., dtype=jnp.float32)`` of the table on the CPU to the bit, outside of ``jit``. In
        ``jit``, on other devices, and with `max_norm`, the last bits may differ; with `max_norm` a table of 16 bits
        also rounds the rows that were scaled down. There is no ``dtype=``: bags are float32.

        Args:
          keys: ``(..., L)`` with a bag in the last axis, or ``(n,)`` beside lengths or segment_ids.
          lengths: ``(b,)`` integers: the bags follow one after the other, and the rest of the n keys is padding.
          segment_ids: ``(n,)`` integers, the bag of each key; those outside 0..num_segments - 1 mark padding.
          num_segments: number of bags for `segment_ids`.
          mask: bool in the shape of the keys, false for padding, which is in no bag.
          pad_id: a key that marks padding wherever it occurs.
          weights: real numbers in the shape of the keys, by default 1; not for "max".
          combiner: "sum", "mean", "sqrtn" or "max", as there.
          max_norm: positive number; longer rows are first scaled down to this Euclidean norm.
          empty: row ``(dim,)`` that a bag without keys gets, such as the parameter "default" of an ``EmbedBag(...,
            empty="learned")``; by default zeros.
          missing: what a key without a row reads as, see `lookup`.

        Returns:
          Bags ``(..., dim)``, ``(b, dim)`` or ``(num_segments, dim)`` float32.

        Raises:
          TypeError, ValueError: an argument does not fit the others; or as `lookup`.

        Example:
          >>> import tempfile, kvjax, numpy as np
          >>> table = kvjax.get_table("doc_frozen_bag", dim=2).upsert([5, 7], [[1.0, 2.0], [3.0, 6.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     frozen = kvjax.serving.FrozenTable.write(f"{folder}/user.frozen", table)
          >>> frozen.lookup_bag([[5, 7, -1], [-1, -1, -1]], pad_id=-1, empty=[9.0, 9.0])
          array([[2., 4.],
                 [9., 9.]], dtype=float32)
          >>> frozen.lookup_bag([5, 7, 7, 0], lengths=[1, 2], combiner="sum")
          array([[ 1.,  2.],
                 [ 6., 12.]], dtype=float32)
          >>> kvjax.drop_table("doc_frozen_bag")
        """
        bits = self._bits(keys, BAGS)
        valid = self._valid(keys, bits, mask, pad_id, BAGS)
        what = where_of(self.name, BAGS)
        for each in (weights, empty):
            check_all_there(each, what)
        own: Any = None if weights is None else to_float32(weights, what, "weights that are real numbers")
        check_combiner(combiner, own, bits.shape, self.name)
        ids, shape = places_of(lengths, segment_ids, num_segments, bits.shape, self.name)
        row: Any = empty if empty is None or isinstance(empty, str) else to_float32(empty, what)
        if empty is not None:
            check_empty(row, self.dim, self.name)
        at = np.flatnonzero(ids >= 0 if valid is None else (ids >= 0) & valid.reshape(-1))
        rows = clip_norm(np, self._rows_of(bits.reshape(-1)[at], missing, BAGS)[0], max_norm, self.name, BAGS)
        own = None if own is None else own.reshape(-1)[at]
        return combined(combiner, shape, ids[at], rows, own, row)

    def contains(self, keys: IdsLike) -> np.ndarray:
        """Whether keys have a row.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` bool.

        Raises:
          TypeError: the keys are not integers, may have been cut to 32 bits, or are traced by JAX (see
            `FrozenTable.as_jax`).

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_frozen_contains", dim=1).upsert([7, 8], [[1.0], [2.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     frozen = kvjax.serving.FrozenTable.write(folder + "/t.frozen", table)
          >>> frozen.contains([7, 9]).tolist()
          [True, False]
          >>> kvjax.drop_table("doc_frozen_contains")
        """
        bits = self._bits(keys, "contains")
        return find(self._hashes, self._starts, self._steps, mixed(bits.reshape(-1)))[1].reshape(bits.shape)

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys ``(n,)`` int64 (uint64 for a table of unsigned keys), and their rows ``(n, dim)`` float32.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_frozen_export", dim=1).upsert([7, 8], [[1.0], [2.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     frozen = kvjax.serving.FrozenTable.write(folder + "/t.frozen", table)
          >>> keys, rows = frozen.export()
          >>> sorted(zip(keys.tolist(), rows.tolist()))
          [(7, [1.0]), (8, [2.0])]
          >>> kvjax.drop_table("doc_frozen_export")
        """
        n, unsigned = len(self), self._key_dtype.startswith("u")
        scales = None if self._scales is None else self._scales[:n]
        keys = unmixed(self._hashes[:n])
        return keys if unsigned else keys.view(np.int64), decode(self._rows[:n], scales, self.dtype)

    def __len__(self) -> int:
        return len(self._hashes) - 1

    def __bool__(self) -> bool:
        return True  # an empty table is a table

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, dim)``, the number of rows and their width."""
        return len(self), self.dim

    # ---- inside ----------------------------------------------------------------------------------------------

    def _bits(self, keys: Any, op: str) -> np.ndarray:
        words = getattr(keys, "words", keys)  # of kvjax.Keys
        if "jax" in sys.modules and isinstance(words, sys.modules["jax"].core.Tracer):
            raise fail(
                TypeError, self.name, op, "keys that are there, as a frozen table reads them by NumPy",
                "those of a program", "give compiled functions frozen.as_jax() as an argument, and read that",
            )  # fmt: skip
        return whole_bits(keys, self._key_dtype, where_of(self.name, op))

    def _valid(self, keys: Any, bits: np.ndarray, mask: Any, pad_id: Any, op: str) -> np.ndarray | None:
        if mask is not None:
            check_all_there(mask, where_of(self.name, op))
            mask = np.asarray(mask)
            check_mask(mask, bits.shape, self.name, op)
        if pad_id is None:
            return mask
        pad = self._bits(pad_id, f"{op}, pad_id")
        check_pad(pad_id, pad.shape, keys, self.name, op)
        return bits != pad if mask is None else mask & (bits != pad)

    def _rows_of(
        self, keys: np.ndarray, missing: Any, op: str, valid: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows ``(n, dim)`` float32 of keys ``(n,)`` uint64, and which of them have one; of padding, any rows."""
        hashes = mixed(keys)
        at, found = find(self._hashes, self._starts, self._steps, hashes)
        at[~found] = len(self._hashes) - 1
        rows = self._rows.take(at, axis=0, mode="clip")
        scales = None if self._scales is None else self._scales.take(at, mode="clip")
        rows = rows if self.dtype == "float32" else decode(rows, scales, self.dtype)
        as_initial = self.missing is None if missing is None else isinstance(missing, str) and missing == "init"
        if as_initial:
            # A random initial row takes as long as dozens of rows that are there: padding gets none.
            lost = np.flatnonzero(~found if valid is None else ~found & valid)
            if len(lost):
                rows[lost] = self._initial_rows(keys[lost], hashes[lost], op)
        elif missing is not None:
            rows[~found] = row_of(self.name, op, missing, self.dim)
        return rows, found

    def _initial_rows(self, keys: np.ndarray, hashes: np.ndarray, op: str) -> np.ndarray:
        if self._initial is None:
            raise no_initial(self.name, op)
        which: Any = slice(None)
        if self._initial.is_random:  # then each key's is made once
            _, first, which = np.unique(hashes, return_index=True, return_inverse=True)
            keys, hashes = keys[first], hashes[first]
        return rounded(self._initial.rows(np, keys, hashes, self.dim, self._pool), self._initial.dtype)[which]
