"""The training write through a handle: what `Table.apply` and `kvjax.optax.partition` check, and what they do then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from kvjax._keys.sparse_rows import SparseRows
from kvjax._keys.steps import step_words
from kvjax._ops import order
from kvjax._table.handle import Handle, check_width, version_to_write
from kvjax._table.view import check_late
from kvjax._training.apply import Update, apply, can_hold, check, end
from kvjax._training.rowwise import Late, Rowwise
from kvjax._values.errors import fail

H = TypeVar("H", bound=Handle)


def check_gradient(table: Handle, rowwise: Rowwise, grads: Any, state: Any) -> None:
    """Raises what the training write would for these gradients and globals, before anything is written."""
    check(table.spec, rowwise, grads, state)
    if grads.table not in (None, table.name):
        raise fail(
            ValueError, table.name, "apply", "gradients of this table", f"those of table {grads.table!r}",
            "each table takes its own; for rows of your own making, kvjax.SparseRows(grads.keys, grads.rows)",
        )  # fmt: skip
    if isinstance(rowwise, Late):
        check_late(table.spec, rowwise, "apply")
        if grads.table is not None and not grads.viewed:
            raise fail(
                ValueError, table.name, "apply", f"gradients at rows of now, as kvjax.optax.{rowwise.name} has them",
                "some at rows as they are stored, which may be behind",
                "differentiate with respect to kvjax.optax.caught_up(params, state, tx), and give the update the "
                "parameters from before it",
            )  # fmt: skip
    check_width(table.spec, grads.keys, "apply")


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
    """The same for distinct tables. Where their steps can be held, all are planned before the first is done: so if one
    table refuses, all are as they were."""
    holds = len(writes) > 1 and all(can_hold(write.table.spec) for write in writes)
    words, states = [], []
    for table, rowwise, grads, state in writes:
        leaves, form = jax.tree.flatten(state)
        version, number = version_to_write(table, "apply"), step_words(step, table.name, "apply")
        update = Update(version, grads, tuple(leaves), number, extra)
        word, leaves = apply(table.spec, rowwise, update, holds)
        words.append(word)
        states.append(jax.tree.unflatten(form, leaves))
    if holds:
        planned = order.after(writes[0].table.spec, words[0], words[1:])
        words = [end(write.table.spec, word, write.grads, planned) for write, word in zip(writes, words, strict=True)]
    return [(write.table.at(word), state) for write, word, state in zip(writes, words, states, strict=True)]
