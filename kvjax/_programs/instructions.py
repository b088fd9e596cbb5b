"""Instructions: what an instruction is called, takes and makes, as the C++ side says it; and registers and fields."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from kvjax.ffi import host


class NotLowered(Exception):
    """What no instruction can do."""


class Form(NamedTuple):
    """Attributes:
    opcode: its number.
    arity: how many operands it has.
    reduces: it makes one element of a row's.
    """

    opcode: int
    arity: int
    reduces: bool


FORMS = {name: Form(code, arity, reduces) for code, (name, arity, reduces) in enumerate(host.INSTRUCTIONS)}

VALUE, GRADIENT, FACTS, CONSTANT, REGISTER = -1, -2, -3, -16, -(1 << 20)
"""Sources of fields that are no slots. Those of facts go down from the one, those of rows of constants and those of
vector registers from the others."""

SUFFIXES = {"float32": "f", "bfloat16": "f", "float16": "f", "int32": "i", "uint32": "i", "bool": "i", "float64": "d"}
"""Which form of an instruction computes with a dtype. What has 16 bits is computed in float32 and rounded."""


@dataclasses.dataclass(frozen=True)
class Field:
    """Elements of a row: of its value, its gradient, a fact about it, or the slot of that number; or of a row of
    constants, or of a vector register."""

    DTYPES: ClassVar = {"float32": 0, "int32": 0, "uint32": 0, "bfloat16": 1, "float16": 2, "bool": 3}

    source: int
    dtype: str
    width: int
    first: int = 0

    @property
    def type(self) -> int:
        """The number of its type in ``core/program.h``."""
        return self.DTYPES[self.dtype]

    @property
    def in_place(self) -> bool:
        """Whether instructions may work on it where it lies."""
        return self.type == 0 and self.width > 1

    def meets(self, other: Field) -> bool:
        """Whether the two have elements in common."""
        apart = self.first + self.width <= other.first or other.first + other.width <= self.first
        return self.source == other.source and not apart

    def part(self, first: int, width: int) -> Field:
        return dataclasses.replace(self, first=self.first + first, width=width)


@dataclasses.dataclass(eq=False)
class Register:
    """Elements of a row: several ("vector"), one ("scalar"), or one that all rows share.

    Attributes:
      field: where it is loaded from, if it is.
      value: of a shared one: ``()``; of constants ``(width,)``.
      width: how many elements.
      whole, first: of a part of another register: that one, and where it begins.
    """

    kind: Literal["vector", "scalar", "shared"]
    dtype: np.dtype[Any]
    field: Field | None = None
    value: Any = None
    width: int = 1
    whole: Register | None = None
    first: int = 0

    @property
    def base(self) -> Register:
        """What its elements are kept in."""
        return self.whole or self


class Instruction(NamedTuple):
    """Attributes:
    op: its name.
    out: what it makes; None of what says where the program goes on.
    args: its operands.
    """

    op: str
    out: Register | None
    args: tuple[Register, ...]
