"""What the Linen and the NNX layer share: how a layer gets its table, and how it reads."""

from __future__ import annotations

from typing import Any

import jax

from kvjax import _initializers
from kvjax._registry import get_table
from kvjax._table import Table


def resolve_table(
    table: str | Table, features: int | None, param_dtype: Any, initializer: Any, **options: Any
) -> Table:
    """The table of a layer: the one that was given, or the one of that name, made if need be.

    The default initial rows are those of ``flax.linen.Embed``: normal with variance 1 / features.
    """
    if isinstance(table, Table):
        if features is not None and features != table.dim:
            raise ValueError(
                f"kvjax: table {table.name!r}, Embed: want features={table.dim} (the table's dim), got {features}; "
                "leave features out"
            )
        return table
    if features is None:
        return get_table(table)
    if initializer is None:
        initializer = _initializers.normal(features**-0.5)
    return get_table(table, dim=features, dtype=param_dtype, initializer=initializer, **options)


def read(table: Table, keys: Any, dtype: Any) -> jax.Array:
    """Rows in the compute dtype. The cast comes after the read, so gradients are summed in float32."""
    rows = table.lookup(keys)
    return rows if dtype is None else rows.astype(dtype)
