"""Views: how a handle reads its rows as something else than is stored: caught up, or a slot in their place."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._formats.source import row_bytes
from kvjax._keys.keys import Keys
from kvjax._sharded import reads
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._training.catch_up import caught_up_row
from kvjax._training.rowwise import CatchUp
from kvjax._training.signature import is_of
from kvjax._values.errors import fail
from kvjax._values.slot_layout import in_record_order, layout_text
from kvjax._values.snapshot import Snapshot


def check_can_catch_up(spec: TableSpec, rowwise: CatchUp, op: str) -> None:
    """Whether rows of this table can be behind without being others than they would be."""
    for option, given in {"constraint=": spec.constraint is not None, "a shared row": spec.shares_row}.items():
        if given:
            raise fail(
                ValueError, spec.name, op, f"a table for kvjax.optax.{rowwise.name}", f"one with {option}",
                "dense training applies it in the steps that a row misses, too, and there is no closed form of that; "
                "leave it out, or train lazily",
            )  # fmt: skip


_AT_ONCE = 1 << 16  # rows


class View(Protocol):
    """Attributes:
    made_by: the function that gives handles with it, for errors.
    trains: whether a gradient at its rows is one of the table's.
    """

    @property
    def made_by(self) -> str: ...

    @property
    def trains(self) -> bool: ...

    def rows(self, spec: TableSpec, version: jax.Array, keys: Keys, stored: jax.Array) -> jax.Array:
        """Rows as the view has them.

        Args:
          spec: of the table.
          version: ``()`` uint32.
          keys: ``(...)``.
          stored: ``(..., dim)``, what is in the table under them.
        """
        ...

    def snapshot(self, spec: TableSpec, stored: Snapshot, slots: bool) -> Snapshot:
        """A snapshot of such rows.

        Args:
          spec: of the table.
          stored: with slots.
          slots: whether to keep them.
        """
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotView:
    """Rows as a slot of their width keeps them; those without slots are themselves.

    Attributes:
      slot: its name.
      types: of all slots of the table by name, in their order.
      b1: of schedule-free: the slot is z, and a row ``b1 * x + (1 - b1) * z``; it reads as x. None: as the slot.
      made_by: see `View`.
    """

    slot: str = dataclasses.field(metadata={"static": True})
    types: tuple[tuple[str, jax.ShapeDtypeStruct], ...] = dataclasses.field(metadata={"static": True})
    b1: float | None = dataclasses.field(metadata={"static": True})
    made_by: str = dataclasses.field(metadata={"static": True})

    @property
    def trains(self) -> bool:
        """See `View`."""
        return False

    def rows(self, spec: TableSpec, version: jax.Array, keys: Keys, stored: jax.Array) -> jax.Array:
        """See `View`."""
        # Of all slots, as a table may be asked before its first step for those that it will have.
        kept = _read_slots(spec, version, keys, dict(self.types))[self.slot]
        has = reads.read_slot(spec, "", version, keys, jnp.bool_, ())
        return jnp.where(has[..., None], self._read(stored, kept).astype(spec.row_dtype), stored)

    def _read(self, stored: Any, kept: Any) -> Any:
        if self.b1 is None:
            return kept
        return (stored.astype(np.float32) - (1 - self.b1) * kept.astype(np.float32)) / self.b1

    def snapshot(self, spec: TableSpec, stored: Snapshot, slots: bool) -> Snapshot:
        """See `View`."""
        rows = stored.rows
        values = rows.values
        if self.slot in rows.slots:
            read = self._read(values, rows.slots[self.slot]).astype(values.dtype)
            values = np.where(rows.has_slots[:, None], read, values)
        kept, types = (rows.slots, stored.slot_types) if slots else ({}, {})
        return dataclasses.replace(stored, rows=dataclasses.replace(rows, values=values, slots=kept), slot_types=types)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CaughtUpView:
    """Rows as they are now, where those that a batch left out are behind.

    Attributes:
      rowwise: the transform.
      globals_: what it keeps for all rows together.
      slot: name of the slot that is read in the place of rows; None for rows.
      made_by: see `View`.
    """

    rowwise: CatchUp = dataclasses.field(metadata={"static": True})
    globals_: tuple[jax.Array, ...]
    slot: str | None = dataclasses.field(default=None, metadata={"static": True})
    made_by: str = dataclasses.field(default="caught_up", metadata={"static": True})

    @property
    def trains(self) -> bool:
        """See `View`."""
        return self.slot is None

    def rows(self, spec: TableSpec, version: jax.Array, keys: Keys, stored: jax.Array) -> jax.Array:
        """See `View`."""
        layout = self.rowwise.layout(spec.dim)
        types = dict(zip(layout.names, layout.types, strict=True))
        state = layout.state_of(self.globals_)
        # By another transform no row can catch up.
        until = jnp.where(is_of(state.made_by, self.rowwise.signature), state.steps, np.int32(-1))
        slots = _read_slots(spec, version, keys, types, until)
        now = _caught_up_rows(self.rowwise, spec.dim, keys.ndim, isinstance(stored, Tracer))

        def run(stored: jax.Array, slots: list[jax.Array], globals_: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            return now(stored.astype(jnp.float32), slots, globals_), ()

        spread = sharding_of(stored, keys.ndim)
        row, kept = as_auto(run, spread, stored, list(slots.values()), self.globals_)[0]
        return (row if self.slot is None else kept[layout.names.index(self.slot)]).astype(spec.row_dtype)

    def snapshot(self, spec: TableSpec, stored: Snapshot, slots: bool) -> Snapshot:
        """See `View`; all rows then have slots."""
        rows, layout = stored.rows, self.rowwise.layout(spec.dim)
        n, steps = len(rows), int(layout.state_of(self.globals_).steps)
        last = int(rows.slots["last_step"].max(initial=0)) if rows.slots else 0
        if last > steps:
            raise fail(
                ValueError, spec.name, "export", "the optimizer's state that the last write returned",
                f"one of {steps} steps for rows of step {last}", "keep and restore it together with the table; to "
                "begin with a new one, sweep by the state that belongs to the rows, then table.clear_slots()",
            )  # fmt: skip
        values = np.empty_like(rows.values)
        new = {name: np.empty((n, *t.shape), t.dtype) for name, t in zip(layout.names, layout.types, strict=True)}
        old = rows.slots if rows.slots else {name: np.zeros_like(x) for name, x in new.items()}
        now = jax.jit(jax.vmap(caught_up_row(self.rowwise, spec.dim), in_axes=(0, 0, None)))
        for start in range(0, n, _AT_ONCE):
            some = slice(start, min(start + _AT_ONCE, n))
            at = np.arange(start, start + min(_AT_ONCE, n)).clip(max=n - 1)  # of one shape: the last row again
            given = [old[name][at] for name in layout.names]
            value, made = now(rows.values[at].astype(np.float32), given, self.globals_)
            size = some.stop - some.start
            read = value if self.slot is None else made[layout.names.index(self.slot)]
            values[some] = np.asarray(read)[:size].astype(values.dtype)
            for name, x in zip(layout.names, made, strict=True):
                new[name][some] = np.asarray(x)[:size]
        kept = {"slots": new, "has_slots": np.ones(n, bool)} if slots else {"slots": {}}
        types = layout.type_texts if slots else {}
        return dataclasses.replace(stored, rows=dataclasses.replace(rows, values=values, **kept), slot_types=types)


@functools.lru_cache(maxsize=64)
def _caught_up_rows(rowwise: CatchUp, dim: int, ndim: int, traced: bool) -> Callable[..., Any]:
    """`caught_up_row` of rows ``(..., dim)``, which in a program is traced once for all tables with such rows."""
    now = caught_up_row(rowwise, dim)
    for _ in range(ndim):
        now = jax.vmap(now, in_axes=(0, 0, None))
    return jax.jit(now) if traced else now


def _word_of(name: str, types: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """The first word of a slot among those of all, in the order in which they lie."""
    return sum(_words(t) for t in list(types.values())[: list(types).index(name)])


def _words(t: jax.ShapeDtypeStruct) -> int:
    """How many words of 32 bits a slot takes."""
    return -(-row_bytes((t.dtype, t.shape)) // 4)


def _read_slots(
    spec: TableSpec,
    version: jax.Array,
    keys: Keys,
    types: Mapping[str, jax.ShapeDtypeStruct],
    steps: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """All slots of rows ``(..., *shape)`` by name, in one read of words ``(..., n)`` uint32, at which each begins; an
    error if a row's last step is beyond `steps`, ``()`` int32."""
    size, text, lie = sum(map(_words, types.values())), layout_text(types), in_record_order(types)
    if steps is None:
        words = reads.read_slot(spec, text, version, keys, jnp.uint32, (size,))
    else:
        words = reads.read_slots_until(spec, text, version, keys, size, _word_of("last_step", lie), steps)
    slots, begin = {}, 0
    for name, t in lie.items():
        part = words[..., begin : (begin := begin + _words(t))]
        if jnp.dtype(t.dtype).itemsize == 8:
            part = part.reshape(*part.shape[:-1], -1, 2)
        kind = jnp.uint8 if t.dtype == jnp.bool_ else t.dtype
        x = jax.lax.bitcast_convert_type(part, kind)
        elements = math.prod(x.shape[words.ndim - 1 :])  # which -1 does not find for no keys
        x = x.reshape(*words.shape[:-1], elements)[..., : t.size].reshape(*words.shape[:-1], *t.shape)
        slots[name] = x.astype(t.dtype)
    return {name: slots[name] for name in types}
