"""Registers, and what a program computes with while it is made: registers, parts of a row, and values of no row."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax._programs.instructions import CONSTANT, FORMS, SUFFIXES, Field, Instruction, NotLowered, Register


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value that no row has, of any shape; if `uniform`, it is ``()`` and stands for an array of equal elements."""

    value: Any
    uniform: bool

    @property
    def concrete(self) -> bool:
        return not isinstance(self.value, Tracer)

    def full(self, shape: Sequence[int]) -> Any:
        return jnp.broadcast_to(self.value, shape) if self.uniform else self.value


@dataclasses.dataclass(frozen=True)
class Parts:
    """A row in parts, in their order: each with how many elements it has."""

    each: tuple[tuple[Register | Shared, int], ...]


Value = Register | Shared | Parts


class Registers:
    """The instructions of rows of `dim` elements, so far."""

    def __init__(self, dim: int):
        self.dim = dim
        self.instructions: list[Instruction] = []
        self._made: dict[Any, Register] = {}  # what an instruction has made of these operands before
        self._shared: dict[Any, Register] = {}
        self._held: list[Any] = []

    def load(self, field: Field, dtype: Any = None) -> Register:
        """The register of a part of the row, as `dtype`."""
        kind = "vector" if field.width > 1 else "scalar"
        register = Register(kind, np.dtype(jnp.dtype(dtype or field.dtype)), field, width=field.width)
        return register if field.in_place else self._append("load", register.dtype, [register], field.width)

    def register(self, value: Value) -> Register:
        if isinstance(value, Register):
            return value
        if isinstance(value, Parts):
            raise NotLowered("a row in parts in the place of a whole one")
        dtype = jnp.result_type(value.value)
        row = not value.uniform and np.size(value.value) > 1 and dtype.itemsize <= 4
        if not (value.uniform or row) or str(dtype) not in SUFFIXES:
            raise NotLowered(f"a value of no row, {dtype}{list(np.shape(value.value))}")
        key = (str(dtype), np.asarray(value.value).tobytes()) if value.concrete else id(value.value)
        if (row, key) not in self._shared:
            register = Register("shared", dtype, value=value.value)
            if row:
                width = np.size(value.value)
                field = Field(CONSTANT - len(self._shared), "float32", width)
                register = Register("vector", dtype, field, (np if value.concrete else jnp).ravel(value.value), width)
            self._shared[row, key] = register
            self._held.append(value.value)  # so that no other one gets its number
        return self._shared[row, key]

    def emit(self, op: str, dtype: Any, *args: Value) -> Value:
        """Appends an instruction, for each part of its operands; its result has the elements of the widest."""
        if op not in FORMS:
            raise NotLowered(op)
        if any(isinstance(x, Parts) for x in args):
            ends = {end for x in args if isinstance(x, Parts) for end in itertools.accumulate(n for _, n in x.each)}
            spans = list(itertools.pairwise(sorted({0, *ends})))
            each = [[self.part(x, first, end) for x in args] for first, end in spans]
            return joined([(self.emit(op, dtype, *some), b - a) for some, (a, b) in zip(each, spans, strict=True)])
        return self.emitted(op, dtype, [self.register(x) for x in args])

    def emitted(self, op: str, dtype: Any, registers: list[Register]) -> Register:
        """Appends an instruction."""
        if op == "select" and any(r.dtype == np.float64 for r in registers):
            raise NotLowered("select of float64")
        vector = any(r.kind == "vector" for r in registers) and not FORMS[op].reduces
        if vector and (op.endswith("_d") or any(r.dtype == np.float64 for r in registers)):
            raise NotLowered("float64 rows")
        widths = {r.width for r in registers if r.kind == "vector"}
        if len(widths) > 1 or max(widths, default=1) > self.dim:
            raise NotLowered(f"{op} of {sorted(widths)} elements")
        return self._append(op, np.dtype(dtype), registers, max(widths) if vector else 1)

    def widened(self, value: Value, width: int) -> Register:
        """A vector of equal elements."""
        register = self.register(value)
        if register.kind == "vector":
            return register
        if register.dtype == np.float64 or width > self.dim:
            raise NotLowered("float64 rows, or wider ones")
        return self._append("mov", register.dtype, [register], width)

    def single(self, value: Value) -> Register:
        """One element: of the row's own, or that all rows share."""
        register = self.register(value)
        if register.kind == "vector":
            raise NotLowered("a row in the place of one element")
        return register

    def part(self, value: Value, first: int, end: int) -> Value:
        """Elements of a row. A scalar stands for any number of them."""
        if isinstance(value, Parts):
            met = [
                (x, max(first - at, 0), min(end - at, n)) for x, at, n in parts_of(value) if at < end and first < at + n
            ]
            return joined([(self.part(x, a, b), b - a) for x, a, b in met])
        if isinstance(value, Shared):
            if value.uniform or end - first == np.size(value.value):
                return value
            return shared((np if value.concrete else jnp).ravel(value.value)[first:end])
        if value.kind != "vector" or end - first == value.width:
            return value
        width, key = end - first, (value.field or value.base, value.first + first, end - first)
        if key not in self._made:
            if value.field is not None:
                self._made[key] = self.load(value.field.part(first, width), value.dtype)
            else:
                part = Register("vector", value.dtype, width=width, whole=value.base, first=value.first + first)
                self._made[key] = part if width > 1 else self._append("load", value.dtype, [part], 1)
        return self._made[key]

    def settled(self, value: Value, width: int) -> Register:
        """Elements of a row's own, or one that may be shared."""
        return self.widened(value, width) if width > 1 else self.single(value)

    def owned(self, value: Value, width: int) -> Register:
        """Elements of a row's own, which no other row shares."""
        register = self.settled(value, width)
        return self._append("mov", register.dtype, [register], 1) if register.kind == "shared" else register

    def variable(self, value: Value, width: int) -> Register:
        """A register that may change, of this value at first."""
        start = self.settled(value, width)
        if start.dtype.itemsize > 4:
            raise NotLowered(f"{start.dtype} that changes in a loop")
        variable = Register("vector" if start.width > 1 else "scalar", start.dtype, width=start.width)
        self.instructions.append(Instruction("mov", variable, (start,)))
        return variable

    def section(self) -> list[Instruction]:
        """The instructions up to here; those that follow know nothing of them."""
        instructions, self.instructions, self._made = self.instructions, [], {}
        return instructions

    def _append(self, op: str, dtype: Any, args: Sequence[Register], width: int) -> Register:
        key = (op, dtype, width, *(a.field or a for a in args))
        if key not in self._made:
            self._made[key] = Register("vector" if width > 1 else "scalar", dtype, width=width)
            self.instructions.append(Instruction(op, self._made[key], tuple(args)))
        return self._made[key]


def joined(parts: Sequence[tuple[Value, int]]) -> Value:
    """A row of these parts."""
    each = [some for x, n in parts for some in (x.each if isinstance(x, Parts) else [(x, n)])]
    return each[0][0] if len(each) == 1 else Parts(tuple(each))


def parts_of(value: Value, width: int = 0) -> list[tuple[Register | Shared, int, int]]:
    """Each part of a row with where it begins and how many elements it has."""
    each = value.each if isinstance(value, Parts) else ((value, width),)
    begins = itertools.accumulate((n for _, n in each), initial=0)
    return [(x, begin, n) for (x, n), begin in zip(each, begins, strict=False)]


def shared(x: Any) -> Shared:
    if np.size(x) == 1:
        return Shared(jnp.reshape(x, ()) if isinstance(x, jax.Array) else np.asarray(x).reshape(()), True)
    if not isinstance(x, Tracer) and np.size(x):
        each = np.asarray(x).ravel()
        if each.tobytes() == each[:1].tobytes() * each.size:  # by bits: 0 and -0 are equal
            return Shared(each[0], True)
    return Shared(x, False)
