"""Taps: how the gradients of a loss's lookups come home.

At each lookup a zero "tap" is added to the rows, and the loss is differentiated with respect to it. The keys come home
inside the cotangent of the tap, as exact 16-bit digits, and so does a count of how often the lookup was used: nothing
has to leave a trace by another way, so remat, nested jit and cond work.

Each call of a jitted function in the loss has taps of its own (`_Place`), and under ``vmap`` each example has its place
in them (`attach_p`, the rule of which is told about the axes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jax.sharding import AxisType

from kvjax._keys.keys import Keys
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import axis_index, known, manual_axes, varying, varying_like, zeros
from kvjax._values.arrays import one_program
from kvjax._values.errors import fail


@jax.custom_vjp
def _attach(rows: jax.Array, tap: Any, words: jax.Array, mask: jax.Array, used: jax.Array) -> jax.Array:
    return rows


def _attach_fwd(
    rows: jax.Array, tap: Any, words: jax.Array, mask: jax.Array, used: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return rows, (words, mask, used)


def _attach_bwd(residuals: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    words, mask, used = residuals
    return None, (*_sent(cotangent, words, mask), used), None, None, None


_attach.defvjp(_attach_fwd, _attach_bwd)


@one_program()
def _sent(cotangent: jax.Array, words: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    digits = jnp.concatenate([words & jnp.uint32(0xFFFF), words >> jnp.uint32(16)], -1)
    digits = jnp.concatenate([digits.astype(jnp.float32), mask[..., None].astype(jnp.float32)], -1)
    return cotangent.astype(jnp.float32), digits


@one_program()
def words_of(digits: jax.Array, behind: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The words of keys that came home, and whether they count.

    Args:
      digits: ``(..., 5)`` float32.
      behind: ``()`` uint32, a 0 without which there are no words.

    Returns:
      ``(..., 2)`` uint32; and int32 ``(...)``, 1 for keys that were looked up, and 0 for padding, also of a lookup in a
      branch of a cond that was not taken.
    """
    low, high = jnp.split(digits[..., :4].astype(jnp.uint32), 2, -1)
    return (low | (high << jnp.uint32(16))) ^ behind, (digits[..., 4] > 0).astype(jnp.int32)


def _attach_jvp(primals: Sequence[Any], tangents: Sequence[Any], **place: Any) -> tuple[Any, Any]:
    rows, words, mask, used, _, *taps = primals
    if isinstance(tangents[4], ad.Zero):  # the loss is not differentiated by this handle
        return rows, ad.Zero(jax.typeof(rows).to_tangent_aval())
    dots = [_instantiated(x) for x in tangents]
    return jax.jvp(_attach, (rows, tuple(taps), words, mask, used), (dots[0], tuple(dots[5:]), *dots[1:4]))


def _instantiated(tangent: Any) -> Any:
    aval = getattr(tangent, "aval", None)
    if isinstance(tangent, ad.Zero) and aval is not None and aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)  # JAX's would be a program
    return ad.instantiate_zeros(tangent)


