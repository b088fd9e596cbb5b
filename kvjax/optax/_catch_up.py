"""Exact laziness: tables trained like dense arrays, also by transforms that move rows without a gradient."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.core import Tracer

from kvjax._table.checks import check_own
from kvjax._table.table import Table, is_table
from kvjax._table.view import CaughtUpView, check_can_catch_up
from kvjax._training.catch_up import CatchUpRows as CatchUpRows
from kvjax._training.catch_up import CatchUpState as CatchUpState
from kvjax._training.catch_up import catching_up_of
from kvjax._training.partitions import partitions
from kvjax._training.replay import ReplayState
from kvjax._training.rowwise import CatchUp, HasUpdate, Rowwise
from kvjax._training.signature import is_of
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail
from kvjax.optax._partition import TableTx, over_tables

T = TypeVar("T")


def catch_up(tx: HasUpdate, replay: int = 0) -> CatchUp:
    """Makes a table equal to a dense array, whichever rows a batch leaves out.

    Dense training moves all rows in every step, by their momentum and by weight decay. A table that is trained by `tx`
    itself does not touch rows that are not in the batch (lazy). With this transform, a row that is touched first makes
    up for the steps that it has missed, by formulas whose cost does not depend on their number. A row that is read
    through `caught_up` does the same. Dense training begins at step 0, so a new row makes up for all steps since then:
    with weight decay, its initial row has decayed. Rows that `Table.upsert` and similar calls write count as the rows
    of the step that last trained them.

    It works for transforms that, without a gradient, move a row by its moments, at rates that follow from the step:
    ``optax.sgd`` (with momentum or Nesterov's), ``optax.adam``, ``adamw``, ``nadam``, ``yogi``, ``rmsprop``,
    ``adadelta``, ``adagrad``, and chains of these with ``optax.add_decayed_weights`` and schedules. `catch_up` tests in
    float64 whether `tx` is such a transform. Counts are shared by all rows (``count="global"``).

    Transforms without such formulas replay the missed steps one by one, up to `replay` steps: ``optax.adabelief``,
    ``amsgrad``, ``adamax``, ``radam``, norms of a row, and ``optax.inject_hyperparams``, whose last rates are kept. A
    row then costs as many updates as it has missed steps. If it has missed more than `replay`, the first `replay` steps
    are replayed, and for the rest rows and slots are only multiplied by their decay. `catch_up` also tests whether that
    equals dense training to 1e-5 of a row's displacement. Rates that are kept in the state are exact for the last
    `replay` steps; in place of older rates, the oldest that is kept is used.

    Args:
      tx: an optax transform.
      replay: 0, or the number of steps in which the moments fade out: 200 if beta1 is 0.9. At most 4096.

    Returns:
      A transform of rows for `partition`, `Table.apply` and `check_compatibility`. Beside the slots of `tx`, a row has
      "last_step" and up to eight numbers: "reach..." (how far its moments will carry it) and "decay_...", four bytes
      each. With `replay` it has only "last_step".

    Raises:
      TypeError: `tx` is not an optax transform.
      ValueError: `tx` has no closed form; the message gives the reason: a step without a gradient keeps its size
        (``optax.lion``, ``signum``, Adam with beta1 above the root of beta2) or has another form (``adabelief``), rows
        decay faster than the moments that move them, or the rates are in the state (``optax.inject_hyperparams``). With
        `replay`: the steps without a gradient do not fade out. From a write: the gradient was taken at rows as they are
        stored, and not through `caught_up`; or the table has ``constraint=`` or a row that unadmitted keys share.

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> tx = kvjax.optax.catch_up(optax.sgd(1.0, momentum=0.5))
      >>> table = kvjax.get_table("doc_catch_up", dim=1)
      >>> state = tx.init(1)
      >>> for key in (7, 8, 8):
      ...     table, state = table.apply(tx, kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))), state)
      >>> kvjax.optax.caught_up(table, state, tx).lookup(7).tolist()  # where it is stored as after one step, -1.0
      [-1.75]
      >>> kvjax.drop_table("doc_catch_up")
    """
    return catching_up_of(tx, "catch_up", replay)


def caught_up(params: T, state: PyTree, tx: TableTx) -> T:
    """Parameters whose tables read up-to-date rows, although the stored rows may be behind. It is for losses,
    evaluation, `Table.export` and checkpoints. Nothing is written.

    Args:
      params: a tree that holds tables, or a `Table`.
      state: the optimizer's state that belongs to `params`: any tree that contains the state of `partition`, or what
        `Table.apply` returned for the table.
      tx: the ``tables=`` of `partition`, or the transform of `Table.apply`. Tables whose transform is not made by
        `catch_up` stay as they are.

    Returns:
      The same tree. Its tables can only be read: lookups, also of layers and bags, `Table.size`, `Table.export`,
      `Table.snapshot`, and checkpoints of this tree have up-to-date rows and slots. For a write, pass the original
      `params`.

    Raises:
      ValueError: there is no state for a table, or the table cannot be trained in this way (see `catch_up`). From a
        lookup or an export: rows are newer than the state, which is not the one that the last write returned.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax, optax
      >>> params = {"t": kvjax.get_table("doc_caught_up", dim=1), "w": jnp.ones(1)}
      >>> rows = kvjax.optax.catch_up(optax.adam(0.1))
      >>> tx = kvjax.optax.partition(dense=optax.adam(0.1), tables=rows)
      >>> state = tx.init(params)
      >>> @jax.jit
      ... def step(params, state, key):
      ...     now = kvjax.optax.caught_up(params, state, rows)
      ...     grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(key) * p["w"]))(now)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> for key in (7, 8):
      ...     params, state = step(params, state, kvjax.keys(key))
      >>> now = kvjax.optax.caught_up(params, state, rows)
      >>> round(float(now["t"].lookup(7)[0]), 3)  # where it is stored as -0.1
      -0.167
      >>> kvjax.drop_table("doc_caught_up")
    """

    def seen(x: Table, rowwise: Rowwise) -> Table:
        if isinstance(rowwise, CatchUp):
            return _viewed(x, rowwise, _state_of(x, params, state))
        if isinstance(_held(x, params, state), CatchUpState | ReplayState):
            raise fail(
                ValueError, x.name, "caught_up", "what kvjax.optax.catch_up made, as the state is of such a transform",
                "another transform", "give what partition got as tables=",
            )  # fmt: skip
        return x

    return over_tables(params, tx, seen)


def sweep(params: T, state: PyTree, tx: TableTx) -> T:
    """Brings all stored rows of tables up to date, for code that reads rows as they are stored: eviction policies
    (`Table.evict`), `Table.upsert`, serving. Not inside ``jit``.

    It copies all rows of each table out and loads them again, which takes as long as `Table.export` and `Table.load`,
    and as much memory as the table, and the next delta of a cursor has all rows. So call it rarely. `Table.export` and
    whole checkpoints do not need it: use `caught_up` for them. At the end of training with this transform,
    ``table.clear_slots()`` after `sweep` makes an ordinary table.

    Args:
      params: as for `caught_up`.
      state: as for `caught_up`.
      tx: as for `caught_up`.

    Returns:
      The parameters with the next handles.

    Raises:
      As `caught_up` and `Table.load` do.

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> tx = kvjax.optax.catch_up(optax.sgd(1.0, momentum=0.5))
      >>> table = kvjax.get_table("doc_sweep", dim=1)
      >>> state = tx.init(1)
      >>> for key in (7, 8):
      ...     table, state = table.apply(tx, kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))), state)
      >>> kvjax.optax.sweep(table, state, tx).lookup(7).tolist()
      [-1.5]
      >>> kvjax.drop_table("doc_sweep")
    """

    def written(x: Any) -> Any:
        return x.stored.load(x.snapshot()) if is_table(x) and x.view is not None else x

    return jax.tree.map(written, caught_up(params, state, tx), is_leaf=is_table)


def _viewed(table: Table, rowwise: CatchUp, state: Any) -> Table:
    op = "caught_up"
    check_own(table, op)
    check_can_catch_up(table.spec, rowwise, op)
    want = jax.tree.structure(jax.eval_shape(lambda: rowwise.init(table.dim)))
    leaves = _leaves_of(state, want)
    if leaves is None:
        raise fail(
            ValueError, table.name, op, f"the state of its transform, {want}", f"{jax.tree.structure(state)}",
            "give the state that the last update returned",
        )  # fmt: skip
    made_by = rowwise.layout(table.dim).state_of(leaves).made_by
    if not isinstance(made_by, Tracer) and not is_of(made_by, rowwise.signature):
        raise fail(
            ValueError, table.name, op, "the transform by which the state was made",
            "another one (its rates, betas or decay differ)", "give what trained the table; to go on by another, sweep "
            "by the one that did, then table.clear_slots() and a new state",
        )  # fmt: skip
    return Table(table.given, table.spec, view=CaughtUpView(rowwise, tuple(leaves)))


def _leaves_of(state: Any, want: Any) -> list[Any] | None:
    """The leaves of a state, also where each is in a box (``nnx.Optimizer`` has variables); None if it is another's."""
    try:
        leaves = [jax.tree.leaves(box) for box in want.flatten_up_to(state)]
    except ValueError:
        return None
    return [leaf for (leaf,) in leaves] if all(len(each) == 1 for each in leaves) else None


def _state_of(table: Table, params: Any, state: Any) -> Any:
    held = _held(table, params, state)
    if held is None:
        raise fail(
            ValueError, table.name, "caught_up", "the state of kvjax.optax.partition in the optimizer's", "none for it",
            "give the state that belongs to the parameters; a table that had another name finds its part in "
            "kvjax.optax.rename_tables(state, {old: new})",
        )  # fmt: skip
    return held


def _held(table: Table, params: Any, state: Any) -> Any:
    """The state of the table's transform, None if there is none."""
    found = [x for x in partitions(state) if table.name in x.tables]
    if found:
        return found[0].tables[table.name]
    return state if is_table(params) else None
