"""Prefetch: lookups made a step ahead, and what of them has to be read again."""

from __future__ import annotations

from kvjax._keys.keys import KeysLike
from kvjax._keys.masks import mask_of
from kvjax._sharded import reads
from kvjax._table.handle import keys_for, version_to_write
from kvjax._table.prefetched import Prefetched
from kvjax._table.table import Table, check_table
from kvjax._values.arrays import ArrayLike
from kvjax._values.numbers import is_integer


def prefetch(
    table: Table, keys: KeysLike, *, mask: ArrayLike | None = None, pad_id: int | None = None
) -> tuple[Prefetched, Table]:
    """Reads rows before the write of this step, for the lookup of the next one.

    What it returns stands for the keys in a later `Table.lookup`, and so in `kvjax.flax.Embed`. That lookup gives
    exactly what it would give without: rows that may have changed in between are read again. These are the rows of the
    step's own keys and those it evicted, if one `Table.apply` lies between, and all rows if anything else does.

    It is for what a read costs besides copying rows: on a table that is sharded over devices only the changed rows have
    to travel after the write, and the others can while the step computes; on a table in a file (`kvjax.storage.Mmap`)
    its pages are read from disk early. On one machine without such waiting it makes steps slower
    (``benchmarks/prefetch.py``).

    Args:
      table: the `Table`, before the write.
      keys: ``(...)`` of the next step.
      mask: ``(...)`` bool, false for padding.
      pad_id: a key that is padding wherever it stands.

    Returns:
      `Prefetched`, a pytree that stands for the keys; and the handle to write through, which orders that write after
      this read.

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
    mask = mask_of(keys, mask, pad_id, table.name, table.spec.key_dtype, "prefetch")
    rows, found, used = reads.lookup(table.spec, version, keys, mask, False)
    padding = int(pad_id) if pad_id is not None and is_integer(pad_id) else None
    return Prefetched(keys, mask, rows, found, version, table.name, padding), table.after(used)
