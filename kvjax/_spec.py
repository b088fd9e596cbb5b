"""What a table is: the static part of a `Table`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from kvjax._admit import NUM_BUCKETS, Admission, MinCount, Sketch
from kvjax._admit import options as admission_options
from kvjax._evict import Every, Policy, call_score
from kvjax._generated import Generated
from kvjax._initializers import Initializer, Pool, native
from kvjax._placement import Placement
from kvjax._storage import Host, Storage
from kvjax.ffi import host, module

if TYPE_CHECKING:
    from kvjax.ffi._native import Native  # pyright: ignore[reportMissingModuleSource]  # a stub alone

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
    placement: Placement | None = None

    @property
    def host(self) -> Native:
        """Where whole-table calls go: the module of the backend that holds the table."""
        return module(self.storage.backend)

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
    def shares_row(self) -> bool:
        """Whether unadmitted keys share the row of a key."""
        return self.admit is not None and not isinstance(self.admit.unadmitted, str)

    @property
    def num_facts(self) -> int:
        """How many numbers the shards of a spread table tell each other in a training step."""
        return host.SUMMARY_WORDS + (self.dim if self.shares_row else 0)

    @property
    def spread(self) -> Placement:
        """The placement of a table that has one."""
        assert self.placement is not None
        return self.placement

    @property
    def tells_facts(self) -> bool:
        """Whether a shard has to know what the others have planned before it can say what it will do."""
        decides_alone = self.placement is None or self.placement.replicated
        return not decides_alone and (self.shares_row or self.max_capacity is not None or self.evict is not None)

    @property
    def shards(self) -> range:
        """The shards that this process has, by number; a table in one place is its own shard 0."""
        return range(1 if self.placement is None else len(self.placement.local))

    @property
    def num_shards(self) -> int:
        return 1 if self.placement is None else self.placement.num_shards

    @property
    def kept(self) -> list[int]:
        """Those of them that are no copies of another."""
        return [0] if self.placement is None else [i for i, _ in self.placement.kept]

    @property
    def originals(self) -> list[int]:
        """Those of which all others, in whatever process, are copies: each row of the table is on one of them."""
        local = () if self.placement is None else self.placement.local
        return [0] if self.placement is None else [i for i, shard in enumerate(local) if shard.replica == 0]

    @property
    def sketch_cells(self) -> int:
        return self.admit.cells * NUM_BUCKETS if isinstance(self.admit, Sketch) else 0

    def host_shards(self) -> dict[str, Any]:
        """Where the C++ side shall have them."""
        if self.placement is None:
            return {"devices": [self.host.HOME], "shards": [0], "owns_shared": [True]}
        local = self.placement.local
        owner = self.placement.owners(self.shared_words.view(np.int64))[0] if self.shares_row else 0
        return {
            "devices": [shard.device for shard in local],
            "shards": [shard.shard for shard in local],
            "owns_shared": [bool(shard.shard == owner) for shard in local],
        }

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
            "sharded": self.placement is not None,
            "capacity": -(-self.capacity // self.num_shards),
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
