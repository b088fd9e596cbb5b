"""States of `kvjax.optax.partition` in trees, which all adapters know by their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax


def is_partition(x: Any) -> bool:
    """Whether this is one, also if each of its leaves is in a box."""
    return {"count", "tables"} <= set(getattr(x, "_fields", ())) and isinstance(x.tables, Mapping)


def partitions(state: Any) -> list[Any]:
    """All that are in a tree."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_partition) if is_partition(x)]


def with_table_names(state: Any, names: Mapping[str, str]) -> Any:
    """The tree with parts of its partitions for tables of other names; those that are not named stay.

    Args:
      state: any tree.
      names: from the name that a table has there to its other name.
    """

    def of(x: Any) -> Any:
        if not is_partition(x):
            return x
        return x._replace(tables={names.get(name, name): part for name, part in x.tables.items()})

    return jax.tree.map(of, state, is_leaf=is_partition) if names else state
