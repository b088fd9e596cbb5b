"""Averages of rows over steps, for evaluation: what an average is ahead or behind of its row is a slot."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kvjax._keys.keys import KeysLike
from kvjax._table.table import Table
from kvjax._training.rowwise import Transform

_SLOT = "average_lag"


class EmaRowsState(NamedTuple):
    """State of `ema_rows`.

    Attributes:
      average_lag: the average less the parameters, of their shape and dtype.
    """

    average_lag: Any


def ema_rows(decay: float) -> optax.GradientTransformation:
    """Keeps an exponential moving average of parameters, and changes no update: put it last in a chain.

    The average starts at the parameters: ``average = decay * average + (1 - decay) * parameters`` after every step. In
    tables a row that a batch leaves out does not move, and its average does not either. What a table's ``constraint=``
    or rounding changes afterwards is not averaged.

    Args:
      decay: in 0..1.

    Returns:
      An optax transform. Its slot in tables is "average_lag", ``(dim,)``: what `lookup_average` adds to a row.

    Raises:
      ValueError: `decay` is not in 0..1.

    Source: Polyak and Juditsky, Acceleration of stochastic approximation by averaging (1992).

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np, optax
      >>> table = kvjax.get_table("doc_ema", dim=1)
      >>> tx = optax.chain(optax.sgd(1.0), kvjax.optax.ema_rows(0.5))
      >>> for _ in range(2):
      ...     table, _ = table.apply(tx, kvjax.SparseRows(np.array([7]), jnp.ones((1, 1))))
      >>> table.lookup(7).tolist(), kvjax.optax.lookup_average(table, 7).tolist()
      ([-2.0], [-1.25])
      >>> kvjax.drop_table("doc_ema")
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"kvjax: ema_rows: want a decay in 0..1, got {decay}")

    def init(params: Any) -> EmaRowsState:
        return EmaRowsState(jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, EmaRowsState]:
        del params
        # The parameters move by an update, and the average by the rest of the way to them.
        lag = jax.tree.map(lambda lag, u: (decay * (lag - u)).astype(lag.dtype), state.average_lag, updates)
        return updates, EmaRowsState(lag)

    return optax.GradientTransformation(init, update)


def lookup_average(table: Table, keys: KeysLike, tx: Transform | None = None) -> jax.Array:
    """The averages of rows that `ema_rows` has kept.

    Args:
      table: a handle.
      keys: ``(...)``.
      tx: the optimizer, needed in a compiled function that begins with the table's first `apply`, see `Table.slot`.

    Returns:
      ``(..., dim)`` float32. Of a key without a row, and of a row that this optimizer has not written, what a lookup
      gives.

    Raises:
      KeyError: the table's optimizer has no `ema_rows`, or has not trained it yet.
    """
    return table.lookup(keys).astype(jnp.float32) + table.slot(_SLOT, keys, tx).astype(jnp.float32)
