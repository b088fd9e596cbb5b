"""Prefetched rows: what a lookup made a step ahead has found; see `kvjax.prefetch`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from kvjax._keys.keys import Keys
from kvjax._sharded import reads
from kvjax._spec.spec import TableSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefetched:
    """Keys whose rows have been read ahead; made by `kvjax.prefetch`, for `Table.lookup`.

    Attributes:
      keys: `Keys` ``(...)``.
      mask: ``(...)`` bool, false for padding, or None.
      rows: ``(..., dim)``, as they were when they were read.
      found: ``(...)`` bool, which keys had a row then.
      version: ``()`` uint32, of the handle they were read through.
      table: name of the table they were read from.
      pad_id: the id that the mask leaves out, or None.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_prefetched", dim=2).upsert([7], [[1.0, 2.0]])
      >>> ahead, table = kvjax.prefetch(table, np.array([[7, 8]]))
      >>> ahead.shape, ahead.rows.shape, ahead.found.tolist()
      ((1, 2), (1, 2, 2), [[True, False]])
      >>> kvjax.drop_table("doc_prefetched")
    """

    keys: Keys
    mask: jax.Array | None = dataclasses.field(repr=False)
    rows: jax.Array = dataclasses.field(repr=False)
    found: jax.Array = dataclasses.field(repr=False)
    version: jax.Array = dataclasses.field(repr=False)
    table: str = dataclasses.field(default="", metadata={"static": True})
    pad_id: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape ``(...)`` of the keys."""
        return self.keys.shape

    def read(self, spec: TableSpec, version: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The rows as they are now, as `kvjax._sharded.reads.lookup` gives them."""
        changed = reads.changed(spec, version, self.version, self.keys, self.mask)
        rows, found, used = reads.lookup(spec, version, self.keys, changed, False, few=True)
        return (
            jnp.where(changed[..., None], rows, self.rows),
            jnp.where(changed, found, self.found),
            used,
        )
