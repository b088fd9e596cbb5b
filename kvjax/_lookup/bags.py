"""Bags: the rows of several keys combined into one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from kvjax._keys.keys import Keys, KeysLike
from kvjax._lookup import combiners, plain_bags
from kvjax._lookup.combiners import Combiner
from kvjax._lookup.norms import clip_norm
from kvjax._lookup.readable import FrozenReadable, Readable, check_readable, query_of, rows_of, spec_of
from kvjax._ops import bags as bag_ops
from kvjax._ops import routing
from kvjax._sharded import mesh
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto
from kvjax._table.reads import Query
from kvjax._table.table import Table
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail
from kvjax._values.missing import Missing
from kvjax._values.numbers import is_integer

_OP = "lookup_bag"


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

    There are three ways to give bags:

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
      segment_ids: ``(n,)`` integers; those outside 0..num_segments - 1 mark padding.
      num_segments: number of bags for `segment_ids`, a Python integer.
      mask: bool in the shape of the keys, false for padding.
      pad_id: the 64-bit id that marks padding.
      weights: real numbers in the shape of the keys, by default 1; not for "max".
      combiner: "sum" of the weighted rows; "mean", the sum divided by the sum of the weights; "sqrtn", the sum
        divided by the root of the sum of the squared weights; "max" of each column, whose gradient goes to the
        first of equal ones. A division by 0 gives 0.
      max_norm: positive number; longer rows are first scaled down to this Euclidean norm.
      empty: row ``(dim,)`` that a bag without keys gets, for instance a learned parameter; by default zeros.
      missing: what keys without a row read as, see `Table.lookup`.
      dtype: of the result, by default the table's. Rows are combined in float32 in any case.

    Returns:
      One row a bag, see above.

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
    check_readable(table, _OP)
    return combined(
        table, query_of(table, _OP, keys, mask, pad_id), lengths=lengths, segment_ids=segment_ids,
        num_segments=num_segments, weights=weights, combiner=combiner, max_norm=max_norm, empty=empty, missing=missing,
        dtype=dtype,
    )  # fmt: skip


def combined(
    table: Readable,
    query: Query,
    *,
    lengths: Any,
    segment_ids: Any,
    num_segments: int | None,
    weights: Any,
    combiner: str,
    max_norm: float | None,
    empty: Any,
    missing: Any,
    dtype: Any,
) -> jax.Array:
    """`lookup_bag` of keys and a mask that have been checked."""
    keys, mask = query.keys, query.mask
    if combiner not in combiners.COMBINERS:
        raise _fail(table, f"combiner in {combiners.COMBINERS}", repr(combiner), "choose one")
    weights = _weights(table, keys, weights, combiner)
    padded = lengths is None and segment_ids is None and num_segments is None and keys.ndim > 0
    ids, bags, fit = None, 0, None
    if padded and keys.shape[-1] == 0:  # one key of padding each: XLA's partitioner takes no shards of nothing
        keys = Keys(jnp.zeros((*keys.shape[:-1], 1, 2), jnp.uint32), keys.narrow)
        mask = jnp.zeros(keys.shape, bool)
        weights = None if weights is None else jnp.zeros(keys.shape, weights.dtype)
        query = Query(keys, mask)
    if not padded:
        ids, bags, fit = _bag_ids(table, keys, lengths, segment_ids, num_segments)
        ids = ids if mask is None else jnp.where(mask, ids, -1)
        query = Query(keys, (ids >= 0) & (ids < bags))
    rows = clip_norm(table, _OP, rows_of(table, query, missing), max_norm)
    combine = functools.partial(_combine, _sums_of(table), combiner, empty is not None)
    if padded:
        made, *filled = mesh.over_batch(
            _spec_of_rows(table), _OP, functools.partial(_combine_padded, combine), keys.ndim - 1, rows, mask, weights
        )
    else:

        def run(*operands: Any) -> Any:
            return (), combine(bags, *operands)

        operands = ids, rows, weights
        made, *filled = (run(*operands) if isinstance(table, Table) else as_auto(run, (), *operands))[1]
    if empty is not None:
        made = jnp.where(filled[0][..., None], made, jnp.broadcast_to(_row(table, empty), made.shape))
    if fit is not None:
        made = jnp.where(fit, made, jnp.float32(np.nan))
    return made.astype(rows.dtype if dtype is None else dtype)


def _sums_of(table: Readable) -> combiners.Sums:
    return combiners.CALLS if isinstance(table, Table) else combiners.PLAIN


def _spec_of_rows(table: Readable) -> TableSpec | None:
    """Where rows are that have been read: those that a following handle has read are of its caller alone."""
    spec = spec_of(table)
    follows = isinstance(table, Table) and table.follows
    return dataclasses.replace(spec, placement=None) if follows and spec is not None else spec


def _combine(
    sums: combiners.Sums, combiner: str, counted: bool, bags: int, ids: Any, rows: jax.Array, weights: Any
) -> Any:
    """Bags ``(bags, dim)`` float32 of rows ``(n, dim)``, and if that is asked for which have any, ``(bags,)`` bool."""
    made = combiners.combine(sums, combiner, bags, ids, rows.astype(jnp.float32), weights)
    return (made, combiners.counts(sums, bags, ids) > 0) if counted else (made,)


def _combine_padded(combine: Callable[..., Any], rows: jax.Array, mask: Any, weights: Any) -> Any:
    """The same of rows ``(bags, L, dim)``."""
    bags, length, dim = rows.shape
    ids = jnp.broadcast_to(jnp.arange(bags, dtype=jnp.int32)[:, None], (bags, length))
    ids = ids if mask is None else jnp.where(mask, ids, -1)
    flat = None if weights is None else weights.reshape(-1)
    return combine(bags, ids.reshape(-1), rows.reshape(-1, dim), flat)


def _bag_ids(
    table: Readable, keys: Keys, lengths: Any, segment_ids: Any, num_segments: Any
) -> tuple[jax.Array, int, jax.Array | None]:
    """The bag of each key ``(n,)`` int32 and the number of bags, where the keys do not say it by their shape; and
    whether lengths fit, ``()`` bool, if nobody else will say so."""
    if lengths is not None and segment_ids is not None:
        raise _fail(table, "lengths or segment_ids", "both", "each of them says which keys make a bag")
    if (segment_ids is None) != (num_segments is None):
        raise _fail(table, "segment_ids and num_segments together", "one of them", "give both or none")
    if lengths is None and segment_ids is None:
        raise _fail(table, "keys (..., L)", "a single key", "give a bag an axis, or lengths, or segment_ids")
    if keys.ndim != 1:
        raise _fail(
            table, "keys (n,) beside lengths or segment_ids", f"keys {keys.shape}", "flatten them, or pad and mask"
        )
    if lengths is not None:
        lengths = _int32(table, "lengths", lengths, 2**31 - 1)
        if lengths.ndim != 1:
            raise _fail(table, "lengths (b,)", f"{lengths.shape}", "give one length a bag")
        bags = lengths.shape[0]
        if not isinstance(table, Table):
            ids, fit = plain_bags.bag_ids(lengths, keys.shape[0])
            return ids, bags, _known_to_fit(table, lengths, keys.shape[0], fit)
        together = table.spec.placement is not None and mesh.inside(table.spec, _OP)
        ids, status = bag_ops.bag_ids(table.name, lengths, keys.shape[0], together)
        if together:  # other devices have other lengths
            (ids,) = routing.agree(table.spec, _OP, mesh.agreed(status), [ids])
        return ids, bags, None
    bags = num_segments
    if not is_integer(bags) or not 0 <= bags < 2**31:
        raise _fail(table, "an integer num_segments in 0..2**31 - 1", repr(bags), "it is a shape, known outside jit")
    ids = _int32(table, "segment_ids", segment_ids, int(bags))
    if ids.shape != keys.shape:
        raise _fail(table, f"segment_ids {keys.shape}", f"{ids.shape}", "give one bag per key")
    return ids, int(bags), None


def _known_to_fit(table: Readable, lengths: jax.Array, n: int, fit: jax.Array) -> jax.Array | None:
    """Whether lengths fit, if that is not known yet.

    Raises:
      ValueError: they do not.
    """
    if isinstance(fit, Tracer):
        return fit
    if not fit:
        want = f"lengths of at least 0 that sum to at most {n}"
        raise _fail(table, want, str(np.asarray(lengths).tolist()), "each key belongs to one bag")
    return None


def _int32(table: Readable, name: str, values: Any, high: int) -> jax.Array:
    """Integers as int32; those below 0 become -1 and those above `high` become it, so that none is cut."""
    values = values if isinstance(values, jax.Array) else np.asarray(values)
    if values.size == 0 and isinstance(values, np.ndarray):
        values = values.astype(np.int32)  # an empty list has no type of its own
    if values.dtype.kind not in "iu":
        raise _fail(table, f"integer {name}", f"{values.dtype}", "convert them first", TypeError)
    info = np.iinfo(values.dtype)
    return jnp.asarray(values.clip(max(info.min, -1), min(info.max, high)).astype(np.int32))


def _weights(table: Readable, keys: Keys, weights: Any, combiner: str) -> jax.Array | None:
    if weights is None:
        return None
    if combiner == "max":
        raise _fail(table, "no weights for combiner 'max'", "weights", "a mask leaves keys out")
    weights = jnp.asarray(weights)
    if weights.shape != keys.shape or weights.dtype.kind in "bc":
        raise _fail(table, f"real weights {keys.shape}", f"{weights.shape} {weights.dtype}", "give one number per key")
    return weights.astype(jnp.float32)


def _row(table: Readable, empty: Any) -> jax.Array:
    if isinstance(empty, str):
        raise _fail(table, f"a row ({table.dim},) for empty bags", repr(empty), "only EmbedBag learns one by itself")
    row = jnp.asarray(empty, jnp.float32)
    if row.shape != (table.dim,):
        raise _fail(table, f"a row ({table.dim},) for empty bags", f"{row.shape}", "give one row")
    return row


def _fail(table: Readable, want: str, got: str, mend: str, kind: type[Exception] = ValueError) -> Exception:
    return fail(kind, table.name, _OP, want, got, mend)
