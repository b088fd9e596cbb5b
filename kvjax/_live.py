"""The tables that live in this process: what each of them is, made and dropped and replaced as one with its rows."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax

from kvjax._spec import TableSpec, fail

# For the dicts alone, and what must change together with them: a sink may ask for tables while another call waits for
# its table.
_lock = threading.RLock()
_specs: dict[str, TableSpec] = {}
# The version of a table that is yet to be made, by name: behind those of one that was dropped, in whatever backend, so
# that its handles stay stale.
_first_versions: dict[str, int] = {}

sinks: dict[str, Any] = {}
"""What shards call with evicted rows, where there is something: it goes with a table that moves."""


def spec_of(name: str) -> TableSpec | None:
    with _lock:
        return _specs.get(name)


def all_specs() -> dict[str, TableSpec]:
    with _lock:
        return dict(_specs)


def create(spec: TableSpec) -> TableSpec:
    """Makes a table, unless there is one of the name. Gives what the table of that name is."""
    with _lock:
        if spec.name not in _specs:
            first = _first_versions.get(spec.name, 0)
            spec.host.create(spec.name, spec.host_options(), **spec.host_shards(), first_version=first)
            _specs[spec.name] = spec
        return _specs[spec.name]


def drop(name: str) -> None:
    _settle()
    with _lock:
        if name not in _specs:
            raise fail(KeyError, name, "drop_table", "a table of this name", "none", "see kvjax.tables()")
        _first_versions[name] = _specs[name].host.drop(name)
        del _specs[name]
        sinks.pop(name, None)


def replace(spec: TableSpec, op: str, version: int, staged: Any) -> None:
    """Puts shards that were made elsewhere in the place of a table's, if that still has `version`.

    Args:
      spec: of the table from then on.
      op: for errors.
      version: of the table that goes.
      staged: made by ``spec.host``.
    """
    _settle()
    with _lock:
        old = _specs.get(spec.name, spec)  # C++ says so if there is none
        if old.host is spec.host:
            spec.host.replace(spec.name, op, version, staged)
        else:
            spec.host.adopt(spec.name, op, staged)
            try:
                old.host.drop(spec.name, op, version)
            except BaseException:
                spec.host.drop(spec.name, op)
                raise
        _specs[spec.name] = spec


def _settle() -> None:
    """Waits for the programs that are writing: one whose table went from under it would fail on some devices alone."""
    with contextlib.suppress(ValueError, jax.errors.JaxRuntimeError):
        jax.effects_barrier()
