"""Prefetch: lookups made a step ahead, and which of their rows have to be read again."""

from __future__ import annotations

from kvjax._keys.keys import KeysLike
from kvjax._keys.masks import mask_of
from kvjax._sharded import reads
from kvjax._sharded.mesh import on_explicit
from kvjax._table.checks import keys_for, version_to_write
from kvjax._table.prefetched import Prefetched
from kvjax._table.table import Table, check_table
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import ArrayLike


def prefetch(
    table: Table, keys: KeysLike, *, mask: ArrayLike | None = None, pad_id: int | None = None
) -> tuple[Prefetched, Table]:
    """Reads rows before the write of this step, for the lookup of the next one.

    Give the `Prefetched` that it returns to a later `Table.lookup` or `kvjax.flax.Embed` in the place of the keys. That
    lookup returns exactly the rows that it would return without prefetching: rows that may have changed in between are
    read again. After one `Table.apply` these are the rows of its keys, and those that it has evicted; after any other
    write, all rows.

    It is useful if a read has to wait. If the table is sharded over devices, only changed rows have to be sent after
    the write, and the others can be sent while the step computes. If the table is in a file (`kvjax.storage.Mmap`), its
    pages are read from disk early. On one machine without such waiting, it makes steps slower
    (``benchmarks/prefetch.py``).

    Args:
      table: the `Table`, before the write.
      keys: ``(...)`` of the next step.
      mask: ``(...)`` bool, false for padding.
      pad_id: a key that marks padding wherever it occurs.

    Returns:
      `Prefetched`, a pytree that takes the place of the keys, and the handle for the write, which orders the write
      after this read.

    Raises:
      As `Table.lookup` does.

    Example:
      >>> import kvjax, optax, jax.numpy as jnp, numpy as np
      >>> table = kvjax.get_table("doc_prefetch", dim=1)
      >>> prefetched, table = kvjax.prefetch(table, np.array([7, 8]))
      >>> table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([7]), jnp.ones((1, 1))))
      >>> table.lookup(prefetched)[:, 0].tolist()
      [-1.0, 0.0]
      >>> kvjax.drop_table("doc_prefetch")
    """
    check_table(table, "prefetch")
    version = version_to_write(table, "prefetch")
    keys = keys_for(table, keys, "prefetch")
    valid = mask_of(keys, mask, pad_id, table.name, table.spec.key_dtype, "prefetch")
    keys, valid = on_explicit(table.spec, keys, valid)  # as the rows are, or XLA would spread the keys over some axis
    rows, found, used = reads.lookup(table.spec, version, keys, valid, False)
    padding = int(pad_id) if pad_id is not None and is_integer(pad_id) else None
    return Prefetched(keys, valid, rows, found, version, table.name, padding), table.after(used)
