"""What a table is: the static part of a `Table`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kvjax._generated import Generated
from kvjax._initializers import Initializer, Pool

KEY_DTYPES = ("int64", "uint64", "int32", "uint32")
ROW_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """The arguments of `kvjax.get_table`, resolved. Two tables of one name must agree in all of them."""

    name: str
    dim: int
    key_dtype: str
    dtype: str
    initializer: Initializer | Pool | Generated
    seed: int
    trainable: bool
    checkpoint: bool
    rounding: str = "nearest"
    constraint: Callable[[Any], Any] | None = None

    @property
    def row_dtype(self) -> Any:
        return jnp.dtype(self.dtype)

    @property
    def generated(self) -> bool:
        """Whether initial rows come with each call, because only JAX can make them."""
        return isinstance(self.initializer, Generated)

    def differences(self, other: TableSpec) -> str:
        """ "dim 8 (not 16), seed 1 (not 2)": what this spec has and `other` has not."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self))
        return ", ".join(f"{name} {mine!r} (not {theirs!r})" for name, mine, theirs in pairs if mine != theirs)


def fail(kind: type[Exception], table: str, op: str, want: str, got: str, mend: str) -> Exception:
    """An error in the form that the C++ side uses too."""
    return kind(f"kvjax: table {table!r}, {op}: want {want}, got {got}; {mend}")
