"""Bags: the rows of several keys combined into one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax._keys.keys import Keys, KeysLike
from kvjax._lookup.readable import FrozenReadable, Reader, reader_of
from kvjax._sharded import mesh
from kvjax._spmd.explicit import as_auto
from kvjax._table.reads import Query
from kvjax._table.table import Table
from kvjax._values.arrays import (
    ArrayLike,
    at_most_32_bits,
    by_value,
    check_no_mask,
    host_or_jax,
    one_program,
    reals_of,
)
from kvjax._values.bags import OP, Combiner, Sums, bags_of, check_combiner, check_empty, combine, counts
from kvjax._values.dtypes import check_result
from kvjax._values.errors import where_of
from kvjax._values.lookups import Missing, clip_norm


def lookup_bag(
    table: Table | FrozenReadable,
    keys: KeysLike,
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
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Looks rows up and combines them into bags; changes nothing.

    Bags can be given in three ways:

    * padded: keys ``(..., L)``, with a bag in the last axis and padding marked by `mask` or `pad_id`; returns ``(...,
      dim)``;
    * keys ``(n,)`` and `lengths` ``(b,)``: the bags follow one after the other, and the rest of the n keys is padding;
      returns ``(b, dim)``;
    * keys ``(n,)`` and `segment_ids` ``(n,)``, in any order, with `num_segments`; returns ``(num_segments, dim)``.

    Padding has no row, no gradient and no frequency. Rows are added in float32, in their order in the call, so results
    are reproducible to the bit. Gradients flow to the table (as `SparseRows`, one row per key), to the weights and to
    the row for empty bags.

    Args:
      table: the `Table`, or the ``as_jax()`` of a `kvjax.serving.FrozenTable`, whose bags are made in plain JAX: they
        may differ from the table's in the last bits, and bags of lengths that do not fit are NaN in a compiled
        function.
      keys: ``(..., L)`` or ``(n,)``: `kvjax.Keys`, NumPy integers or JAX integers. Padded bags may be given as
        prefetched keys.
      lengths: ``(b,)`` integers of at least 0, whose sum is at most n.
      segment_ids: ``(n,)`` integers; those outside 0..num_segments - 1 mark padding. Use -1: with x64 off, ``jit`` cuts
        NumPy's 64-bit integers before kvjax sees them, and the lowest of these becomes 0.
      num_segments: number of bags for `segment_ids`, a Python integer.
      mask: bool in the shape of the keys, false for padding.
      pad_id: the 64-bit id that marks padding.
      weights: real numbers in the shape of the keys, by default 1; not for "max".
      combiner: "sum" of the weighted rows; "mean", the sum divided by the sum of the weights; "sqrtn", the sum
        divided by the root of the sum of the squared weights; "max" of each column, whose gradient goes to the
        first of equal ones. A division by 0 gives 0.
      max_norm: positive number; longer rows are first scaled down to this Euclidean norm. It is computed in float32, so
        a row whose norm is above about 1.8e19 becomes zeros: its square is infinite.
      empty: row ``(dim,)`` that a bag without keys gets, for instance a learned parameter; by default zeros.
      missing: what keys without a row read as, see `Table.lookup`.
      dtype: of the result, by default the table's. Rows are combined in float32 in any case.

    Returns:
      One row per bag, see above.

    Raises:
      TypeError, ValueError: an argument does not fit the others.
      ValueError, jax.errors.JaxRuntimeError: a length is negative, or they sum to more than n; or as
        `Table.lookup` does.

    Source:
      The combiners are those of TensorFlow's ``tf.nn.embedding_lookup_sparse``.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_bag", dim=2).upsert(np.array([5, 7]), [[1.0, 2.0], [3.0, 6.0]])
      >>> kvjax.lookup_bag(table, np.array([[5, 7, -1], [-1, -1, -1]]), pad_id=-1)
      Array([[2., 4.],
             [0., 0.]], dtype=float32)
      >>> keys = np.array([5, 7, 7, 0])
      >>> kvjax.lookup_bag(table, keys, lengths=[1, 0, 2], combiner="sum", empty=[9.0, 9.0])
      Array([[ 1.,  2.],
             [ 9.,  9.],
             [ 6., 12.]], dtype=float32)
      >>> kvjax.lookup_bag(table, keys[:3], segment_ids=[1, 0, 1], num_segments=2, weights=[1.0, 1.0, 3.0])
      Array([[3. , 6. ],
             [2.5, 5. ]], dtype=float32)
      >>> kvjax.drop_table("doc_bag")
    """
    reader = reader_of(table, OP)
    query, made_of = bags_in(
        reader, reader.query(OP, keys, mask, pad_id), OP, lengths=lengths, segment_ids=segment_ids,
        num_segments=num_segments, weights=weights, combiner=combiner, max_norm=max_norm, empty=empty, dtype=dtype,
    )  # fmt: skip
    return made_of(reader.rows(query, missing))


