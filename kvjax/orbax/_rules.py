"""Admissions, policies and constraints as JSON, so that a table can be made as it was saved."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax import _admit, _constraints, _evict

_MODULES = (_admit, _evict, _constraints)


def dump(rule: Any) -> Any:
    """A rule as JSON: its class and fields; of a function of the user's only the name."""
    if dataclasses.is_dataclass(rule) and not isinstance(rule, type):
        fields = {field.name: dump(getattr(rule, field.name)) for field in dataclasses.fields(rule)}
        return {"rule": type(rule).__name__} | fields
    if callable(rule):
        return {"function": getattr(rule, "__qualname__", repr(rule))}
    return rule.item() if hasattr(rule, "item") else rule


def name_of(function: Any) -> str:
    """ "module.function", for people to read: nothing is ever called by it."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def load(saved: Any) -> Any:
    """What `dump` was given.

    Raises:
      ValueError: a function is part of it, or a later kvjax wrote it.
    """
    if not isinstance(saved, dict):
        return saved
    if "function" in saved:
        raise ValueError(
            f"want rules without functions of yours, got {saved['function']}, of which a checkpoint has only the name; "
            "make the table with kvjax.get_table first and restore into it"
        )
    kinds = [getattr(module, saved["rule"], None) for module in _MODULES]
    kind = next((k for k in kinds if dataclasses.is_dataclass(k)), None)
    if kind is None:
        raise ValueError(f"want a rule that this kvjax knows, got {saved['rule']!r}; a later kvjax may have written it")
    return kind(**{name: load(value) for name, value in saved.items() if name != "rule"})  # pyright: ignore[reportCallIssue]
