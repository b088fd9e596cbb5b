"""Readables: what bags, features and layers read rows from: a table, or the arrays of a frozen one."""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

import jax

from kvjax._keys.key_width import keys_of
from kvjax._keys.keys import Keys, KeysLike
from kvjax._keys.masks import mask_of
from kvjax._spec.spec import TableSpec
from kvjax._table import reads
from kvjax._table.checks import keys_for
from kvjax._table.prefetched import Prefetched
from kvjax._table.reads import Query
from kvjax._table.table import Table
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail
from kvjax._values.missing import Missing


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


def check_readable(x: Any, op: str) -> None:
    """Whether a function that reads rows has got something that has them; `op` is for the error."""
    if not isinstance(x, (Table, FrozenReadable)):
        raise TypeError(
            f"kvjax: {op}: want a kvjax.Table, got {type(x).__name__}; give what kvjax.get_table returns, the leaf of "
            "the parameters that holds it, params[...]['table'], or the as_jax() of a kvjax.serving.FrozenTable"
        )


def spec_of(readable: Readable) -> TableSpec | None:
    """The spec of a table; None of what has none, and so is in one place."""
    return readable.spec if isinstance(readable, Table) else None


def keys_of_readable(readable: Readable, keys: Any, op: str) -> Keys:
    """Keys ``(...)`` as it has them, checked."""
    if isinstance(readable, Table):
        return keys_for(readable, keys, op)
    if isinstance(keys, Prefetched):
        raise fail(
            TypeError, readable.name, op, "keys", "prefetched ones, and a frozen table reads nothing ahead",
            "leave kvjax.prefetch out",
        )  # fmt: skip
    return keys_of(keys, readable.name, readable.key_dtype, op)


def query_of(readable: Readable, op: str, keys: Any, mask: Any, pad_id: Any) -> Query:
    """The arguments of a lookup, checked once; see `kvjax._table.reads.query_of`."""
    if isinstance(readable, Table):
        return reads.query_of(readable, op, keys, mask, pad_id)
    keys = keys_of_readable(readable, keys, op)
    return Query(keys, mask_of(keys, mask, pad_id, readable.name, readable.key_dtype, op))


def rows_of(readable: Readable, query: Query, missing: Any) -> jax.Array:
    """Rows ``(..., dim)`` of a query."""
    if isinstance(readable, Table):
        return reads.lookup(readable, query, missing)[0]
    return readable.lookup(query.keys, mask=query.mask, missing=missing)
