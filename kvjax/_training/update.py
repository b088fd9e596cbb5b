"""The update of one row: transform, constraint and new slots, as functions; and as a row program, if it is one.

What these functions say is done by either way of a training write: a program, which the table runs on its rows where
they lie, or XLA, on chunks of rows that are gathered and scattered (apply.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend import core as jex

from kvjax._ops.as_value import without_derivative
from kvjax._programs.fuse import contracted, fused, renamed
from kvjax._programs.instructions import FACTS, GRADIENT, VALUE, Field, NotLowered
from kvjax._programs.lower import Lowering
from kvjax._programs.program import Encoded, Program, Run, Section, encoded, live, ordered
from kvjax._programs.registers import Shared, Value, parts_of, shared
from kvjax._spec.spec import TableSpec
from kvjax._training.canonical import canonical
from kvjax._training.rowwise import CatchUp, Rowwise
from kvjax._training.slots import SlotLayout
from kvjax._training.transform_errors import check_update, other_shape
from kvjax._values.facts import FACT_DTYPES, NUM_FACTS, ROW_FACTS, RowFacts, fact_types
from kvjax._values.key_width import x64_enabled
from kvjax._values.tracing import computed_now


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """Attributes:
    initial: value ``(dim,)`` float32 to the slots of a row that has none yet.
    update: gradient and value ``(dim,)`` float32, slots, globals and facts to the new value, slots and globals. The
      facts are None or those of the row, ``()`` each.
    """

    initial: Callable[..., list[jax.Array]]
    update: Callable[..., tuple[jax.Array, list[jax.Array], list[jax.Array]]]


def update_of(
    rowwise: Rowwise, dim: int, extra: dict[str, Any], constraint: Callable[..., Any] | None = None
) -> RowUpdate:
    """The update of a row `dim` wide; `extra` are extra arguments of the transform."""
    made: Any = rowwise.tx
    tx, layout = optax.with_extra_args_support(made), rowwise.layout(dim)

    def initial(value: jax.Array) -> list[jax.Array]:
        return layout.slots_of(tx.init(value.reshape(1, dim)))

    def moved(grads: Any, state: Any, row: Any, **extra: Any) -> tuple[Any, Any]:
        out = tx.update(grads, state, row, **extra)
        check_update(out)
        updates, state = out
        shape = getattr(updates, "shape", row.shape)
        if shape not in ((), row.shape):  # a number is for all elements, as optax.apply_updates has it
            raise other_shape(row.shape, shape)
        return jnp.asarray(optax.apply_updates(row, updates)), state

    step = rowwise.step if isinstance(rowwise, CatchUp) else moved

    def update(grad: Any, value: Any, slots: Any, globals_: Any, facts: RowFacts | None = None) -> Any:
        about = {} if facts is None else {ROW_FACTS: jax.tree.map(lambda x: jnp.reshape(x, 1), facts)}
        state = layout.join(slots, globals_)
        row, state = step(grad.reshape(1, dim), state, value.reshape(1, dim), **extra, **about)
        value = jnp.reshape(row, dim)
        if constraint is not None:
            value = constraint(value)
        return value, layout.slots_of(state), layout.globals_of(state)

    return RowUpdate(initial, update)


def takes_facts(rowwise: Rowwise, dim: int, extra: dict[str, Any]) -> bool:
    """Whether the update of a row reads facts about it; `extra` are extra arguments of the transform."""
    return _takes_facts(rowwise, dim, extra) if extra else _takes_facts_alone(rowwise, dim, x64_enabled())


@functools.lru_cache(maxsize=256)
def _takes_facts_alone(rowwise: Rowwise, dim: int, x64: bool) -> bool:
    return _takes_facts(rowwise, dim, {})


def _takes_facts(rowwise: Rowwise, dim: int, extra: dict[str, Any]) -> bool:
    if not isinstance(rowwise.tx, optax.GradientTransformationExtraArgs):
        return False
    row, layout = jax.ShapeDtypeStruct((dim,), jnp.float32), rowwise.layout(dim)
    update = update_of(rowwise, dim, extra).update
    globals_ = jax.tree.leaves(jax.eval_shape(lambda: rowwise.first_globals(dim)))
    operands = (row, row, list(layout.types), globals_)
    try:
        closed = jax.make_jaxpr(update)(*operands, fact_types())
    except TypeError:
        jax.eval_shape(update, *operands)  # it is one that takes other arguments only
        return False
    facts = closed.jaxpr.invars[-NUM_FACTS:]
    read = {v for v in closed.jaxpr.outvars if not isinstance(v, jex.Literal)}
    for eqn in reversed(closed.jaxpr.eqns):  # `update` reshapes facts for any transform
        if eqn.effects or any(v in read for v in eqn.outvars):
            read |= {v for v in eqn.invars if not isinstance(v, jex.Literal)}
    return any(v in read for v in facts)


class Lowered(NamedTuple):
    """An update as a program, and the next globals, which depend on no row."""

    run: Run
    globals_: tuple[jax.Array, ...]


def lowered(
    spec: TableSpec, rowwise: Rowwise, state: tuple[jax.Array, ...], extra: dict[str, Any], facts: bool = False
) -> Lowered | None:
    """The program of an update, or None if it is none: the update then goes the way of any function.

    facts: whether it takes facts about rows.
    """
    rows = _Rows(spec.dim, spec.dtype, spec.rounding, spec.constraint)
    found = _lowered(spec.name, rows, rowwise, state, extra, facts)
    return found if isinstance(found, Lowered) else None


def program_of(rowwise: Rowwise, dim: int, extra: dict[str, Any]) -> Program | NotLowered:
    """The program of a transform alone, on rows of float32; or what in it no instruction can do."""
    rows, facts = _Rows(dim, "float32", "nearest", None), takes_facts(rowwise, dim, extra)
    found = _lowered("program", rows, rowwise, tuple(jax.tree.leaves(rowwise.first_globals(dim))), extra, facts)
    return found.run.program if isinstance(found, Lowered) else found


def canonical_of(spec: TableSpec, rowwise: Rowwise, state: tuple[jax.Array, ...], facts: bool) -> Hashable:
    """What an update without extra arguments does, in canonical form; the transform itself, if it has none."""
    types = tuple(map(_type_of, state))
    return _canonical_of(spec.dim, spec.constraint, rowwise, types, facts, x64_enabled())


@functools.lru_cache(maxsize=256)
def _canonical_of(
    dim: int, constraint: Any, rowwise: Rowwise, globals_: tuple[jax.ShapeDtypeStruct, ...], facts: bool, x64: bool
) -> Hashable:
    try:
        return tuple(map(canonical, _traced(dim, constraint, rowwise, list(globals_), {}, facts)))
    except (TypeError, RuntimeError):  # it cannot be compared, or is of other processes
        return rowwise


def _type_of(x: Any) -> jax.ShapeDtypeStruct:
    of: Any = jax.typeof(x)
    return jax.ShapeDtypeStruct(of.shape, of.dtype, weak_type=of.weak_type)


def _traced(
    dim: int, constraint: Any, rowwise: Rowwise, globals_: list[jax.ShapeDtypeStruct], extra: Any, facts: bool
) -> tuple[Any, Any]:
    """The jaxprs of an update: of the slots of a new row, and of the update itself."""
    functions, row = update_of(rowwise, dim, extra, constraint), jax.ShapeDtypeStruct((dim,), jnp.float32)
    about = fact_types() if facts else None
    slots = list(rowwise.layout(dim).types)
    return (
        jax.make_jaxpr(functions.initial)(row),
        jax.make_jaxpr(functions.update)(row, row, slots, globals_, about),
    )


class _Rows(NamedTuple):
    """What of a table goes into the instructions of a program. Its name does not, so that tables share them; and the
    rest, such as its engine, is not kept alive by them."""

    dim: int
    dtype: str
    rounding: str
    constraint: Any


class _Made(NamedTuple):
    """An update in instructions, and the next globals."""

    encoded: Encoded
    globals_: tuple[jax.Array, ...]


def _lowered(
    name: str, rows: _Rows, rowwise: Rowwise, state: tuple[jax.Array, ...], extra: dict[str, Any], facts: bool
) -> Lowered | NotLowered:
    """The program of a table; or what in it no instruction can do."""
    of = rows, rowwise, facts, x64_enabled()
    with contextlib.suppress(_OfTrace):
        if not state and not extra:
            with computed_now():
                return _given(name, _made_alone(*of))
        if not extra and all(isinstance(x, Tracer) for x in state):  # what is known may be part of the program
            once = _made_once(*of, tuple(map(_type_of, state)), jax.sharding.get_abstract_mesh())
            return _given(name, once if isinstance(once, NotLowered) else once.of(state))
    return _given(name, _made(rows, rowwise, state, extra, facts))


def _given(name: str, made: _Made | NotLowered) -> Lowered | NotLowered:
    if isinstance(made, NotLowered):
        return made
    return Lowered(made.encoded.run(functools.partial(without_derivative, name, "apply")), made.globals_)


class _OfTrace(Exception):
    """A transform reads a value of the program around. Another program has another, so nothing is remembered."""

    @classmethod
    def check(cls, values: Iterable[Any]) -> None:
        if any(isinstance(x, Tracer) for x in values):
            raise cls


@functools.lru_cache(maxsize=256)
def _made_alone(rows: _Rows, rowwise: Rowwise, facts: bool, x64: bool) -> _Made | NotLowered:
    """Of a transform without globals, which is the same in all calls, and for all tables with such rows."""
    made = _made(rows, rowwise, (), {}, facts)
    if not isinstance(made, NotLowered):
        _OfTrace.check([*made.encoded.values, *made.encoded.rows])
    return made


class _MadeOnce(NamedTuple):
    """The update of all tables with such rows, whose globals are not known.

    Attributes:
      encoded: None in the place of what follows from globals.
      computed: globals to what follows from them: values, rows of constants, and the next globals.
    """

    encoded: Encoded
    computed: jex.ClosedJaxpr

    def of(self, state: tuple[jax.Array, ...]) -> _Made:
        made = iter(jex.jaxpr_as_fun(self.computed)(*state))
        values, rows = ([next(made) if x is None else x for x in some] for some in self.encoded[1:])
        return _Made(Encoded(self.encoded.program, values, rows), tuple(made))


@functools.lru_cache(maxsize=256)
def _made_once(
    rows: _Rows, rowwise: Rowwise, facts: bool, x64: bool, types: tuple[jax.ShapeDtypeStruct, ...], mesh: Any
) -> _MadeOnce | NotLowered:
    """mesh: of the program around, on which values in jaxprs are."""
    encoded: Any = None

    def computed(*state: jax.Array) -> Any:
        nonlocal encoded
        made = _made(rows, rowwise, state, {}, facts)
        if isinstance(made, NotLowered):
            raise made
        program, *operands = made.encoded
        encoded = Encoded(program, *([None if isinstance(x, Tracer) else x for x in some] for some in operands))
        return [x for some in operands for x in some if isinstance(x, Tracer)], made.globals_

    try:
        closed = jax.make_jaxpr(computed)(*types)
    except NotLowered as error:
        return NotLowered(*error.args)  # without frames of the trace, and without errors being handled around it
    _OfTrace.check(closed.consts)
    return _MadeOnce(encoded, closed)


def _made(
    rows: _Rows, rowwise: Rowwise, state: tuple[jax.Array, ...], extra: dict[str, Any], facts: bool
) -> _Made | NotLowered:
    try:
        globals_ = list(map(_type_of, state))
        initial, update = _traced(rows.dim, rows.constraint, rowwise, globals_, extra, facts)
        return _Trace(rows, rowwise.layout(rows.dim)).made(initial, update, state)
    except NotLowered as error:
        return NotLowered(*error.args)  # without frames of the trace, and without errors being handled around it


class _Trace:
    """The two jaxprs of an update on the way to instructions."""

    def __init__(self, spec: _Rows, layout: SlotLayout):
        self.spec, self.low = spec, Lowering(spec.dim)
        self.value = Field(VALUE, spec.dtype, spec.dim)
        self.slots = [self._slot(i, t) for i, t in enumerate(layout.types)]

    def _slot(self, number: int, of: jax.ShapeDtypeStruct) -> Field:
        if not 1 <= of.size <= self.spec.dim or str(of.dtype) not in Field.DTYPES:
            raise NotLowered(f"a slot {of.dtype}{list(of.shape)}")
        return Field(number, str(of.dtype), of.size)

    def made(self, initial: Any, update: Any, state: Any) -> _Made:
        first = self._section(initial, [self._loaded_value()], self.slots)[0]
        operands = [self.low.load(Field(GRADIENT, "float32", self.spec.dim)), self._loaded_value()]
        operands += [self.low.load(field) for field in self.slots]
        operands += map(shared, state)
        facts = zip(range(len(update.in_avals) - len(operands)), FACT_DTYPES, strict=False)
        operands += [self.low.load(Field(FACTS - i, dtype, 1)) for i, dtype in facts]
        section, rest = self._section(update, operands, [self.value, *self.slots])
        globals_ = []
        for x, old, aval in zip(rest, state, update.out_avals[1 + len(self.slots) :], strict=True):
            if not isinstance(x, Shared):
                raise NotLowered("a global that depends on a row")
            globals_.append(jnp.asarray(x.full(aval.shape), jnp.result_type(old)))
        return _Made(encoded(self.spec.dim, first, section), tuple(globals_))

    def _loaded_value(self) -> Any:
        return self.low.load(self.value, np.float32)

    def _section(self, closed: Any, args: list[Value], fields: list[Field]) -> tuple[Section, list[Value]]:
        outs = self.low.run(closed.jaxpr, closed.consts, args)
        stores = []
        for field, out in zip(fields, outs, strict=False):
            for part, first, width in parts_of(out, field.width):
                if field == self.value and self.spec.rounding != "nearest":
                    operands = [self.low.owned(part, width), self.low.register(shared(np.int32(first)))]
                    register = self.low.emitted(f"stochastic_{field.dtype}", np.float32, operands)
                else:
                    register = self.low.settled(part, width)
                stores.append((field.part(first, width), register))
        return renamed(ordered(fused(live(contracted(Section(self.low.section(), stores)))))), outs[len(fields) :]
