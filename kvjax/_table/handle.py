"""The immutable handle of a table, and the versions that it names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn, Self, TypeVar

import jax
from jax.core import Tracer

from kvjax._keys.opaque import are_words, is_array, is_fresh, is_opaque, opaque, uncast, words_in
from kvjax._ops.notices import if_unused
from kvjax._process import check_process
from kvjax._spec.spec import TableSpec
from kvjax._spmd.replicated import clashes, on_mesh_around
from kvjax._table import at_exit
from kvjax._table.refused import warn_of_refused
from kvjax._table.table_update import TableUpdate
from kvjax._table.view import View
from kvjax._values.errors import fail

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

    def __init__(
        self, version: Any = None, spec: TableSpec | None = None, tape: Any = None, view: View | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        if spec is None or options:
            got = " and ".join([repr(version), *(f"{name}=" for name in options)])
            mend = "kvjax.get_table(name, dim=) makes tables"
            raise fail(TypeError, None, "Table", "the version and the spec of a table", got, mend)
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
            made = self._keep(self._opaque(made)) if kept is None else kept
        return uncast(made) if is_opaque(made) else made

    def _opaque(self, words: Any) -> jax.Array:
        check_process(self.name, "flatten")
        return opaque(words)

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
        """The name of the table, unique in the process."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """The width of a row: how many elements it has."""
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


def wait(table: Handle) -> None:
    """Waits for the writes that lead to a handle; one that has failed says so where its result is used."""
    with contextlib.suppress(ValueError, RuntimeError):  # also of a handle that was donated
        jax.block_until_ready(table.version)
