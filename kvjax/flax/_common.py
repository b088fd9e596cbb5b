"""What the Linen and the NNX layers share: how a layer gets its table, and how it reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from kvjax import _initializers
from kvjax._bags import clip_norm, lookup_bag
from kvjax._keys import Keys, as_keys
from kvjax._masks import mask_of
from kvjax._registry import get_table
from kvjax._table import Table


@dataclasses.dataclass
class TableOptions:
    """The fields of every layer. Those after `param_dtype` are options of `kvjax.get_table`, one line each."""

    table: str | Table
    features: int | None = None
    dtype: Any = None  # of the output
    param_dtype: Any = None  # get_table's dtype
    initializer: Any = None
    key_dtype: str | None = None
    seed: int | None = None
    trainable: bool | None = None
    checkpoint: bool | None = None
    capacity: int | None = None
    max_capacity: int | None = None
    on_full: str | None = None
    admit: Any = None
    evict: Any = None
    count: str | None = None
    storage: Any = None
    rounding: str | None = None
    constraint: Any = None
    mesh: Any = None
    axis: Any = None
    partitioner: Any = None
    replicated: bool | None = None
    wire: Any = None


_FIELDS = [field.name for field in dataclasses.fields(TableOptions)]
OPTIONS = tuple(_FIELDS[_FIELDS.index("param_dtype") + 1 :])


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
        return table if isinstance(table, Table) else _existing(table)
    defaults: dict[str, Any] = {"initializer": _initializers.normal(features**-0.5)}
    return get_table(table, dim=features, **defaults | given)


def _existing(name: str) -> Table:
    try:
        return get_table(name)
    except KeyError:
        raise KeyError(
            f"kvjax: table {name!r}, Embed: want a table of this name, got none; give features= to make it"
        ) from None


def read(layer: Any, table: Table, keys: Any, mask: Any, salt: int | None, missing: Any) -> jax.Array:
    """Rows in the compute dtype. The cast comes after the read, so gradients are summed in float32."""
    keys, mask = _meant(layer, table, keys, mask, salt)
    rows = clip_norm(table, type(layer).__name__, table.lookup(keys, mask=mask, missing=missing), layer.max_norm)
    return rows if layer.dtype is None else rows.astype(layer.dtype)


def read_bag(layer: Any, table: Table, keys: Any, mask: Any, salt: int | None, empty: Any, **form: Any) -> jax.Array:
    """Bags in the compute dtype; `empty` is the row for empty ones."""
    keys, mask = _meant(layer, table, keys, mask, salt)
    options = {"combiner": layer.combiner, "max_norm": layer.max_norm, "dtype": layer.dtype}
    return lookup_bag(table, keys, mask=mask, empty=empty, **options, **form)


def learns_default(empty: str, table: Table) -> bool:
    """Whether a bag layer has a row for empty bags among its parameters."""
    if empty not in ("zeros", "learned"):
        raise ValueError(
            f"kvjax: table {table.name!r}, EmbedBag: want empty='zeros' or 'learned', got {empty!r}; choose one"
        )
    return empty == "learned"


def _meant(layer: Any, table: Table, keys: Any, mask: Any, salt: int | None) -> tuple[Keys, jax.Array | None]:
    """Salted keys, and which of them are meant; padding is told by the ids, before the salt."""
    keys = as_keys(keys, f"table {table.name!r}, {type(layer).__name__}")
    mask = mask_of(keys, mask, layer.pad_id, table.name, type(layer).__name__)
    return (keys if salt is None else keys.salted(salt)), mask
