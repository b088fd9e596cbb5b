"""Gradients: ``jax.value_and_grad`` for trees that hold tables.

The loss is traced for its shapes first, to learn its lookups. Then it is differentiated with respect to a zero "tap"
added to each looked-up row. The keys come home inside the cotangent of the tap, as exact 16-bit digits, and so
does a count of how often the lookup was used: nothing has to leave a trace by another way, so remat, nested jit
and cond work.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from kvjax._keys.keys import Keys
from kvjax._keys.sparse_rows import SparseRows, sealed
from kvjax._ops import order
from kvjax._sharded.mesh import elements
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._spmd.varying import axis_index, known, manual_axes, varying, varying_like, zeros
from kvjax._table.handle import check_one_version
from kvjax._table.table import Table, is_table
from kvjax._table.tapes import untaped
from kvjax._values.errors import fail

P = ParamSpec("P")


@jax.custom_vjp
def _attach(rows: jax.Array, tap: Any, words: jax.Array, mask: jax.Array, used: jax.Array) -> jax.Array:
    return rows


def _attach_fwd(
    rows: jax.Array, tap: Any, words: jax.Array, mask: jax.Array, used: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return rows, (words, mask, used)


def _attach_bwd(residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    words, mask, used = residuals
    digits = jnp.concatenate([words & jnp.uint32(0xFFFF), words >> jnp.uint32(16)], -1)
    digits = jnp.concatenate([digits.astype(jnp.float32), mask[..., None].astype(jnp.float32)], -1)
    return None, (cotangent.astype(jnp.float32), digits, used), None, None, None


_attach.defvjp(_attach_fwd, _attach_bwd)


def _words(digits: jax.Array) -> jax.Array:
    low, high = jnp.split(digits[..., :4].astype(jnp.uint32), 2, -1)
    return low | (high << jnp.uint32(16))


def _counts(digits: jax.Array) -> jax.Array:
    """1 for keys that were looked up; 0 for padding, also of a lookup in a branch of a cond that was not taken."""
    return (digits[..., 4] > 0).astype(jnp.int32)


class _Tape:
    """The lookups of one table in one trace of the loss; it rides in the static part of the `Table`."""

    def __init__(self, spec: TableSpec, taps: Sequence[Any] | None) -> None:
        self.spec, self.taps = spec, taps
        self.outside = jax.sharding.get_abstract_mesh()
        self.kinds: list[list[Any]] = []  # of each lookup what its taps must be like, see `_kinds`

    def attach(self, rows: jax.Array, keys: Keys, mask: jax.Array | None, used: jax.Array) -> jax.Array:
        index = len(self.kinds)
        valid = jnp.ones_like(keys.words[..., 0], jnp.bool_)  # with the sharding of the keys
        valid = valid if mask is None else valid & mask
        words = varying_like(keys.words, valid)
        self.kinds.append(self._kinds(rows, words, used))
        if self.taps is None:
            return rows
        if index >= len(self.taps) or [t.shape for t in self.taps[index]] != [k.shape for _, k in self.kinds[index]]:
            raise ValueError(
                f"kvjax: table {self.spec.name!r}, value_and_grad: want a loss that makes the same lookups whenever it "
                f"is traced, got another lookup of keys {keys.shape}; the loss must not depend on outside state"
            )
        pairs = zip(self.taps[index], self.kinds[index], strict=True)
        taps = tuple(tap if axes is None else tap[axis_index(axes)] for tap, (axes, _) in pairs)
        return _attach(rows, taps, words, valid, used)

    def _kinds(self, rows: jax.Array, words: jax.Array, used: jax.Array) -> list[Any]:
        """Of each tap of a lookup its type, and None.

        Or, where the lookup is in a ``shard_map`` of the loss, its axes over which the devices have taps of their own,
        which stand in one array for all of them ``(devices, ...)``: each device has its place in it.
        """
        digits = jax.typeof(words).update(shape=(*words.shape[:-1], 5), dtype=jnp.dtype(jnp.float32))
        types = [jax.typeof(rows).update(dtype=jnp.dtype(jnp.float32)), digits, jax.typeof(used)]
        sizes = manual_axes()
        inner = tuple(axis for axis in sizes if axis not in getattr(self.outside, "manual_axes", ()))
        if not inner:
            return [(None, kind) for kind in types]
        placement = self.spec.placement
        hidden = not known(inner) and placement is not None and set(inner) > set(placement.axes)
        if hidden or AxisType.Explicit in getattr(self.outside, "axis_types", ()):
            raise fail(
                ValueError, self.spec.name, "value_and_grad", "lookups outside the loss's shard_map",
                "one inside, " + ("where check_vma=False hides which axes split the keys" if hidden else
                "under Explicit axes"), "call value_and_grad inside the shard_map",
            )  # fmt: skip
        own = [tuple(a for a in inner if a in varying(x)) if known(inner) else inner for x in (rows, words, used)]
        counts = [math.prod(sizes[axis] for axis in axes) for axes in own]
        return [
            (axes, jax.ShapeDtypeStruct((n, *kind.shape), jnp.float32))
            for axes, n, kind in zip(own, counts, types, strict=True)
        ]

    def zero_taps(self) -> list[Any]:
        return [tuple(zeros(kind) for _, kind in kinds) for kinds in self.kinds]


def value_and_grad(
    fun: Callable[P, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[P, tuple[Any, Any]]:
    """Like ``jax.value_and_grad``, for arguments whose trees hold tables.

    Where a `Table` stood, the gradient holds a `SparseRows` with one row per key that the loss looked up. (If a table
    stands in several places, its first one has the gradient of all lookups.) The function is traced twice, also outside
    ``jit``. It must use each lookup at most once: a lookup inside a ``scan`` or ``vmap`` of the loss is an error when
    the gradient is computed; do the lookup before, and pass the rows in. A trainable table that the loss closes over
    has no gradient, and a warning names it.

    Args:
      fun: returns a ``()`` float, or with has_aux a pair (float, any pytree).
      argnums: which positional arguments to differentiate.
      has_aux: see `fun`.

    Returns:
      A function with the arguments of `fun` that returns ``(value, gradients)``, as ``jax.value_and_grad``'s does.

    Raises:
      ValueError: the calls are nested.

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
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    run: Callable[..., Any] = fun

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not all(-len(args) <= i < len(args) for i in numbers):
            raise TypeError(
                f"kvjax.value_and_grad wants the arguments {numbers} that it differentiates by position, got "
                f"{len(args)} positional arguments"
            )
        leaves, treedef = jax.tree.flatten(tuple(args[i] for i in numbers), is_leaf=is_table)
        is_dense = [not is_table(leaf) for leaf in leaves]
        dense = [leaf for leaf, d in zip(leaves, is_dense, strict=True) if d]
        handles = _outermost(leaf for leaf, d in zip(leaves, is_dense, strict=True) if not d)
        tables = list({handle.name: handle for handle in reversed(handles)}.values())  # a table may have several

        def call(dense: Any, tapes: Sequence[_Tape]) -> Any:
            d, t = iter(dense), iter(_record(handles, tapes))
            chosen = jax.tree.unflatten(treedef, [next(d) if x else next(t) for x in is_dense])
            full = list(args)
            for i, tree in zip(numbers, chosen, strict=True):
                full[i] = tree
            return run(*full, **kwargs)

        probes = [_Tape(t.spec, None) for t in tables]
        with untaped() as closed_over:
            jax.eval_shape(lambda d: call(d, probes), dense)
        others = [arg for i, arg in enumerate(args) if i not in numbers and i - len(args) not in numbers]
        _warn_of_untrained(closed_over, (others, kwargs))

        def tapped(dense: Any, taps: Any) -> tuple[Any, Any]:
            tapes = [_Tape(t.spec, tap) for t, tap in zip(tables, taps, strict=True)]
            try:
                out = call(dense, tapes)
            finally:
                for tape in tapes:
                    tape.taps = []  # JAX's caches keep the tapes; the tracers need not stay with them
            value, aux = out if has_aux else (out, None)
            # A table that the loss hands out is a handle like any other.
            aux = jax.tree.map(lambda x: Table(x.version, x.spec) if is_table(x) else x, aux, is_leaf=is_table)
            return value, aux

        (value, aux), (dense_grads, taps) = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)(
            dense, [probe.zero_taps() for probe in probes]
        )
        waits = [x for x in jax.tree.leaves((value, aux, dense_grads)) if hasattr(x, "dtype")]
        table_grads = {t.name: _gradient(t, tap, waits) for t, tap in zip(tables, taps, strict=True)}
        # The first handle of a table has the gradient of all its lookups, and the others an empty one.
        d, t = iter(dense_grads), iter([table_grads.pop(h.name, None) or _empty(h) for h in handles])
        grads = jax.tree.unflatten(treedef, [next(d) if x else next(t) for x in is_dense])
        result = (value, aux) if has_aux else value
        return result, grads[0] if isinstance(argnums, int) else grads

    return wrapped


