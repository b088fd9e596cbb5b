"""What the Linen and the NNX layer share: how a layer gets its table, and how it reads."""

from __future__ import annotations

from typing import Any

import jax

from kvjax import _initializers
from kvjax._registry import get_table
from kvjax._table import Table


def resolve_table(table: str | Table, features: int | None, **options: Any) -> Table:
    """The table of a layer: the one that was given, or the one of that name, made if need be.

    Of the `options` of `get_table`, those that are None are left to its defaults; but the default initial rows are
    those of ``flax.linen.Embed``, normal with variance 1 / features.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(table, Table) or features is None:
        name = table.name if isinstance(table, Table) else table
        if given:
            raise ValueError(
                f"kvjax: table {name!r}, Embed: want {', '.join(given)} where the table is made, got them for one that "
                "exists; give them to kvjax.get_table, or give a name and features"
            )
        if isinstance(table, Table) and features not in (None, table.dim):
            raise ValueError(
                f"kvjax: table {name!r}, Embed: want features={table.dim} (the table's dim), got {features}; "
                "leave features out"
            )
        return table if isinstance(table, Table) else get_table(table)
    defaults: dict[str, Any] = {"initializer": _initializers.normal(features**-0.5)}
    return get_table(table, dim=features, **defaults | given)


def read(table: Table, keys: Any, dtype: Any) -> jax.Array:
    """Rows in the compute dtype. The cast comes after the read, so gradients are summed in float32."""
    rows = table.lookup(keys)
    return rows if dtype is None else rows.astype(dtype)
