"""Untaped lookups: those that a loss makes of tables without a tape, whose rows have no gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

_seen: ContextVar[set[str] | None] = ContextVar("kvjax_untaped", default=None)


@contextlib.contextmanager
def untaped() -> Generator[set[str]]:
    """Collects the names of trainable tables that are looked up inside, through handles without a tape."""
    names: set[str] = set()
    token = _seen.set(names)
    try:
        yield names
    finally:
        _seen.reset(token)


def note(name: str) -> None:
    """Says that the table of this name was looked up through a handle without a tape."""
    names = _seen.get()
    if names is not None:
        names.add(name)
