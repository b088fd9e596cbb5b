"""Reads of a table's rows; they change nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvjax import _calls
from kvjax._ahead import Ahead
from kvjax._export import slot_type
from kvjax._handle import Handle
from kvjax._keys import x64_enabled
from kvjax._masks import mask_of
from kvjax._rowwise import slot_types
from kvjax._spec import fail


class Reading(Handle):
    """The reads of `kvjax.Table`."""

    __slots__ = ()

    def lookup(
        self, keys: Any, *, mask: Any = None, pad_id: int | None = None, missing: Any = None, return_found: bool = False
    ) -> Any:
        """Reads rows; changes nothing.

        Args:
          keys: ``(...)``, or what `kvjax.prefetch` has returned for them.
          mask: ``(...)`` bool, false for padding: those rows are zeros, have no gradient and count nowhere.
          pad_id: a key that is padding wherever it stands.
          missing: what a key without a row reads as: "init" (its initial row), "zeros", or a row ``(dim,)``. By
            default its initial row, unless the table's ``admit=`` says otherwise.
          return_found: whether to return too which keys have a row.

        Returns:
          Rows ``(..., dim)`` of the table's dtype, or ``(rows, found)`` with found ``(...)`` bool.

        Raises:
          TypeError: the keys are not integers, or the mask is not bool.
          ValueError: the mask has another shape.
          ValueError, jax.errors.JaxRuntimeError: the handle is stale, or 64-bit keys were cut to 32 bits.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_lookup", dim=1, initializer=0.5).upsert(np.array([7]), [[1.0]])
          >>> table.lookup(np.array([7, 8, -1]), pad_id=-1)[:, 0].tolist()
          [1.0, 0.5, 0.0]
          >>> kvjax.drop_table("doc_lookup")
        """
        ahead = keys if isinstance(keys, Ahead) else None
        if ahead is not None:
            keys, mask = ahead.keys, self._mask_ahead(ahead, mask)
        keys = self._keys(keys, "lookup")
        mask = mask_of(keys, mask, pad_id, self.name, "lookup")
        as_initial = isinstance(missing, str) and missing == "init"
        if ahead is not None and pad_id is None and not as_initial:
            rows, found, used = ahead.read(self.spec, self._read("lookup"))
        else:
            asks = return_found or not (missing is None or as_initial)
            version = self._read("lookup")
            rows, found, used = _calls.lookup(self.spec, version, keys, mask, as_initial, with_found=asks)
        if self.tape is not None:
            rows = self.tape.attach(rows, keys, mask, used)
        if missing is not None and not as_initial:
            as_read = found if mask is None else found | ~mask
            rows = jnp.where(as_read[..., None], rows, self._missing_row(missing))
        return (rows, found) if return_found else rows

    def _mask_ahead(self, ahead: Ahead, mask: Any) -> Any:
        if mask is None or mask is ahead.mask:
            return ahead.mask
        raise fail(
            ValueError, self.name, "lookup", "the mask that the keys were prefetched with", "another",
            "give it to kvjax.prefetch",
        )  # fmt: skip

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
        row = jnp.asarray(missing).astype(self.spec.row_dtype)
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

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_contains", dim=1).upsert(np.array([7]), [[1.0]])
          >>> table.contains(np.array([7, 8])).tolist()
          [True, False]
          >>> kvjax.drop_table("doc_contains")
        """
        return self._inspect("contains", keys)[0]

    def frequency(self, keys: Any) -> jax.Array:
        """How often keys have occurred in training; 0 without a row.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` int64, or int32 (at most 2**31 - 1) while ``jax_enable_x64`` is off; exports are always int64.

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_frequency", dim=1)
          >>> grads = kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 1)))
          >>> table, _ = table.apply(optax.sgd(0.1), grads, step=5)
          >>> table.frequency(np.array([7, 8])).tolist()
          [2, 0]
          >>> kvjax.drop_table("doc_frequency")
        """
        return _integers(self._inspect("frequency", keys)[1])

    def version_of(self, keys: Any) -> jax.Array:
        """The step that last wrote the rows of keys; -1 without a row.

        Args:
          keys: ``(...)``.

        Returns:
          ``(...)`` int64, or int32 (at most 2**31 - 1) while ``jax_enable_x64`` is off; exports are always int64.

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_version_of", dim=1)
          >>> grads = kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 1)))
          >>> table, _ = table.apply(optax.sgd(0.1), grads, step=5)
          >>> table.version_of(np.array([7, 8])).tolist()
          [5, -1]
          >>> kvjax.drop_table("doc_version_of")
        """
        return _integers(self._inspect("version_of", keys)[2])

    def slot(self, name: str, keys: Any, tx: Any = None) -> jax.Array:
        """What the optimizer keeps beside rows.

        Args:
          name: of a slot, as `export` and ``stats().slots`` name it: "sum_of_squares" for ``optax.adagrad``.
          keys: ``(...)``.
          tx: the optimizer, needed where the table has no slots yet: in a compiled function that begins with its first
            `apply`.

        Returns:
          ``(..., *shape)`` of the slot's dtype; zeros where no optimizer has written it yet.

        Raises:
          KeyError: the table has no slot of this name now.

        Example:
          >>> import kvjax, optax, jax.numpy as jnp, numpy as np
          >>> table = kvjax.get_table("doc_slot", dim=2)
          >>> table, _ = table.apply(optax.trace(0.9), kvjax.SparseRows(np.array([7]), jnp.ones((1, 2))))
          >>> table.slot("trace", 7).tolist()
          [1.0, 1.0]
          >>> kvjax.drop_table("doc_slot")
        """
        version, keys = self._read("slot"), self._keys(keys, "slot")
        if tx is not None:
            types = slot_types(tx, self.dim)
        else:
            if not isinstance(version, Tracer):
                self._wait()
            types = dict(self.spec.host.slots(self.name, 0))
        if name not in types:
            raise fail(
                KeyError, self.name, "slot", f"one of its slots {list(types)}", repr(name),
                "slots appear with the first `apply` of an optimizer that has them; before it, slot(name, keys, tx)",
            )  # fmt: skip
        dtype, shape = slot_type(types[name])
        return _calls.read_slot(self.spec, name, version, keys, dtype, shape)

    def _inspect(self, op: str, keys: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _calls.inspect(self.spec, op, self._read(op), self._keys(keys, op))


def _integers(words: jax.Array) -> jax.Array:
    """``(..., 2)`` words of int64 as integers of the widest type that JAX has now."""
    if x64_enabled():
        return jax.lax.bitcast_convert_type(words, jnp.int64)
    low, high = (jax.lax.bitcast_convert_type(words[..., i], jnp.int32) for i in (0, 1))
    return jnp.where(high == low >> 31, low, jnp.int32(2**31 - 1))
