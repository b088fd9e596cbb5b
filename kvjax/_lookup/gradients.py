"""Gradients: ``jax.value_and_grad`` for trees that hold tables.

The loss is traced for its shapes first, to learn its lookups. Then it is differentiated with respect to a "tap" at each
of them (`kvjax._lookup.taps`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._keys.keys import Keys
from kvjax._keys.opaque import opaque_canary
from kvjax._keys.sparse_rows import SparseRows
from kvjax._lookup.readable import FrozenReadable, Readable
from kvjax._lookup.runs import Run, check_derivatives, in_need, repeated, with_taps
from kvjax._lookup.taps import Site, Tape, uses_of, words_of
from kvjax._ops import order
from kvjax._sharded.mesh import elements
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._table.checks import check_one_version, check_without_a_view
from kvjax._table.handle import with_tape
from kvjax._table.table import Table, is_table
from kvjax._table.untaped import untaped
from kvjax._values.arrays import PyTree, one_program
from kvjax._values.errors import fail, warn
from kvjax._values.tracing import in_a_trace
from kvjax.ffi import host

P = ParamSpec("P")
R = TypeVar("R")

_WANTS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""What a loss with an ``if`` of values fails with where there are shapes alone."""


def value_and_grad(
    fun: Callable[P, R], argnums: int | Sequence[int] = 0, has_aux: bool = False, *, allow_int: bool = False
) -> Callable[P, tuple[R, PyTree]]:
    """Like ``jax.value_and_grad``, for arguments whose trees hold tables.

    In the place of each `Table`, the gradient has a `SparseRows` with one row per key that the loss looked up. If a
    table is in several places, the first place has the gradient of all its lookups. Lookups in a tree that went through
    ``jax.lax.stop_gradient`` have no gradient, as with dense parameters. A trainable table that the loss closes over
    has none either, and a warning names it.

    Lookups may be under ``vmap``, in a ``scan``, whose turns are the leading axes of their gradient, and in a jitted
    function that is called several times. A lookup that runs several times in any other way, for instance in a ``scan``
    inside of a ``shard_map`` of the loss, is an error when the gradient is computed, and so is one in a function with a
    derivative of its own (``custom_vjp``): do the lookup first, and pass the rows in.

    The function is traced twice, even outside ``jit``. There, it may go by values, as under ``jax.grad``, and is run
    twice more then. A jitted function, a ``scan``, a ``cond`` or a ``checkpoint`` to which the loss passes a table is
    compiled again in each call outside ``jit``, and a warning says so: put the whole step under ``jit``.

    Args:
      fun: returns a ``()`` float, or with has_aux a pair (float, any pytree, also of leaves that are not arrays).
      argnums: which positional arguments to differentiate: an integer, or a sequence of different integers.
      has_aux: see `fun`.
      allow_int: whether dense leaves may be integers; their gradients have the dtype ``jax.dtypes.float0``, as in JAX.

    Returns:
      A function with the arguments of `fun` that returns ``(value, gradients)``, as ``jax.value_and_grad``'s does.

    Raises:
      ValueError: the calls are nested, or `argnums` names an argument twice or none at all; or a table in the
        arguments is a following handle (`Table.live`).
      TypeError: `argnums` has something other than integers, or positions at which the call has no argument; or a
        frozen table is to be differentiated, or an integer without `allow_int`.
      RuntimeError: a lookup runs several times in another way than those above (in a compiled function it may be a
        ValueError, see docs/troubleshooting.md).

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np
      >>> table = kvjax.get_table("doc_grad", dim=2, initializer=1.0)
      >>> def loss(params):
      ...     return jnp.sum(params["w"] * params["table"].lookup(np.array([3, 5])))
      >>> value, grads = kvjax.value_and_grad(loss)({"w": jnp.float32(2.0), "table": table})
      >>> float(value), float(grads["w"]), grads["table"]
      (8.0, 4.0, SparseRows(keys=(2,), rows=(2, 2), merged=False))
      >>> kvjax.drop_table("doc_grad")
    """
    numbers, single = _numbers(argnums)
    run: Callable[..., Any] = fun

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        check_positions(numbers, args, "value_and_grad")
        if len({i % len(args) for i in numbers}) < len(numbers):
            want, mend = "argnums that name each argument once", "leave out the second"
            raise fail(ValueError, None, "value_and_grad", want, f"{numbers}", mend)
        given = _Given(tuple(args[i] for i in numbers))
        # A table may have several handles, of which this is the first.
        tables = list({handle.name: handle for handle in reversed(given.handles)}.values())
        specs = [table.spec for table in tables]

        def call(dense: Any, tapes: Sequence[Tape]) -> Any:
            full = list(args)
            for i, tree in zip(numbers, given.with_leaves(dense, _record(given.handles, tapes)), strict=True):
                full[i] = tree
            return run(*full, **kwargs)

        with _mesh_of((args, kwargs)):
            gates = [np.zeros((), np.float32) for _ in tables]
            with untaped() as closed_over:
                probes, runs = _probe(call, given.dense, lambda: [Tape(*x) for x in zip(specs, gates, strict=True)])
            others = [arg for i, arg in enumerate(args) if i not in numbers and i - len(args) not in numbers]
            _warn_of_untrained(closed_over, (others, kwargs))
            compiled: list[str] = []

            def tapped(dense: Any, taps: Any, gates: Any) -> tuple[Any, Any]:
                tapes = [Tape(*x) for x in zip(specs, gates, probes, taps, strict=True)]
                out = _taped(call, dense, tapes)
                compiled.extend(tape.spec.name for tape in tapes if tape.compiled)
                value, aux = out if has_aux else (out, None)
                # A table that the loss hands out is a handle like any other.
                plain = jax.tree.map(lambda x: with_tape(x, None) if is_table(x) else x, aux, is_leaf=is_table)
                return value, plain

            def whole(dense: Any, taps: Any, gates: Any, of_runs: Any) -> tuple[Any, Any]:
                return with_taps(tapped, runs, of_runs, dense, taps, gates) if runs else tapped(dense, taps, gates)

            (value, aux), (dense_grads, taps, _, of_runs) = jax.value_and_grad(
                whole, argnums=(0, 1, 2, 3), has_aux=True, allow_int=allow_int
            )(given.dense, [probe.zero_taps() for probe in probes], gates, [each.zero_taps() for each in runs])
            if not isinstance(value, Tracer):
                _warn_of_compiled(compiled)
            waits = [x for x in jax.tree.leaves((value, aux, dense_grads)) if _is_computed(x)]
            table_grads: dict[str, SparseRows] = {}
            for table, probe, own in zip(tables, probes, taps, strict=True):
                mine = [x for each, x in zip(runs, of_runs, strict=True) if each.tape is probe]
                table_grads[table.name] = _gradient(table, [*filter(None, own), *mine], waits)
            # The first handle of a table has the gradient of all its lookups, and the others an empty one.
            of_handles = [table_grads.pop(h.name, None) or _empty(h) for h in given.handles]
            grads = given.with_leaves(dense_grads, of_handles)
            result = (value, aux) if has_aux else value
            return result, grads[0] if single else grads

    return wrapped


