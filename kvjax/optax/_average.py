"""Averages of rows over steps, for evaluation: a slot of each row, and parameters that read as it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from kvjax._table.checks import check_outside_a_loss
from kvjax._table.reads import of_slot
from kvjax._table.table import Table
from kvjax._training.rowwise import Rowwise, check_params
from kvjax._values.arrays import PyTree
from kvjax.optax._checks import FRACTION, check
from kvjax.optax._partition import TableTx, over_tables

T = TypeVar("T")
_SLOT = "ema"


class EmaRowsState(NamedTuple):
    """State of `ema_rows`.

    Attributes:
      ema: the average, in the parameters' shape and dtype.
    """

    ema: PyTree


def ema_rows(decay: float) -> optax.GradientTransformation:
    """Keeps an exponential moving average of parameters, and changes no update: put it last in a chain.

    The average starts at the parameters: ``average = decay * average + (1 - decay) * parameters`` after every step. In
    tables, a row that a batch leaves out does not move, nor does its average, unless `catch_up` with ``replay=`` is
    around the chain. The average does not contain what a
    table's ``constraint=`` or rounding changes after the update.

    Args:
      decay: in 0..1.

    Returns:
      An optax transform; its update needs ``params``. Its slot in tables is "ema", ``(dim,)``, which ``lookup(keys,
      slot="ema")`` reads; `averaged` makes a whole model read it. The average of dense parameters is
      ``optax.tree_utils.tree_get(state.dense, "ema")``, from the state of `partition`.

    Raises:
      ValueError: `decay` is not in 0..1; or, in ``update``, without params.

    Source: Polyak and Juditsky, Acceleration of stochastic approximation by averaging (1992).

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np, optax
      >>> table = kvjax.get_table("doc_ema", dim=1)
      >>> tx = optax.chain(optax.sgd(1.0), kvjax.optax.ema_rows(0.5))
      >>> for _ in range(2):
      ...     table, _ = table.apply(tx, kvjax.SparseRows(np.array([7]), jnp.ones((1, 1))))
      >>> table.lookup(7).tolist(), table.lookup(7, slot="ema").tolist()
      ([-2.0], [-1.25])
      >>> kvjax.drop_table("doc_ema")
    """
    check("ema_rows", FRACTION, decay=decay)

    def init(params: Any) -> EmaRowsState:
        return EmaRowsState(jax.tree.map(jnp.asarray, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, EmaRowsState]:
        check_params(params, "ema_rows")
        after = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda ema, x: (decay * ema + (1 - decay) * x).astype(ema.dtype), state.ema, after)
        return updates, EmaRowsState(average)

    return optax.GradientTransformation(init, update)


def averaged(params: T, tx: TableTx) -> T:
    """Parameters whose tables read the averages that `ema_rows` keeps, for evaluation and export. Nothing is written.

    Args:
      params: a tree that holds tables, or a `Table`; of tables that `catch_up` trains, what `caught_up` returns.
      tx: the ``tables=`` of `partition`, or the transform of `Table.apply`. Tables whose transform has no `ema_rows`
        stay as they are, and so do dense parameters.

    Returns:
      The same tree. Its tables can only be read: by lookups, also of layers and bags, and by `Table.export`. A
      checkpoint of them has the averages as rows. Keys without a row, and rows that no step of this optimizer has
      written, read as without `averaged`; through `caught_up` as the averages of dense training.

    Raises:
      KeyError: no table has an `ema_rows`, or one has several, so that the name is not unique.
      ValueError: a table has a row that unadmitted keys share; or a gradient is taken at the returned parameters.

    Example:
      >>> import jax.numpy as jnp, kvjax, optax
      >>> params = {"t": kvjax.get_table("doc_averaged", dim=1), "w": jnp.ones(1)}
      >>> rows = optax.chain(optax.sgd(1.0), kvjax.optax.ema_rows(0.5))
      >>> tx = kvjax.optax.partition(dense=optax.sgd(0.0), tables=rows)
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(7) * p["w"]))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> kvjax.optax.averaged(params, rows)["t"].lookup(7).tolist()
      [-1.25]
      >>> kvjax.drop_table("doc_averaged")
    """
    found = 0

    def seen(x: Table, rowwise: Rowwise) -> Table:
        nonlocal found
        check_outside_a_loss(x, "averaged")
        if _SLOT not in rowwise.layout(x.dim).names:
            return x
        found += 1
        return of_slot(x, _SLOT, rowwise, "averaged")

    made = over_tables(params, tx, seen)
    if not found:
        raise KeyError(
            "kvjax: averaged: want tables with the slot 'ema', got none whose transform has one; chain "
            "kvjax.optax.ema_rows(decay) behind it"
        )
    return made