def bags_in(
    reader: Reader,
    query: Query,
    op: str,
    *,
    lengths: Any,
    segment_ids: Any,
    num_segments: int | None,
    weights: Any,
    combiner: str,
    max_norm: float | None,
    empty: Any,
    dtype: Any,
) -> tuple[Query, Callable[[jax.Array], jax.Array]]:
    """The bags of keys and a mask that have been checked; for the arguments see `lookup_bag`.

    Returns:
      What is to be looked up, and the function that makes the bags of its rows.
    """
    keys, mask = query.keys, query.mask
    check_result(dtype, reader.name, op)
    if weights is not None:
        weights = reals_of(weights, jnp.float32, reader.name, op, "weights that are real numbers")
    check_combiner(combiner, weights, keys.shape, reader.name, op)
    for each in (lengths, segment_ids):
        check_no_mask(each, where_of(reader.name, op))
    given = bags_of(_integers(lengths), _integers(segment_ids), num_segments, keys.shape, reader.name, op)
    empty = None if empty is None else _row(reader, empty, op)
    ids, bags, fit = None, 0, None
    if given is None and keys.shape[-1] == 0:  # one key of padding each: XLA's partitioner takes no shards of nothing
        keys = Keys(jnp.zeros((*keys.shape[:-1], 1, 2), jnp.uint32), keys.narrow)
        mask = jnp.zeros(keys.shape, bool)
        weights = None if weights is None else jnp.zeros(keys.shape, weights.dtype)
        query = Query(keys, mask)
    if given is not None:
        bags = given.number
        if given.ids is None:
            ids, fit = reader.bag_ids(by_value(given.lengths), keys.shape[0], op)
        else:
            ids = by_value(given.ids)
        ids, used = _in_bags(bags, ids, mask)
        query = Query(keys, used)

    def made_of(rows: jax.Array) -> jax.Array:
        rows = clip_norm(jnp, rows, max_norm, reader.name, op)
        how = (reader.sums, combiner, empty is not None)
        if given is None:
            padded = functools.partial(_combine_padded, *how)
            made, *filled = mesh.over_batch(reader.spec, op, padded, keys.ndim - 1, rows, mask, weights)
        else:

            def run(*operands: Any) -> Any:
                return (), _combine(*how, bags, *operands)

            made, *filled = as_auto(run, (), ids, rows, weights)[1]
        if empty is not None:
            made = jnp.where(filled[0][..., None], made, jnp.broadcast_to(empty, made.shape))
        if fit is not None:
            made = jnp.where(fit, made, jnp.float32(np.nan))
        return made.astype(rows.dtype if dtype is None else dtype)

    return query, made_of


@one_program(0)
def _in_bags(bags: int, ids: jax.Array, mask: Any) -> tuple[jax.Array, jax.Array]:
    """Ids ``(n,)`` with -1 for padding, and which of them are of a bag."""
    ids = ids if mask is None else jnp.where(mask, ids, -1)
    return ids, (ids >= 0) & (ids < bags)


def _combine(sums: Sums, combiner: str, counted: bool, bags: int, ids: Any, rows: jax.Array, weights: Any) -> Any:
    """Bags ``(bags, dim)`` float32 of rows ``(n, dim)``, and if that is asked for which have any, ``(bags,)`` bool."""
    made = combine(jnp, sums, combiner, bags, ids, rows.astype(jnp.float32), weights)
    return (made, counts(jnp, sums, bags, ids) > 0) if counted else (made,)


def _combine_padded(sums: Sums, combiner: str, counted: bool, rows: jax.Array, mask: Any, weights: Any) -> Any:
    """The same of rows ``(bags, L, dim)``."""
    return _combine(sums, combiner, counted, rows.shape[0], *_flat(rows, mask, weights))


@one_program()
def _flat(rows: jax.Array, mask: Any, weights: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Ids ``(n,)``, rows ``(n, dim)`` and weights ``(n,)`` of padded bags. What is computed of them is no part of this
    program, which XLA would round otherwise."""
    bags, length, dim = rows.shape
    ids = jnp.broadcast_to(jnp.arange(bags, dtype=jnp.int32)[:, None], (bags, length))
    ids = ids if mask is None else jnp.where(mask, ids, -1)
    return ids.reshape(-1), rows.reshape(-1, dim), None if weights is None else weights.reshape(-1)


def _integers(values: Any) -> Any:
    """Integers as an array of NumPy, or of JAX of at most 32 bits."""
    values = None if values is None else host_or_jax(values)
    return at_most_32_bits(values) if isinstance(values, jax.Array) else values


def _row(reader: Reader, empty: Any, op: str) -> jax.Array:
    row: Any = empty
    if not isinstance(empty, str):
        row = reals_of(empty, jnp.float32, reader.name, op, "rows of real numbers")
    check_empty(row, reader.dim, reader.name, op)
    return row
