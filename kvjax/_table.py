"""`Table`: the immutable handle of a table of rows."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax import _export, _ops, _rowwise
from kvjax._keys import Keys, as_keys, x64_enabled
from kvjax._sparse import SparseRows
from kvjax._spec import TableSpec, fail
from kvjax.ffi import host


@jax.tree_util.register_pytree_with_keys_class
class Table:
    """A table of rows under 64-bit keys: an immutable value that names the live table in the process.

    A table is made by `kvjax.get_table`. It is a pytree with one leaf, the version: reads leave it alone, every
    write returns the next handle, and a handle that is not the latest is refused. So a table can stand in
    ``params``, pass through ``jit``, ``scan`` and donation, and be told apart from a copy that something else made.

    All methods take keys of any shape ``(...)``, also empty: `Keys`, NumPy integers (exact) or JAX integers.

    Attributes:
      version: ``()`` uint32.
      spec: name, dim, dtype and the other arguments of `kvjax.get_table`.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_table", dim=2)
      >>> table = table.upsert(np.array([2**40, -1]), [[1.0, 2.0], [3.0, 4.0]])
      >>> table.lookup(np.array([-1, 5, 2**40]))
      Array([[3., 4.],
             [0., 0.],
             [1., 2.]], dtype=float32)
      >>> table.remove(np.array([-1])).shape
      (1, 2)
      >>> kvjax.drop_table("doc_table")
    """

    __slots__ = ("spec", "tape", "version")

    def __init__(self, version: Any, spec: TableSpec, tape: Any = None):
        self.version = version
        self.spec = spec
        self.tape = tape  # kvjax.value_and_grad's record of the lookups, None everywhere else

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("version"), self.version)], (self.spec, self.tape)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], *aux)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dim(self) -> int:
        return self.spec.dim

    def _next(self, version: jax.Array) -> Table:
        return Table(version, self.spec)

    # ---- reads ---------------------------------------------------------------------------------------------

    def lookup(self, keys: Any, *, missing: Any = "init", return_found: bool = False) -> Any:
        """Reads rows; changes nothing.

        Args:
          keys: ``(...)``.
          missing: what a key without a row reads as: "init" (its initial row), "zeros", or a row ``(dim,)``.
          return_found: whether to return too which keys have a row.

        Returns:
          Rows ``(..., dim)`` of the table's dtype, or ``(rows, found)`` with found ``(...)`` bool.

        Raises:
          TypeError: the keys are not integers.
          ValueError, jax.errors.JaxRuntimeError: the handle is stale, or 64-bit keys were cut to 32 bits.
        """
        keys = self._keys(keys, "lookup")
        rows, found, used = _ops.lookup(self.spec, self._read("lookup"), keys)
        if self.tape is not None:
            rows = self.tape.attach(rows, keys, used)
        if not (isinstance(missing, str) and missing == "init"):
            rows = jnp.where(found[..., None], rows, self._missing_row(missing))
        return (rows, found) if return_found else rows

    def _missing_row(self, missing: Any) -> jax.Array:
        if isinstance(missing, str):
            if missing != "zeros":
                raise fail(
                    ValueError,
                    self.name,
                    "lookup",
                    "missing='init', 'zeros' or a row",
                    repr(missing),
                    "choose one",
                )
            return jnp.zeros((), self.spec.row_dtype)
        row = jnp.asarray(missing, self.spec.row_dtype)
        if row.shape != (self.dim,):
            raise fail(
                ValueError,
                self.name,
                "lookup",
                f"a missing row ({self.dim},)",
                str(row.shape),
                "give one row",
            )
        return row

    def contains(self, keys: Any) -> jax.Array:
        """Whether keys have a row.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` bool.
        """
        return self._inspect("contains", keys)[0]

    def frequency(self, keys: Any) -> jax.Array:
        """How often keys have occurred in training; 0 without a row.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` int64, or int32 (at most 2**31 - 1) while ``jax_enable_x64`` is off; exports are always int64.
        """
        return _integers(self._inspect("frequency", keys)[1])

    def version_of(self, keys: Any) -> jax.Array:
        """The step that last wrote the rows of keys; -1 without a row.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` int64, or int32 (at most 2**31 - 1) while ``jax_enable_x64`` is off; exports are always int64.
        """
        return _integers(self._inspect("version_of", keys)[2])

    # ---- writes --------------------------------------------------------------------------------------------

    def lookup_or_insert(self, keys: Any) -> tuple[jax.Array, Table]:
        """Reads rows and gives every key without one its initial row, now.

        Training needs no such call: `apply` inserts what it updates.

        Args:
          keys: ``(...)``.

        Returns:
          Rows ``(..., dim)`` and the next handle.
        """
        keys = self._keys(keys, "lookup_or_insert")
        table = self._next(_ops.insert(self.spec, self._write("lookup_or_insert"), keys))
        return table.lookup(keys), table

    def upsert(self, keys: Any, values: Any) -> Table:
        """Inserts or overwrites rows; of equal keys the last one wins. Slots and frequency stay as they are.

        Args:
          keys: ``(...)``.
          values: ``(..., dim)`` of a floating type.

        Returns:
          The next handle.

        Raises:
          ValueError, TypeError: shape or dtype of the values do not fit.
        """
        keys = self._keys(keys, "upsert")
        values = jnp.asarray(values)
        if values.shape != (*keys.shape, self.dim):
            raise fail(
                ValueError, self.name, "upsert", f"values {(*keys.shape, self.dim)}", f"{values.shape}",
                "give one row per key",
            )  # fmt: skip
        if not jnp.issubdtype(values.dtype, jnp.floating) and not jnp.issubdtype(values.dtype, jnp.integer):
            raise fail(TypeError, self.name, "upsert", "real values", f"{values.dtype}", "convert them first")
        return self._next(_ops.upsert(self.spec, self._write("upsert"), keys, values.astype(self.spec.row_dtype)))

    def apply(
        self, tx: Any, grads: SparseRows, state: Any = (), step: Any = None, **extra_args: Any
    ) -> tuple[Table, Any]:
        """The training write: inserts the keys of the gradients and updates their rows.

        Rows of equal keys are merged first. The transform then sees each row by itself and keeps its slots in the
        table; rows that are not in the batch are not touched. Frequency grows by the occurrences of a key, and the
        version becomes the step.

        Args:
          tx: optax transform, or `kvjax.optax.rowwise(tx)`.
          grads: `SparseRows` of this table.
          state: what the transform keeps for all rows together: ``kvjax.optax.rowwise(tx).init(dim)`` at first,
            then what the last call returned. Transforms without schedules have none, ``()``.
          step: integer or ``()`` integer array; by default one more than the table's last step.
          **extra_args: handed to the transform's update.

        Returns:
          The next handle and the next state.

        Raises:
          ValueError: shapes or state do not fit.
          ValueError, jax.errors.JaxRuntimeError: the handle is stale, the table holds slots of another
            optimizer, or the gradients went through arithmetic.

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_apply", dim=2, initializer=1.0)
          >>> grads = kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 2)))
          >>> table, state = table.apply(optax.sgd(0.25), grads)
          >>> table.lookup(7).tolist(), int(table.frequency(7)), int(table.version_of(7))
          ([0.5, 0.5], 2, 1)
          >>> kvjax.drop_table("doc_apply")
        """
        self._write("apply")
        version, state = _rowwise.apply(self, tx, grads, state, step, extra_args)
        return self._next(version), state

    def remove(self, keys: Any) -> Table:
        """Removes rows with their slots, frequency and version; keys without a row are passed over.

        Args:
          keys: ``(...)``.

        Returns:
          The next handle.
        """
        return self._next(_ops.remove(self.spec, self._write("remove"), self._keys(keys, "remove")))

    def clear(self) -> Table:
        """Removes every row and returns the next handle."""
        return self._next(_ops.clear(self.spec, self._write("clear"), slots_only=False))

    def clear_slots(self) -> Table:
        """Forgets the optimizer's state of every row, so that another optimizer can take over.

        Returns:
          The next handle.
        """
        return self._next(_ops.clear(self.spec, self._write("clear_slots"), slots_only=True))

    # ---- handles -------------------------------------------------------------------------------------------

    def after(self, x: Any) -> Table:
        """The same handle, usable only once `x` exists: orders a later write behind a read.

        Args:
          x: pytree of arrays that earlier reads gave.
        """
        leaves = [leaf for leaf in jax.tree.leaves(x) if hasattr(leaf, "dtype")]
        return Table(_ops.after(self.spec, self._read("after"), leaves), self.spec, self.tape)

    def refresh(self) -> Table:
        """The live handle of this table, for instance after a failed step. Not inside ``jit``.

        Raises:
          RuntimeError: this handle comes from another process, for instance from a checkpoint that was saved without
            `kvjax.orbax.split`. The table of this process does not have its rows.
        """
        self._outside_a_loss("refresh")
        table = live(self.spec)
        with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):  # the version of a failed write
            ahead = (int(self._read("refresh")) - int(table.version)) % 2**32
            if 0 < ahead < 2**31:
                host.size(self.name, int(self.version))  # raises what every call through this handle would
        return table

    def _keys(self, keys: Any, op: str) -> Keys:
        return as_keys(keys, f"table {self.name!r}, {op}")

    def _inspect(self, op: str, keys: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _ops.inspect(self.spec, op, self._read(op), self._keys(keys, op))

    def _read(self, op: str) -> jax.Array:
        """The version operand of a read, if it still looks like one."""
        version = self.version
        if getattr(version, "dtype", None) != jnp.uint32 or getattr(version, "shape", None) != ():
            got = f"{getattr(version, 'shape', '')} {getattr(version, 'dtype', type(version).__name__)}"
            raise fail(
                TypeError, self.name, op, "a handle whose version is () uint32", got,
                "something did arithmetic on the tree that holds it; table.refresh() gives the live handle",
            )  # fmt: skip
        return version

    def _write(self, op: str) -> jax.Array:
        """The version operand of a write."""
        self._outside_a_loss(op)
        return self._read(op)

    def _outside_a_loss(self, op: str) -> None:
        if self.tape is not None:
            raise fail(
                ValueError, self.name, op, "a loss that only reads its tables", f"a {op} inside it",
                "its rows would have no gradient: do it before kvjax.value_and_grad, or after",
            )  # fmt: skip

    # ---- the whole table, on the host ----------------------------------------------------------------------

    def _settled(self, op: str) -> int:
        """This handle's version, once the writes that lead to it are done."""
        if isinstance(self.version, Tracer):
            raise fail(
                TypeError, self.name, op, "a call outside jit", "one inside",
                "sizes and exports are host values: take them between steps",
            )  # fmt: skip
        return int(self._write(op))

    def size(self) -> int:
        """The number of rows, once all writes up to this handle are done."""
        return host.size(self.name, self._settled("size"))

    def __len__(self) -> int:
        return self.size()

    def __bool__(self) -> bool:
        return True  # an empty table is a table

    @property
    def shape(self) -> tuple[int, int]:
        """``(size, dim)``."""
        return self.size(), self.dim

    def export(self, prune: _export.PruneLike | None = None, dry_run: bool = False, slots: bool = False) -> Any:
        """Copies the table out as NumPy arrays, sorted by (bucket, key). The table itself is not changed.

        Args:
          prune: `kvjax.Prune`, or a function from the export to ``(n,)`` bool, true for rows to keep.
          dry_run: only count.
          slots: whether to export the optimizer's slots too.

        Returns:
          `Exported` with ``.keys (n,)`` int64, ``.values (n, dim)``, ``.freqs (n,)`` int64, ``.versions (n,)`` int64
          and ``.slots``; with dry_run the tuple (rows kept, rows in the table).

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_export", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> table.export().values.shape, table.export(kvjax.Prune(min_frequency=1), dry_run=True)
          ((3, 1), (0, 3))
          >>> kvjax.drop_table("doc_export")
        """
        rows, _, _ = self.snapshot(slots)
        if prune is not None:
            rows = rows.take(_export.keep_mask(prune, rows))
        return (len(rows), rows.total) if dry_run else rows

    def snapshot(self, slots: bool = True) -> tuple[_export.Exported, np.ndarray, dict[str, str]]:
        """What a checkpoint stores.

        Args:
          slots: whether to include the optimizer's slots.

        Returns:
          The export, the first row of each bucket ``(buckets + 1,)`` int64, and the slots' types by name.
        """
        raw = host.export_table(self.name, self._settled("export"), slots)
        return _export.from_host(raw, self.dim, self.spec.row_dtype, self.spec.key_dtype)

    def load(self, rows: _export.Exported, slot_types: dict[str, str] | None = None) -> Table:
        """Replaces the contents of the table; it is unchanged if this fails.

        Args:
          rows: arrays as `export` gives them, in any order, keys distinct.
          slot_types: dtype and shape of each slot in ``rows.slots`` ("float32[64]"), as `snapshot` gives them;
            by default those of the arrays.

        Returns:
          The next handle.

        Raises:
          ValueError: the arrays do not fit the table or each other, or a key occurs twice.
        """
        version = self._settled("load")
        n = len(rows.keys)
        if np.asarray(rows.keys).dtype not in (np.int64, np.uint64):
            raise fail(
                TypeError, self.name, "load", "keys (n,) int64 or uint64", f"{np.asarray(rows.keys).dtype}",
                "convert them first",
            )  # fmt: skip
        if np.shape(rows.values) != (n, self.dim) or rows.values.dtype != self.spec.row_dtype:
            raise fail(
                ValueError, self.name, "load", f"values ({n}, {self.dim}) {self.spec.dtype}",
                f"{np.shape(rows.values)} {rows.values.dtype}", "load into a table of that dim and dtype",
            )  # fmt: skip
        types = slot_types or {name: f"{a.dtype}[{','.join(map(str, a.shape[1:]))}]" for name, a in rows.slots.items()}
        version = host.load_table(
            self.name, version,
            np.ascontiguousarray(rows.keys).view(np.int64),
            _bytes(rows.values), np.asarray(rows.freqs, np.int64), np.asarray(rows.versions, np.int64),
            _bytes(np.asarray(rows.has_slots, bool)), int(rows.last_step),
            [(name, types[name], _bytes(array)) for name, array in rows.slots.items()],
        )  # fmt: skip
        return self._next(jnp.uint32(version))

    def __repr__(self) -> str:
        version = "traced" if isinstance(self.version, Tracer) else self.version
        if isinstance(version, jax.Array) and version.is_deleted():
            version = "donated"
        return f"Table({self.name!r}, dim={self.dim}, dtype={self.spec.dtype}, version={version})"


def is_table(x: Any) -> bool:
    return isinstance(x, Table)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _integers(words: jax.Array) -> jax.Array:
    """``(..., 2)`` words of int64 as integers of the widest type that JAX has now."""
    if x64_enabled():
        return jax.lax.bitcast_convert_type(words, jnp.int64)
    low, high = (jax.lax.bitcast_convert_type(words[..., i], jnp.int32) for i in (0, 1))
    return jnp.where(high == low >> 31, low, jnp.int32(2**31 - 1))


def live(spec: TableSpec) -> Table:
    """The live handle of the table that `spec` names, once the writes that have been started are done."""
    # A write that failed says so where its result is used; here it is only waited for.
    with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    return Table(jnp.uint32(host.version(spec.name)), spec)
