"""One optax transform for parameters of which some are tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax

from kvjax._keys.opaque import opaque
from kvjax._keys.sparse_rows import SparseRows, is_sparse
from kvjax._keys.steps import MOST_COUNTED, step_words
from kvjax._process import check_process
from kvjax._table.commit import CommitState
from kvjax._table.table import Table, is_table
from kvjax._table.table_update import TableUpdate
from kvjax._table.training import Write, check_gradient, train_all, train_or_refuse
from kvjax._training.merge import merge
from kvjax._training.rowwise import Rowwise, Transform, as_rowwise, check_params, check_transform
from kvjax._training.transform_errors import of_table
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail, meant
from kvjax.optax._choice import Choice

T = TypeVar("T")

TableTx: TypeAlias = Transform | Mapping[str, Transform] | Callable[[str], Transform]


class PartitionState(NamedTuple):
    """State of `partition`.

    Attributes:
      count: ``()`` int32, the last step: the number of updates so far, or the last ``step=`` that ``update`` was given,
        at most 2**31 - 1. The next number becomes the row version of updated rows, unless the table's last step is
        higher already (see `Table.apply`).
      dense: state of the dense transform.
      tables: by table name, the transform's state for all rows together: None stands for what is kept per row, in the
        table. So ``optax.tree_utils.tree_get`` and ``tree_set`` find hyperparameters and counts.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  (the name every optax state gives it)
    dense: PyTree
    tables: dict[str, PyTree]


def partition(
    dense: optax.GradientTransformation, tables: TableTx, on_refused: Literal["error", "keep"] = "error"
) -> optax.GradientTransformationExtraArgs:
    """Updates dense parameters by one transform and the rows of tables by another.

    ``update`` writes the rows. The "update" that it returns for a `Table` is the difference of versions, so
    ``optax.apply_updates``, Flax's ``TrainState`` and ``nnx.Optimizer`` work as they are. Because ``update`` writes,
    `partition` comes last in a chain, and its result must be used: in a compiled program an unused update is not done,
    and outside it leaves stale handles, which the next call reports. A transform after `partition` in a chain sees no
    rows: weight decay, a scale or a clip there would not change tables, so it is an error; put it into `dense` and
    `tables`.

    Optax's wrappers that hold updates back cannot go around `partition`: put `accumulate`, `apply_if_finite`,
    `apply_if` or `scale_loss` there instead. Inside `tables` Optax's would act on each row separately:
    ``optax.apply_if_finite`` would skip rows instead of the step, and ``optax.MultiSteps`` would never train rows that
    are rarely touched. Both are refused there, like other transforms that would be wrong row by row (see `rowwise`).

    The step of a table is done as a whole or not at all. The steps of several tables are planned before the first is
    done, so if any table refuses (it is full and ``on_full="error"``, for example), or the user's code raises in an
    update, all tables stay as they were. That holds for the tables of one ``update``, on the CPU, on a GPU and over a
    mesh; each further ``update`` in a program is a separate write. If there are several tables in one place on a GPU,
    each tries its step before it is done.

    Args:
      dense: transform of everything that is not a table.
      tables: transform of the rows, run row-wise (see `rowwise`); or a mapping from table names, or a function of
        the name, to transforms.
      on_refused: what happens if a table refuses. "error" raises, and a compiled program that raises loses all its
        results and what was donated to it. With "keep", everything comes out of the step as it went in, until
        `kvjax.commit` raises the error; for this, the host waits for a GPU once in each step.

    Returns:
      An optax transform. ``update(grads, state, params, step=n)`` gives updated rows the row version n, as
      ``Table.apply(step=)`` does, and the next update counts on from it. So steps may be seconds of a clock, and
      `kvjax.evict.MaxAge` a time. `dense` gets ``step=``, too, and `tables` have it as a fact about each row. Other
      extra arguments of ``update`` go to `dense` and `tables`, except ``row_facts=``: tables have their own (see
      `RowFacts`). Transforms around this one, such as `accumulate`, pass extra arguments on.

    Raises:
      ValueError: a table has no transform, a transform has no table, a transform holds updates back, the gradients do
        not fit the parameters, or `on_refused` is none of these.
      TypeError: the gradient of a table is not `SparseRows`.

    Example:
      >>> import jax.numpy as jnp, kvjax, optax
      >>> params = {"w": jnp.ones(2), "t": kvjax.get_table("doc_partition", dim=2)}
      >>> tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.5))
      >>> state = tx.init(params)
      >>> grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(7) * p["w"]))(params)
      >>> updates, state = tx.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> params["t"].lookup(7).tolist()
      [-0.5, -0.5]
      >>> kvjax.drop_table("doc_partition")
    """
    check_transform(dense, "partition")
    if on_refused not in ("error", "keep"):
        raise ValueError(f"kvjax: partition: want on_refused='error' or 'keep', got {on_refused!r}; see kvjax.commit")
    keeps = on_refused == "keep"
    dense = optax.with_extra_args_support(dense)
    choose = chooser(tables)
    _check_tables(tables)

    def init(params: Any) -> Any:
        leaves, _ = jax.tree.flatten(params, is_leaf=is_table)
        found = [leaf for leaf in leaves if is_table(leaf) and leaf.spec.trainable]
        _check_names(tables, [leaf.name for leaf in leaves if is_table(leaf)])
        state = PartitionState(
            count=jnp.zeros((), jnp.int32),
            dense=dense.init(_without(params)),
            tables={t.name: _begun(t, choose(t.name)) for t in found},
        )
        return CommitState(jnp.zeros((), jnp.uint32), state) if keeps else state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        _check_state(state, CommitState if keeps else PartitionState)
        refused, state = state if keeps else (None, state)
        check_params(params, "partition")
        _check_same_tree(params, updates)
        writes = _writes(params, updates, choose, state)
        step, count = _next_step(state.count, extra.get("step"), writes[0].table.name if writes else "")
        of_rows = {name: x for name, x in extra.items() if name != "step"}
        dense_grads, dense_params = _without(updates), _without(params)

        def update_dense(grads: Any, kept: Any) -> Any:
            return dense.update(grads, kept, dense_params, **extra)

        if refused is None:
            dense_updates, dense_state = update_dense(dense_grads, state.dense)
            results = train_all(writes, step, of_rows)
        else:
            choice = Choice(update_dense, dense_grads, state.dense)
            results, refused = train_or_refuse(writes, step, of_rows, refused)
            dense_updates, dense_state = choice.made_if(refused == 0)
        written = {table.name: table.version for table, _ in results}
        globals_ = state.tables | {table.name: new for table, new in results}
        new_updates = _with_table_updates(dense_updates, params, written)
        if refused is None:
            return new_updates, PartitionState(count, dense_state, globals_)
        common = state.count, state.tables
        count, globals_ = jax.tree.map(functools.partial(jnp.where, refused == 0), (count, globals_), common)
        return new_updates, CommitState(refused, PartitionState(count, dense_state, globals_))

    return optax.GradientTransformationExtraArgs(init, update)


