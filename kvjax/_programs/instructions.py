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

VALUE, GRADIENT, FACTS, CONSTANT = -1, -2, -3, -16
"""Sources of fields that are no slots. Those of facts go down from the one, those of rows of constants from the other.
"""

SUFFIXES = {"float32": "f", "bfloat16": "f", "float16": "f", "int32": "i", "uint32": "i", "bool": "i", "float64": "d"}
"""Which form of an instruction computes with a dtype. What has 16 bits is computed in float32 and rounded."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A part of a row: its value, its gradient, a fact about it, or the slot of that number; or a row of constants."""

    DTYPES: ClassVar = {"float32": 0, "int32": 0, "uint32": 0, "bfloat16": 1, "float16": 2, "bool": 3}

    source: int
    dtype: str
    width: int

    @property
    def type(self) -> int:
        """The number of its type in ``core/program.h``."""
        return self.DTYPES[self.dtype]

    def in_place(self, dim: int) -> bool:
        """Whether instructions may work on it where it lies."""
        return self.type == 0 and self.width == dim > 1


@dataclasses.dataclass(eq=False)
class Register:
    """Elements of a row: all ("vector"), one ("scalar"), or one that all rows share.

    Attributes:
      field: where it is loaded from, if it is.
      value: of a shared one: ``()``; of constants ``(dim,)``.
    """

    kind: Literal["vector", "scalar", "shared"]
    dtype: np.dtype[Any]
    field: Field | None = None
    value: Any = None


class Instruction(NamedTuple):
    op: str
    out: Register
    args: tuple[Register, ...]
