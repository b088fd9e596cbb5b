"""The registry: the tables of this process by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from kvjax import storage
from kvjax._process import PROCESS, check_process
from kvjax._spec.options import Options
from kvjax._spec.placement import Placement
from kvjax._spec.sharding import Sharding, placement_of
from kvjax._spec.signature import takes
from kvjax._spec.spec import TableSpec
from kvjax._spec.unsupported import check_backend
from kvjax._table import lifetime
from kvjax._table.stats import Stats, stats_of
from kvjax._table.table import Replaced, Table, live
from kvjax._values.errors import fail, meant
from kvjax._values.tracing import check_not_traced

T = TypeVar("T")


@dataclasses.dataclass(kw_only=True)
class _Dim:
    dim: int | None = None


@dataclasses.dataclass(kw_only=True)
class Arguments(Sharding, Options, _Dim):  # whose fields are in the order of the classes, from the last one on
    """The arguments of `get_table` beside the name."""


@takes(Arguments)
def get_table(name: str, given: Arguments) -> Table:
    """Gets the table of this name, or creates it. With only a name, it does not create one.

    It starts no JAX backend, so modules may make tables when they are imported, before ``jax.distributed.initialize``.
    There are two exceptions: if a function makes the initial rows, and if the CUDA module is built, because then only
    the backend knows whether the table belongs on a GPU.

    If ``mesh`` has devices of several processes, all of them make the table with the same arguments. Each process holds
    the rows of its own devices, and host values (`Table.size`, `Table.export`, `Table.stats`) cover only these.
    Everything else is a program over the whole mesh, even outside ``jit``: all processes call it together, with equal
    NumPy keys, or with global arrays (``jax.make_array_from_process_local_data``). A failure of a shard in one process
    is an error in all. If only one process raises an exception, it must end, or the others wait for it.

    Args:
      name: unique in the process; compiled programs and checkpoints find the table by it.
      dim: width of a row, at least 1.
      key_dtype: "int64" or "uint64": any 64-bit key, exported as signed or unsigned. While ``jax_enable_x64`` is off,
        JAX arrays of 32-bit integers may be 64-bit ids that JAX has cut, so they are refused. "int32" or "uint32" says
        that ids have 32 bits, and accepts them. The same 32 bits are then one key, signed or unsigned, in ``jit`` or
        not: -1 is 2**32 - 1 in a table of "uint32". Keys that need more bits, as salted and hashed ones do, are taken
        as they are.
      dtype: of the rows, "float32", "bfloat16" or "float16". Gradients are float32, and slots have the dtypes that the
        optimizer gives them for float32 rows.
      initializer: a number, by default 0; an array, one row ``(dim,)`` or a pool of rows ``(p, dim)`` of which each key
        gets one; one of `kvjax.initializers`; or a function ``(rng, shape, dtype)``, such as any of
        ``jax.nn.initializers``. The function is traced, and called for each key with shape ``(1, dim)``: it must take
        random numbers from its ``rng``, because others would be drawn once for all keys. A model that multiplies rows
        of two tables does not train if both begin as zeros; the Flax layers begin with normal rows.
      seed: 64-bit integer for the initial rows; by default a hash of the name.
      trainable: whether `kvjax.value_and_grad` and `kvjax.optax.partition` train it. Writes by hand, `Table.apply`
        included, always work.
      checkpoint: whether `kvjax.orbax.split` returns it among the tables to save.
      capacity: rows to reserve memory for at the start; the table grows beyond that. At most `max_capacity`, if no more
        rows can come.
      max_capacity: the most rows that the table should have, in all its shards together; None for no limit.
      on_full: what a full table does: "grow" (`Stats.over_capacity` counts the rows beyond the limit), "evict" (by
        `evict`, and if that makes too little space, the rows that were written longest ago) or "error" (before anything
        changes).
      admit: which new keys get a row in training, one of `kvjax.admit`; None for all.
      evict: which rows are evicted when the table is full, one of `kvjax.evict`; with ``.every(steps)`` also every so
        many steps.
      count: what the frequency of a key counts: its "occurrences" in training, or once per step ("batch").
      storage: where rows live, one of `kvjax.storage`. By default a table that exists keeps its storage; a new one gets
        `kvjax.storage.Device` if programs run on a GPU, and `kvjax.storage.Host` if not. Checkpoints do not record it:
        a table may be restored into any storage.
      rounding: how training rounds rows to bfloat16 or float16: to the "nearest" value, or "stochastic", which keeps
        updates that are smaller than the spacing of the dtype, on average.
      constraint: function of a row ``(dim,)`` float32 that returns one, applied after each update of training and
        before rounding; one of `kvjax.constraints`, or your own.
      mesh: devices over which to shard the rows, a ``jax.sharding.Mesh``; by default the table is in one place, and an
        existing table stays where it is.
      devices: a list of devices instead of a mesh, for instance ``jax.devices()``; in programs they are the axis
        "devices" of a mesh of their own.
      axis: name of the mesh's axis over which rows are sharded, or several; by default all axes. Over other axes the
        table is replicated, like an array. In ``shard_map`` with ``check_vma=False`` and in ``pmap``, JAX does not know
        what is the same on several devices; there kvjax assumes that each device of the axes has its own batch.
      partitioner: function of `Keys` ``(n,)`` and the number of shards that returns the shard of each key, ``(n,)``
        int32; traced by JAX. By default a hash of the key decides.
      replicated: whether each device of the axes has all rows, for small tables: lookups need no exchange then, and
        training merges the gradients of all devices.
      wire: the dtype in which looked-up rows travel between devices, "bfloat16" to send half the bytes; by default the
        table's.

    Returns:
      The live handle.

    Raises:
      ValueError: a table of this name exists with other arguments, or an argument is out of range.
      RuntimeError: the backend that the storage needs is not loaded, see `kvjax.backends`.
      TypeError: the initializer is none of these, or its function takes or returns something else.
      KeyError: only the name was given and there is no such table.

    Example:
      >>> import kvjax
      >>> kvjax.get_table("doc_get", dim=4, initializer=kvjax.initializers.normal(0.1))
      Table('doc_get', dim=4, dtype=float32, rows=0, version=0)
      >>> kvjax.get_table("doc_get").dim
      4
      >>> kvjax.drop_table("doc_get")
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        raise fail(TypeError, name, "get_table", "a name", type(name).__name__, "a Table's is table.name")
    if given.dim is None:
        if any(getattr(given, field.name) is not field.default for field in dataclasses.fields(given)):
            raise fail(
                ValueError, name, "get_table", "dim= beside the other arguments", "none", "give all or only the name"
            )
        table = _of_now(name, live)
        if table is None:
            mend = meant(name, PROCESS.all_specs()) + "give dim= to create it"
            raise fail(KeyError, name, "get_table", "a table of this name", "none", mend)
        return table
    check_process(name, "get_table")  # before a device is asked whether the table belongs there
    return get_or_make(name, given.dim, _placement(given, name, PROCESS.spec_of(name)), given)


