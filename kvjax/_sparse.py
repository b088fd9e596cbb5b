"""Sparse gradients: the rows of the keys that a loss looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import _ops, _spread
from kvjax._keys import Keys, as_keys
from kvjax.ffi import host

_SEAL: int = host.SEAL


@jax.tree_util.register_pytree_with_keys_class
class SparseRows:
    """The gradient of a table: one row per key that was looked up.

    Attributes:
      keys: `Keys` of shape ``(...)``; keys may repeat unless the gradient is merged.
      rows: ``(..., dim)`` float32.
      counts: ``(...)`` int32, how often each key occurred; 0 marks padding, whose row is ignored.
      seal: uint32, constants that any arithmetic on the whole tree destroys. Arithmetic would destroy the keys
        too, so `merge` refuses a gradient with a broken seal instead of training wrong rows.
      merged: whether the keys are distinct and the padding stands at the end, as `merge` leaves them.

    Args:
      keys: `Keys` or integers ``(...)``.
      rows: ``(..., dim)``.
      counts: ``(...)`` int32; by default 1 for every key.

    Raises:
      ValueError: the shapes do not belong together.

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np
      >>> kvjax.SparseRows(np.array([7, 9]), jnp.ones((2, 3)))
      SparseRows(keys=(2,), rows=(2, 3), merged=False)
    """

    def __init__(self, keys: Any, rows: Any, counts: Any = None):
        self.keys = as_keys(keys)
        self.rows = jnp.asarray(rows)
        self.counts = jnp.ones(self.keys.shape, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
        if self.rows.shape[:-1] != self.keys.shape or self.counts.shape != self.keys.shape:
            raise ValueError(
                f"SparseRows wants keys (...), rows (..., dim) and counts (...), got keys {self.keys.shape}, "
                f"rows {self.rows.shape}, counts {self.counts.shape}"
            )
        self.seal = jnp.uint32(_SEAL)
        self.merged = False

    def tree_flatten_with_keys(self):
        names = ("keys", "rows", "counts", "seal")
        return [(jax.tree_util.GetAttrKey(n), getattr(self, n)) for n in names], self.merged

    @classmethod
    def tree_unflatten(cls, merged, children):
        new = object.__new__(cls)
        new.keys, new.rows, new.counts, new.seal = children
        new.merged = merged
        return new

    def replace(self, **fields: Any) -> SparseRows:
        """A copy with some attributes exchanged; their shapes are not checked.

        Other keys or counts are not merged any more, unless `merged` is given too.

        Args:
          **fields: attributes by name.
        """
        merged = self.merged and not fields.keys() & {"keys", "counts"}
        new = self.tree_unflatten(merged, (self.keys, self.rows, self.counts, self.seal))
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    def __repr__(self) -> str:
        def shape(x):
            return tuple(x.shape) if hasattr(x, "shape") else x

        return f"SparseRows(keys={shape(self.keys)}, rows={shape(self.rows)}, merged={self.merged})"


def is_sparse(x: Any) -> bool:
    return isinstance(x, SparseRows)


def merge(grads: SparseRows | Sequence[SparseRows], scale: Any = 1.0) -> SparseRows:
    """Sums the rows of equal keys, in float32 and in the order in which they stand.

    A sum of more than 256 rows is that of blocks: the sums of 256 rows each are added, in order. So the result is the
    same to the bit on the CPU and on a GPU, which sums the blocks of a frequent key at the same time.

    Args:
      grads: one gradient of a table, or several of the same table; their leading axes (of lookups, of
        ``lax.scan``) are flattened.
      scale: number or ``()`` array by which the sums are multiplied, for instance 1 / microbatches.

    Returns:
      `SparseRows` with keys ``(n,)``, rows ``(n, dim)`` float32 and counts ``(n,)``, where n is the number of rows
      that came in: the distinct keys in order of first occurrence, then padding with count 0 and zero rows.

    Raises:
      ValueError: the rows differ in width, or there are none.
      ValueError, jax.errors.JaxRuntimeError: the gradients went through arithmetic (see `SparseRows.seal`).

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np
      >>> g = kvjax.merge(kvjax.SparseRows(np.array([7, 9, 7]), jnp.ones((3, 2))))
      >>> np.asarray(g.keys).tolist(), g.counts.tolist(), g.rows[:, 0].tolist()
      ([7, 9, 0], [2, 1, 0], [2.0, 1.0, 0.0])
    """
    parts = [grads] if isinstance(grads, SparseRows) else list(grads)
    if not parts:
        raise ValueError("merge wants at least one SparseRows, got an empty sequence")
    widths = {part.rows.shape[-1] for part in parts}
    if len(widths) > 1:
        raise ValueError(f"merge wants gradients of one table, got rows of widths {sorted(widths)}")
    (dim,) = widths
    if len(parts) == 1 and parts[0].merged and parts[0].rows.ndim == 2:
        merged = parts[0]
    else:
        _check_dtypes(parts)
        narrow = any(p.keys.narrow for p in parts)

        def run(*parts: SparseRows) -> Any:
            # The seals stay with the result: what they wait for, a write made of it waits for, even if n is 0.
            seals = jnp.concatenate([p.seal.reshape(-1) for p in parts])
            results = _ops.merge(
                Keys(jnp.concatenate([p.keys.words.reshape(-1, 2) for p in parts])),
                jnp.concatenate([p.rows.reshape(-1, dim).astype(jnp.float32) for p in parts]),
                jnp.concatenate([p.counts.reshape(-1) for p in parts]),
                seals,
            )
            return (), (*results, seals)

        words, rows, counts, seals = _spread.as_auto(run, (), *parts)[1]
        merged = parts[0].replace(keys=Keys(words, narrow), rows=rows, counts=counts, seal=seals, merged=True)
    if isinstance(scale, (int, float)) and scale == 1:
        return merged
    return merged.replace(rows=merged.rows * jnp.asarray(scale, jnp.float32))


def _check_dtypes(parts: Sequence[SparseRows]) -> None:
    for part in parts:
        got = (part.keys.words.dtype, part.counts.dtype, part.seal.dtype)
        if got != (jnp.uint32, jnp.int32, jnp.uint32):
            raise TypeError(
                f"kvjax: merge: want keys uint32, counts int32 and seal uint32, got {[str(d) for d in got]}: an "
                "optax transform or other arithmetic ran over the whole gradient tree and destroyed the keys; "
                "wrap transforms of dense and sparse gradients together in kvjax.optax.joint(tx), and put all "
                "others inside kvjax.optax.partition(dense=..., tables=...)"
            )
