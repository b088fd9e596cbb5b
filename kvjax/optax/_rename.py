"""The state of an optimizer for tables that have other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from kvjax._training.partitions import partitions, with_table_names
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail, meant

T = TypeVar("T", bound=PyTree)


def rename_tables(state: T, names: Mapping[str, str]) -> T:
    """Renames tables in the state of an optimizer: for copies (`Table.copy`), or for tables that
    `kvjax.checkpoint.restore` has put under other names. `partition` keeps what a transform has for all rows of a table
    under the table's name.

    `kvjax.orbax.combine` does this by itself for tables that were restored under other names.

    Args:
      state: any tree that contains states of `partition`, such as a ``TrainState``, or the ``opt_state`` of an
        ``nnx.Optimizer``.
      names: from the name that a table has in the state to the name that it has now.

    Returns:
      The same tree; what it has for other tables stays.

    Raises:
      ValueError: the state has no such table, or would have two of one name.

    Example:
      >>> import jax.numpy as jnp, kvjax, optax
      >>> params = {"t": kvjax.get_table("doc_rename", dim=2)}
      >>> tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(optax.linear_schedule(1.0, 0.0, 10)))
      >>> fork = {"t": params["t"].copy("doc_fork")}
      >>> sorted(kvjax.optax.rename_tables(tx.init(params), {"doc_rename": "doc_fork"}).tables)
      ['doc_fork']
      >>> kvjax.drop_table("doc_rename"), kvjax.drop_table("doc_fork")
      (None, None)
    """
    if not isinstance(cast("object", names), Mapping):
        mend = "give {name in the state: other name}"
        raise fail(TypeError, None, "rename_tables", "names= as a mapping", type(names).__name__, mend)
    known = {name for each in partitions(state) for name in each.tables}
    for name in names:
        if name not in known:
            mend = f"{meant(name, known)}give {{name in the state: other name}}"
            raise fail(ValueError, name, "rename_tables", f"one of the state's tables {sorted(known)}", "another", mend)
    for each in partitions(state):
        others = [names.get(name, name) for name in each.tables]
        for name in others:
            if others.count(name) > 1:
                mend = "give each table a name of its own"
                raise fail(ValueError, name, "rename_tables", "one table of this name", "two", mend)
    return with_table_names(state, names)
