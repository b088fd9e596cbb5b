"""Sources: what bags, features and layers read rows of, a table or the arrays of a frozen one."""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

import jax

from kvjax._keys.keys import Keys
from kvjax._keys.masks import mask_of
from kvjax._keys.width import keys_of
from kvjax._spec.spec import TableSpec
from kvjax._table import reads
from kvjax._table.handle import keys_for
from kvjax._table.prefetched import Prefetched
from kvjax._table.reads import Query
from kvjax._table.table import Table
from kvjax._values.errors import fail


class FrozenSource(abc.ABC):
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

    @abc.abstractmethod
    def lookup(self, keys: Any, *, mask: Any = None, missing: Any = None) -> Any: ...


Source: TypeAlias = Table | FrozenSource


def check_source(x: Any, op: str) -> None:
    """Whether a function that reads rows has got something that has them; `op` is for the error."""
    if not isinstance(x, (Table, FrozenSource)):
        raise TypeError(
            f"kvjax: {op}: want a kvjax.Table, got {type(x).__name__}; give what kvjax.get_table returns, the leaf of "
            "the parameters that holds it, params[...]['table'], or the as_jax() of a kvjax.serving.FrozenTable"
        )


def spec_of(source: Source) -> TableSpec | None:
    """The spec of a table; None of what has none, and so is in one place."""
    return source.spec if isinstance(source, Table) else None


def key_dtype_of(source: Source) -> str:
    return source.spec.key_dtype if isinstance(source, Table) else source.key_dtype


def keys_of_source(source: Source, keys: Any, op: str) -> Keys:
    """Keys ``(...)`` as the source has them, checked."""
    if isinstance(source, Table):
        return keys_for(source, keys, op)
    if isinstance(keys, Prefetched):
        raise fail(
            TypeError, source.name, op, "keys", "prefetched ones, and a frozen table reads nothing ahead",
            "leave kvjax.prefetch out",
        )  # fmt: skip
    return keys_of(keys, source.name, source.key_dtype, op)


def query_of(source: Source, op: str, keys: Any, mask: Any, pad_id: Any) -> Query:
    """The arguments of a lookup, checked once; see `kvjax._table.reads.query_of`."""
    if isinstance(source, Table):
        return reads.query_of(source, op, keys, mask, pad_id)
    keys = keys_of_source(source, keys, op)
    return Query(keys, mask_of(keys, mask, pad_id, source.name, source.key_dtype, op))


def rows_of(source: Source, query: Query, missing: Any = None) -> jax.Array:
    """Rows ``(..., dim)`` of a query."""
    if isinstance(source, Table):
        return reads.lookup(source, query, missing)[0]
    return source.lookup(query.keys, mask=query.mask, missing=missing)
