"""`Table`: the immutable handle of a table of rows."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._table.derived_handles import DerivedHandles
from kvjax._table.live import live_version
from kvjax._table.moves import Moves
from kvjax._table.reads import Reads
from kvjax._table.whole import Whole
from kvjax._table.writes import Writes
from kvjax._values.errors import fail


@jax.tree_util.register_pytree_with_keys_class
class Table(Reads, Writes, DerivedHandles, Whole, Moves):
    """A table of rows under 64-bit keys: an immutable value that names the live table in the process.

    `kvjax.get_table` makes tables. A `Table` is a pytree with one leaf, its version. Reads keep the version, every
    write returns the next handle, and a handle that is not the latest is refused. So a table can be part of ``params``
    and pass through ``jit``, ``scan`` and donation, and an outdated copy is recognised.

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

    __slots__ = ()


def is_table(x: Any) -> bool:
    return isinstance(x, Table)


def check_table(x: Any, op: str) -> None:
    """Whether a function that takes a table has got one; `op` is for the error."""
    if not is_table(x):
        raise TypeError(
            f"kvjax: {op}: want a kvjax.Table, got {type(x).__name__}; give what kvjax.get_table returns, or the leaf "
            "of the parameters that holds it, params[...]['table']"
        )


class Replaced(RuntimeError):
    """Another thread has dropped the table meanwhile, or put another in its place."""


def live(spec: TableSpec) -> Table:
    """The live handle of the table that `spec` names.

    Raises:
      Replaced: it is not that table any more, and the version may be another's.
    """
    version = None
    with contextlib.suppress(KeyError):
        version = live_version(spec)
    if version is None or PROCESS.spec_of(spec.name) != spec:
        got = "one that another thread has dropped or replaced meanwhile"
        raise Replaced(str(fail(RuntimeError, spec.name, "get_table", "a table that stays", got, "ask again")))
    return Table(version, spec)
