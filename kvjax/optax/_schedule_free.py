"""Evaluation of what Optax trains without schedules: parameters that read as their averages x."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import ScheduleFreeState

from kvjax._table.checks import check_outside_a_loss
from kvjax._table.reads import of_slot
from kvjax._table.table import Table, is_table
from kvjax._training.rowwise import Rowwise
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail
from kvjax._values.tracing import computed_now
from kvjax.optax._partition import TableTx, over_tables

T = TypeVar("T")


def schedule_free_eval_params(state: PyTree, params: T, tx: TableTx) -> T:
    """Parameters for the evaluation of ``optax.contrib.schedule_free``, as Optax's function of this name has them.

    Such an optimizer trains parameters y, beside which it keeps z, and a model is evaluated at x, where
    ``y = b1 * x + (1 - b1) * z``. Nothing is written.

    Args:
      state: what the last update of `partition` returned, or of what is around it.
      params: what was trained: a tree that holds tables.
      tx: the ``tables=`` of `partition`. Tables whose transform is not schedule-free stay as they are, and so do dense
        parameters if ``dense=`` is not.

    Returns:
      The same tree. Its tables can only be read, as those of `averaged`: by lookups, also of layers and bags, and by
      `Table.export`. Keys without a row, and rows that no step of this optimizer has written, read as stored: there
      x, y and z are the same.

    Raises:
      ValueError: neither half is schedule-free; the dense parameters are in several parts that are; a table has a row
        that unadmitted keys share; or a gradient is taken at the returned parameters.
      KeyError: a table's transform has several such parts, so that the name of z is not unique.

    Source: Defazio et al., The Road Less Scheduled (2024).

    Example:
      >>> import jax.numpy as jnp, kvjax, optax
      >>> params = {"t": kvjax.get_table("doc_free", dim=1, initializer=1.0), "w": jnp.ones(1)}
      >>> free = optax.contrib.schedule_free_sgd(0.5, b1=0.5)
      >>> tx = kvjax.optax.partition(dense=free, tables=free)
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(7) + p["w"]))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> x = kvjax.optax.schedule_free_eval_params(state, params, free)
      >>> params["t"].lookup(7).tolist(), x["t"].lookup(7).tolist(), x["w"].tolist()
      ([0.125], [0.25], [0.25])
      >>> kvjax.drop_table("doc_free")
    """
    found = False

    def of_table(x: Table, rowwise: Rowwise) -> Table:
        nonlocal found
        check_outside_a_loss(x, "schedule_free_eval_params")
        with computed_now():
            begun = _parts(rowwise.tx.init(jnp.zeros((1, x.dim))))
        if not begun:
            return x
        found = True
        return of_slot(x, "z", rowwise, "schedule_free_eval_params", float(np.asarray(begun[0].b1)))

    made = over_tables(params, tx, of_table)
    dense = [part for part in _parts(state) if jax.tree.leaves(part.z)]  # of tables, z is in the rows
    if len(dense) > 1 or not (dense or found):
        raise fail(
            ValueError, None, "schedule_free_eval_params", "the state and tables= of one optax.contrib.schedule_free",
            f"{len(dense)} of them for dense parameters", "give what partition was made with, and its last state",
        )  # fmt: skip
    if not dense:
        return made

    def of_dense(x: Any, z: Any) -> Any:
        return x if is_table(x) else optax.contrib.schedule_free_eval_params(dense[0]._replace(z=z), x)

    return jax.tree.map(of_dense, made, dense[0].z, is_leaf=is_table)


def _parts(state: Any) -> list[ScheduleFreeState]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ScheduleFreeState))
    return [leaf for leaf in leaves if isinstance(leaf, ScheduleFreeState)]