def _attach_batch(operands: Sequence[Any], axes: Sequence[Any], tape: Tape, index: int) -> tuple[jax.Array, int]:
    """Of many examples at once; the taps have a place for each of them, and the gate is one for all."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    own = [batching.bdim_at_front(x, axis, size) for x, axis in zip(operands[:4], axes[:4], strict=True)]
    rows, words, _, used = own
    tape.note(index, rows, words, used)
    if axes[4] is not None:  # a cond that vmap has made a selection: examples that do not choose it have no gradient
        tape.masked.add(index)
    gate = operands[4] if axes[4] is None else jax.lax.index_in_dim(operands[4], 0, axes[4], keepdims=False)
    both = zip(operands[5:], axes[5:], (rows, words, used), strict=False)  # a probe has no taps
    taps = [tap if axis is None else _own_place(tap, axis, like) for tap, axis, like in both]
    return attach_p.bind(*own, gate, *taps, tape=tape, index=index), 0


def _own_place(taps: jax.Array, axis: int, like: jax.Array) -> jax.Array:
    """Taps of which each example has got a copy, as a cond gives them: as one, in which each has its place."""
    place = taps.ndim - 1 - like.ndim
    return jnp.moveaxis(jnp.diagonal(taps, axis1=axis, axis2=place + (place >= axis)), -1, place)


attach_p = Primitive("kvjax_attach")  # gives the rows
attach_p.def_impl(lambda rows, *_, **place: rows)
attach_p.def_abstract_eval(lambda rows, *_, **place: rows)
ad.primitive_jvps[attach_p] = _attach_jvp
batching.primitive_batchers[attach_p] = _attach_batch
mlir.register_lowering(attach_p, lambda ctx, rows, *_, **place: [rows])


class _Place:
    """Where in a tape a handle is that a tree is taken apart with: after so many of its lookups.

    Calls of a jitted function share its trace, and so its taps, if their arguments' trees are equal. So places from
    before a lookup, through which it was made, differ from those after it: the next call is traced by itself.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape, self.after = tape, len(tape.kinds)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Place) or self.tape is not other.tape:
            return False
        return self.after == other.after or self.tape.used.isdisjoint((self.after, other.after))

    def __hash__(self) -> int:
        return hash(self.tape)


@jax.tree_util.register_pytree_node_class
class Site:
    """A tape as it rides in a `Table` through a loss.

    Args:
      place: of the handle in it.
      gate: ``()`` float32, 0: a leaf that the loss is differentiated by, too. Of a table that ``stop_gradient`` was
        done to, it is not; then lookups have no gradient.
    """

    def __init__(self, place: _Place, gate: Any) -> None:
        self.place, self.gate = place, gate

    @classmethod
    def of(cls, tape: Tape) -> Site:
        return cls(_Place(tape), tape.gate)

    def attach(self, rows: jax.Array, keys: Keys, mask: jax.Array | None, used: jax.Array) -> jax.Array:
        self.place.tape.used.add(self.place.after)
        return self.place.tape.attach(rows, keys, mask, used, self.gate)

    def tree_flatten(self) -> tuple[tuple[Any], _Place]:
        return (self.gate,), _Place(self.place.tape)

    @classmethod
    def tree_unflatten(cls, place: _Place, children: Sequence[Any]) -> Site:
        return cls(place, children[0])


