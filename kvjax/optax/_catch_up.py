"""Exact laziness: tables that are trained as dense arrays are, also by transforms that go on without a gradient."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
from jax.core import Tracer

from kvjax._table.handle import check_one_version, check_outside_a_loss, check_without_a_view
from kvjax._table.table import Table, is_table
from kvjax._table.view import PresentView, check_late
from kvjax._training.catch_up import CatchUpRows as CatchUpRows
from kvjax._training.catch_up import CatchUpState as CatchUpState
from kvjax._training.catch_up import late
from kvjax._training.replay import ReplayState
from kvjax._training.rowwise import HasUpdate, Late
from kvjax._training.signature import is_of
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail
from kvjax.optax._partition import PartitionState, TableTx, chooser

T = TypeVar("T")


def catch_up(tx: HasUpdate, replay: int = 0) -> Late:
    """Makes a table equal to a dense array, whichever rows a batch leaves out.

    Dense training moves all rows in every step: by their momentum, by weight decay. A table that is trained by `tx`
    itself leaves rows as they are that are not in the batch (lazy). With this transform, a row that is touched first
    makes up for the steps that it has missed, by formulas that cost the same however many they are; and so does a row
    that is read, through what `caught_up` gives. Dense training begins at step 0, so a new row makes up for all steps
    since then: with weight decay its initial row has decayed. What `Table.upsert` and the like write is taken as the
    row of the step that last trained it.

    It works for what moves a row without a gradient by its moments, at rates that follow from the step: ``optax.sgd``,
    with momentum or Nesterov's, ``optax.adam``, ``adamw``, ``nadam``, ``yogi``, ``rmsprop``, ``adadelta``, ``adagrad``,
    and what is chained of them with ``optax.add_decayed_weights`` and schedules. Whether it is such a transform is
    tried in float64, as it is made. Counts are shared by all rows (``count="global"``).

    What has no such formulas takes the missed steps one by one, if `replay` says up to how many: ``optax.adabelief``,
    ``amsgrad``, ``adamax``, ``radam``, norms of a row, and ``optax.inject_hyperparams``, whose last rates are kept. It
    costs as many updates of a row as it has missed steps. Of more steps the first ones are taken, and in the rest rows
    and slots go on by what multiplies them: whether that is dense training to 1e-5 of a row's way is tried as well.
    Rates that are kept in the state are exact in the last `replay` steps; of older ones the oldest of these stands in.

    Args:
      tx: an optax transform.
      replay: 0, or the steps in which its moments end: 200 where beta1 is 0.9. At most 4096.

    Returns:
      What `partition`, `Table.apply` and `check_compatibility` take as a transform of rows. Beside the slots of `tx` a
      row has "last_step" and up to eight numbers, four bytes each: "reach..." (how far its moments carry it) and
      "decay_..."; with `replay` only the first.

    Raises:
      TypeError: `tx` is not an optax transform.
      ValueError: it has no closed form, with the reason: the step without a gradient keeps its size (``optax.lion``,
        ``signum``, Adam with beta1 above the root of beta2) or is made otherwise (``adabelief``), rows decay faster
        than what moves them, or its rates are in the state (``optax.inject_hyperparams``). With `replay`: its steps do
        not end. From a write: the gradient was taken at rows as they are stored, and not through `caught_up`; or the
        table has ``constraint=`` or a row that unadmitted keys share.

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> tx = kvjax.optax.catch_up(optax.sgd(1.0, momentum=0.5))
      >>> table = kvjax.get_table("doc_catch_up", dim=1)
      >>> state = tx.init(1)
      >>> for key in (7, 8, 8):
      ...     table, state = table.apply(tx, kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))), state)
      >>> table.lookup(7).tolist(), kvjax.optax.caught_up(table, state, tx).lookup(7).tolist()
      ([-1.0], [-1.75])
      >>> kvjax.drop_table("doc_catch_up")
    """
    return late(tx, "catch_up", replay)


def caught_up(params: T, state: PyTree, tx: TableTx) -> T:
    """Parameters whose tables read as they are now, where rows in the table may be behind: for losses, evaluation,
    `Table.export` and checkpoints. Nothing is written.

    Args:
      params: a tree that holds tables, or a `Table`.
      state: the optimizer's state that belongs to them: any tree with that of `partition`, or what `Table.apply`
        returned for the table.
      tx: what `partition` was given as ``tables=``, or `Table.apply` as its transform. Tables whose transform is not
        made by `catch_up` stay as they are.

    Returns:
      The same tree. Its tables only read: lookups, also of layers and bags, `Table.size`, `Table.export` and
      `Table.snapshot`, and so checkpoints that are saved of it, have rows and slots of now. A write takes the
      parameters from before.

    Raises:
      ValueError: there is no state for a table, or the table can not be trained so (see `catch_up`). From a lookup or
        an export: rows are ahead of the state, which is not the one that the last write returned.

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
      >>> [round(float(p["t"].lookup(7)[0]), 3) for p in (params, now)]
      [-0.1, -0.167]
      >>> kvjax.drop_table("doc_caught_up")
    """
    choose = chooser(tx)

    def seen(x: Any) -> Any:
        if not is_table(x) or not x.spec.trainable:
            return x
        rowwise = choose(x.name)
        if isinstance(rowwise, Late):
            return _viewed(x, rowwise, _state_of(x, params, state))
        if isinstance(_held(x, params, state), CatchUpState | ReplayState):
            raise fail(
                ValueError, x.name, "caught_up", "what kvjax.optax.catch_up made, as the state is of such a transform",
                "another transform", "give what partition got as tables=",
            )  # fmt: skip
        return x

    return jax.tree.map(seen, params, is_leaf=is_table)


def sweep(params: T, state: PyTree, tx: TableTx) -> T:
    """Writes all rows of tables as they are now, so that what reads them as they are stored is right: policies of
    eviction (`Table.evict`), `Table.upsert`, serving. Not inside ``jit``.

    It copies each table out and in, which takes as long as `Table.export` and `Table.load` and as much memory as the
    table, so it is for now and then. `Table.export` and checkpoints need it not: they take what `caught_up` gives.
    When training by this transform has ended, ``table.clear_slots()`` after it makes an ordinary table.

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


def _viewed(table: Table, rowwise: Late, state: Any) -> Table:
    op = "caught_up"
    check_outside_a_loss(table, op)
    check_one_version(table, op)
    check_without_a_view(table, op)
    check_late(table.spec, rowwise, op)
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
    return Table(table.given, table.spec, view=PresentView(rowwise, tuple(leaves)))


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
            "give the state that belongs to the parameters",
        )  # fmt: skip
    return held


def _held(table: Table, params: Any, state: Any) -> Any:
    """The state of the table's transform, None if there is none."""
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_partition) if _is_partition(x) and table.name in x.tables]
    if found:
        return found[0].tables[table.name]
    return state if is_table(params) else None


def _is_partition(x: Any) -> bool:
    return isinstance(x, PartitionState)
