"""Features: descriptions of what a model reads from tables, so that features of one table can be read together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike

from kvjax._keys.keys import KeysLike, salted_keys
from kvjax._lookup.bags import bags_in
from kvjax._lookup.readable import FrozenReadable, Reader, reader_of
from kvjax._table.prefetched import Prefetched
from kvjax._table.reads import Query
from kvjax._table.table import Table
from kvjax._values.arguments import is_integer, is_real
from kvjax._values.arrays import ArrayLike
from kvjax._values.bags import Combiner
from kvjax._values.dtypes import check_result
from kvjax._values.errors import fail, where_of
from kvjax._values.integers import salt_of
from kvjax._values.lookups import Missing, clip_norm, missing_row

_OF_BAGS = ("lengths", "segment_ids", "num_segments", "weights", "empty")


@dataclasses.dataclass(frozen=True, eq=False)
class Feature:
    """A feature of a model: a table, the keys of a batch, and how their rows are combined; for `kvjax.lookup_many`.

    Without a `combiner` it reads one row per key, as `Table.lookup` does; with one it makes bags, as `kvjax.lookup_bag`
    does. Layers make features of their own table with `kvjax.flax.Embed.feature`. Nothing is read or checked until the
    feature is looked up.

    Attributes:
      table: the `Table`, or the ``as_jax()`` of a `kvjax.serving.FrozenTable`.
      keys: ``(...)``; for bags ``(..., L)``, or ``(n,)`` with lengths or segment_ids. `kvjax.Keys`, NumPy integers or
        JAX integers; or, except for ``(n,)`` keys of bags, what `kvjax.prefetch` has returned for them.
      mask: bool in the shape of the keys, false for padding.
      pad_id: the id that marks padding, before the salt.
      salt: number of the feature, so that it shares the table with other features but no rows; or a salt for each key.
        See `kvjax.Keys.salted`.
      missing: what keys without a row read as, see `Table.lookup`.
      combiner: "sum", "mean", "sqrtn" or "max" for bags; None for one row per key.
      lengths: for bags only: ``(b,)`` integers, see `kvjax.lookup_bag`.
      segment_ids: for bags only: ``(n,)`` integers.
      num_segments: for bags only: a Python integer.
      weights: for bags only: real numbers in the shape of the keys.
      empty: for bags only: the row ``(dim,)`` of a bag without keys, by default zeros.
      max_norm: positive number; longer rows are scaled down to this Euclidean norm, before bags are made of them.
      dtype: of the result, by default the table's.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_feature", dim=2)
      >>> kvjax.Feature(table, np.array([[5, 7, -1]]), pad_id=-1, combiner="mean")
      Feature(table='doc_feature', keys=(1, 3), pad_id=-1, combiner='mean')
      >>> kvjax.drop_table("doc_feature")
    """

    table: Table | FrozenReadable
    keys: KeysLike | Prefetched
    mask: ArrayLike | None = None
    _: dataclasses.KW_ONLY
    pad_id: int | None = None
    salt: int | ArrayLike | None = None
    missing: Missing | None = None
    combiner: Combiner | None = None
    lengths: ArrayLike | None = None
    segment_ids: ArrayLike | None = None
    num_segments: int | None = None
    weights: ArrayLike | None = None
    empty: ArrayLike | None = None
    max_norm: float | None = None
    dtype: DTypeLike | None = None

    def __repr__(self) -> str:
        """Arrays by their shapes, and the table by its name: it may be traced, and shown when that has ended."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["table"] = getattr(self.table, "name", type(self.table).__name__)
        given["dtype"] = None if self.dtype is None else getattr(self.dtype, "__name__", str(self.dtype))
        return f"Feature({', '.join(f'{name}={_said(x)}' for name, x in given.items() if x is not None)})"


def _said(x: Any) -> str:
    if isinstance(x, str) or is_real(x):
        return repr(x if isinstance(x, str) or not hasattr(x, "item") else x.item())
    return str(x.shape) if hasattr(x, "shape") else f"<{type(x).__name__}>"


class Plan(NamedTuple):
    """A feature that has been checked.

    Attributes:
      reader: of the table.
      query: what is asked of it.
      missing: what keys without a row read as.
      made_of: the result of the rows of the query.
      salt: that the keys are still to get, or None: so that features that are read together get theirs together.
    """

    reader: Reader
    query: Query
    missing: Any
    made_of: Callable[[jax.Array], jax.Array]
    salt: int | None = None

    @property
    def rows(self) -> jax.Array:
        """What is to be read, read by itself."""
        keys = self.query.keys if self.salt is None else self.query.keys.salted(self.salt)
        return self.reader.rows(self.query._replace(keys=keys), self.missing)


def plan(feature: Feature, op: str) -> Plan:
    """What is to be read for a feature; `op` is for errors.

    Raises:
      TypeError, ValueError: an argument does not fit the others.
    """
    reader = reader_of(feature.table, op)
    check_result(feature.dtype, reader.name, op)
    if feature.missing is not None and not (isinstance(feature.missing, str) and feature.missing == "init"):
        missing_row(feature.missing, reader.dim, None, jnp.asarray, reader.name, op)
    query, salt = _query_of(feature, reader, op)
    if feature.combiner is not None:
        form: dict[str, Any] = {name: getattr(feature, name) for name in (*_OF_BAGS, "combiner", "max_norm", "dtype")}
        query, made_of = bags_in(reader, query, op, **form)
        return Plan(reader, query, feature.missing, made_of, salt)
    if given := [name for name in _OF_BAGS if getattr(feature, name) is not None]:
        raise fail(
            ValueError, reader.name, op, f"a combiner beside {', '.join(given)}", "none",
            "combiner='sum', 'mean', 'sqrtn' or 'max' makes bags",
        )  # fmt: skip

    def as_asked(rows: jax.Array) -> jax.Array:
        rows = clip_norm(jnp, rows, feature.max_norm, reader.name, op)
        # The cast comes after the read, so that gradients are summed in float32.
        return rows if feature.dtype is None else rows.astype(feature.dtype)

    return Plan(reader, query, feature.missing, as_asked, salt)


def _query_of(feature: Feature, reader: Reader, op: str) -> tuple[Query, int | None]:
    """The keys, and which of them are valid: ids say what is padding, before the salt; and a salt that a program is
    still to give them."""
    keys: Any = feature.keys
    salt: Any = feature.salt
    if isinstance(keys, Prefetched) and salt is not None:
        raise fail(
            ValueError, reader.name, op, "no salt beside prefetched keys", f"salt={salt}",
            "prefetch the salted keys: kvjax.keys(ids).salted(salt)",
        )  # fmt: skip
    query = reader.query(op, keys, feature.mask, feature.pad_id)
    if salt is None:
        return query, None
    where = where_of(reader.name, op)
    if is_integer(salt) and isinstance(query.keys.words, Tracer):
        return query, salt_of(salt, where)
    return query._replace(keys=salted_keys(query.keys, salt, where)), None


def read(feature: Feature, op: str) -> jax.Array:
    """Looks one feature up; `op` is for errors."""
    planned = plan(feature, op)
    return planned.made_of(planned.rows)
