from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy
import numpy.typing

class Prepared:
    """Contents that are read for a table; nothing has changed yet."""

class Staged:
    """Shards that no call finds yet."""

class Frozen:
    """The rows of a shard as they were at one moment."""

class Native(Protocol):
    """A native module: the calls on whole tables of one backend, its handlers and constants."""

    MAX_DIM: int = 1048576
    CANARY: int = 1802922616
    NUM_BUCKETS: int = 65536
    TALLY_WORDS: int = 512
    SUMMARY_WORDS: int = 5

    def set_process(self, process: int) -> None:
        """
        Says which of several processes this is, so that the numbers of their failures differ.
        """

    def left_failures(self) -> list[tuple[int, str, list[str], bool]]:
        """
        Failures nobody has asked for: numbers, texts, tables whose steps they were, whether others followed.
        """

    def forget_failures(self, table: str) -> None:
        """Says that a table is gone, and with it those whose steps were refused."""

    def ask_failure(self, number: int) -> None:
        """
        Raises the failure of a number, unless somebody has asked for it before.
        """

    def owners(self, keys: numpy.typing.NDArray[numpy.int64], shards: int) -> numpy.typing.NDArray[numpy.int32]:
        """The shard (n,) of each key by its virtual bucket."""

    def hash_strings(self, items: Sequence[str | bytes], salt: int) -> numpy.typing.NDArray[numpy.int64]:
        """A key (n,) for each of n strings, as UTF-8."""

    def hash_spans(
        self,
        data: numpy.typing.NDArray[numpy.uint8],
        begins: numpy.typing.NDArray[numpy.int64],
        ends: numpy.typing.NDArray[numpy.int64],
        salt: int,
    ) -> numpy.typing.NDArray[numpy.int64]:
        """A key (n,) for each of n strings in one buffer, as UTF-8."""

    def digest(self, data: numpy.typing.NDArray[numpy.uint8]) -> int:
        """The XXH64 of bytes (n,)."""

    def hash_integers(self, items: numpy.typing.NDArray[numpy.int64], salt: int) -> numpy.typing.NDArray[numpy.int64]:
        """A key (n,) for each of n numbers."""
    OPERATIONS: dict[str, dict[str, bool]]
    INSTRUCTIONS: list[tuple[str, int, bool]]
    FUSED: dict[str, tuple[str, str]]
    MAX_OPERANDS: int = 5
    MAX_INSTRUCTIONS: int = 4096
    HOME: int

    def create(
        self,
        name: str,
        options: dict[str, object],
        devices: Sequence[int],
        shards: Sequence[int],
        owns_shared: Sequence[bool],
        first_version: int,
    ) -> None:
        """
        Makes the shards of a table that live in this process.

        options: what a table is, by the keys dim, dtype, kind, segments, pool, seed (of the initializer), storage,
        placement, sharded, capacity, max_capacity, on_full, admit (None, or a dict of kvjax.admit), policy,
        evict_every, count_batches, score and engine (of storage.External).
        devices, shards, owns_shared: for each shard the device it lives on, its number,
        and whether it has the row that unadmitted keys share; [HOME], [0], [True] for a table in one place.
        """

    def drop(self, name: str, op: str = "drop_table", only_at: int | None = None) -> int:
        """
        Forgets a table, unless it has been written since version `only_at`. Returns the first version of a later
        table of the name.
        """

    def version(self, name: str, shard: int) -> int:
        """The live version, once no write is under way."""

    def size(self, name: str, shard: int, version: int, op: str = "size") -> int:
        """The number of rows of a shard. op: of the call that asks, for errors."""

    def reserve(self, name: str, shard: int, version: int, n: int) -> None:
        """Makes space for n rows in all."""

    def export_table(
        self, name: str, shard: int, version: int, with_slots: bool, op: str = "export", raises: bool = True
    ) -> dict[str, object]:
        """
        The snapshot of a shard as flat arrays, sorted by (bucket, key): keys, values, freqs, versions, has_slots,
        pinned, offsets, last_step, slots as (name, type, bytes), and of its admission pending_keys,
        pending_counts and sketch. op: of the call that wants it, for errors. raises: whether to raise what other
        calls have been refused for, which a device says late.
        """

    def stats(self, name: str, shard: int, raises: bool = True) -> dict[str, Any]:
        """
        What a shard holds and has done, by name; "evicted" is a dict of rows by reason. raises: as of
        export_table.
        """

    def rows(self, name: str, shard: int) -> tuple[int, int]:
        """The number of rows, and the version they belong to."""

    def slots(self, name: str, shard: int) -> list[tuple[str, str]]:
        """The optimizer's slots as (name, type), in its order."""

    def set_sink(self, name: str, shard: int, sink: Callable[[dict[str, object], str], None] | None) -> None:
        """Sets the function that is given evicted rows, as (snapshot, reason)."""

    def begin_load(self, name: str, shard: int, version: int, head: dict[str, object]) -> Prepared:
        """
        Begins to read the contents of a shard: the number of rows, last_step, slots as (name, type, bytes of one),
        and pending_keys, pending_counts and sketch, without which the shard keeps its admission.
        """

    def begin_staged(self, staged: Staged, shard: int, head: dict[str, object]) -> Prepared:
        """The same for a shard that no call finds yet."""

    def add_load(self, prepared: Prepared, rows: dict[str, object]) -> None:
        """
        Reads some of the rows: columns as export_table gives them, with slots as (name, type, bytes of one, bytes).
        """

    def end_load(self, prepared: Prepared) -> None:
        """Once all rows have been added."""

    def commit_load(self, prepared: Prepared) -> int:
        """
        Replaces the contents of the shard that these were read for. Returns its next version.
        """

    def stage(
        self,
        name: str,
        op: str,
        options: dict[str, object],
        devices: Sequence[int],
        shards: Sequence[int],
        owns_shared: Sequence[bool],
        version: int,
        originals: Sequence[int],
        sink: Callable[[dict[str, object], str], None] | None,
    ) -> Staged:
        """
        Makes shards, for handles of later versions than `version`; arguments as those of create.
        The shards in `originals` get the sink.
        """

    def replace(self, name: str, op: str, version: int, staged: Staged) -> None:
        """
        Replaces the shards of a table, unless it has been written since `version`.
        """

    def adopt(self, name: str, op: str, staged: Staged) -> None:
        """Makes a table of the shards, where there is none of the name."""

    def open_cursor(self, name: str, shard: int, version: int) -> int:
        """
        Has a shard remember what it is now, to know what changes. Returns the cursor's token.
        """

    def close_cursor(self, name: str, shard: int, token: int) -> None:
        """Forgets a cursor, if the shard has it."""

    def export_since(self, name: str, shard: int, version: int, token: int) -> dict[str, object] | None:
        """
        What has changed in a shard since a cursor: as export_table, of the rows that may be others, with
        removed, keys that have none any more, and counts_of_all, whether pending_keys are all that wait and not
        only those among them. None if the shard does not know, and all of it is to be taken.
        """

    def freeze(
        self, name: str, shard: int, version: int, with_slots: bool, op: str, raises: bool = True
    ) -> dict[str, Any]:
        """
        What export_table gives, but for the columns: rows, whether one is pinned, offsets, last_step, slots as
        (name, type), the admission; and as frozen what next_part gives the columns of. Writes may go on.
        """

    def next_part(
        self,
        frozen: Frozen,
        columns: dict[str, numpy.typing.NDArray[numpy.uint8]],
        slots: Sequence[numpy.typing.NDArray[numpy.uint8]],
    ) -> tuple[int, float]:
        """
        Copies the next rows, as export_table gives them, to the front of each column's bytes, as many as there is
        space for or fewer; pinned may be missing where no row is. Returns how many, in the end 0; and how many
        seconds to pause before the next, so that writes go on at about their pace.
        """

    def handlers(self) -> dict[str, object]:
        """XLA FFI handlers by target name."""
