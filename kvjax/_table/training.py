"""The training write through a handle: what `Table.apply` and `kvjax.optax.partition` check, and what they do then."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from kvjax._keys.sparse_rows import SparseRows
from kvjax._keys.steps import step_words
from kvjax._table.handle import Handle, check_width, version_to_write
from kvjax._table.view import check_late
from kvjax._training.apply import Update, apply, check
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
    version = version_to_write(table, "apply")
    words = step_words(step, table.name, "apply")
    leaves, form = jax.tree.flatten(state)
    version, leaves = apply(table.spec, rowwise, Update(version, grads, tuple(leaves), words, extra))
    return table.at(version), jax.tree.unflatten(form, leaves)
