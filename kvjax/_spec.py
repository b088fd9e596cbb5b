"""What a table is: the static part of a `Table`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax._admit import NUM_BUCKETS, Admission, MinCount, Sketch
from kvjax._admit import options as admission_options
from kvjax._evict import Every, Policy, call_score
from kvjax._generated import Generated
from kvjax._initializers import Initializer, Pool, native
from kvjax._storage import Host, Storage

KEY_DTYPES = ("int64", "uint64", "int32", "uint32")
ROW_DTYPES = ("float32", "bfloat16", "float16")
ON_FULL = ("grow", "evict", "error")
COUNTS = ("occurrences", "batch")


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """The arguments of `kvjax.get_table`, resolved. Two tables of one name must agree in all of them."""

    name: str
    dim: int
    key_dtype: str
    dtype: str
    initializer: Initializer | Pool | Generated
    seed: int
    trainable: bool = True
    checkpoint: bool = True
    capacity: int = 0
    max_capacity: int | None = None
    on_full: str = "grow"
    admit: Admission | None = None
    evict: Policy | Every | None = None
    count: str = "occurrences"
    storage: Storage = Host()  # noqa: RUF009  (frozen)
    rounding: str = "nearest"
    constraint: Callable[[Any], Any] | None = None

    @property
    def row_dtype(self) -> Any:
        return jnp.dtype(self.dtype)

    @property
    def generated(self) -> bool:
        """Whether initial rows come with each call, because only JAX can make them."""
        return isinstance(self.initializer, Generated)

    @property
    def keeps_counts(self) -> bool:
        """Whether keys without a row are counted one by one."""
        return isinstance(self.admit, MinCount)

    @property
    def shared_words(self) -> np.ndarray:
        """The words ``(2,)`` of the key whose row unadmitted keys share; zeros if there is none."""
        key = 0 if self.admit is None or isinstance(self.admit.unadmitted, str) else int(self.admit.unadmitted)
        return np.array([key % 2**64], np.uint64).view(np.uint32)

    @property
    def sketch_cells(self) -> int:
        return self.admit.cells * NUM_BUCKETS if isinstance(self.admit, Sketch) else 0

    def host_options(self) -> dict[str, Any]:
        """What the C++ side is told."""
        kind, a, b, pool = native(self.initializer)
        policy = self.evict.policy if isinstance(self.evict, Every) else self.evict
        return {
            "dim": self.dim,
            "dtype": self.dtype,
            "kind": kind,
            "a": a,
            "b": b,
            "pool": pool,
            "seed": self.seed,
            "storage": self.storage.text,
            "capacity": self.capacity,
            "max_capacity": self.max_capacity or 0,
            "on_full": self.on_full,
            "admit": None if self.admit is None else admission_options(self.admit, self.seed),
            "policy": "" if policy is None else policy.text(),
            "evict_every": self.evict.steps if isinstance(self.evict, Every) else 0,
            "count_batches": self.count == "batch",
            "score": functools.partial(call_score, self.dim, self.row_dtype, self.key_dtype),
        }

    def differences(self, other: TableSpec) -> str:
        """ "dim 8 (not 16), seed 1 (not 2)": what this spec has and `other` has not."""
        mine, theirs = vars(self), vars(other)
        different = [k for k in mine if mine[k] != theirs[k]]
        alike = " another function; define it once, at the top of a module"
        return ", ".join(
            f"{k} {mine[k]!r} (not {theirs[k]!r}{alike if repr(mine[k]) == repr(theirs[k]) else ''})" for k in different
        )


def fail(kind: type[Exception], table: str, op: str, want: str, got: str, mend: str) -> Exception:
    """An error in the form that the C++ side uses too."""
    return kind(f"kvjax: table {table!r}, {op}: want {want}, got {got}; {mend}")