class _Given:
    """The arguments to differentiate, taken apart.

    Args:
      trees: the arguments.

    Attributes:
      dense: the leaves that are no tables.
      handles: those that are.
    """

    def __init__(self, trees: tuple[Any, ...]) -> None:
        leaves, self._treedef = jax.tree.flatten(trees, is_leaf=_is_whole)
        _check_trained(leaves)
        self._is_table = [is_table(leaf) for leaf in leaves]
        self.dense = [leaf for leaf in leaves if not is_table(leaf)]
        self.handles = [leaf for leaf in leaves if is_table(leaf)]
        _check_outermost(self.handles)

    def with_leaves(self, dense: Iterable[Any], of_handles: Iterable[Any]) -> tuple[Any, ...]:
        """Trees of the same structure with other leaves."""
        d, t = iter(dense), iter(of_handles)
        return jax.tree.unflatten(self._treedef, [next(t) if is_handle else next(d) for is_handle in self._is_table])


def _taped(call: Callable[..., Any], dense: Any, tapes: Sequence[Tape]) -> Any:
    """What a loss gives whose lookups go through tapes, with taps for all of them."""
    try:
        out = call(dense, tapes)
        for tape in tapes:
            tape.check_whole()
        return out
    finally:
        for tape in tapes:
            tape.taps, tape.gate = [], None  # JAX's caches keep the tapes


