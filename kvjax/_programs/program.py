"""Programs: instructions with places for their registers, as the words that a table reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._programs.instructions import (
    CONSTANT,
    FACTS,
    FORMS,
    GRADIENT,
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
    wanted = {register for _, register in stores}
    kept: list[Instruction] = []
    for instruction in reversed(section.instructions):
        if instruction.out in wanted:
            kept.append(instruction)
            wanted.update(instruction.args)
    return Section(kept[::-1], stores)


def ordered(section: Section) -> Section:
    """What follows from the single elements that a row keeps comes first: a table makes it once for rows that are alike
    in them (``cpu/program/alike.h``)."""
    kept: set[Register] = set()
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
        if follows and out.kind == "scalar":
            to.append(instruction)
            kept.add(out)
        else:
            rest.append(instruction)
    return Section(loads + made + rest, section.stores)


def encoded(dim: int, initial: Section, update: Section) -> tuple[Program, jax.Array]:
    """The program, and its shared registers ``(s, 2)`` uint32.

    Raises:
      NotLowered: it is longer than tables take.
    """
    encoder = _Encoder(dim)
    lists = [encoder.section(initial), encoder.section(update)]
    row = -(-dim // 2)  # cells of a row of constants
    shared = len(encoder.shared) + row * len(encoder.constants)
    if max(shared, len(encoder.fields), *map(len, lists)) > host.MAX_INSTRUCTIONS:
        raise NotLowered(f"more than {host.MAX_INSTRUCTIONS} instructions")
    head = [encoder.used["vector"], encoder.used["scalar"], shared, len(encoder.fields)]
    words = [*head, *map(len, lists)]
    constants = {field: CONSTANT - len(encoder.shared) - row * i for i, field in enumerate(encoder.constants)}
    for field in encoder.fields:
        words += [constants.get(field, field.source), field.type, field.width]
    for each in lists:
        for word in each:
            words += word
    listing = "\n".join(["initial slots:", *encoder.text(lists[0]), "update:", *encoder.text(lists[1])])
    return Program(tuple(words), listing), _cells([r.value for r in encoder.shared], list(encoder.constants.values()))


class _Encoder:
    def __init__(self, dim: int):
        self.dim = dim
        self.used = {"vector": 0, "scalar": 0}
        self.shared: dict[Register, int] = {}
        self.fields: dict[Field, int] = {}
        self.constants: dict[Field, Any] = {}

    def section(self, section: Section) -> list[list[int]]:
        instructions, in_place = self._stored(section)
        last = {a: i for i, instruction in enumerate(instructions) for a in instruction.args}
        places: dict[Register, int] = {}
        free: dict[str, list[int]] = {"vector": [], "scalar": []}

        def place(register: Register) -> int:
            if register.kind == "shared":
                return _SHARED << 16 | self.shared.setdefault(register, len(self.shared))
            field = register.field or in_place.get(register)
            if field is not None and field.source <= CONSTANT:
                self.constants[field] = register.value
            if field is not None:
                return _FIELD << 16 | self.fields.setdefault(field, len(self.fields))
            return places[register]

        words: list[list[int]] = []
        for i, (op, out, args) in enumerate(instructions):
            operands = [place(a) for a in args]
            for a in dict.fromkeys(args):
                if a in places and last[a] == i:
                    free[a.kind].append(places[a] & 0xFFFF)
            if out.kind != "shared" and out.field is None and out not in in_place:
                if not free[out.kind]:
                    free[out.kind].append(self.used[out.kind])
                    self.used[out.kind] += 1
                places[out] = _KINDS[out.kind] << 16 | free[out.kind].pop()
                if out not in last:
                    free[out.kind].append(places[out] & 0xFFFF)
            words.append([FORMS[op].opcode, place(out), *operands, *[-1] * (host.MAX_OPERANDS - len(operands))])
        return words

    def _stored(self, section: Section) -> tuple[list[Instruction], dict[Register, Field]]:
        """The instructions with those that store, and which results are made in the field where they belong."""
        instructions = list(section.instructions)
        made = {instruction.out: i for i, instruction in enumerate(instructions)}
        times = [register for _, register in section.stores]
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
                and field.in_place(self.dim)
                and times.count(register) == 1
                and loaded.get(field, -1) <= at
            ):
                in_place[register] = field
                continue
            if register.field is not None and register.field.source > GRADIENT:  # which another store may overwrite
                copy = Register(register.kind, register.dtype)
                copies.append(Instruction("mov", copy, (register,)))
                register = copy
            kind = "scalar" if register.kind == "shared" else register.kind
            last.append(Instruction("store", Register(kind, register.dtype, field), (register,)))
        return instructions + copies + last, in_place

    def text(self, words: Sequence[Sequence[int]]) -> list[str]:
        names, fields = list(FORMS), list(self.fields)

        def name(word: int) -> str:
            kind, number = word >> 16, word & 0xFFFF
            if kind != _FIELD:
                return "vsg"[kind] + str(number)
            source = fields[number].source
            if source <= FACTS:
                return f"constants{CONSTANT - source}" if source <= CONSTANT else f"fact{FACTS - source}"
            return {VALUE: "value", GRADIENT: "grad"}.get(source, f"slot{source}")

        return [f"  {name(out)} = {names[op]} {' '.join(name(a) for a in args if a >= 0)}" for op, out, *args in words]


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
