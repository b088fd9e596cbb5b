"""Programs: instructions with places for their registers, as the words that a table reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._programs.instructions import (
    CONSTANT,
    FACTS,
    FORMS,
    GRADIENT,
    REGISTER,
    VALUE,
    Field,
    Instruction,
    NotLowered,
    Register,
)
from kvjax.ffi import host

_VECTOR, _SCALAR, _SHARED, _FIELD = range(4)  # kinds of registers, as core/program.h numbers them
_KINDS = {"vector": _VECTOR, "scalar": _SCALAR}


@dataclasses.dataclass(frozen=True)
class Program:
    """The update of one row as plain data. Two programs that do the same in the same way are equal.

    Attributes:
      words: int32, as ``core/program.h`` reads them.
      listing: the same for people.
    """

    words: tuple[int, ...]
    listing: str = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return self.listing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
    """A program with its operands.

    Attributes:
      program: what is done to each row.
      shared: ``(s, 2)`` uint32, its shared registers, eight bytes each, and behind them rows of constants.
    """

    program: Program = dataclasses.field(metadata={"static": True})
    shared: jax.Array


@dataclasses.dataclass
class Section:
    """Instructions, and what they leave in which fields."""

    instructions: list[Instruction]
    stores: list[tuple[Field, Register]]


def live(section: Section) -> Section:
    """Without what nothing reads, and without stores of what is there already."""
    stores = [(field, register) for field, register in section.stores if register.field != field]
    wanted, before = {register.base for _, register in stores}, -1
    kept: list[Instruction] = []
    while len(wanted) != before:  # what a loop changes at its end it may read at its begin
        kept, before = [], len(wanted)
        for instruction in reversed(section.instructions):
            if instruction.out is None or instruction.out in wanted:
                kept.append(instruction)
                wanted.update(a.base for a in instruction.args)
    return Section(kept[::-1], stores)


def ordered(section: Section) -> Section:
    """What follows from the single elements that a row keeps comes first: a table makes it once for rows that are alike
    in them (``cpu/program/alike.h``)."""
    kept: set[Register] = set()
    times = Counter(instruction.out for instruction in section.instructions)  # what changes in a loop is made twice
    loads: list[Instruction] = []
    made: list[Instruction] = []
    rest: list[Instruction] = []
    for instruction in section.instructions:
        op, out, args = instruction
        if op == "load":
            field = args[0].field
            follows, to = field is not None and field.source >= 0, loads
        else:
            follows, to = any(a in kept for a in args) and all(a in kept or a.kind == "shared" for a in args), made
        if follows and out is not None and out.kind == "scalar" and times[out] == 1:
            to.append(instruction)
            kept.add(out)
        else:
            rest.append(instruction)
    return Section(loads + made + rest, section.stores)


class Encoded(NamedTuple):
    """A program and what its operands hold: the values of its shared registers, and rows of constants."""

    program: Program
    values: list[Any]
    rows: list[Any]

    def run(self, given: Callable[[Any], Any]) -> Run:
        """With its operands as a table reads them. `given` is done to those that are traced."""
        traced = ([given(x) if isinstance(x, Tracer) else x for x in some] for some in (self.values, self.rows))
        return Run(self.program, _cells(*traced))


def encoded(dim: int, initial: Section, update: Section) -> Encoded:
    """The program of an update.

    Raises:
      NotLowered: it is longer than tables take.
    """
    encoder = _Encoder(dim)
    lists = [encoder.section(initial), encoder.section(update)]
    cells = [-(-field.width // 2) for field in encoder.constants]  # of each row of constants
    shared = len(encoder.shared) + sum(cells)
    if max(shared, len(encoder.fields), *map(len, lists)) > host.MAX_INSTRUCTIONS:
        raise NotLowered(f"more than {host.MAX_INSTRUCTIONS} instructions")
    head = [encoder.used["vector"], encoder.used["scalar"], shared, len(encoder.fields)]
    words = [*head, *map(len, lists)]
    begins = itertools.accumulate(cells, initial=len(encoder.shared))
    constants = {field: CONSTANT - begin for field, begin in zip(encoder.constants, begins, strict=False)}
    for field in encoder.fields:
        words += [constants.get(field, field.source), field.type, field.first, field.width]
    for each in lists:
        for word in each:
            words += word
    listing = "\n".join(["initial slots:", *encoder.text(lists[0]), "update:", *encoder.text(lists[1])])
    return Encoded(Program(tuple(words), listing), [r.value for r in encoder.shared], list(encoder.constants.values()))


class _Encoder:
    def __init__(self, dim: int):
        self.dim = dim
        self.used = {"vector": 0, "scalar": 0}
        self.shared: dict[Register, int] = {}
        self.fields: dict[Field, int] = {}
        self.constants: dict[Field, Any] = {}

    def section(self, section: Section) -> list[list[int]]:
        instructions, in_place = self._stored(section)
        last = _last_uses(instructions)
        places: dict[Register, int] = {}
        free: dict[str, list[int]] = {"vector": [], "scalar": []}

        def place(register: Register) -> int:
            if register.kind == "shared":
                return _SHARED << 16 | self.shared.setdefault(register, len(self.shared))
            field, base = register.field or in_place.get(register.base), register.base
            if field is None and register.kind == "vector" and (base is not register or register.width != self.dim):
                field = Field(REGISTER - (places[base] & 0xFFFF), "float32", base.width)
            if field is None:
                return places[register]
            if base is not register:
                field = field.part(register.first, register.width)
            if REGISTER < field.source <= CONSTANT:
                self.constants[field] = register.value
            return _FIELD << 16 | self.fields.setdefault(field, len(self.fields))

        words: list[list[int]] = []
        for i, (op, out, args) in enumerate(instructions):
            operands = [place(a) for a in args]
            ended = [r for r in last.get(i, ()) if r in places]
            parts = any(a.whole is not None for a in args)  # whose elements move: they stay until these are made
            for r in () if parts else ended:
                free[r.kind].append(places[r] & 0xFFFF)
            if out is not None and out.field is None and out not in in_place and out not in places:
                if not free[out.kind]:
                    free[out.kind].append(self.used[out.kind])
                    self.used[out.kind] += 1
                places[out] = _KINDS[out.kind] << 16 | free[out.kind].pop()
            for r in ended if parts else ():
                free[r.kind].append(places[r] & 0xFFFF)
            to = -1 if out is None else place(out)
            words.append([FORMS[op].opcode, to, *operands, *[-1] * (host.MAX_OPERANDS - len(operands))])
        return words

    def _stored(self, section: Section) -> tuple[list[Instruction], dict[Register, Field]]:
        """The instructions with those that store, and which results are made in the field where they belong."""
        instructions = list(section.instructions)
        made = {instruction.out: i for i, instruction in enumerate(instructions)}
        times = Counter([*(register for _, register in section.stores), *(i.out for i in instructions)])
        read = {a: i for i, instruction in enumerate(instructions) for a in instruction.args}
        loaded: dict[Field, int] = {}
        for a, i in read.items():
            if a.field is not None:
                loaded[a.field] = max(i, loaded.get(a.field, -1))
        for _, register in section.stores:
            if register.field is not None:
                loaded[register.field] = len(instructions)
        in_place: dict[Register, Field] = {}
        last: list[Instruction] = []
        copies: list[Instruction] = []
        for field, register in section.stores:
            at = made.get(register)
            if (
                at is not None
                and register.kind == "vector"
                and field.in_place
                and times[register] == 2  # it is made and stored, once
                and all(i < at or (i == at and read == field) for read, i in loaded.items() if read.meets(field))
            ):
                in_place[register] = field
                continue
            if register.field is not None and register.field.source > GRADIENT:  # which another store may overwrite
                copy = Register(register.kind, register.dtype, width=register.width)
                copies.append(Instruction("mov", copy, (register,)))
                register = copy
            kind = "scalar" if register.kind == "shared" else register.kind
            last.append(Instruction("store", Register(kind, register.dtype, field, width=field.width), (register,)))
        return instructions + copies + last, in_place

    def text(self, words: Sequence[Sequence[int]]) -> list[str]:
        names, fields = list(FORMS), list(self.fields)

        def name(word: int) -> str:
            kind, number = word >> 16, word & 0xFFFF
            if kind != _FIELD:
                return "vsg"[kind] + str(number)
            field = fields[number]
            part = f"[{field.first}:{field.first + field.width}]"
            if field.source <= REGISTER:
                return f"v{REGISTER - field.source}{part}"
            if field.source <= FACTS:
                of_rows = field.source > CONSTANT
                return f"fact{FACTS - field.source}" if of_rows else f"constants{CONSTANT - field.source}"
            whole = field.width == self.dim or (field.source >= 0 and field.first == 0)
            return {VALUE: "value", GRADIENT: "grad"}.get(field.source, f"slot{field.source}") + ("" if whole else part)

        def line(op: int, out: int, args: Sequence[int]) -> str:
            does = " ".join([names[op], *(name(a) for a in args if a >= 0)])
            return does if out < 0 else f"{name(out)} = {does}"

        return [f"  {line(op, out, args)}" for op, out, *args in words]


def _last_uses(instructions: Sequence[Instruction]) -> dict[int, list[Register]]:
    """By instruction, the registers that nothing reads after it. What a loop has from before it keeps to its end."""
    first: dict[Register, int] = {}
    last: dict[Register, int] = {}
    begins: list[int] = []
    for i, (op, out, args) in enumerate(instructions):
        touched = [register.base for register in (*args, *([] if out is None else [out]))]
        for register in touched:
            first.setdefault(register, i)
            last[register] = i
        if op == "loop":
            begins.append(i)
        if op == "again":
            begin = begins.pop()
            last |= {register: i for register, at in last.items() if at > begin and first[register] < begin}
    ends: dict[int, list[Register]] = {}
    for register, i in last.items():
        ends.setdefault(i, []).append(register)
    return ends


def _cells(values: Sequence[Any], rows: Sequence[Any]) -> Any:
    """Eight bytes for each value, of which numbers of four have the first, and then rows. What is known is known to
    NumPy, whose arrays belong to no trace and no mesh."""
    cells = [_cell(jnp.asarray(x)) if isinstance(x, Tracer) else _known(x) for x in values]
    cells = [np.zeros((0, 2), np.uint32), *(x[None] for x in cells), *map(_row_cells, rows)]
    return (jnp if any(isinstance(x, Tracer) for x in cells) else np).concatenate(cells)


def _row_cells(x: Any) -> Any:
    """A row of constants: four bytes for each element."""
    if not isinstance(x, Tracer):
        x = np.asarray(x)
        words = x.astype(np.float32 if jnp.issubdtype(x.dtype, jnp.floating) else np.uint32).view(np.uint32)
        return np.pad(words, (0, words.size % 2)).reshape(-1, 2)
    words = jax.vmap(_cell)(x)[:, 0]
    return jnp.pad(words, (0, words.size % 2)).reshape(-1, 2)


def _known(x: Any) -> np.ndarray:
    x = np.asarray(x)
    if x.dtype != np.float64:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        x = np.array([x, 0]).astype(np.float32 if floating else np.uint32)
    return x.reshape(-1).view(np.uint32)


def _cell(x: jax.Array) -> jax.Array:
    if x.dtype == np.float64:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    x = x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
    return jnp.stack([jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(0)])
