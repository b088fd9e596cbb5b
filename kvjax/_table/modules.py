"""Tables of modules: what a module's ``init`` makes, replaces, or takes unchanged."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from kvjax._ops.notices import if_compiled
from kvjax._process import PROCESS, OfModule
from kvjax._spec.options import ENTRIES
from kvjax._spec.spec import TableSpec
from kvjax._table import lifetime
from kvjax._table.live import live_version, version_leaf
from kvjax._table.registry import Arguments, asked, check_same
from kvjax._table.table import Table, live
from kvjax._values.errors import fail, warn
from kvjax._values.tracing import computed_now, is_rematerialized, is_traced
from kvjax.ffi import host


class Maker(NamedTuple):
    """Who makes a table, as far as it is known.

    Attributes:
      model: what all layers of the model have in common in this ``init`` and in no other, or None.
      layer: the layer, if it holds its table itself, or None.
      part: whether `model` is only a part of the model, which a transform such as ``nn.jit`` runs by itself, once it
        is traced.
    """

    model: Any
    layer: Any
    part: bool


def init_table(name: str, given: Arguments, said: Set[str], rng: Any, op: str, reuse: bool, maker: Maker) -> Table:
    """The table of a module that is initialized.

    One that an earlier ``init`` made is made anew, unless it has never been written and is what is asked for: so two
    modules of one model share a table by its name. One that `kvjax.get_table` or a restore made is taken as it is,
    unless it has been written. While JAX traces, nobody knows whether the program will ever run: no table is made anew
    then, and the handle is that of a table that has not been written, so that it is stale for one that has. Under
    ``nn.remat`` alone it runs at once, and Flax has it traced in each ``init``: there a table that has been written, or
    is another one than is asked for, is made anew.

    Args:
      name: of the table.
      given: the arguments of `kvjax.get_table`.
      said: those that the user has given; of a table that is taken as it is, the others may be as they are.
      rng: a JAX key, from which and from the name the seed is made if none is given; None for one of the name alone.
      op: the layer, for errors.
      reuse: whether to go on with the rows of a table that lives.
      maker: who initializes.

    Returns:
      The handle for ``params``.

    Raises:
      ValueError: a table that the module may not make anew has other arguments, or has been written; or another layer
        of the model has made it with other ones.
    """
    known, tracing = PROCESS.spec_of(name), is_traced()
    maker = maker._replace(part=maker.part and tracing)
    drawn = given.seed is None
    if drawn and rng is not None and not tracing:
        given = dataclasses.replace(given, seed=_seed(name, rng))
    seeded = drawn and rng is not None
    if known is None:
        return _of_its_own_seed(_make(asked(name, given, None), drawn, maker), op, seeded and tracing)
    if not reuse and name in PROCESS.of_modules:
        if not tracing:
            return _make_anew(known, asked(name, given, None), drawn, maker)
        if is_rematerialized():
            with computed_now():
                spec = asked(name, given, None)
                same = spec == known or (drawn and _same_but_for_seed(spec, known))
                stays = same and not _is_written(_now(known))
                table = None if stays else _make_anew(known, spec, drawn, maker)
            if table is not None:
                return _of_its_own_seed(table, op, seeded)
    given = dataclasses.replace(given, seed=known.seed) if drawn else given
    spec, birth = _as_said(asked(name, given, known), said, known), PROCESS.births[name]
    if tracing and not reuse:
        table = Table(version_leaf(spec, birth if spec == known else (birth - 1) % 2**32), spec)
        return _of_its_own_seed(table, op, seeded and name in PROCESS.of_modules)  # a key seeds no others
    check_same(spec, known)
    table = live(spec)
    if not reuse and _is_written(table):
        raise fail(
            ValueError, name, op, "a table that nobody has written yet, or reuse=True",
            f"one that was made by get_table or a restore and has been written, with {len(table):,} rows",
            f"for rows of a checkpoint make the model first, then restore; {op}(..., reuse=True) goes on with the rows "
            "that are there; kvjax.drop_table(name) first begins without them",
        )  # fmt: skip
    return table


def warn_of_others(table: Table, given: Arguments, said: Set[str], op: str) -> None:
    """Says so if a layer gives options that its table does not have: they were given after it was made.

    Args:
      table: of the layer.
      given: as in `init_table`, but without a place of rows, which a table may change.
      said: as there.
      op: the layer, for the warning.
    """
    known = table.spec
    spec = _as_said(asked(known.name, given, known), said, known)
    if spec != known:
        warn(
            f"kvjax: table {known.name!r}, {op}: want the options that the table was made with, got "
            f"{spec.differences(known)}; it stays as it is: docs/restarts.md has how to change a table that has rows"
        )


def _as_said(spec: TableSpec, said: Set[str], known: TableSpec) -> TableSpec:
    """What is asked for, and where nothing is said what is known."""
    return dataclasses.replace(spec, **{name: getattr(known, name) for name in ENTRIES if name not in said})


def _of_its_own_seed(table: Table, op: str, notice: bool) -> Table:
    """The table, with a notice for an ``init`` that runs as a program; who traces it for its shapes has no rows."""
    if not notice:
        return table
    text = (
        f"kvjax: table {table.name!r}, {op}: want an init outside of jit and nn.remat, where its key seeds the table, "
        f"got one inside, in which the key has no number yet; the rows begin by seed {table.spec.seed}, whatever the "
        "key, and under jit a live table is not made anew; give the layer a seed, or call init outside of them"
    )
    if is_rematerialized():  # it compiles nothing
        warn(text, each_time=True)
        return table
    return table.at(if_compiled(table.version, text))


def _make(spec: TableSpec, drawn: bool, maker: Maker) -> Table:
    check_same(spec, lifetime.create(spec))
    PROCESS.of_modules[spec.name] = _made_by(drawn, maker)
    return live(spec)


def _made_by(drawn: bool, maker: Maker) -> OfModule:
    model, layer = (_nothing if x is None else weakref.ref(x) for x in (maker.model, maker.layer))
    return OfModule(drawn, model, layer, traced=maker.part)


def _nothing() -> None:
    return None


def _now(known: TableSpec) -> Table:
    return Table(live_version(known), known)


def _is_written(table: Table) -> bool:
    return int(table.version) != PROCESS.births[table.name]


def _make_anew(known: TableSpec, spec: TableSpec, drawn: bool, maker: Maker) -> Table:
    table = _now(known)
    written = _is_written(table)
    before = PROCESS.of_modules[spec.name]
    same_model = maker.model is not None and before.model() is maker.model
    if not written and before.traced and before.drawn and drawn and _same_but_for_seed(spec, known):
        if spec != known and not same_model:  # the table may be that of a layer of this model, under nn.jit
            warn(
                f"kvjax: table {spec.name!r}, init: want an init outside of jit, where its key seeds the table, got a "
                "table that a compiled init has made, as that of a layer under nn.jit; its rows begin by seed "
                f"{known.seed}, whatever the key; give the layers a seed, or drop_table({spec.name!r}) first",
                each_time=True,
            )
        spec = known
    if not written and spec == known:
        PROCESS.of_modules[spec.name] = _made_by(drawn, maker)._replace(traced=before.traced)
        return table
    if same_model:
        raise fail(
            ValueError, spec.name, "init", "all layers of a model that name it to give the same options",
            f"one that differs from an earlier one: {spec.differences(known)}",
            "give the same options, or tables of other names",
        )  # fmt: skip
    if written and len(table):
        warn(
            f"kvjax: table {spec.name!r}, init: made anew, without the {len(table):,} rows that training had given it; "
            "its handles from before are stale. To go on with its rows, give the layer reuse=True or the Table; for "
            "shapes alone, jax.eval_shape(net.init, ...) touches no table",
            each_time=True,
        )
    elif not written and (before.layer() is not None or before.traced):
        warn(
            f"kvjax: table {spec.name!r}, init: made anew for a layer that differs ({spec.differences(known)}); that "
            "of before has a stale handle. Layers that share a table are one module, or have the same options and "
            "rngs, or are given the Table. Where a model takes the place of another, nothing is to be done",
            each_time=True,
        )
    lifetime.drop(spec.name)
    return _make(spec, drawn, maker)


def _same_but_for_seed(spec: TableSpec, known: TableSpec) -> bool:
    return dataclasses.replace(spec, seed=known.seed) == known


def _seed(name: str, rng: Any) -> int:
    """A seed for the table of this name: modules that name one table get the same, wherever they stand in the model."""
    if isinstance(rng, Tracer):
        raise fail(
            TypeError, name, "init", "one key for a table, which has one seed", "a traced one, as under jax.vmap",
            "call init outside of it: the members of a batch of models would share the table",
        )  # fmt: skip
    return int(host.hash_strings([name.encode() + b"\0" + np.asarray(jax.random.key_data(rng)).tobytes()], 0)[0])
