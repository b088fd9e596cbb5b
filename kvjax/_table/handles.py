"""Other handles of the same table, as methods of `kvjax.Table`: later ones, the live one, and one that follows it."""

from __future__ import annotations

from typing import Self

import jax
import numpy as np
from jax.core import Tracer

from kvjax._ops import order
from kvjax._sharded import following
from kvjax._sharded.mesh import elements
from kvjax._table import at_exit
from kvjax._table.behind import warn_if_behind
from kvjax._table.handle import (
    Handle,
    check_on_host,
    check_one_version,
    check_outside_a_loss,
    check_spec,
    check_without_a_view,
    live_version,
    version_to_read,
)
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail


class Handles(Handle):
    """The calls of `kvjax.Table` that give another handle and leave the rows alone."""

    __slots__ = ()

    def after(self, x: PyTree) -> Self:
        """The same handle, usable only once `x` exists: orders a later write behind a read.

        Args:
          x: pytree of arrays that earlier reads gave.
        """
        check_one_version(self, "after")
        leaves = [leaf for leaf in jax.tree.leaves(x) if hasattr(leaf, "dtype")]
        version = order.after(self.spec, version_to_read(self, "after"), elements(self.spec, leaves))
        return type(self)(version, self.spec, self.tape, self.view)

    def refresh(self) -> Self:
        """The live handle of this table, for instance after a failed step. Not inside ``jit``.

        It waits for the programs that this thread has started. One that another thread has started, or that an
        interrupt has cut off as it was started, may write after it: then the next call says that the handle is stale.

        Raises:
          TypeError: it is inside of ``jit``.
          RuntimeError: this handle comes from another process, for instance from a checkpoint that was saved without
            `kvjax.orbax.split`. The table of this process does not have its rows. Or a step over a mesh was done
            on some of its devices alone, as one of them had failed: restore the last checkpoint.
        """
        check_outside_a_loss(self, "refresh")
        check_without_a_view(self, "refresh")
        check_spec(self, "refresh")
        if isinstance(self.given, Tracer):
            raise fail(
                TypeError, self.name, "refresh", "a call outside of jit", "one inside, where it would be done once, as "
                "the function is traced", "give the function the live handle; table.live() reads the newest rows in it",
            )  # fmt: skip
        at_exit.acknowledge()
        live = self.at(live_version(self.spec))
        check_spec(self, "refresh")  # another may have taken its name meanwhile
        if self.follows:
            return live
        try:
            version = int(version_to_read(self, "refresh"))
        except (TypeError, ValueError, RuntimeError):  # of a failed write, donated, or no version at all
            return live
        if 0 < (version - int(live.version)) % 2**32 < 2**31:
            self.spec.host.size(self.name, 0, version)  # raises what every call through this handle would
        return live

    def live(self) -> Self:
        """A following handle, for evaluation and serving beside training: each read sees the newest finished version.

        It is never stale, so it may be kept, and given to any thread and to compiled functions, while another thread
        trains. A read waits for a write that is under way and sees all of it, or nothing; of one that JAX has not begun
        to run it knows nothing, and ``jax.block_until_ready(table)`` waits for that. Two reads may see different
        versions, and so may the tables of one model. Rows are all that it reads: whatever writes, orders or copies
        the table takes a handle of one version, and is an error. Dense parameters that go with it must be the reader's
        own: those that a training step donates are gone.

        A table over a mesh is read shard by shard, so that no read waits for the devices of another: rows of two shards
        may be a step apart. In a program over several devices each of them reads the keys that it is given. Where the
        shards are in the memory of several GPUs, such a read is one outside of ``jit``: look rows up, and give the
        compiled function those.

        Where a function makes the initial rows, each read makes those of all its keys. Not inside ``jit``: give the
        compiled function what this returns.

        Returns:
          The following handle, of the table of this name, whichever that is. A lookup through it has no gradient.

        Raises:
          ValueError: the table is over a mesh of several processes; from a compiled read, over several GPUs.
          RuntimeError: the handle is of another table; from a read, the table was resharded since.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_live", dim=1)
          >>> live = table.live()
          >>> table = table.upsert(7, [1.0]).upsert(7, [2.0])
          >>> live.lookup(7).tolist(), live
          ([2.0], Table('doc_live', dim=1, dtype=float32, rows=1, live))
          >>> kvjax.drop_table("doc_live")
        """
        check_on_host(self, "live")
        check_without_a_view(self, "live")
        check_spec(self, "live")
        warn_if_behind(self, "live")
        if self.spec.placement is not None and None in following.devices(self.spec.placement):
            raise fail(
                ValueError, self.name, "live", "a table whose shards are all in this process",
                f"one over the mesh {dict(self.spec.placement.mesh.shape)} of several", "each process would have to "
                "read when the others do: read it between two steps, by the handle that is trained",
            )  # fmt: skip
        return self.at(np.zeros(0, np.uint32))
