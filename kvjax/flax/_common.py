"""The part that Linen and NNX layers share: how a layer gets its table, and what it reads of it."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from jax.typing import DTypeLike

from kvjax._lookup.feature import Feature
from kvjax._lookup.readable import Readable
from kvjax._spec.options import ENTRIES, Options
from kvjax._spec.sharding import Sharding
from kvjax._table.modules import Maker, init_table, warn_of_others
from kvjax._table.registry import Arguments, get_table, tables
from kvjax._table.table import Table
from kvjax._values.arguments import is_integer
from kvjax._values.bags import check_combiner
from kvjax._values.errors import meant
from kvjax.initializers import InitializerLike, normal


@dataclasses.dataclass(repr=False)
class _Positional:
    table: str | Table
    features: int | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike | None = None


@dataclasses.dataclass(repr=False)
class LayerOptions(Options, Sharding, _Positional):
    """The fields of every layer: its table, and the options of `kvjax.get_table`.

    `dtype` is that of the output; `param_dtype` is `kvjax.get_table`'s. By default the initial rows are normal with
    variance 1 / features, as those of ``flax.linen.Embed``. `pad_id` and `max_norm` are those of `kvjax.Feature`.
    """

    # None is for the layer to resolve; pyright wants the types of `Options`.
    dtype: DTypeLike | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    initializer: InitializerLike | None = dataclasses.field(default=None, kw_only=True)  # pyright: ignore[reportIncompatibleVariableOverride]
    reuse: bool = dataclasses.field(default=False, kw_only=True)
    pad_id: int | None = dataclasses.field(default=None, kw_only=True)
    max_norm: float | None = dataclasses.field(default=None, kw_only=True)


_DEFAULTS: dict[str, Any] = {
    field.name: field.default for cls in (Options, Sharding) for field in dataclasses.fields(cls)
}


def resolve_table(layer: LayerOptions, op: str, rng: Any, maker: Maker) -> Table:
    """The table of a layer that is initialized: the one that was given, or the one of that name, made if need be.

    An option that is None is one that was not given.

    Args:
      layer: the layer's options.
      op: what the layer is called, for errors.
      rng: the JAX key of the model, or None.
      maker: who initializes.
    """
    table, features = layer.table, layer.features
    if not isinstance(table, (str, Table)):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        raise TypeError(f"kvjax: {op}: want the name of a table or a kvjax.Table, got {table!r}; {op}('user', 64)")
    options = _options(layer)
    if isinstance(table, Table) or features is None:
        name = table.name if isinstance(table, Table) else table
        if options:
            raise ValueError(
                f"kvjax: table {name!r}, {op}: want {', '.join(options)} where the table is made, got them for one "
                "that exists; give them to kvjax.get_table, or give a name and features"
            )
        return checked(layer, op, table if isinstance(table, Table) else _existing(table, op))
    scaled = normal(features**-0.5) if is_integer(features) and features > 0 else 0.0  # else get_table says what it is
    made: dict[str, Any] = {"dim": features, "initializer": scaled, **options}
    return init_table(table, Arguments(**made), set(options), rng, op, bool(layer.reuse), maker)


def _options(layer: LayerOptions) -> dict[str, Any]:
    """Those that are given."""
    said = {name: getattr(layer, name) for name in _DEFAULTS} | {"dtype": layer.param_dtype}
    return {name: value for name, value in said.items() if value is not None and value is not _DEFAULTS[name]}


S = TypeVar("S", bound=Readable)


def checked(layer: LayerOptions, op: str, table: S) -> S:
    """What stands in ``params`` for the table of a layer, if it is one and fits the layer."""
    if not isinstance(table, Readable):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        raise TypeError(
            f"kvjax: table {layer.table!r}, {op}: want a kvjax.Table in params, got {table!r}; what "
            "kvjax.orbax.split took out, kvjax.orbax.combine(state, tables) puts back, and of a frozen table as_jax() "
            "reads"
        )
    if layer.features not in (None, table.dim):
        raise ValueError(
            f"kvjax: table {table.name!r}, {op}: want features={table.dim} (the table's dim), got {layer.features}; "
            "leave features out"
        )
    options = {name: value for name, value in _options(layer).items() if name in ENTRIES and name != "storage"}
    if options and isinstance(table, Table):
        warn_of_others(table, Arguments(dim=table.dim, **options), set(options), op)
    return table


def _existing(name: str, op: str) -> Table:
    try:
        return get_table(name)
    except KeyError:
        raise KeyError(
            f"kvjax: table {name!r}, {op}: want a table of this name, got none; {meant(name, tables())}give features= "
            "to make it"
        ) from None


def feature_of(layer: Any, table: Readable, keys: Any, **others: Any) -> Feature:
    """What a layer reads of its table, by its own options and by those of a call."""
    return Feature(table, keys, pad_id=layer.pad_id, max_norm=layer.max_norm, dtype=layer.dtype, **others)


def learns_default(empty: str, combiner: str, table: Readable) -> bool:
    """Whether a bag layer, whose options are looked at here, has a row for empty bags among its parameters."""
    check_combiner(combiner, None, (), table.name, "EmbedBag")
    if empty not in ("zeros", "learned"):
        raise ValueError(
            f"kvjax: table {table.name!r}, EmbedBag: want empty='zeros' or 'learned', got {empty!r}; choose one"
        )
    return empty == "learned"
