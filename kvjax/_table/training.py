"""The training write through a handle: what `Table.apply` and `kvjax.optax.partition` check, and what they do then."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from kvjax._keys.sparse_rows import SparseRows
from kvjax._keys.steps import step_words
from kvjax._keys.table_keys import keys_of
from kvjax._ops import order, training
from kvjax._spec.spec import TableSpec
from kvjax._spec.unsupported import check_together
from kvjax._table.checks import version_to_write
from kvjax._table.handle import Handle, after_write
from kvjax._table.refused import watch
from kvjax._table.table_update import TableUpdate
from kvjax._table.view import check_can_catch_up
from kvjax._training.apply import PlannedStep, apply, check, end, plan
from kvjax._training.rowwise import CatchUp, Rowwise
from kvjax._training.ways import Update
from kvjax._values.errors import fail

H = TypeVar("H", bound=Handle)


def check_gradient(table: Handle, rowwise: Rowwise, grads: Any, state: Any) -> None:
    """Raises what the training write would for these gradients and globals, before anything is written."""
    if isinstance(getattr(grads, "given", None), TableUpdate):
        raise fail(
            TypeError, table.name, "apply", "SparseRows", "the update that another partition has made of them",
            "one partition, the last of a chain, updates all tables; it takes transforms of each by name "
            "(tables={name: tx}), and what wraps steps, as kvjax.optax.accumulate does, takes it as an argument",
        )  # fmt: skip
    check(table.spec, rowwise, grads, state)
    if grads.table not in (None, table.name):
        raise fail(
            ValueError, table.name, "apply", "gradients of this table", f"those of table {grads.table!r}",
            "each table takes its own; for rows of your own making, kvjax.SparseRows(grads.keys, grads.rows)",
        )  # fmt: skip
    if isinstance(rowwise, CatchUp):
        check_can_catch_up(table.spec, rowwise, "apply")
        if grads.table is not None and not grads.viewed:
            raise fail(
                ValueError, table.name, "apply", f"gradients at rows of now, as kvjax.optax.{rowwise.name} has them",
                "some at rows as they are stored, which may be behind",
                "differentiate with respect to kvjax.optax.caught_up(params, state, rows), where rows is what "
                "partition got as tables=, and give the update the parameters from before it",
            )  # fmt: skip
    keys_of(grads.keys, table.spec.name, table.spec.key_dtype, "apply")


def train(table: H, rowwise: Rowwise, grads: SparseRows, state: Any, step: Any, extra: dict[str, Any]) -> tuple[H, Any]:
    """`Table.apply` of what `check_gradient` has let through."""
    return train_all([Write(table, rowwise, grads, state)], step, extra)[0]


class Write(NamedTuple):
    """The training write of one of several tables."""

    table: Any
    rowwise: Rowwise
    grads: SparseRows
    state: Any


def train_all(writes: Sequence[Write], step: Any, extra: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The same for distinct tables. All steps are planned before the first is done: so if one table refuses, or
    the user's code raises in an update, all are as they were."""
    check_together([write.table.spec for write in writes], "apply")
    if len(writes) < 2:
        return [_result(write, apply(*_update(write, step, extra))) for write in writes]
    held, number = _planned(writes, step, extra, None)
    return _ended(writes, held, order.after(held[0].spec, number, [each.planned.word for each in held]))


def _planned(
    writes: Sequence[Write], step: Any, extra: dict[str, Any], unasked: jax.Array | None
) -> tuple[list[PlannedStep], jax.Array]:
    """Planned steps, and the greatest status of them ``()`` uint32."""
    held = [plan(*_update(write, step, extra), unasked) for write in writes]
    return held, functools.reduce(jnp.maximum, [each.planned.status for each in held])


def _ended(writes: Sequence[Write], held: Sequence[PlannedStep], planned: jax.Array) -> list[tuple[Any, Any]]:
    """The results of planned steps, once the greatest status of them exists."""
    return [_result(write, end(each, planned)) for write, each in zip(writes, held, strict=True)]


def train_or_refuse(
    writes: Sequence[Write], step: Any, extra: dict[str, Any], refused: jax.Array
) -> tuple[list[tuple[Any, Any]], jax.Array]:
    """The same, but what one table refuses is no error: all are as they were, and the handles stay live.

    refused: ``()`` uint32, what the step before gave.

    Returns:
      The results, and 0, or the number of the failure ``()`` uint32: of this step, or of the one before until it has
      been asked for (`kvjax.commit`), and no table is written.
    """
    check_together([write.table.spec for write in writes], "apply")
    if not writes:
        return [], jnp.zeros((), jnp.uint32)
    watch()
    unasked = training.unasked(writes[0].table.spec, refused)
    held, number = _planned(writes, step, extra, unasked)
    return _ended(writes, held, number), number


def _update(write: Write, step: Any, extra: dict[str, Any]) -> tuple[TableSpec, Rowwise, Update]:
    table, leaves = write.table, tuple(jax.tree.leaves(write.state))
    version, number = version_to_write(table, "apply"), step_words(step, table.name, "apply")
    keys = keys_of(write.grads.keys, table.spec.name, table.spec.key_dtype, "apply")
    # Not merged any more where the table has its own form of keys, in which two of one gradient may be the same.
    grads = write.grads if keys is write.grads.keys else write.grads.replace(keys=keys)
    return table.spec, write.rowwise, Update(version, grads, leaves, number, extra)


def _result(write: Write, done: tuple[jax.Array, Any]) -> tuple[Any, Any]:
    version, leaves = done
    return after_write(write.table, "apply", version), jax.tree.unflatten(jax.tree.structure(write.state), leaves)