def _probe(
    call: Callable[..., Any], dense: Any, blank: Callable[[], Sequence[Tape]]
) -> tuple[Sequence[Tape], Sequence[Run]]:
    """Tapes that have noted a loss's lookups, and those of them that get taps for each run.

    It is traced for its shapes; or else run, where it goes by values. Then it is not known what JAX runs several times.
    """
    config: Any = jax.config
    if not config.jax_disable_jit:  # else a cond is its one branch, for which there have to be values
        probes = blank()
        try:
            closed = jax.make_jaxpr(lambda d: (call(d, probes), None)[1])(dense)  # aux need not be of arrays
            check_derivatives(closed)
            for tape, indices in repeated(closed).items():
                tape.repeated |= indices
            return probes, in_need(closed)
        except _WANTS_VALUES:
            if in_a_trace():
                raise
    probes = blank()
    jax.vjp(lambda d: (call(d, probes), None)[1], dense)  # of tracers, as later: arrays of the user's may be NumPy's
    return probes, ()


@contextlib.contextmanager
def _mesh_of(arguments: Any) -> Generator[None]:
    """In ``jax.set_mesh``, if the tables in a tree are on one mesh, some with Explicit axes: outside of programs
    and of that, JAX computes no gradients of arrays on such axes."""
    explicit: set[Any] = set()
    if not in_a_trace() and jax.sharding.get_abstract_mesh().empty:
        tables = [leaf for leaf in jax.tree.leaves(arguments, is_leaf=is_table) if is_table(leaf)]
        placements = {table.spec.placement for table in tables} - {None}
        explicit = {placement.explicit for placement in placements} - {None}
        devices = {placement.mesh for placement in placements}
        explicit = explicit if len(devices) == len(explicit) == 1 else set()
    with jax.set_mesh(*explicit) if explicit else contextlib.nullcontext():
        yield


