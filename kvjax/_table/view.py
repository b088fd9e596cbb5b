"""Views: what a handle needs to read rows as they are now, where those that a batch left out are behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys
from kvjax._sharded import reads
from kvjax._spec.spec import TableSpec
from kvjax._training.catch_up import present_row
from kvjax._training.rowwise import Late
from kvjax._values.errors import fail
from kvjax._values.slot_layout import row_bytes
from kvjax._values.snapshot import Snapshot


def check_late(spec: TableSpec, rowwise: Late, op: str) -> None:
    """Whether rows of this table can be behind without being others than they would be."""
    for option, given in {"constraint=": spec.constraint is not None, "a shared row": spec.shares_row}.items():
        if given:
            raise fail(
                ValueError, spec.name, op, f"a table for kvjax.optax.{rowwise.name}", f"one with {option}",
                "dense training applies it in the steps that a row misses, too, and there is no closed form of that; "
                "leave it out, or train lazily",
            )  # fmt: skip


_AT_ONCE = 1 << 16  # rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """Attributes:
    rowwise: the transform.
    globals_: what it keeps for all rows together.
    """

    rowwise: Late = dataclasses.field(metadata={"static": True})
    globals_: tuple[jax.Array, ...]

    def rows(self, spec: TableSpec, version: jax.Array, keys: Keys, stored: jax.Array) -> jax.Array:
        """Rows as they are now.

        Args:
          spec: of the table.
          version: ``()`` uint32.
          keys: ``(...)``.
          stored: ``(..., dim)``, what is in the table under them.
        """
        layout = self.rowwise.layout(spec.dim)
        words = reads.read_slot(spec, layout.text, version, keys, jnp.uint32, (sum(map(_words, layout.types)),))
        now = present_row(self.rowwise, spec.dim)
        for _ in keys.shape:
            now = jax.vmap(now, in_axes=(0, 0, None))
        return now(stored.astype(jnp.float32), _slots(layout.types, words), self.globals_)[0].astype(spec.row_dtype)

    def snapshot(self, spec: TableSpec, stored: Snapshot, slots: bool) -> Snapshot:
        """A snapshot with all rows as they are now; with their slots, which all of them then have.

        Args:
          spec: of the table.
          stored: with slots.
          slots: whether to keep them.
        """
        rows, layout = stored.rows, self.rowwise.layout(spec.dim)
        n = len(rows)
        values = np.empty_like(rows.values)
        new = {name: np.empty((n, *t.shape), t.dtype) for name, t in zip(layout.names, layout.types, strict=True)}
        old = rows.slots if rows.slots else {name: np.zeros_like(x) for name, x in new.items()}
        now = jax.jit(jax.vmap(present_row(self.rowwise, spec.dim), in_axes=(0, 0, None)))
        for start in range(0, n, _AT_ONCE):
            some = slice(start, min(start + _AT_ONCE, n))
            at = np.arange(start, start + min(_AT_ONCE, n)).clip(max=n - 1)  # of one shape: the last row again
            given = [old[name][at] for name in layout.names]
            value, made = now(rows.values[at].astype(np.float32), given, self.globals_)
            size = some.stop - some.start
            values[some] = np.asarray(value)[:size].astype(values.dtype)
            for name, x in zip(layout.names, made, strict=True):
                new[name][some] = np.asarray(x)[:size]
        kept = {"slots": new, "has_slots": np.ones(n, bool)} if slots else {"slots": {}}
        types = layout.type_texts if slots else {}
        return dataclasses.replace(stored, rows=dataclasses.replace(rows, values=values, **kept), slot_types=types)


def _words(t: jax.ShapeDtypeStruct) -> int:
    """How many words of 32 bits a slot takes."""
    return -(-row_bytes(t) // 4)


def _slots(types: Sequence[jax.ShapeDtypeStruct], words: jax.Array) -> list[jax.Array]:
    """Slots ``(..., *shape)`` of all slots of rows in words ``(..., n)`` uint32, at which each of them begins."""
    slots, begin = [], 0
    for t in types:
        part = words[..., begin : (begin := begin + _words(t))]
        if jnp.dtype(t.dtype).itemsize == 8:
            part = part.reshape(*part.shape[:-1], -1, 2)
        kind = jnp.uint8 if t.dtype == jnp.bool_ else t.dtype
        x = jax.lax.bitcast_convert_type(part, kind)
        x = x.reshape(*words.shape[:-1], -1)[..., : t.size].reshape(*words.shape[:-1], *t.shape)
        slots.append(x.astype(t.dtype))
    return slots
