"""Checks of handles, which every call through one makes first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from kvjax import ffi
from kvjax._keys.keys import Keys
from kvjax._keys.table_keys import keys_of
from kvjax._process import PROCESS, check_process
from kvjax._spmd.varying import manual_axes
from kvjax._table import at_exit
from kvjax._table.handle import Handle
from kvjax._values.errors import fail
from kvjax._values.tracing import is_traced


def keys_for(table: Handle, keys: Any, op: str) -> Keys:
    """The keys of a call."""
    check_process(table.name, op)
    keys = keys_of(keys, table.spec.name, table.spec.key_dtype, op)
    # A program takes words of the host as they are; JAX's conversion compiles a program for each shape.
    as_they_are = table.spec.placement is None or isinstance(keys.words, jax.Array)
    return keys if as_they_are else keys.with_words(jnp.asarray(keys.words))


def version_to_read(table: Handle, op: str) -> jax.Array:
    """The version operand of a read, if it still looks like one."""
    check_process(table.name, op)
    if table.donated:
        raise fail(
            RuntimeError, table.name, op, "a handle that is still there", "one that was donated",
            "use what the call that took it returned, or table.refresh()",
        )  # fmt: skip
    version: Any = table.version
    if getattr(version, "dtype", None) != jnp.uint32 or getattr(version, "shape", None) not in ((), (0,)):
        got = f"{getattr(version, 'shape', '')} {getattr(version, 'dtype', type(version).__name__)}"
        raise fail(
            TypeError, table.name, op, "a handle whose version is () uint32", got,
            "a callback of JAX's has taken it apart, or something did arithmetic on the tree that holds it; "
            "table.refresh() gives the live handle",
        )  # fmt: skip
    _check_rows(table, op)
    return version


def check_own(table: Handle, op: str) -> None:
    """Whether a handle is of no loss, has a version, and reads what is stored.

    Raises:
      TypeError, ValueError: it does not.
    """
    check_outside_a_loss(table, op)
    check_one_version(table, op)
    check_without_a_view(table, op)


def version_to_write(table: Handle, op: str) -> jax.Array:
    """The version operand of a write."""
    check_own(table, op)
    axes = manual_axes() if table.spec.placement is None else {}
    if any(size > 1 for size in axes.values()):
        raise fail(
            ValueError, table.name, op, "a table that is made for several devices", f"one in one place, inside a "
            f"shard_map or pmap over {axes}", "get_table(..., mesh=mesh), or replicated=True beside it for a copy "
            "on each device",
        )  # fmt: skip
    return version_to_read(table, op)


def version_on_host(table: Handle, op: str) -> int:
    """The handle's version for a call on the whole table, once the writes that lead to it are done."""
    check_on_host(table, op)
    version: Any = version_to_write(table, op)  # NumPy's have the type and shape too
    try:
        with PROCESS.blaming():
            number = int(jax.block_until_ready(version))  # on all shards: int() waits for one of the copies alone
    except jax.errors.JaxRuntimeError as error:
        at_exit.met(error)
        raise
    for _, refused, _ in ffi.left_failures(table.name):
        raise fail(
            RuntimeError, table.name, op, "no refused step that kvjax.commit has not raised", f"one ({refused})",
            "kvjax.commit(state) raises it, and then gives the state from before it; kvjax.commit() does "
            "where that state is lost",
        )  # fmt: skip
    return number


def check_on_host(table: Handle, op: str, *others: Any) -> None:
    """Whether a call on the whole table, with `others` as its arguments, stands where it can: outside ``jit``, and
    outside a loss."""
    check_outside_a_loss(table, op)
    if any(isinstance(x, Tracer) for x in (table.version, *others)):
        raise fail(
            TypeError, table.name, op, "a call outside jit and outside a loss", "one inside",
            "whole tables and their numbers are of the host: take them between steps",
        )  # fmt: skip


def check_spec(table: Handle, op: str) -> None:
    """Whether the table of this name is still the one that the handle was made for."""
    now = PROCESS.spec_of(table.name)
    if now is None:
        raise fail(
            KeyError, table.name, op, "a table of this name", "one that has been dropped",
            "make it with kvjax.get_table(name, dim=...)",
        )  # fmt: skip
    if now != table.spec:
        got, mend = now.instead_of(table.spec)
        raise fail(RuntimeError, table.name, op, "the table that the handle was made for", got, mend)


def _check_rows(table: Handle, op: str) -> None:
    """Whether the rows of the table are still of the type that the handle was made for, and those that JAX makes for
    keys without one still the same: of a following one no version says so, and of others it would be the shapes."""
    now, spec = PROCESS.specs.get(table.name) or table.spec, table.spec
    made = (spec.generated or now.generated) and (now.initializer, now.seed) != (spec.initializer, spec.seed)
    others = table.follows and (now.placement != spec.placement or made)
    if (now.dim, now.dtype) == (spec.dim, spec.dtype) and not others:
        return
    if table.follows or not is_traced():  # a module's init may be traced, and never run
        check_spec(table, op)


def check_one_version(table: Handle, op: str) -> None:
    """Whether a call that needs to know which version it is about has a handle that says so."""
    if table.follows:
        raise fail(
            ValueError, table.name, op, "a handle of one version",
            "one through which rows are only read, of table.live() or of a function that kvjax.export traces",
            "between two writes table.refresh() gives one; what is exported only reads",
        )  # fmt: skip


def check_without_a_view(table: Handle, op: str, instead: str = "") -> None:
    """Whether a call that writes, or reads what is stored, has a handle of that; `instead` may say what else to do."""
    if table.view is not None:
        made_by = table.view.made_by
        instead = f"; {instead}" if instead else ""
        if made_by == "caught_up":
            instead += "; where rows must be those of now, kvjax.optax.sweep writes them"
        raise fail(
            ValueError, table.name, op, "the handle itself", f"what kvjax.optax.{made_by} gives, which only reads",
            f"give the parameters from before {made_by}{instead}",
        )  # fmt: skip


def check_outside_a_loss(table: Handle, op: str) -> None:
    """Whether a call that is no read stands outside of what `kvjax.value_and_grad` differentiates."""
    if table.tape is not None:
        raise fail(
            ValueError, table.name, op, "a loss that only reads its tables", f"{op} inside it",
            "its rows would have no gradient: do it before kvjax.value_and_grad, or after",
        )  # fmt: skip