def _next_step(count: jax.Array, said: Any, table: str) -> tuple[Any, jax.Array]:
    """The step of an update, as `Table.apply` takes it, and the count after it.

    Args:
      count: ``()`` int32, before it.
      said: the step, if the caller has said it: an integer, or a ``()`` array of such.
      table: for errors.
    """
    most = jnp.int32(MOST_COUNTED)
    following = jnp.minimum(count, most - 1) + 1
    if said is None:
        # Behind what the count can hold, tables go on by themselves, for which -1 stands.
        return jnp.where(count < most, count + 1, -1), following
    if is_integer(said):
        return said, jnp.int32(max(0, min(said, MOST_COUNTED)))
    words = step_words(said, table, "partition")
    low, high = jax.lax.bitcast_convert_type(words, jnp.int32)
    # Below zero, which a compiled step cannot refuse, tables go on by themselves, too.
    return said, jnp.where(high < 0, following, jnp.where((high == 0) & (low >= 0), low, most))


def _writes(params: Any, grads: Any, choose: Callable[[str], Rowwise], state: PartitionState) -> list[Write]:
    """The training write of each table, once, however many handles of it the parameters have. All gradients are checked
    before the first write."""
    pairs = zip(*(jax.tree.leaves(tree, is_leaf=_is_either) for tree in (params, grads)), strict=True)
    gradients: dict[str, list[Any]] = {}
    trained: dict[str, Table] = {}
    for table, grad in pairs:
        if is_table(table) and table.spec.trainable:
            check_process(table.name, "partition")
            check_gradient(table, choose(table.name), grad, _globals_of(table, state))
            gradients.setdefault(table.name, []).append(grad)
            trained.setdefault(table.name, table)
        elif not is_table(table) and (is_sparse(grad) or jnp.shape(table) != jnp.shape(grad)):
            got = f"{'SparseRows' if is_sparse(grad) else jnp.shape(grad)} for {jnp.shape(table)}"
            want, mend = "dense gradients of the shapes of their parameters", "give those of kvjax.value_and_grad"
            raise fail(ValueError, None, "partition", want, got, mend)
    return [Write(table, choose(name), _joined(gradients[name]), state.tables[name]) for name, table in trained.items()]


