"""The spec of a table: its name, its dim, its options resolved, and where its rows live."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from kvjax._process import PROCESS
from kvjax._spec.options import ENTRIES, Options, Request
from kvjax._spec.placement import Placement
from kvjax._values.exported import Exported
from kvjax._values.key_width import own_key
from kvjax._values.snapshot import from_native
from kvjax.admit import MinCount, Sketch
from kvjax.ffi import host, module
from kvjax.initializers import Generated, ResolvedInitializer
from kvjax.storage import External, Storage, of_table

if TYPE_CHECKING:
    from kvjax.ffi._native import Native  # pyright: ignore[reportMissingModuleSource]  # a stub alone


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class TableSpec(Options):
    """What a table is. Two tables of one name must agree in all of it."""

    name: str
    dim: int
    placement: Placement | None = None

    if TYPE_CHECKING:
        # Resolved, these are of narrower types; pyright wants those of `Options`, and defaults.
        key_dtype: str  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
        dtype: str  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
        initializer: ResolvedInitializer  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
        seed: int  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]
        storage: Storage  # pyright: ignore[reportGeneralTypeIssues, reportIncompatibleVariableOverride]

    @classmethod
    def resolve(cls, name: str, op: str, dim: Any, placement: Placement | None, options: Options) -> TableSpec:
        """The spec of a table that is asked for.

        Raises:
          ValueError, TypeError: an option is out of range.
        """
        request = Request(name, op, dim)
        for option in ENTRIES:
            request.resolve(option, getattr(options, option))
        return cls(name=name, dim=request.dim, placement=placement, **request.options)

    def __post_init__(self) -> None:
        if isinstance(self.storage, External):
            vars(self)["storage"] = of_table(self.storage)

    def __setattr__(self, option: str, value: Any) -> None:
        # What `frozen=True` would do, which a subclass of `Options` cannot have: compiled programs are found by specs.
        if option in vars(self):
            raise dataclasses.FrozenInstanceError(f"cannot change {option} of the spec of table {self.name!r}")
        super().__setattr__(option, value)

    # ---- rows ----------------------------------------------------------------------------------------------

    @property
    def row_dtype(self) -> np.dtype[Any]:
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
    def sketch_cells(self) -> int:
        return self.admit.cells * host.NUM_BUCKETS if isinstance(self.admit, Sketch) else 0

    @property
    def shares_row(self) -> bool:
        """Whether unadmitted keys share the row of a key."""
        return self.shared_key is not None

    @property
    def shared_key(self) -> int | None:
        """The key whose row unadmitted keys share; None if there is none."""
        return None if self.admit is None or isinstance(self.admit.unadmitted, str) else int(self.admit.unadmitted)

    @property
    def shared_words(self) -> np.ndarray:
        """The words ``(2,)`` of the key whose row unadmitted keys share; zeros if there is none."""
        return np.array([own_key(self.shared_key or 0, self.key_dtype)], np.uint64).view(np.uint32)

    def exported(self, raw: dict[str, Any]) -> Exported:
        """The rows that the C++ side has copied out."""
        return from_native(raw, self.dim, self.row_dtype, self.key_dtype).rows

    # ---- shards --------------------------------------------------------------------------------------------

    @property
    def mesh_placement(self) -> Placement:
        """The placement of a table that has one."""
        assert self.placement is not None
        return self.placement

    @property
    def sharded(self) -> bool:
        """Whether several devices have rows of the table, or copies of it: on a mesh of one, calls are as in one
        place."""
        return self.placement is not None and not self.placement.alone

    @property
    def num_shards(self) -> int:
        return 1 if self.placement is None else self.placement.num_shards

    @property
    def num_processes(self) -> int:
        """Of which each has a part of the table, or of its copies."""
        return 1 if self.placement is None else self.placement.num_processes

    @property
    def shards(self) -> range:
        """The shards that this process has, by number; a table in one place is its own shard 0."""
        return range(1 if self.placement is None else len(self.placement.local))

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
    def needs_summaries(self) -> bool:
        """Whether a shard has to know what the others have planned before it can say what it will do."""
        decides_alone = self.placement is None or self.placement.replicated
        return not decides_alone and (self.shares_row or self.max_capacity is not None or self.evict is not None)

    @property
    def summary_words(self) -> int:
        """How many numbers a shard's summary of a training step has."""
        return host.SUMMARY_WORDS + (self.dim if self.shares_row else 0)

    # ---- the C++ side --------------------------------------------------------------------------------------

    @property
    def host(self) -> Native:
        """Where whole-table calls go: the module of the backend that holds the table."""
        return module(self.storage.backend)

    @property
    def placement_number(self) -> int:
        """By which compiled programs know that rows are where they were; 0 of a table in one place."""
        return 0 if self.placement is None else PROCESS.number_of(self.placement)

    # ---- compared with another -----------------------------------------------------------------------------

    def differences(self, other: TableSpec) -> str:
        """ "dim 8 (not 16), seed 1 (not 2)": what this spec has and `other` has not."""
        mine, theirs = vars(self), vars(other)
        return ", ".join(
            f"{k} {_shown(mine[k], theirs[k])}" for k in ("dim", *ENTRIES, "placement") if mine[k] != theirs[k]
        )

    def moved_from(self, other: TableSpec) -> bool:
        """Whether this is the table of `other`, which `Table.to` or `reshard` may have put elsewhere."""
        return self == dataclasses.replace(other, placement=self.placement, storage=self.storage)

    def instead_of(self, other: TableSpec) -> tuple[str, str]:
        """What an error says where this table is and `other` was wanted: what it got, and the mend."""
        if self.moved_from(other):
            return f"that table moved to {self.differences(other)}", "get its handle by table.refresh()"
        return f"another of its name, with {self.differences(other)}", "get its handle by kvjax.get_table(name)"


def _shown(mine: Any, theirs: Any) -> str:
    placements = isinstance(mine, Placement) or isinstance(theirs, Placement)
    left, right = (repr(x) if not placements else "one place" if x is None else str(x) for x in (mine, theirs))
    if left != right:
        return f"{left} (not {right})"
    other = "on other devices or by another function" if placements else "another function"
    return f"{left} (not {right} {other}; define it once, at the top of a module)"