class Tape:
    """The lookups of one table in one trace of the loss: a probe of it, or with the taps that a probe asks for."""

    def __init__(self, spec: TableSpec, gate: Any, probe: Tape | None = None, taps: Sequence[Any] = ()) -> None:
        self.spec, self.gate, self.probe, self.taps = spec, gate, probe, taps
        self.outside = jax.sharding.get_abstract_mesh()
        self.kinds: list[list[Any]] = []  # of each lookup what its taps must be like, see `_kinds`
        self.repeated: set[int] = set() if probe is None else probe.repeated  # which have taps for each run, see `runs`
        self.masked: set[int] = set()  # of which only some examples may have a gradient, as their taps say
        self.used: set[int] = set()  # after how many lookups the sites were made through which there was one
        self.batched: dict[int, tuple[tuple[int, ...], list[Any]]] = {}  # under vmap: its sizes, and types with them
        self.compiled = False  # whether a lookup was in a jitted function of the loss, a cond or such

    def attach(self, rows: jax.Array, keys: Keys, mask: jax.Array | None, used: jax.Array, gate: Any) -> jax.Array:
        index = len(self.kinds)
        self.compiled |= isinstance(rows, DynamicJaxprTracer)
        valid = jnp.ones_like(keys.words[..., 0], jnp.bool_)  # with the sharding of the keys
        valid = valid if mask is None else valid & mask
        words = varying_like(keys.words, valid)
        self.kinds.append(self._kinds(rows, words, used))
        taps = [] if self.probe is None else self._taps(index, self.probe, keys)
        return attach_p.bind(rows, words, valid, used, gate, *taps, tape=self, index=index)

    def note(self, index: int, rows: jax.Array, words: jax.Array, used: jax.Array) -> None:
        """Says that a lookup is one of many examples at once. Of several times that it is said the last one counts,
        or that with the most axes."""
        sizes = used.shape
        if len(sizes) >= len(self.batched.get(index, ((),))[0]):
            self.batched[index] = sizes, types_of(*map(jax.typeof, (rows, words, used)))

    def _taps(self, index: int, probe: Tape, keys: Keys) -> list[Any]:
        mine = [kind.shape for _, kind in self.kinds[index]]
        if index >= len(self.taps) or mine != [kind.shape for _, kind in probe.kinds[index]]:
            raise self.other_lookups(f"another lookup of keys {keys.shape}")
        if index in self.repeated:
            return []
        pairs = zip(self.taps[index], self.kinds[index], strict=True)
        return [tap if axes is None else tap[axis_index(axes)] for tap, (axes, _) in pairs]

    def check_whole(self) -> None:
        """Whether the loss has made all lookups of the probe. It has not where JAX has kept a trace of the probe's."""
        if self.probe is not None and len(self.kinds) < len(self.probe.kinds):
            raise self.other_lookups(f"{len(self.kinds)} lookups after {len(self.probe.kinds)}")

    def other_lookups(self, got: str) -> Exception:
        """The error that the loss does not do what its probe has done."""
        return fail(
            ValueError, self.spec.name, "value_and_grad", "a loss that makes the same lookups whenever it is traced",
            got, "the loss must not depend on outside state, and a function that is jitted or checkpointed outside of "
            "the loss wants the table as an argument, as JAX keeps its trace",
        )  # fmt: skip

    def _kinds(self, rows: jax.Array, words: jax.Array, used: jax.Array) -> list[Any]:
        """Of each tap of a lookup its type, and None.

        Or, where the lookup is in a ``shard_map`` of the loss, its axes over which the devices have taps of their own,
        which stand in one array for all of them ``(devices, ...)``: each device has its place in it.
        """
        types = types_of(*map(jax.typeof, (rows, words, used)))
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
        """Of each lookup its taps; none if it has those of its runs."""
        return zeros_of(tuple(() if i in self.repeated else tuple(self._whole(i)) for i in range(len(self.kinds))))

    def _whole(self, index: int) -> list[Any]:
        """The types of the taps of a lookup, with the axes of vmap behind those of devices."""
        sizes, types = self.batched.get(index, ((), []))
        whole = []
        for number, (axes, kind) in enumerate(self.kinds[index]):
            if sizes and axes is None:
                kind = types[number]
            elif sizes:
                kind = jax.ShapeDtypeStruct((kind.shape[0], *sizes, *kind.shape[1:]), kind.dtype)
            whole.append(kind)
        return whole


def uses_of(taps: Sequence[Any]) -> jax.Array:
    """How often each lookup was used ``(lookups,)``, by what came home; the most of any device, example or turn."""
    most = [jnp.max(used, initial=0.0) for _, _, used in taps]  # of no examples it is 0
    return jnp.stack(most) if most else jnp.zeros(0, jnp.float32)


@one_program(0)
def zeros_of(kinds: Sequence[Sequence[Any]]) -> list[tuple[jax.Array, ...]]:
    return [tuple(map(zeros, each)) for each in kinds]


def types_of(rows: Any, words: Any, used: Any) -> list[Any]:
    """The types of a lookup's taps, by those of its operands."""
    digits = words.update(shape=(*words.shape[:-1], 5), dtype=jnp.dtype(jnp.float32))
    return [rows.update(dtype=jnp.dtype(jnp.float32)), digits, used]
