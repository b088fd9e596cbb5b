"""Sparse gradients: the rows of the keys that a loss looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._keys.keys import Keys, KeysLike, as_keys
from kvjax._keys.opaque import opaque_canary, uncast_canary
from kvjax._values.arrays import ArrayLike, array_of, at_most_32_bits, by_value, check_no_mask, host_or_jax, uncut
from kvjax._values.errors import fail, meant
from kvjax.ffi import host

_CANARY: int = host.CANARY
_FIELDS = ("keys", "rows", "counts", "canary", "merged", "table", "viewed")


@jax.tree_util.register_pytree_with_keys_class
class SparseRows:
    """The gradient of a table: one row per key that was looked up.

    Attributes:
      keys: `Keys` of shape ``(...)``; keys may repeat unless the gradient is merged.
      rows: ``(..., dim)`` float32, or another dtype of floats that it was made of.
      counts: ``(...)`` int32, how often each key occurred; 0 marks padding, whose row is ignored. A step counts one
        key 2**31 - 1 times at most.
      canary: a leaf of a dtype that no arithmetic accepts. So a norm, a sum or a scale over the whole gradient is an
        error, instead of using keys as numbers or destroying them. Its words are uint32 constants, by which `merge`
        detects a gradient that was changed nevertheless.
      merged: whether the keys are distinct and the padding is at the end, as `merge` returns them.
      table: name of the table whose gradient `kvjax.value_and_grad` made; no other table accepts it. None for gradients
        made by hand.
      viewed: whether it was taken at rows that `kvjax.optax.caught_up` brought up to date.

    Args:
      keys: `Keys` or integers ``(...)``.
      rows: ``(..., dim)`` real numbers; integers and bools become float32.
      counts: ``(...)`` int32; by default those of the gradient whose keys these are, and 1 for other keys.

    Raises:
      ValueError: the shapes do not fit each other, or counts are negative or not integers.
      TypeError: the rows are complex, or not numbers.

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np
      >>> kvjax.SparseRows(np.array([7, 9]), jnp.ones((2, 3)))
      SparseRows(keys=(2,), rows=(2, 3), merged=False)
    """

    _keys: object  # of a tree of something else, anything
    rows: jax.Array
    counts: jax.Array
    canary: jax.Array
    merged: bool
    table: str | None
    viewed: bool

    def __init__(self, keys: KeysLike, rows: ArrayLike, counts: ArrayLike | None = None) -> None:
        keys = as_keys(keys)
        if counts is not None:
            self.counts = _as_counts(counts)
        elif keys.counts is not None:  # or padding would become keys, and a key that is there twice one that is once
            self.counts = keys.counts
        else:
            self.counts = jnp.ones(keys.shape, jnp.int32)
        self.keys = Keys(jnp.asarray(keys.words), keys.narrow)
        self.rows = _as_rows(array_of(rows, None, "SparseRows", "rows of real numbers"))
        check_fit(self, None, "SparseRows")
        self.canary = opaque_canary(jnp.uint32(_CANARY))
        self.merged = False
        self.table = None
        self.viewed = False

    @property
    def keys(self) -> Keys:
        keys = self._keys
        return Keys(keys.words, keys.narrow, counts=self.counts) if isinstance(keys, Keys) else cast("Keys", keys)

    @keys.setter
    def keys(self, keys: Keys) -> None:
        self._keys = keys

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[bool, str | None, bool]]:
        uncast_canary(self.canary)
        children = (self._keys, self.rows, self.counts, self.canary)
        named = [(jax.tree_util.GetAttrKey(n), child) for n, child in zip(_FIELDS[:4], children, strict=True)]
        return named, (self.merged, self.table, self.viewed)

    @classmethod
    def tree_unflatten(cls, aux: tuple[bool, str | None, bool], children: Sequence[Any]) -> Self:
        new = object.__new__(cls)
        new.keys, new.rows, new.counts, new.canary = children
        new.merged, new.table, new.viewed = aux
        return new

    def replace(self, **fields: object) -> SparseRows:
        """A copy with some attributes replaced.

        If keys or counts are replaced, ``merged`` becomes false, unless it is given too.

        Args:
          **fields: attributes by name. Keys, rows and counts that are replaced together may have another shape.

        Raises:
          ValueError: keys, rows and counts do not fit each other any more.
          TypeError: the rows are complex, or not numbers; or there is no such attribute.

        Example:
          >>> import kvjax, jax.numpy as jnp, numpy as np
          >>> grads = kvjax.SparseRows(np.array([7, 9]), jnp.ones((2, 3)))
          >>> grads.replace(rows=grads.rows * 2).rows[0].tolist()
          [2.0, 2.0, 2.0]
        """
        others = [name for name in fields if name not in _FIELDS]
        if others:
            mend = meant(others[0], _FIELDS) + "give attributes of SparseRows"
            raise fail(TypeError, None, "SparseRows.replace", f"any of {list(_FIELDS)}", repr(others[0]), mend)
        merged = self.merged and not fields.keys() & {"keys", "counts"}
        new = self.tree_unflatten((merged, self.table, self.viewed), (self._keys, self.rows, self.counts, self.canary))
        for name, value in fields.items():
            setattr(new, name, _taken(name, value))
        check_fit(new, None, "SparseRows.replace")
        return new

    def __repr__(self) -> str:
        def shape(x: Any) -> Any:
            return tuple(x.shape) if hasattr(x, "shape") else x

        return f"SparseRows(keys={shape(self.keys)}, rows={shape(self.rows)}, merged={self.merged})"


def check_fit(grads: SparseRows, table: str | None, op: str) -> None:
    """Whether there is a row of numbers, and a count, for each key; leaves that are no arrays may be anything.

    Raises:
      ValueError, TypeError: there is not.
    """
    parts: dict[str, Any] = {"keys": grads.keys, "rows": grads.rows, "counts": grads.counts}
    if isinstance(parts["keys"], Keys) and not hasattr(parts["keys"].words, "shape"):
        return
    if not all(hasattr(part, "shape") for part in parts.values()):
        return
    keys, rows, counts = (tuple(part.shape) for part in parts.values())
    if len(rows) != len(keys) + 1 or rows[:-1] != keys or counts != keys:
        raise fail(
            ValueError, table, op, "keys (...), rows (..., dim) and counts (...)",
            f"keys {keys}, rows {rows}, counts {counts}", "give one row a key",
        )  # fmt: skip
    dtype: Any = getattr(grads.rows, "dtype", None)
    real = [jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)]
    if dtype is not None and not any(real):
        mend = "give float32, of complex numbers their real part (jnp.real)"
        raise fail(TypeError, table, op, "rows of real numbers", str(dtype), mend)


def _taken(name: str, value: Any) -> Any:
    """What the constructor makes of an array or a list; anything else as it is."""
    if isinstance(value, (Keys, np.ndarray, jax.Array, list)):
        if name == "keys":
            keys = as_keys(value, "SparseRows.replace")
            return Keys(jnp.asarray(keys.words), keys.narrow)
        if name == "rows":
            return _as_rows(uncut(value))
        if name == "counts" and getattr(value, "dtype", None) != jnp.int32:
            return _as_counts(value)
    return value


def _as_rows(rows: Any) -> Any:
    """Rows in which a norm, a scale or a clip does not round: of integers and bools float32."""
    whole = jnp.issubdtype(rows.dtype, jnp.integer) or rows.dtype == jnp.bool_
    return rows.astype(jnp.float32) if whole else rows


def _as_counts(counts: ArrayLike) -> jax.Array:
    """Counts ``(...)`` int32: others would be cut, and what is below 1 is padding."""
    check_no_mask(counts, "SparseRows")
    given: Any = host_or_jax(counts)
    if isinstance(given, jax.Array) and not isinstance(given, Tracer) and given.is_fully_addressable:
        given = np.asarray(given)
    wrong = None if given.size == 0 or jnp.issubdtype(given.dtype, jnp.integer) else str(given.dtype)
    if wrong is None and isinstance(given, np.ndarray) and given.size and not 0 <= given.min() <= given.max() < 2**31:
        wrong = f"{given.min()} to {given.max()}"
    if wrong is not None:
        want = "counts of integers, 0 or more and below 2**31"
        raise fail(ValueError, None, "SparseRows", want, wrong, "give how often each key occurred, 0 for padding")
    return by_value(at_most_32_bits(given) if isinstance(given, jax.Array) else given, jnp.int32)


def is_sparse(x: Any) -> bool:
    return isinstance(x, SparseRows)
