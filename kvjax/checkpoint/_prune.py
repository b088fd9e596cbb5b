"""Pruning of rows that are not all in memory, and what a rule asks, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from kvjax._formats.source import Source, ranges, row_bytes
from kvjax._values.arguments import is_integer
from kvjax._values.exported import ROW_COLUMNS, Exported
from kvjax._values.prune import Prune, PruneLike, PruneReport, as_rule, norms_of
from kvjax.checkpoint._disk.format import digest
from kvjax.checkpoint._disk.rules import name_of


def kept(rows: Source, rule: Prune) -> np.ndarray:
    """Which rows are kept, ``(n,)`` bool. Their values are read only if the rule asks for them.

    Beside a piece, this takes a byte or two for each row; with ``top_k`` or ``keep`` 24 more.
    """
    passing = [rule.passing(some) for some in _pieces(rows, rule, rule.reads_rows)]
    return rule.chosen(np.concatenate([np.empty(0, bool), *passing]), **_ranked_by(rows, rule))


def judged(rows: Source, rule: Prune) -> tuple[np.ndarray, PruneReport]:
    """Which rows are kept, ``(n,)`` bool, and what the others are, for which all values are read.

    Beside a piece, this takes about 24 bytes for each row and 2 for each test; with ``top_k`` or ``keep`` 24 more.
    """
    asked: dict[str, np.ndarray] = {}
    norms, start = np.empty(rows.num_rows), 0
    for some in _pieces(rows, rule, values=True):
        stop = start + len(some)
        for name, test in rule.tests(some).items():
            asked.setdefault(name, np.empty(rows.num_rows, bool))[start:stop] = test
        norms[start:stop] = norms_of(some.values)
        start = stop
    return rule.judged(asked, norms, rows.row_bytes, **_ranked_by(rows, rule))


def _pieces(rows: Source, rule: Prune, values: bool) -> Iterator[Exported]:
    """The rows piece by piece, as far as the tests of a rule see them; without values these are zeros."""
    names = list(rows.types if rule.predicate is not None else ROW_COLUMNS)
    if not values:
        names.remove("values")
    dtype, shape = rows.types["values"]
    for start, stop in ranges(rows.num_rows, sum(row_bytes(rows.types[name]) for name in names)):
        unread = {"values": np.broadcast_to(np.zeros((), dtype), (stop - start, *shape))}
        yield Exported.of_columns(unread | rows.read(names, start, stop), int(rows.meta["last_step"]))


def _ranked_by(rows: Source, rule: Prune) -> dict[str, np.ndarray]:
    """What is asked of all rows together: empty if nothing is."""
    ranked = rule.top_k is not None or rule.keep is not None
    return rows.read(["keys", "freqs", "versions"], 0, rows.num_rows if ranked else 0)


def in_words(prune: PruneLike) -> str | None:
    """What a rule asks, the same text for the same rule; None if it asks nothing. Of keys it has their digest, of a
    predicate the name."""
    rule = as_rule(prune)
    given = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    words: list[str] = []
    for name, value in given.items():
        if name in rule.key_sets:
            words.append(f"{name}={digest(np.sort(rule.key_sets[name].view(np.uint64)).view(np.uint8))}")
        elif name == "predicate" and value is not None:
            words.append(f"predicate={name_of(value)}")
        elif value is not None and value is not False:
            exact = int(value) if is_integer(value) else value
            number = float(value)  # as releases have it that are there, but for what only an integer can say
            words.append(f"{name}={exact if value is True or number != exact else number}")
    return ", ".join(words) or None