def _numbers(argnums: int | Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """The arguments to differentiate, and whether they were named by one integer."""
    try:
        numbers = tuple(map(operator.index, argnums)) if isinstance(argnums, Iterable) else (operator.index(argnums),)
    except TypeError:
        want, mend = "argnums as an integer or several", "give the positions of arguments"
        raise fail(TypeError, None, "value_and_grad", want, repr(argnums), mend) from None
    if not numbers:
        mend = "give its position"
        raise fail(ValueError, None, "value_and_grad", "argnums of an argument to differentiate", "none", mend)
    return numbers, not isinstance(argnums, Iterable)


def _is_whole(x: Any) -> bool:
    return isinstance(x, Readable)


def _check_trained(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, FrozenReadable):
            raise fail(
                TypeError, leaf.name, "value_and_grad", "what is to be trained", "a frozen table, which nothing trains",
                "give it to the loss as another argument, which is not differentiated",
            )  # fmt: skip


def _is_computed(x: Any) -> bool:
    return hasattr(x, "dtype") and x.dtype != jax.dtypes.float0


def grad(
    fun: Callable[P, object], argnums: int | Sequence[int] = 0, has_aux: bool = False, *, allow_int: bool = False
) -> Callable[P, PyTree]:
    """Like ``jax.grad``, for arguments whose trees hold tables; see `value_and_grad`.

    Args:
      fun: returns a ``()`` float, or with has_aux a pair (float, any pytree, also of leaves that are not arrays).
      argnums: which positional arguments to differentiate: an integer, or several of them.
      has_aux: see `fun`.
      allow_int: see `value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns the gradients, or with has_aux ``(gradients, aux)``.

    Raises:
      ValueError, TypeError, RuntimeError: as for `value_and_grad`.

    Example:
      >>> import kvjax, jax.numpy as jnp, numpy as np
      >>> table = kvjax.get_table("doc_only_grad", dim=2, initializer=1.0)
      >>> grads = kvjax.grad(lambda table: jnp.sum(table.lookup(np.array([3, 5])) ** 2))(table)
      >>> grads.keys.tolist(), grads.rows.tolist()
      ([3, 5], [[2.0, 2.0], [2.0, 2.0]])
      >>> kvjax.drop_table("doc_only_grad")
    """
    return without_value(value_and_grad(fun, argnums, has_aux, allow_int=allow_int), has_aux)


def without_value(function: Callable[P, tuple[Any, PyTree]], has_aux: bool) -> Callable[P, PyTree]:
    """As a function that gives values and gradients, but without the values."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        result, grads = function(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return wrapped


def check_positions(numbers: Sequence[int], args: Sequence[Any], op: str) -> None:
    """Whether the arguments to differentiate are there.

    Raises:
      TypeError: one is not.
    """
    if not all(-len(args) <= i < len(args) for i in numbers):
        raise fail(
            TypeError, None, op, f"the arguments {tuple(numbers)} that it differentiates by position",
            f"{len(args)} positional arguments", "give these without their names",
        )  # fmt: skip


def _check_outermost(handles: Sequence[Table]) -> None:
    for handle in handles:
        check_one_version(handle, "value_and_grad")
        if shape := getattr(handle.given, "shape", ()):
            raise fail(
                ValueError, handle.name, "value_and_grad", "one handle", f"{shape[0]} stacked, as nn.scan gives layers",
                "a name is one table for all layers: look the rows up before the scan",
            )  # fmt: skip
        if handle.tape is not None:
            raise ValueError(
                f"kvjax: table {handle.name!r}, value_and_grad: want one value_and_grad over a table, got one inside "
                "another; take the rows out with lookup and differentiate the inner loss with jax.grad"
            )
        if handle.view is not None and not handle.view.trains:
            check_without_a_view(handle, "value_and_grad")


def _warn_of_untrained(names: set[str], given: Any) -> None:
    """Says which trainable tables a loss has looked up that came to it by no argument: they get no gradient."""
    given = {leaf.name for leaf in jax.tree.leaves(given, is_leaf=is_table) if is_table(leaf)}
    for name in sorted(names - given):
        warn(
            f"kvjax: table {name!r}, value_and_grad: want the table in an argument of the loss, got one that the loss "
            "closes over, which is not trained; differentiate with respect to a tree that holds it, or hand it to the "
            "loss as another argument if it is not to be trained"
        )


def _warn_of_compiled(names: Sequence[str]) -> None:
    """Says that a loss is traced in part in every call: each has tapes of its own, and JAX keeps what it makes."""
    for name in names:
        warn(
            f"kvjax: table {name!r}, value_and_grad: want a call under jit of a loss that hands a table to a jitted "
            "function, a scan, a cond or a checkpoint, got one outside, which traces and compiles these again in every "
            "call, and JAX keeps them all; put the whole step under jax.jit"
        )


def _record(handles: Sequence[Table], tapes: Sequence[Tape]) -> list[Table]:
    """The handles as the loss gets them: with a tape."""
    by_name = {tape.spec.name: tape for tape in tapes}
    return [with_tape(h, Site.of(by_name[h.name])) if h.spec.trainable else h for h in handles]


def _empty(table: Table) -> SparseRows:
    return SparseRows(np.zeros(0, np.int64), jnp.zeros((0, table.dim), jnp.float32)).replace(**_made(table))


def _made(table: Table) -> dict[str, Any]:
    """What a gradient says of the handle that it was taken through."""
    return {"table": table.name, "viewed": table.view is not None}


def _gradient(table: Table, taps: Sequence[Any], waits: Sequence[jax.Array]) -> SparseRows:
    """What the taps of one table brought home, behind everything the loss has computed.

    A write made of this gradient comes after every read: those of the backward pass are behind the taps and the dense
    gradients, those of the forward pass behind the value and the auxiliary output. Its keys are behind the canary, too:
    keys of a lookup that was used twice are sums of keys, and nobody gets them, whatever he makes of the gradient.
    """
    word = order.canary(table.spec, uses_of(taps), elements(table.spec, waits))
    canary, behind = opaque_canary(word), word ^ jnp.uint32(host.CANARY)  # 0, which XLA does not know
    if not taps:
        return _empty(table).replace(canary=canary)
    if len(taps) == 1:
        ((rows, digits, _),) = taps
        words, counts = words_of(digits, behind)
        return SparseRows(Keys(words), rows, counts).replace(canary=canary, **_made(table))
    first = taps[0][1]
    even = sum(d.size // 5 for _, d, _ in taps) % max(1, jax.typeof(first).sharding.mesh.size) == 0
    words, rows, counts = as_auto(_joined, sharding_of(first, 1) if even else (), behind, *taps)[0]
    return SparseRows(Keys(words), rows, counts).replace(canary=canary, **_made(table))


@one_program()
def _joined(behind: jax.Array, *taps: Any) -> Any:
    rows = jnp.concatenate([row.reshape(-1, row.shape[-1]) for row, _, _ in taps])
    words, counts = words_of(jnp.concatenate([d.reshape(-1, d.shape[-1]) for _, d, _ in taps]), behind)
    return (words, rows, counts), ()