def asked(name: str, given: Arguments, known: TableSpec | None) -> TableSpec:
    """The spec that arguments ask for, which the backend can hold; what they leave open of the place of the rows is as
    the table that is `known` has it."""
    return _spec(name, given.dim, _placement(given, name, known), given, known)


def get_or_make(name: str, dim: Any, placement: Placement | None, options: Options) -> Table:
    """Gets the table of this name, which must be as is asked, or creates it.

    Args:
      name: of the table.
      dim: width of a row.
      placement: where its rows live.
      options: all others; without a storage it is where it is, or where programs run.

    Raises:
      ValueError, TypeError, RuntimeError: as `get_table`.
    """
    while True:
        spec = _spec(name, dim, placement, options, PROCESS.spec_of(name))
        check_same(spec, lifetime.create(spec))
        with contextlib.suppress(Replaced):
            return live(spec)


def _placement(given: Arguments, name: str, known: TableSpec | None) -> Placement | None:
    placement = placement_of(given, name, "get_table")
    return known.placement if not given.given and known is not None else placement


def _spec(name: str, dim: Any, placement: Placement | None, options: Options, known: TableSpec | None) -> TableSpec:
    where = options.storage
    if where is None:
        where = known.storage if known else storage.default()
    if placement is not None and known is not None and placement.is_like(known.placement):
        placement = known.placement  # with the kinds of axes that the table was made with
    spec = TableSpec.resolve(name, "get_table", dim, placement, dataclasses.replace(options, storage=where))
    check_backend(spec, "get_table")
    return spec


