"""Flax's own serialization: it takes what `split` leaves, and restores no handle."""

from __future__ import annotations

from typing import Any

from flax import serialization

from kvjax._table.table import Table
from kvjax._values.errors import fail
from kvjax.orbax._split import TableRef


def _given(table: Table, state: Any) -> Table:
    if isinstance(state, Table):
        return state
    raise fail(
        TypeError, table.name, "from_state_dict", "a target without tables", "one with this handle",
        "give kvjax.orbax.split(state)[0] as the target, and what comes back to kvjax.orbax.combine",
    )  # fmt: skip


# A module that has a `Table` for an attribute takes it out by `to_state_dict`. So that is no error, and `to_bytes` says
# that it can serialize no `Table`.
serialization.register_serialization_state(Table, lambda table: table, _given)
serialization.register_serialization_state(TableRef, lambda place: {}, lambda place, state: place)
