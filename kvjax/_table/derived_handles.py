"""Derived handles of the same table, as methods of `kvjax.Table`: later ones, the live one, and a following one."""

from __future__ import annotations

from typing import Self

import jax
import numpy as np
from jax.core import Tracer

from kvjax._ops import order
from kvjax._process import PROCESS
from kvjax._sharded import following
from kvjax._sharded.mesh import elements
from kvjax._table import at_exit
from kvjax._table.behind import warn_if_behind
from kvjax._table.checks import (
    check_on_host,
    check_one_version,
    check_outside_a_loss,
    check_spec,
    check_without_a_view,
    version_to_read,
)
from kvjax._table.handle import Handle
from kvjax._table.live import live_version
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail


class DerivedHandles(Handle):
    """The calls of `kvjax.Table` that give another handle and leave the rows alone."""

    __slots__ = ()

    def after(self, x: PyTree) -> Self:
        """The same handle, usable only after `x` has been computed. It orders a later write after a read.

        Args:
          x: pytree of arrays that earlier reads returned.

        Returns:
          A handle of the same version.

        Raises:
          ValueError: the handle is a following one (`live`).
          RuntimeError: the handle was donated.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_after", dim=1).upsert([7], [[1.0]])
          >>> row = table.lookup(7)
          >>> table = table.after(row).upsert([7], [[2.0]])  # the write waits for the read
          >>> row.tolist(), table.lookup(7).tolist()
          ([1.0], [2.0])
          >>> kvjax.drop_table("doc_after")
        """
        check_one_version(self, "after")
        leaves = [leaf for leaf in jax.tree.leaves(x) if hasattr(leaf, "dtype")]
        version = order.after(self.spec, version_to_read(self, "after"), elements(self.spec, leaves))
        return type(self)(version, self.spec, self.tape, self.view)

    def refresh(self) -> Self:
        """The live handle of this table, for instance after a failed step. Not inside ``jit``.

        After `reshard` or `to`, it is the handle of the table in its new place.

        It waits for the programs that this thread has started. A program that another thread has started, or whose
        start was interrupted, may still write afterwards: then the next call reports a stale handle.

        Returns:
          The handle of the newest version.

        Raises:
          TypeError: it is called inside ``jit``.
          KeyError: the table has been dropped.
          ValueError: the call is inside a loss.
          RuntimeError: this handle comes from another process, for instance from a checkpoint that was saved without
            `kvjax.orbax.split`; the table of this process does not have its rows. Or a step over a mesh was done on
            only some of its devices, because one of them failed: restore the last checkpoint.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_refresh", dim=1)
          >>> _ = table.upsert([7], [[1.0]])  # now `table` is stale
          >>> table = table.refresh()
          >>> table.lookup(7).tolist()
          [1.0]
          >>> kvjax.drop_table("doc_refresh")
        """
        check_outside_a_loss(self, "refresh")
        check_without_a_view(self, "refresh")
        here = self._where_it_is()
        check_spec(here, "refresh")
        if isinstance(self.given, Tracer):
            raise fail(
                TypeError, self.name, "refresh", "a call outside of jit", "one inside, where it would be done once, as "
                "the function is traced", "give the function the live handle; table.live() reads the newest rows in it",
            )  # fmt: skip
        at_exit.acknowledge()
        live = here.at(live_version(here.spec))
        check_spec(live, "refresh")  # another may have taken its name meanwhile
        if self.follows:
            return live
        try:
            version = int(version_to_read(self, "refresh"))
        except (TypeError, ValueError, RuntimeError):  # of a failed write, donated, or no version at all
            return live
        if 0 < (version - int(live.version)) % 2**32 < 2**31:
            here.spec.host.size(self.name, 0, version, "refresh")  # raises what every call through this handle would
        return live

    def _where_it_is(self) -> Self:
        """This handle, of the table in the place to which `reshard` or `to` has moved it since."""
        now = PROCESS.spec_of(self.name)
        if now is None or not now.moved_from(self.spec):
            return self
        return type(self)(self.given, now)

    def live(self) -> Self:
        """A following handle, for evaluation and serving beside training: each read sees the newest finished version.

        It is never stale, so you may keep it and give it to any thread and to compiled functions while another thread
        trains. A read waits for a write that is under way, and sees all of that write or nothing. It does not wait for
        writes that JAX has not begun to run; ``jax.block_until_ready(table)`` does. Two reads may see different
        versions, and so may the tables of one model. Such a handle only reads: methods that write or order need a
        handle with a version, so they are errors. A copy of the table (`export`, a save without a cursor, a release) is
        of its newest finished version. Each table of a model is copied separately: to save what belongs to one step,
        use the handles of that step. The dense parameters used with it must be your own copies, because a training step
        may donate its parameters.

        A table over a mesh is read shard by shard, so that no read waits for other devices: rows of two shards may be a
        step apart. In a program over several devices, each device reads the keys that it is given. If the shards are in
        the memory of several GPUs, read outside ``jit``: look the rows up, and give them to the compiled function.

        If a function makes the initial rows, each read computes them for all its keys. Do not call this inside ``jit``:
        give the compiled function the handle that this returns.

        Returns:
          The following handle. It reads whichever table has this name. A lookup through it has no gradient.

        Raises:
          TypeError: the call is inside ``jit``.
          KeyError: the table has been dropped.
          ValueError: the table is over a mesh of several processes, or the call is inside a loss. From a
            compiled read: it is over several GPUs.
          RuntimeError: the handle belongs to another table. From a read: the table has been resharded since, or dropped
            and made with another function for initial rows, or another seed for it (a compiled read does not notice).

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
