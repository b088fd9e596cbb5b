"""Options as JSON, so that a table can be made as it was saved."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from kvjax import admit, constraints, evict
from kvjax.initializers import Generated, Initializer, Pool, ResolvedInitializer, Segments, from_pool

_RULES: dict[str, Any] = admit.RULES | evict.RULES | constraints.RULES


def dump(value: Any) -> Any:
    """An option as JSON: of a rule its class and fields; of a function of the user's only the name.

    The rows of a pool are stored beside it.
    """
    if isinstance(value, Pool):
        return {"kind": "pool", "shape": [value.rows, value.dim]}
    if isinstance(value, Generated):
        return {"kind": "generated", "probes": list(value.probes)}
    if isinstance(value, Segments):
        return {"kind": "segments", "ends": list(value.ends), "parts": [dump(part) for part in value.parts]}
    if isinstance(value, Initializer):
        return dataclasses.asdict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: dump(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"rule": type(value).__name__} | fields
    if callable(value):
        return {"function": _qualified(value)}
    return value.item() if hasattr(value, "item") else value


def name_of(function: Any) -> str:
    """ "module.function", for people to read: nothing is ever called by it."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _qualified(function: Any) -> str:
    """A name without addresses, which differ from process to process."""
    if isinstance(function, functools.partial):
        return _qualified(function.func)
    return getattr(function, "__qualname__", type(function).__qualname__)


def shared_key(admit: dict[str, Any] | None) -> int | None:
    """Of an admission, as `dump` has it, the key of the row that unadmitted keys share; None if they share none."""
    key = None if admit is None else admit.get("unadmitted")
    return key if type(key) is int else None


def load_initializer(saved: dict[str, Any], pool: Any = None) -> ResolvedInitializer:
    """The initializer that `dump` was given."""
    if saved["kind"] == "pool":
        return from_pool(pool)
    if saved["kind"] == "generated":
        return Generated(None, tuple(saved["probes"]))
    if saved["kind"] == "segments":
        return Segments(tuple(saved["ends"]), tuple(Initializer(**part) for part in saved["parts"]))
    return Initializer(**saved)


class NeedsFunctionError(ValueError):
    """A function of the user's is part of a rule."""


def load(saved: Any) -> Any:
    """The rule, or the plain value, that `dump` was given.

    Raises:
      NeedsFunctionError: a function is part of it.
      ValueError: it is none, or a later kvjax wrote it.
    """
    if not isinstance(saved, dict):
        return saved
    if saved.keys() == {"function"}:
        raise NeedsFunctionError(
            f"want rules without functions of yours, got {saved['function']}, of which a checkpoint has only the name; "
            "make the table with kvjax.get_table first and restore into it"
        )
    kind = _RULES.get(str(saved.get("rule")))
    fields = {} if kind is None else {field.name: field for field in dataclasses.fields(kind)}
    if kind is None or saved.keys() - {"rule"} - fields.keys():
        raise ValueError(f"want a rule that this kvjax knows, got {saved!r:.100}; a later kvjax may have written it")
    for name, field in fields.items():  # one that was not there yet when it was written has its default
        if name not in saved and field.default is dataclasses.MISSING:
            raise ValueError(f"want {name} of the rule {saved['rule']}, got {saved!r:.100}; it may be damaged")
    return kind(**{name: load(value) for name, value in saved.items() if name != "rule"})
