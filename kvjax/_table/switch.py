"""The switch to another optimizer: which slots of a table stay, and what the others start from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._training.rowwise import Rowwise
from kvjax._training.slots import SlotLayout
from kvjax._training.update import update_of
from kvjax._values.errors import warn
from kvjax._values.snapshot import Snapshot

_ROWS = 1 << 16  # at once


def same_slots(held: dict[str, str], slots: dict[str, str]) -> bool:
    """Whether a table whose rows have the slots `held` can go on with `slots`, in this order, as it is."""
    return not held or list(held.items()) == list(slots.items())


def kept_slots(layout: SlotLayout, held: dict[str, str]) -> list[str]:
    """The slots that the optimizer of a layout goes on with: those of the same name, dtype and shape.

    Where a state counts the steps of a row, its other slots are corrected by the count, so it goes on as a whole or
    not at all: the second moment of rmsprop is none of adam's, and adam's are none of one that counts for all rows.
    """
    same = {name for name, text in layout.type_texts.items() if held.get(name) == text}
    for group in layout.groups.values():
        counts = any(layout.type_texts[name].endswith("int32[]") for name in group)
        if counts and not same.issuperset(group):
            same -= set(group)
    # A count that all rows share would correct moments of many steps as those of its first ones.
    counts = {name.rpartition(".")[2] for name, text in held.items() if text == "int32[]"}
    for part, name in layout.shared:
        if name in counts:
            same -= set(layout.groups.get(part, ()))
    return [name for name in layout.names if name in same]


def switched(table: str, rowwise: Rowwise, before: Snapshot) -> Snapshot | None:
    """What a table holds, with the slots of another optimizer; None if none of them stays. Warns of what is lost."""
    dim = before.rows.values.shape[1]
    layout, held = rowwise.layout(dim), before.slot_types
    kept = kept_slots(layout, held)
    fresh, dropped = ([name for name in names if name not in kept] for names in (layout.names, held))
    if fresh or dropped:
        said = (f"{what} {', '.join(names) or 'none'}" for what, names in
                (("kept", kept), ("fresh", fresh), ("dropped", dropped)))  # fmt: skip
        warn(f"kvjax: table {table!r}, switch_optimizer: slots {'; '.join(said)}")
    if not kept:
        return None
    slots = {name: before.rows.slots[name] for name in kept}
    if fresh:
        slots |= _first(rowwise, layout, before.rows.values, before.rows.has_slots)
        slots |= {name: before.rows.slots[name] for name in kept}
    rows = dataclasses.replace(before.rows, slots={name: slots[name] for name in layout.names})
    return dataclasses.replace(before, rows=rows, slot_types=layout.type_texts)


def _first(rowwise: Rowwise, layout: SlotLayout, values: np.ndarray, has_slots: np.ndarray) -> dict[str, np.ndarray]:
    """The slots that rows begin with; zeros for those that have none yet, and so begin with their first step."""
    initial = jax.jit(jax.vmap(update_of(rowwise, values.shape[1], {}).initial))
    out = [np.zeros((len(values), *t.shape), t.dtype) for t in layout.types]
    for rows in _pieces(np.flatnonzero(has_slots)):
        made: Any = initial(jnp.asarray(values[rows]).astype(jnp.float32))
        for to, first in zip(out, made, strict=True):
            to[rows] = np.asarray(first)
    return dict(zip(layout.names, out, strict=True))


def _pieces(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Of one size but for the last, so that few programs are compiled."""
    return (rows[begin : begin + _ROWS] for begin in range(0, len(rows), _ROWS))
