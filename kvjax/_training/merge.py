"""Merging: sums of the gradient rows of equal keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys
from kvjax._keys.opaque import words_in
from kvjax._keys.sparse_rows import SparseRows, check_fit
from kvjax._ops import training
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail


def merge(grads: SparseRows | Sequence[SparseRows], scale: ArrayLike = 1.0) -> SparseRows:
    """Sums the rows of equal keys, in float32 and in the order of the batch.

    More than 256 rows are summed in blocks of 256, and the sums of the blocks are added in order. So the result is the
    same to the bit on the CPU and on a GPU, which sums the blocks of a frequent key in parallel.

    Args:
      grads: one gradient of a table, or several of the same table; all axes before the last one (of lookups, of
        ``lax.scan``) are flattened.
      scale: number or ``()`` array by which the sums are multiplied, for instance 1 / microbatches.

    Returns:
      `SparseRows` with keys ``(n,)``, rows ``(n, dim)`` float32 and counts ``(n,)``, where n is the number of rows in
      `grads`: the distinct keys in order of first occurrence, then padding with count 0 and zero rows.

    Raises:
      TypeError: these are not gradients of a table.
      ValueError: the rows differ in width or belong to several tables; there are no gradients; or one does not have a
        row for each key.
      ValueError, jax.errors.JaxRuntimeError: the gradients went through arithmetic (see `SparseRows.canary`).

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np
      >>> g = kvjax.merge(kvjax.SparseRows(np.array([7, 9, 7]), jnp.ones((3, 2))))
      >>> np.asarray(g.keys).tolist(), g.counts.tolist(), g.rows[:, 0].tolist()
      ([7, 9, 0], [2, 1, 0], [2.0, 1.0, 0.0])
    """
    if isinstance(scale, SparseRows):
        raise fail(
            TypeError, None, "merge", "one SparseRows, or a list of them", "two arguments", "kvjax.merge([a, b])"
        )
    number: Any = scale
    shape = np.shape(number)
    if isinstance(number, str | None) or shape != () or jnp.iscomplexobj(number):
        raise fail(
            ValueError, None, "merge", "one real number as scale=", f"{type(number).__name__} {shape}",
            "scale each row before the merge: grads.replace(rows=grads.rows * weights[:, None])",
        )  # fmt: skip
    parts: list[Any] = list(grads) if isinstance(grads, (list, tuple)) else [grads]
    for part in parts:
        if not isinstance(part, SparseRows):
            raise TypeError(
                f"kvjax: merge: want the SparseRows of a table, or several, got {type(part).__name__}; dense gradients "
                "are averaged by jax.numpy, and trees by jax.tree.map(..., is_leaf=lambda g: isinstance(g, SparseRows))"
            )
        check_fit(part, None, "merge")
    if not parts:
        raise fail(ValueError, None, "merge", "at least one SparseRows", "an empty sequence", "give one")
    widths = {part.rows.shape[-1] for part in parts}
    if len(widths) > 1:
        mend = "merge those of each table by themselves"
        raise fail(ValueError, None, "merge", "gradients of one table", f"rows of widths {sorted(widths)}", mend)
    (dim,) = widths
    names = {part.table for part in parts} - {None}
    if len(names) > 1:
        mend = "merge those of each table by themselves"
        raise fail(ValueError, None, "merge", "gradients of one table", f"those of {sorted(map(str, names))}", mend)
    merged, _ = _merged(parts, dim, None)
    if isinstance(scale, (int, float)) and scale == 1:
        return merged
    return merged.replace(rows=merged.rows * jnp.asarray(scale, jnp.float32))


def merge_on_shard(spec: TableSpec, grads: SparseRows) -> tuple[SparseRows, jax.Array]:
    """The same of one device's part of a gradient, and the status ``()`` uint32: a failure of one device alone is no
    error there, as the others would wait for its keys for ever. It gives padding then."""
    return _merged([grads], spec.dim, spec)


def _merged(parts: list[SparseRows], dim: int, spec: TableSpec | None) -> tuple[SparseRows, jax.Array]:
    if len(parts) == 1 and parts[0].merged and parts[0].rows.ndim == 2:
        return parts[0], jnp.uint32(0)
    check_dtypes(parts)
    narrow = any(p.keys.narrow for p in parts)

    def run(*parts: SparseRows) -> Any:
        # The canaries stay with the result: what they wait for, a write made of it waits for, even if n is 0.
        canaries = jnp.concatenate([p.canary.reshape(-1) for p in parts])
        results = training.merge(
            spec,
            Keys(jnp.concatenate([p.keys.words.reshape(-1, 2) for p in parts])),
            jnp.concatenate([p.rows.reshape(-1, dim).astype(jnp.float32) for p in parts]),
            jnp.concatenate([p.counts.reshape(-1) for p in parts]),
            words_in(canaries),
        )
        return (), (*results, canaries)

    words, rows, counts, status, canaries = as_auto(run, (), *parts)[1]
    merged = parts[0].replace(keys=Keys(words, narrow), rows=rows, counts=counts, canary=canaries, merged=True)
    merged.table = next((part.table for part in parts if part.table is not None), None)
    merged.viewed = all(part.viewed or part.table is None for part in parts)
    return merged, status


def check_dtypes(parts: Sequence[SparseRows]) -> None:
    """Refuses gradients whose keys went through arithmetic that changed their types."""
    for part in parts:
        got = (part.keys.words.dtype, part.counts.dtype, part.canary.dtype)
        if got[:2] != (jnp.uint32, jnp.int32) or not jnp.issubdtype(got[2], jax.dtypes.prng_key):
            raise TypeError(
                f"kvjax: merge: want keys uint32, counts int32 and a typed key as canary, got {[str(d) for d in got]}: "
                "an optax transform or other arithmetic ran over the whole gradient tree and destroyed the keys; "
                "wrap transforms of dense and sparse gradients together in kvjax.optax.joint(tx), and put all "
                "others inside kvjax.optax.partition(dense=..., tables=...)"
            )
