"""Splitting a state into its tables and a pytree that Orbax saves like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from kvjax._keys.opaque import is_array
from kvjax._lookup.readable import FrozenReadable, Readable
from kvjax._table.registry import tables as tables_of_process
from kvjax._table.table import Table, is_table
from kvjax._training.partitions import with_table_names
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail, meant
from kvjax.orbax._like import fitted, in_the_form_of
from kvjax.orbax._steps import warn_of_another_step


@jax.tree_util.register_pytree_node_class
class TableRef:
    """Takes the place of a table in a state; a pytree without leaves, so nothing is saved for it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def tree_flatten(self) -> tuple[tuple[()], str]:
        return (), self.name

    @classmethod
    def tree_unflatten(cls, name: str, _: Any) -> TableRef:
        return cls(name)

    def __repr__(self) -> str:
        return f"TableRef({self.name!r})"


def split(state: PyTree) -> tuple[PyTree, dict[str, Table]]:
    """Splits a state into an ordinary pytree and its tables.

    Args:
      state: any pytree, for instance Flax's ``TrainState``.

    Returns:
      The state without tables, for ``ocp.args.StandardSave``, and the tables by name, for `TableSave`. Tables made with
      ``checkpoint=False`` are left out.

    Raises:
      ValueError: the state has handles of two versions of a table, for example in an older copy of the parameters.

    Example:
      >>> import kvjax
      >>> state = {"w": 1.0, "t": kvjax.get_table("doc_split", dim=2)}
      >>> dense, tables = kvjax.orbax.split(state)
      >>> dense
      {'t': TableRef('doc_split'), 'w': 1.0}
      >>> kvjax.orbax.combine(dense, tables)["t"].name
      'doc_split'
      >>> kvjax.drop_table("doc_split")
    """
    tables: dict[str, Table] = {}
    for leaf in jax.tree.leaves(state, is_leaf=is_table):
        if is_table(leaf) and leaf.spec.checkpoint:
            tables[leaf.name] = _one_of(tables[leaf.name], leaf) if leaf.name in tables else leaf
    return jax.tree.map(lambda x: TableRef(x.name) if is_table(x) else x, state, is_leaf=is_table), tables


def _one_of(one: Table, other: Table) -> Table:
    """Of two handles of a table the one that says of which version it is; both, or there is nothing to be chosen."""
    if one is other or one.follows or other.follows:
        return other if one.follows else one
    versions = [int(x.version) for x in (one, other) if not x.donated and _is_known(x.version)]
    if len(set(versions)) > 1:
        raise fail(
            ValueError, one.name, "split", "one version of a table in a state", f"versions {versions}",
            "a table has the rows of its last version alone: to keep those of an earlier one, save a checkpoint then, "
            "or table.export()",
        )  # fmt: skip
    return other


def _is_known(version: Any) -> bool:
    return isinstance(version, (np.ndarray, np.generic)) or is_array(version)


def combine(
    state: PyTree, tables: Mapping[str, Readable] | None = None, like: PyTree = None, *, partial: bool = False
) -> PyTree:
    """Puts tables back into their places, from which `split` took them.

    Args:
      state: what `split` returned, or what Orbax restored with that as a template; with `like`, also what Orbax
        restored without a template.
      tables: live handles by name, as `split` or `TableRestore` returns them, of the same step as the state. Tables
        made with ``checkpoint=False`` are not among them: they are taken from the process. To serve the state, give
        frozen tables: `kvjax.serving.FrozenTable.as_jax`.
      like: a state of the same structure, with its tables or as `split` returns it. It is needed for what
        ``ocp.args.StandardRestore()`` restores: dicts and lists of arrays, without the places of tables. Its values do
        not matter (``jax.eval_shape`` can make it).
      partial: the model has changed since the save, and `like` is a new state of it: what the restored state lacks, or
        has with another shape, is taken from `like`, and so are tables that are not given. A warning lists all of this,
        and what no longer has a place. Leaves are the same if their paths are, so give layers names: Flax numbers
        unnamed layers, and a new one would take the number of an old one. A leaf keeps the dtype that was saved.

    Returns:
      The state with its tables. A warning says if the state of a `kvjax.optax.partition` has counted other steps than a
      table that it trains: then one of them comes from another step. A state that has counted no step is new, and fits
      any table.

    Raises:
      TypeError: `tables` is something else, for instance the state.
      KeyError: a table is not given, or not in the process; or the state has no place for a table.
      RuntimeError: a table has been written since, so its handle is stale.
      ValueError: the structure of the state is not that of `like`.

    Example:
      >>> import kvjax
      >>> state = {"w": 1.0, "t": kvjax.get_table("doc_combine", dim=2)}
      >>> _, tables = kvjax.orbax.split(state)
      >>> restored = {"w": 3.0, "t": None}
      >>> kvjax.orbax.combine(restored, tables, like=state)["w"]
      3.0
      >>> kvjax.drop_table("doc_combine")
    """
    given: Any = {} if tables is None else tables
    _check_given(given)
    if partial and like is None:
        raise fail(
            ValueError, None, "combine", "like= with partial=True", "none", "give a new state of the model as it is now"
        )
    new: dict[str, Table] = {}
    others = {name: table.name for name, table in given.items() if isinstance(table, Table) and table.name != name}
    if like is not None:
        form, own = split(like)
        form = with_table_names(form, {other: name for name, other in others.items()})
        if partial:
            named = {table.name: table for table in given.values()}
            new = {name: table for name, table in own.items() if name not in named}
            state, given = fitted(form, state, new, named.keys() - own.keys()), named | new
        else:
            state = in_the_form_of(form, state)
    _check_places(state, given)
    placed: set[str] = set()

    def put_back(x: Any) -> Any:
        if not _is_ref(x):
            return x
        table = _table_of(x.name, given)
        first = x.name not in placed
        placed.add(x.name)
        return table if first else _with_own_leaf(table)

    combined = jax.tree.map(put_back, with_table_names(state, others), is_leaf=_is_ref)
    combined = _on_the_same_devices(combined)
    tables_of_it = [x for x in jax.tree.leaves(combined, is_leaf=is_table) if is_table(x)]
    warn_of_another_step(combined, {t.name: t for t in tables_of_it if t.name not in new})
    return combined