def grad(fun: Callable[P, Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[P, Any]:
    """Like ``jax.grad``, for arguments whose trees hold tables; see `value_and_grad`.

    Args:
      fun: returns a ``()`` float, or with has_aux a pair (float, any pytree).
      argnums: which positional arguments to differentiate.
      has_aux: see `fun`.

    Returns:
      A function with the arguments of `fun` that returns the gradients, or with has_aux ``(gradients, aux)``.
    """
    function = value_and_grad(fun, argnums, has_aux)

    @functools.wraps(fun)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        result, grads = function(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return wrapped


def _outermost(leaves: Any) -> list[Table]:
    handles = list(leaves)
    for handle in handles:
        check_one_version(handle, "value_and_grad")
        if handle.tape is not None:
            raise ValueError(
                f"kvjax: table {handle.name!r}, value_and_grad: want one value_and_grad over a table, got one inside "
                "another; take the rows out with lookup and differentiate the inner loss with jax.grad"
            )
    return handles


def _warn_of_untrained(names: set[str], given: Any) -> None:
    """Says which trainable tables a loss has looked up that came to it by no argument: they get no gradient."""
    given = {leaf.name for leaf in jax.tree.leaves(given, is_leaf=is_table) if is_table(leaf)}
    for name in sorted(names - given):
        warnings.warn(
            f"kvjax: table {name!r}, value_and_grad: want the table in an argument of the loss, got one that the loss "
            "closes over, which is not trained; differentiate with respect to a tree that holds it, or hand it to the "
            "loss as another argument if it is not to be trained",
            stacklevel=3,
        )


def _record(handles: Sequence[Table], tapes: Sequence[_Tape]) -> list[Table]:
    by_name = {tape.spec.name: tape for tape in tapes}
    return [Table(h.version, h.spec, by_name[h.name] if h.spec.trainable else None) for h in handles]


def _empty(table: Table) -> SparseRows:
    return SparseRows(np.zeros(0, np.int64), jnp.zeros((0, table.dim), jnp.float32)).replace(table=table.name)


def _gradient(table: Table, taps: Sequence[Any], waits: Sequence[jax.Array]) -> SparseRows:
    """What the taps of one table brought home, behind everything the loss has computed.

    A write made of this gradient comes after every read: those of the backward pass are behind `used` and the dense
    gradients, those of the forward pass behind the value and the auxiliary output.
    """
    used = jnp.stack([use for _, _, use in taps]) if taps else jnp.zeros(0, jnp.float32)
    seal = sealed(order.seal(table.spec, used, elements(table.spec, waits)))
    if not taps:
        return _empty(table).replace(seal=seal)
    if len(taps) == 1:
        ((rows, digits, _),) = taps
        return SparseRows(Keys(_words(digits)), rows, _counts(digits)).replace(seal=seal, table=table.name)

    def run(*taps: Any) -> Any:
        rows = jnp.concatenate([row.reshape(-1, table.dim) for row, _, _ in taps])
        digits = jnp.concatenate([d.reshape(-1, d.shape[-1]) for _, d, _ in taps])
        return (_words(digits), rows, _counts(digits)), ()

    first = taps[0][1]
    even = sum(d.size // 5 for _, d, _ in taps) % max(1, jax.typeof(first).sharding.mesh.size) == 0
    words, rows, counts = as_auto(run, sharding_of(first, 1) if even else (), *taps)[0]
    return SparseRows(Keys(words), rows, counts).replace(seal=seal, table=table.name)
