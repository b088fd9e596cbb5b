"""Splitting a state into its tables and a pytree that Orbax saves like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from kvjax._table.registry import get_table
from kvjax._table.table import Table, is_table


@jax.tree_util.register_pytree_node_class
class TableRef:
    """Stands where a table stood; a pytree without leaves, so nothing is saved for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tree_flatten(self) -> tuple[tuple[()], str]:
        return (), self.name

    @classmethod
    def tree_unflatten(cls, name: str, _: Any) -> TableRef:
        return cls(name)

    def __repr__(self) -> str:
        return f"TableRef({self.name!r})"


def split(state: Any) -> tuple[Any, dict[str, Table]]:
    """Splits a state into an ordinary pytree and its tables.

    Args:
      state: any pytree, for instance Flax's ``TrainState``.

    Returns:
      The state without tables, for ``ocp.args.StandardSave``, and the tables by name, for `TableSave`. Tables made with
      ``checkpoint=False`` are left out.

    Example:
      >>> import kvjax
      >>> state = {"w": 1.0, "t": kvjax.get_table("doc_split", dim=2)}
      >>> dense, tables = kvjax.orbax.split(state)
      >>> dense
      {'t': TableRef('doc_split'), 'w': 1.0}
      >>> kvjax.orbax.combine(dense, tables)["t"].name
      'doc_split'
      >>> kvjax.drop_table("doc_split")
    """
    leaves = jax.tree.leaves(state, is_leaf=is_table)
    tables = {leaf.name: leaf for leaf in leaves if is_table(leaf) and leaf.spec.checkpoint}
    return jax.tree.map(lambda x: TableRef(x.name) if is_table(x) else x, state, is_leaf=is_table), tables


def combine(state: Any, tables: Mapping[str, Table] | None = None) -> Any:
    """Puts tables back where `split` took them out.

    Args:
      state: what `split` gave, or what Orbax restored into it.
      tables: live handles by name, as `TableRestore` gives them; those not given are the tables of the process.

    Returns:
      The state with its tables.

    Raises:
      KeyError: a table is neither given nor in the process.
    """
    tables = tables or {}

    def put_back(x: Any) -> Any:
        return (tables.get(x.name) or get_table(x.name)) if isinstance(x, TableRef) else x

    return jax.tree.map(put_back, state, is_leaf=lambda x: isinstance(x, TableRef))