def _with_table_updates(dense_updates: Any, params: Any, written: Mapping[str, jax.Array]) -> Any:
    """The updates with those of tables in their places: by how much their versions have risen.

    Args:
      dense_updates: None in these places.
      params: the parameters.
      written: ``()`` uint32, the next version of each table that was trained, by its name.
    """

    def update_of(table: Any) -> Any:
        if not is_table(table):
            return None
        raised = written[table.name] - table.version if table.spec.trainable else jnp.zeros((), jnp.uint32)
        return Table(TableUpdate(opaque(raised)), table.spec)

    table_updates = jax.tree.map(update_of, params, is_leaf=is_table)
    return jax.tree.map(
        lambda d, t: t if is_table(t) else d, dense_updates, table_updates,
        is_leaf=lambda x: x is None or is_table(x),
    )  # fmt: skip


def _begun(table: Table, rowwise: Rowwise) -> Any:
    with of_table(table.name, "partition"):
        return rowwise.init(table.dim)


def _globals_of(table: Table, state: PartitionState) -> Any:
    if table.name not in state.tables:
        raise fail(
            ValueError, table.name, "partition", "its part of the optimizer's state",
            f"a state of tables {sorted(state.tables)}", "init(params) makes the state of these parameters, and for a "
            "table that had another name kvjax.optax.rename_tables(state, {old: new}) has that of before",
        )  # fmt: skip
    return state.tables[table.name]


def _is_either(x: Any) -> bool:
    return is_table(x) or is_sparse(x)


def _without(tree: Any) -> Any:
    """The tree with None for tables and their gradients, which dense transforms pass over."""
    return jax.tree.map(lambda x: None if _is_either(x) else x, tree, is_leaf=_is_either)


def _joined(grads: list[SparseRows]) -> SparseRows:
    """The gradient of a table of which the parameters have as many handles."""
    some = [grad for grad in grads if grad.counts.size] or grads[:1]
    return some[0] if len(some) == 1 else merge(some)


def _check_same_tree(params: Any, grads: Any) -> None:
    want, got = (jax.tree.structure(tree, is_leaf=_is_either) for tree in (params, grads))
    if want != got:
        mend = "give what kvjax.grad gives for them"
        raise fail(ValueError, None, "partition", f"gradients in the tree of the parameters, {want}", f"{got}", mend)


def _check_state(state: Any, want: type) -> None:
    if not isinstance(state, want):
        raise fail(
            TypeError, None, "partition", f"its own state, a {want.__name__}", f"{type(state).__name__}",
            "give what init(params) or the last update of this transform returned; a chain takes that of the chain",
        )  # fmt: skip


def _check_tables(tables: Any) -> None:
    """Whether tables can be given transforms by this; what it is for each is seen when they are."""
    if isinstance(tables, Mapping):
        for name, tx in tables.items():
            as_rowwise(tx, f"table {name!r}, partition")
    elif not _is_function(tables):
        as_rowwise(tables, "partition, tables")


def _check_names(tables: Any, names: list[str]) -> None:
    """Whether the parameters have the tables for which transforms are given by name."""
    for name in tables if isinstance(tables, Mapping) else ():
        if name not in names:
            raise ValueError(
                f"kvjax: table {name!r}, partition: want transforms for tables of the parameters, {sorted(names)}, got "
                f"tables={sorted(tables)}; {meant(name, names)}leave out what is not there"
            )


def _is_function(tables: Any) -> bool:
    """Whether these are a function of the name. A transform may be an object that is callable, too; and what makes
    transforms, in optax and here, takes a rate and no name."""
    maker = tables.func if isinstance(tables, functools.partial) else tables
    makes = (getattr(maker, "__module__", None) or "").split(".")[0] in ("optax", "kvjax")
    return callable(tables) and not hasattr(tables, "update") and not makes


def chooser(tables: Any) -> Callable[[str], Rowwise]:
    def choose(name: str) -> Rowwise:
        if isinstance(tables, Mapping):
            if name not in tables:
                raise ValueError(
                    f"kvjax: table {name!r}, partition: want a transform for every table, got "
                    f"tables={sorted(tables)}; add one for it, or make the table with trainable=False"
                )
            tx = tables[name]
        else:
            tx = tables(name) if _is_function(tables) else tables
        return as_rowwise(tx, f"table {name!r}, partition")

    return choose


def over_tables(params: T, tables: TableTx, read: Callable[[Table, Rowwise], Any]) -> T:
    """Parameters that have ``read(table, transform)`` in the place of each table that is trained."""
    choose = chooser(tables)

    def of(x: Any) -> Any:
        return read(x, choose(x.name)) if is_table(x) and x.spec.trainable else x

    return jax.tree.map(of, params, is_leaf=is_table)