def check_same(spec: TableSpec, made: TableSpec, op: str = "get_table") -> None:
    """Whether a table was made as it is asked for now."""
    if made != spec:
        raise fail(
            ValueError, spec.name, op, "the arguments it was made with", spec.differences(made),
            _mend(spec, made),
        )  # fmt: skip


# What a table that exists can change.
_MENDS = {
    "placement": "it has another mesh: leave mesh= out to get it where it is, or kvjax.reshard(table, mesh)",
    "storage": "it is elsewhere: leave storage= out to get it where it is, or table.to(storage)",
}


def _mend(asked: TableSpec, made: TableSpec) -> str:
    """How to get from the spec that was asked for to the one that a table was made with, or back."""
    changed = [field for field in _MENDS if getattr(asked, field) != getattr(made, field)]
    if dataclasses.replace(asked, **{field: getattr(made, field) for field in changed}) == made:
        return "; ".join(_MENDS[field] for field in changed)
    return "give the same arguments, another name, or kvjax.drop_table(name) first"


def tables() -> dict[str, Table]:
    """The live handles of all tables of this process, by name.

    Example:
      >>> import kvjax
      >>> table = kvjax.get_table("doc_tables", dim=4)
      >>> kvjax.tables()["doc_tables"]
      Table('doc_tables', dim=4, dtype=float32, rows=0, version=0)
      >>> kvjax.drop_table("doc_tables")
    """
    return _of_all(live)


def stats() -> dict[str, Stats]:
    """`Table.stats` of all tables of this process, by name. It does not wait for writes that are under way.

    Raises:
      RuntimeError, MemoryError: a table on a GPU has refused an earlier write, and no call has raised that yet.

    Example:
      >>> import kvjax
      >>> table = kvjax.get_table("doc_all_stats", dim=4)
      >>> kvjax.stats()["doc_all_stats"].size
      0
      >>> kvjax.drop_table("doc_all_stats")
    """
    return _of_all(stats_of)


def _of_all(f: Callable[[TableSpec], T]) -> dict[str, T]:
    found = {name: _of_now(name, f) for name in PROCESS.all_specs()}
    return {name: value for name, value in found.items() if value is not None}


def _of_now(name: str, f: Callable[[TableSpec], T]) -> T | None:
    """What `f` gives of the table of this name, or None if there is none. Another thread may move it meanwhile, or drop
    it and make another of its name; then `f` is asked again."""
    while (spec := PROCESS.spec_of(name)) is not None:
        try:
            return f(spec)
        except (KeyError, Replaced):
            if PROCESS.spec_of(name) is spec:  # nobody has, so it would fail again, and for ever
                raise
    return None


def drop_table(name: str) -> None:
    """Drops a table and releases its memory. Its handles stay stale, even if the name is used again. It waits for all
    results that this process has and that are not computed yet, as they may be read from the table.

    JAX keeps the programs that were compiled for the table, for a table that is made again in the same way. Once 128
    dropped tables (or score functions) have not been made again, kvjax clears all of JAX's caches
    (``jax.clear_caches``), so that memory does not grow.

    Args:
      name: of a table of this process.

    Raises:
      TypeError: `name` is not a string, or the call is inside ``jit``.
      KeyError: there is no table of this name.

    Example:
      >>> import kvjax
      >>> table = kvjax.get_table("doc_drop", dim=4)
      >>> kvjax.drop_table("doc_drop")
      >>> "doc_drop" in kvjax.tables(), table
      (False, Table('doc_drop', dim=4, dtype=float32, version=0 (dropped)))
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        raise TypeError(f"kvjax: drop_table: want the name of a table, got {name!r}; drop_table(table.name)")
    check_not_traced(name, "drop_table")
    lifetime.drop(name)
