"""The immutable handle of a table: its version, and the checks that every call through it makes."""

from __future__ import annotations

import contextlib
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import _live, _ops
from kvjax._keys import Keys, as_keys
from kvjax._spec import TableSpec, fail
from kvjax._varying import manual_axes


class Handle:
    """What all methods of `kvjax.Table` stand on; its subclasses read, write and look at whole tables."""

    __slots__ = ("spec", "tape", "version")

    def __init__(self, version: Any, spec: TableSpec, tape: Any = None):
        self.version = version
        self.spec = spec
        self.tape = tape  # kvjax.value_and_grad's record of the lookups, None everywhere else

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("version"), self.version)], (self.spec, self.tape)

    @classmethod
    def tree_unflatten(cls, aux, children) -> Self:
        return cls(children[0], *aux)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dim(self) -> int:
        return self.spec.dim

    def _next(self, version: jax.Array) -> Self:
        return type(self)(version, self.spec)

    def after(self, x: Any) -> Self:
        """The same handle, usable only once `x` exists: orders a later write behind a read.

        Args:
          x: pytree of arrays that earlier reads gave.
        """
        leaves = [leaf for leaf in jax.tree.leaves(x) if hasattr(leaf, "dtype")]
        return type(self)(_ops.after(self.spec, self._read("after"), leaves), self.spec, self.tape)

    def refresh(self) -> Self:
        """The live handle of this table, for instance after a failed step. Not inside ``jit``.

        Raises:
          RuntimeError: this handle comes from another process, for instance from a checkpoint that was saved without
            `kvjax.orbax.split`. The table of this process does not have its rows.
        """
        self._outside_a_loss("refresh")
        self._check_spec("refresh")
        live = type(self)(live_version(self.spec), self.spec)
        try:
            version = int(self._read("refresh"))
        except (TypeError, ValueError, RuntimeError):  # of a failed write, donated, or no version at all
            return live
        if 0 < (version - int(live.version)) % 2**32 < 2**31:
            self.spec.host.size(self.name, 0, version)  # raises what every call through this handle would
        return live

    # ---- checks --------------------------------------------------------------------------------------------

    def _keys(self, keys: Any, op: str) -> Keys:
        return as_keys(keys, f"table {self.name!r}, {op}")

    def _check_spec(self, op: str) -> None:
        """Whether the table of this name is still the one that the handle was made for."""
        now = _live.spec_of(self.name) or self.spec  # C++ says so if there is none
        if now != self.spec:
            raise fail(
                RuntimeError, self.name, op, "the table that the handle was made for",
                f"another of its name, with {now.differences(self.spec)}", "get its handle by kvjax.get_table(name)",
            )  # fmt: skip

    def _wait(self) -> None:
        """Waits for the writes that lead to this handle; one that has failed says so where its result is used."""
        with contextlib.suppress(ValueError, RuntimeError):  # also of a handle that was donated
            jax.block_until_ready(self.version)

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
        axes = manual_axes() if self.spec.placement is None else {}
        if any(size > 1 for size in axes.values()):
            raise fail(
                ValueError, self.name, op, "a table that is made for several devices", f"one in one place, inside a "
                f"shard_map or pmap over {axes}", "get_table(..., mesh=mesh), or replicated=True beside it for a copy "
                "on each device",
            )  # fmt: skip
        return self._read(op)

    def _outside_a_loss(self, op: str) -> None:
        if self.tape is not None:
            raise fail(
                ValueError, self.name, op, "a loss that only reads its tables", f"a {op} inside it",
                "its rows would have no gradient: do it before kvjax.value_and_grad, or after",
            )  # fmt: skip


def live_version(spec: TableSpec) -> jax.Array:
    """The live version of the table that `spec` names, once the writes that have been started are done.

    Raises:
      RuntimeError: the shards of this process have different ones: a write has stopped half-way.
    """
    # A write that failed says so where its result is used; here it is only waited for.
    with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    versions = {spec.host.version(spec.name, shard) for shard in spec.shards}
    if len(versions) > 1:
        raise fail(
            RuntimeError, spec.name, "refresh", "shards of one version", f"versions {sorted(versions)}",
            "a write has stopped half-way: kvjax.drop_table(name) and restore the last checkpoint",
        )  # fmt: skip
    return handle_version(spec, versions.pop())


def handle_version(spec: TableSpec, version: int) -> jax.Array:
    """The version as the leaf of a handle: on all devices of the table."""
    if spec.placement is None or jax.process_count() == 1:
        return jnp.uint32(version)
    sharding = spec.placement.everywhere
    return jax.make_array_from_callback((), sharding, lambda _: np.uint32(version))