def _check_given(tables: Any) -> None:
    for name, table in tables.items() if isinstance(tables, Mapping) else ():
        if hasattr(table, "as_jax"):
            raise TypeError(
                f"kvjax: table {name!r}, combine: want arrays of a frozen table, got a file; give its as_jax()"
            )
    given = tables.items() if isinstance(tables, Mapping) else [("", None)]
    wrong = [(name, x) for name, x in given if not isinstance(x, Readable)]
    if wrong:
        of = (
            f"{type(wrong[0][1]).__name__} as {wrong[0][0]!r}" if isinstance(tables, Mapping) else type(tables).__name__
        )
        raise fail(
            TypeError, None, "combine", "the tables by name as its second argument", of,
            "combine(state, tables) is called with what split(state) returns, in that order",
        )  # fmt: skip


def _check_places(state: PyTree, tables: Mapping[str, Readable]) -> None:
    """Whether a state that gets tables has a place for any."""
    if not tables or any(map(_is_ref, jax.tree.leaves(state, is_leaf=_is_ref))):
        return
    mend = (
        "combine(state, tables, like=state) for what was restored without a template, with a state of that "
        "structure; or restore by StandardRestore(kvjax.orbax.split(state)[0])"
    )
    if all(isinstance(table, FrozenReadable) for table in tables.values()):
        mend += "; or, to serve without a state, put the arrays in their places: params['Embed_0']['table'] = arrays"
    want = "a state with the places of its tables"
    raise fail(KeyError, min(tables), "combine", want, "one without any", mend)


def _with_own_leaf(table: Readable) -> Readable:
    """The same handle for another place in a tree: a program takes the buffer of a leaf that is donated to it once."""
    if not isinstance(table, Table) or table.follows or table.donated or not _is_known(table.version):
        return table
    return table.at(np.asarray(table.version))


def _on_the_same_devices(state: PyTree) -> PyTree:
    """The state with the versions of its tables where a step leaves them, which is beside its arrays that are committed
    to devices, as those are that Orbax restores: else the second step would be compiled anew."""
    arrays = [x for x in jax.tree.leaves(state, is_leaf=is_table) if not is_table(x) and is_array(x) and x.committed]
    devices = {frozenset(x.sharding.device_set): x.sharding for x in arrays}  # of each set that of one array
    if len(devices) != 1:
        return state
    (sharding,) = devices.values()
    place = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding

    def placed(x: Any) -> Any:
        if not is_table(x) or x.follows or x.donated or not _is_known(x.version):
            return x
        if len(place.device_set) != (1 if x.spec.placement is None else x.spec.placement.mesh.size):
            return x  # no step has both
        if is_array(x.version) and x.version.committed and x.version.sharding == place:
            return x
        return x.at(jax.device_put(np.asarray(x.version), place))

    return jax.tree.map(placed, state, is_leaf=is_table)


def _is_ref(x: Any) -> bool:
    return isinstance(x, TableRef)


def _check_now(table: Table) -> None:
    """Whether a handle is of the rows that there are, as far as it is known yet."""
    if table.follows or table.tape is not None or isinstance(table.version, Tracer):
        return
    try:
        len(table)
    except RuntimeError as error:
        raise fail(
            RuntimeError, table.name, "combine", "tables as they are now", f"one of another time ({error})",
            "give what TableRestore has restored beside the state, or what split gave after the last step",
        ) from error  # fmt: skip


def _table_of(name: str, given: Mapping[str, Readable]) -> Readable:
    # A restore under another name gives the handle by the name in the checkpoint.
    found = {table.name: table for table in given.values()}.get(name, given.get(name))
    if found is not None:
        if isinstance(found, Table):
            _check_now(found)
        return found
    table = tables_of_process().get(name)
    if table is None or table.spec.checkpoint:
        # The table of the process would have rows of another time than the state, or none.
        raise fail(
            KeyError, name, "combine", "this table among tables=", f"{sorted(given)}",
            f"{meant(name, given)}give what kvjax.orbax.TableRestore restored beside the state, restored['tables'], or "
            "the tables of kvjax.orbax.split; for a table that is newer than the checkpoint, see docs/restarts.md",
        )  # fmt: skip
    return table
