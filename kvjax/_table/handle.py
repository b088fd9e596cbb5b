"""The immutable handle of a table, and the checks that every call through it makes at the door."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax import ffi
from kvjax._keys.key_width import keys_of
from kvjax._keys.keys import Keys
from kvjax._keys.opaque import are_words, is_array, is_fresh, is_opaque, opaque, uncast, words_in
from kvjax._ops.notices import if_unused
from kvjax._process import PROCESS
from kvjax._spec.spec import TableSpec
from kvjax._spmd.replicated import clashes, on_mesh_around
from kvjax._spmd.varying import manual_axes
from kvjax._table import at_exit
from kvjax._table.refused import warn_of_refused
from kvjax._table.table_update import TableUpdate
from kvjax._table.view import View
from kvjax._values.errors import fail
from kvjax._values.tracing import is_traced

H = TypeVar("H", bound="Handle")
_NO_ROWS = (
    "rows are not part of a handle: save them with kvjax.orbax.split and TableSave, or take them out with "
    "table.export()"
)


@dataclasses.dataclass(frozen=True)
class VersionKey:
    """The entry of a tree's path that leads to the version of a handle.

    It is a type of its own, and not JAX's ``GetAttrKey``, so that Orbax's stock handlers stop at it: they would save
    the version for the table, and the rows would be gone.

    Attributes:
      table: name of the table.
    """

    table: str

    @property
    def name(self) -> str:
        return "version"

    def __str__(self) -> str:
        return ".version"

    def __format__(self, spec: str) -> str:  # which is what Orbax shows, and chex, which would compare versions
        return (
            str(fail(TypeError, self.table, "save or compare", "its rows", "a handle", _NO_ROWS))
            if spec == ""
            else str(self)
        )


class Handle:
    """What all methods of `kvjax.Table` stand on: a version of a table that a spec names."""

    __slots__ = ("given", "kept", "spec", "tape", "view")

    given: Any  # the version, its leaf, or what stands in its place in a tree of something else
    kept: Any  # the other of version and leaf, once somebody has asked for it
    spec: TableSpec
    tape: Any
    view: View | None

    def __init__(self, version: Any, spec: TableSpec, tape: Any = None, view: View | None = None) -> None:
        put = functools.partial(object.__setattr__, self)
        put("given", version)
        put("kept", None)
        put("spec", spec)
        put("tape", tape)  # kvjax.value_and_grad's record of the lookups, None everywhere else
        put("view", view)  # of kvjax.optax.caught_up and averaged, None everywhere else

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        got, mend = f"{name} to be set", "each write returns the next handle, and kvjax.get_table makes another table"
        raise fail(AttributeError, self.name, "setattr", "a handle that stays as it is", got, mend)

    def tree_flatten(self) -> tuple[tuple[Any, ...], TableSpec]:
        warn_of_refused()
        return (self.leaf, self.tape, self.view), self.spec

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], TableSpec]:
        children, spec = self.tree_flatten()
        paths = VersionKey(spec.name), jax.tree_util.GetAttrKey("tape"), jax.tree_util.GetAttrKey("view")
        return list(zip(paths, children, strict=True)), spec

    @classmethod
    def tree_unflatten(cls, spec: TableSpec, children: Sequence[Any]) -> Self:
        word = children[0].raised if isinstance(children[0], TableUpdate) else children[0]
        if is_fresh(word):
            at_exit.started(spec.name, uncast(word))
        return cls(children[0], spec, *children[1:])

    # Copies of an immutable value are itself. Pickled, or as an array, it would be what `_NO_ROWS` says.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise fail(TypeError, self.name, "pickle", "its rows", "a handle", _NO_ROWS)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise fail(TypeError, self.name, "as an array", "its rows", "a handle", _NO_ROWS)

    @property
    def version(self) -> jax.Array:
        """``()`` uint32, the version of the table that this handle names; ``(0,)`` for a following handle."""
        given, kept = self._forms()
        if not is_opaque(given) or self.donated:
            return given
        return self._keep(words_in(given)) if kept is None else kept

    @property
    def donated(self) -> bool:
        """Whether a program has taken the buffer of this handle for its results."""
        forms = [x for x in (self.given, self.kept) if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
        return any(x.is_deleted() for x in forms)

    @property
    def leaf(self) -> jax.Array:
        """The version as it stands in trees, where no arithmetic takes it for a parameter: an opaque word."""
        made, kept = self._forms()
        if are_words(made):
            made = self._keep(opaque(made)) if kept is None else kept
        return uncast(made) if is_opaque(made) else made

    def _forms(self) -> tuple[Any, Any]:
        """What is given and kept, as the program around takes them: they may be of one on another mesh."""
        placement = self.spec.placement
        if jax.sharding.get_abstract_mesh().empty and (placement is None or placement.num_processes == 1):
            return self.given, self.kept  # as nearly every call finds
        given = on_mesh_around(self.given, None if placement is None else placement.mesh)
        if given is not self.given:
            object.__setattr__(self, "given", given)
        return given, None if clashes(self.kept) else self.kept

    def _keep(self, made: Any) -> Any:
        if not isinstance(made, Tracer):  # which may be of a trace within that of the handle
            object.__setattr__(self, "kept", made)
        return made

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def dim(self) -> int:
        return self.spec.dim

    @property
    def follows(self) -> bool:
        """Whether this is a following handle, see `Table.live`: its leaf is empty, ``(0,)``."""
        return getattr(self.given, "shape", None) == (0,)

    @property
    def stored(self) -> Self:
        """The same handle without a view."""
        return type(self)(self.given, self.spec, self.tape)

    def at(self, version: Any) -> Self:
        """The handle of another version of the same table.

        Args:
          version: ``()`` uint32.
        """
        if is_array(version):
            at_exit.started(self.name, version)
        return type(self)(version, self.spec)


def after_write(table: H, op: str, version: Any) -> H:
    """The handle that a write gives, with the version that it has made."""
    return table.at(
        if_unused(
            version,
            f"kvjax: table {table.name!r}, {op}: want a compiled function that returns what this write gives, the "
            "table or the parameters that hold it, got one that does not use it; so the write is not done",
        )
    )


def with_tape(table: H, tape: Any) -> H:
    """The same handle with another tape."""
    return type(table)(table.given, table.spec, tape, table.view)


# ---- checks ----------------------------------------------------------------------------------------------------


def keys_for(table: Handle, keys: Any, op: str) -> Keys:
    """The keys of a call."""
    check_process(table.name, op)
    keys = keys_of(keys, table.spec.name, table.spec.key_dtype, op)
    # A program takes words of the host as they are; JAX's conversion compiles a program for each shape.
    as_they_are = table.spec.placement is None or isinstance(keys.words, jax.Array)
    return keys if as_they_are else keys.with_words(jnp.asarray(keys.words))


def check_process(name: str, op: str) -> None:
    """Whether this is the process of the tables. Asked before JAX is, which would wait for ever in a forked one."""
    if PROCESS.forked:
        raise fail(
            RuntimeError, name, op, "the process that made it", "a forked one",
            "tables and JAX stay behind in the parent: make kvjax.keys in the workers of a loader and look them up "
            "outside, or start workers by multiprocessing's 'spawn'",
        )  # fmt: skip


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
            "something did arithmetic on the tree that holds it; table.refresh() gives the live handle",
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


def check_on_host(table: Handle, op: str) -> None:
    """Whether a call on the whole table stands where it can: outside ``jit``, and outside a loss."""
    check_outside_a_loss(table, op)
    if isinstance(table.version, Tracer):
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


def check_without_a_view(table: Handle, op: str) -> None:
    """Whether a call that writes has a handle of what is stored."""
    if table.view is not None:
        made_by = table.view.made_by
        sweep = "; where rows must be those of now, kvjax.optax.sweep writes them" if made_by == "caught_up" else ""
        raise fail(
            ValueError, table.name, op, "the handle itself", f"what kvjax.optax.{made_by} gives, which only reads",
            f"give the parameters from before {made_by}{sweep}",
        )  # fmt: skip


def check_outside_a_loss(table: Handle, op: str) -> None:
    """Whether a call that is no read stands outside of what `kvjax.value_and_grad` differentiates."""
    if table.tape is not None:
        raise fail(
            ValueError, table.name, op, "a loss that only reads its tables", f"{op} inside it",
            "its rows would have no gradient: do it before kvjax.value_and_grad, or after",
        )  # fmt: skip


# ---- versions on the host --------------------------------------------------------------------------------------


def wait(table: Handle) -> None:
    """Waits for the writes that lead to a handle; one that has failed says so where its result is used."""
    with contextlib.suppress(ValueError, RuntimeError):  # also of a handle that was donated
        jax.block_until_ready(table.version)


def live_version(spec: TableSpec) -> jax.Array:
    """The live version of the table that `spec` names, once the writes that have been started are done.

    Raises:
      RuntimeError: a write has stopped half-way, so that the table is at no version.
    """
    check_process(spec.name, "get_table")
    at_exit.wait_for_programs()
    versions, since = _versions(spec), time.monotonic()
    while len(set(versions)) > 1:  # of a write that another thread has started, they move on
        before, versions = versions, _versions(spec)
        if versions != before:
            since = time.monotonic()
        elif time.monotonic() - since > _PATIENCE:
            raise fail(
                RuntimeError, spec.name, "refresh", "shards of one version", f"versions {sorted(set(versions))}",
                "a write has stopped half-way: kvjax.drop_table(name) and restore the last checkpoint",
            )  # fmt: skip
        time.sleep(1e-4)
    return version_leaf(spec, versions[0])


_PATIENCE = 10.0
"""Seconds for which shards have to stay at different versions, before a write has stopped half-way."""


def _versions(spec: TableSpec) -> list[int]:
    return [spec.host.version(spec.name, shard) for shard in spec.shards]


def version_leaf(spec: TableSpec, version: int) -> jax.Array:
    """A version as the leaf of a handle: on all devices of the table.

    NumPy's where that will do: it starts no backend, so tables may be made before ``jax.distributed.initialize``.
    """
    if spec.placement is None or jax.process_count() == 1:
        leaf: Any = np.asarray(version, np.uint32)
        return leaf
    return jax.make_array_from_callback((), spec.placement.everywhere, lambda _: np.uint32(version))
