"""The lifetime of tables: made, dropped and replaced as one with what the process knows of them."""

from __future__ import annotations

import collections
import errno
import operator
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from kvjax._process import PROCESS, check_process
from kvjax._spec.native import native_options, native_shards
from kvjax._spec.spec import TableSpec
from kvjax._table.at_exit import forget, wait_for_programs, wait_for_results
from kvjax._values.errors import fail, meant
from kvjax.ffi import forget_failures, set_process
from kvjax.storage import Mmap

MANY = 128
"""Dropped tables and score functions for which JAX keeps programs, 1.5 to 3 MiB each: it holds what is static about a
handle for as long as the function that was called with it, and nothing clears the programs of one table alone. So all
are cleared then, which costs less than compiling for so many tables has. Tables that no program was made for do not
count: they would cost others theirs."""


def create(spec: TableSpec) -> TableSpec:
    """Makes a table, unless there is one of the name. Gives what the table of that name is."""
    check_process(spec.name, "get_table")
    with PROCESS.lock:
        if spec.name not in PROCESS.specs:
            _check_folder(spec, "get_table")
            first = PROCESS.first_versions.get(spec.name, 0)
            _number_failures(spec)
            options, shards = native_options(spec), native_shards(spec)
            in_one_go(  # so that C++ and Python know the same tables
                partial(spec.host.create, spec.name, options, **shards, first_version=first),
                partial(PROCESS.specs.__setitem__, spec.name, spec),
                partial(PROCESS.births.__setitem__, spec.name, first),
                partial(PROCESS.outlived.discard, hash(spec)),
            )
        return PROCESS.specs[spec.name]


def drop(name: str) -> None:
    check_process(name, "drop_table")
    wait_for_programs()  # one whose table went from under it would fail on some devices alone
    if name in PROCESS.traced:  # else this might start JAX's backend
        wait_for_results()
    with PROCESS.lock:
        if name not in PROCESS.specs:
            mend = meant(name, PROCESS.specs) + "see kvjax.tables()"
            raise fail(KeyError, name, "drop_table", "a table of this name", "none", mend)
        spec = PROCESS.specs[name]
        dropped = zip([name], map(spec.host.drop, [name]), strict=True)  # drops it once it is read
        known = (PROCESS.specs, PROCESS.births, PROCESS.caught_up, PROCESS.of_modules, PROCESS.sinks)
        try:
            in_one_go(
                partial(PROCESS.first_versions.update, dropped),
                *(partial(of.pop, name, None) for of in known),
                *_outliving(spec),
            )
        finally:
            if name not in PROCESS.specs:  # also where an interrupt came behind all of it
                forget_failures(name)
                forget(name)
    _clear_programs()


def _outliving(spec: TableSpec) -> list[Callable[[], None]]:
    """For `in_one_go`: counts a table that goes, if programs were made for it."""
    return [partial(PROCESS.outlived.add, hash(spec))] if spec.name in PROCESS.traced else []


def _clear_programs() -> None:
    with PROCESS.lock:
        many = len(PROCESS.outlived) >= MANY
        if many:
            PROCESS.outlived.clear()
            PROCESS.traced.clear()
    if many:
        jax.clear_caches()


def stage(spec: TableSpec, op: str, version: int) -> Any:
    """Makes the shards of a table beside those that it has, for `replace`.

    Args:
      spec: of the table from then on.
      op: for errors.
      version: of the table that will go.
    """
    _check_folder(spec, op)
    _number_failures(spec)
    return spec.host.stage(
        spec.name, op, native_options(spec), **native_shards(spec), version=version,
        originals=spec.originals, sink=PROCESS.sink_of(spec.name),
    )  # fmt: skip


def replace(spec: TableSpec, op: str, version: int, staged: Any) -> None:
    """Puts staged shards in the place of a table's, if that still has `version`.

    Args:
      spec: of the table from then on.
      op: for errors.
      version: of the table that goes.
      staged: made by `stage`.
    """
    wait_for_programs()  # as in `drop`
    with PROCESS.lock:
        old = PROCESS.specs.get(spec.name, spec)  # C++ says so if there is none
        adopted: list[bool] = []
        if old.host is spec.host:
            moves = [partial(spec.host.replace, spec.name, op, version, staged)]
        else:
            moves = [
                partial(spec.host.adopt, spec.name, op, staged),
                partial(adopted.append, True),
                partial(old.host.drop, spec.name, op, version),
            ]
        programs = [] if old == spec else [*_outliving(old), partial(PROCESS.outlived.discard, hash(spec))]
        try:
            in_one_go(*moves, partial(PROCESS.specs.__setitem__, spec.name, spec), *programs)
        except BaseException:
            if adopted and PROCESS.specs.get(spec.name) is old:  # else an interrupt came behind all of it
                spec.host.drop(spec.name, op)
            raise
    _clear_programs()


def _check_folder(spec: TableSpec, op: str) -> None:
    """Whether there is the folder of a table that is to be in a file. What else is wrong with it the C++ side says."""
    if isinstance(spec.storage, Mmap) and not os.path.isdir(path := spec.storage.path):
        reason = os.strerror(errno.ENOTDIR if os.path.exists(path) else errno.ENOENT)
        raise fail(
            ValueError, spec.name, op, "a folder to make a file in", f"{path!r}: {reason}",
            "make the folder first, or give kvjax.storage.Mmap another one",
        )  # fmt: skip


def _number_failures(spec: TableSpec) -> None:
    """Failures that shards tell each other have numbers, which differ from process to process."""
    if spec.placement is not None:
        set_process(jax.process_index())


def in_one_go(*calls: Callable[[], object]) -> None:
    """Calls one after the other, up to the first that fails. Python runs handlers of signals only in its own code, so
    none, of which an exception may be raised, runs between calls of C: functions of our C++ side, methods of dicts."""
    collections.deque(map(operator.call, calls), maxlen=0)  # a loop in C
