"""Readables: what bags, features and layers read rows from, a table or the arrays of a frozen one; their readers."""

from __future__ import annotations

import abc
from collections.abc import Hashable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer

from kvjax._keys.keys import KeysLike
from kvjax._keys.masks import mask_of
from kvjax._keys.table_keys import keys_of
from kvjax._lookup.sums import CALLS, PLAIN, plain_bag_ids
from kvjax._ops import bags as bag_ops
from kvjax._ops import routing
from kvjax._sharded import mesh
from kvjax._sharded.collectives import agreed
from kvjax._spec.spec import TableSpec
from kvjax._table import reads
from kvjax._table.prefetched import Prefetched
from kvjax._table.reads import Query
from kvjax._table.table import Table
from kvjax._values.arrays import ArrayLike
from kvjax._values.bags import Sums, lengths_error
from kvjax._values.errors import fail
from kvjax._values.lookups import Missing


class FrozenReadable(abc.ABC):
    """Rows that nothing trains, read in plain JAX; see `kvjax.serving.FrozenTable.as_jax`.

    Attributes:
      name: of the table.
      dim: width of a row.
      key_dtype: of the table.
    """

    name: str
    key_dtype: str

    @property
    @abc.abstractmethod
    def dim(self) -> int: ...

    @property
    @abc.abstractmethod
    def said(self) -> str:
        """What a program that reads it has as constants, beside the types of its arrays."""

    @abc.abstractmethod
    def lookup(self, keys: KeysLike, *, mask: ArrayLike | None = None, missing: Missing | None = None) -> jax.Array: ...


Readable: TypeAlias = Table | FrozenReadable


class Reader(abc.ABC):
    """How lookups read a readable.

    Attributes:
      name: of the table.
      dim: width of a row.
      sums: by which its rows become bags.
      spec: of the table over whose mesh the rows that it has read are spread, or None.
      spread: whether their first axis may be spread over devices.
      identity: what readers have in common of which one can read for all.
      usual: the `missing` that it has anyway, or None.
    """

    name: str
    dim: int
    sums: Sums
    spec: TableSpec | None
    spread: bool
    identity: Hashable
    usual: str | None

    @abc.abstractmethod
    def query(self, op: str, keys: Any, mask: Any, pad_id: Any) -> Query:
        """The arguments of a lookup, checked once; see `kvjax._table.reads.query_of`."""

    @abc.abstractmethod
    def rows(self, query: Query, missing: Any) -> jax.Array:
        """Rows ``(..., dim)``."""

    @abc.abstractmethod
    def bag_ids(self, lengths: jax.Array, n: int, op: str) -> tuple[jax.Array, jax.Array | None]:
        """The bag of each of n keys ``(n,)`` int32, of bags that stand one after the other; and whether their lengths
        fit, ``()`` bool, if nobody else will say so."""


class _OfTable(Reader):
    sums = CALLS

    def __init__(self, table: Table) -> None:
        self._table = table
        self.name, self.dim, spec = table.name, table.dim, table.spec
        self.spread = spec.placement is not None
        self.spec = spec if self.spread and not table.follows else None  # else what it reads is of its caller alone
        self.usual = "init" if spec.admit is None else None

    @property
    def identity(self) -> Hashable:
        """Handles that differ are asked each for itself, so that a stale one is refused; and so are those of one
        version of which one is not trained, or is a view."""
        # A tree of parameters that was taken apart has other tapes and views, of the same leaves.
        table = self._table
        leaves = table.given, *jax.tree.leaves((table.tape, table.view))
        return jax.tree.structure(table.view), *map(id, leaves)

    def query(self, op: str, keys: Any, mask: Any, pad_id: Any) -> Query:
        return reads.query_of(self._table, op, keys, mask, pad_id)

    def rows(self, query: Query, missing: Any) -> jax.Array:
        return reads.lookup(self._table, query, missing)[0]

    def bag_ids(self, lengths: jax.Array, n: int, op: str) -> tuple[jax.Array, jax.Array | None]:
        spec = self._table.spec
        together = spec.placement is not None and mesh.inside(spec, op)
        ids, status = bag_ops.bag_ids(self.name, lengths, n, together)
        if together:  # other devices have other lengths
            (ids,) = routing.agree(spec, op, agreed(status), [ids])
        return ids, None


class _OfFrozen(Reader):
    sums, spec, spread, usual = PLAIN, None, True, None

    def __init__(self, frozen: FrozenReadable) -> None:
        self._frozen, self.identity = frozen, id(frozen)
        self.name, self.dim = frozen.name, frozen.dim

    def query(self, op: str, keys: Any, mask: Any, pad_id: Any) -> Query:
        if isinstance(keys, Prefetched):
            raise fail(
                TypeError, self.name, op, "keys", "prefetched ones, and a frozen table reads nothing ahead",
                "leave kvjax.prefetch out",
            )  # fmt: skip
        keys = keys_of(keys, self.name, self._frozen.key_dtype, op)
        return Query(keys, mask_of(keys, mask, pad_id, self.name, self._frozen.key_dtype, op))

    def rows(self, query: Query, missing: Any) -> jax.Array:
        return self._frozen.lookup(query.keys, mask=query.mask, missing=missing)

    def bag_ids(self, lengths: jax.Array, n: int, op: str) -> tuple[jax.Array, jax.Array | None]:
        ids, fit = plain_bag_ids(lengths, n)
        if isinstance(fit, Tracer):
            return ids, fit
        if not fit:
            raise lengths_error(np.asarray(lengths), n, self.name, op)
        return ids, None


def reader_of(x: Any, op: str) -> Reader:
    """The reader of what a function that reads rows has got; `op` is for the error.

    Raises:
      TypeError: it has none.
    """
    if isinstance(x, Table):
        return _OfTable(x)
    if isinstance(x, FrozenReadable):
        return _OfFrozen(x)
    raise fail(
        TypeError, None, op, "a kvjax.Table", type(x).__name__, "give what kvjax.get_table returns, the leaf of the "
        "parameters that holds it, params[...]['table'], or the as_jax() of a kvjax.serving.FrozenTable",
    )  # fmt: skip
