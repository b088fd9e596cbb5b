"""Features: several lookups in one call, of which those on one table become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys, KeysLike
from kvjax._keys.masks import mask_of
from kvjax._lookup.readable import FrozenReadable, Readable, key_dtype_of, keys_of_readable, rows_of
from kvjax._table.reads import Query
from kvjax._table.table import Table
from kvjax._values.arrays import ArrayLike
from kvjax._values.numbers import is_integer

Feature: TypeAlias = tuple[Readable, KeysLike] | tuple[Readable, KeysLike, ArrayLike | None]


def lookup_many(features: Mapping[str, Feature]) -> dict[str, jax.Array]:
    """Looks the rows of several features up, of one table or of several; changes nothing.

    Features on one table become one lookup, with one gradient. They share the rows of equal keys, unless each has
    a salt of its own: ``kvjax.keys(ids).salted(number)``.

    Args:
      features: ``(table, keys)`` or ``(table, keys, mask)`` by name; keys ``(...)``, and mask ``(...)`` bool, false
        for padding, as in `Table.lookup`.

    Returns:
      Rows ``(..., dim)`` by name, in the order of the features.

    Raises:
      TypeError, ValueError: a feature is no such tuple, or as `Table.lookup` does.

    Example:
      >>> import kvjax, numpy as np
      >>> tags, users = kvjax.get_table("doc_tags", dim=2), kvjax.get_table("doc_users", dim=3)
      >>> rows = kvjax.lookup_many({
      ...     "user": (users, np.array([7, 8])),
      ...     "liked": (tags, kvjax.keys(np.array([[1, 2], [3, -1]])).salted(0)),
      ...     "shown": (tags, kvjax.keys(np.array([1, 2])).salted(1)),
      ... })
      >>> {name: r.shape for name, r in rows.items()}
      {'user': (2, 3), 'liked': (2, 2, 2), 'shown': (2, 2)}
      >>> kvjax.drop_table("doc_tags"), kvjax.drop_table("doc_users")
      (None, None)
    """
    if not isinstance(features, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        raise TypeError(
            f"kvjax: lookup_many: want features by name, got {type(features).__name__}; give {{name: (table, keys)}}"
        )
    parsed = {name: _parse(name, feature) for name, feature in features.items()}
    # Handles that differ are asked each for itself, so that a stale one is refused.
    groups: dict[tuple[str, int], list[str]] = {}
    for name, (table, _, _) in parsed.items():
        handle = table.given if isinstance(table, Table) else table
        groups.setdefault((table.name, id(handle)), []).append(name)
    rows = {}
    for names in groups.values():
        rows |= _lookup_group(names, [parsed[name] for name in names])
    return {name: rows[name] for name in parsed}


def _parse(name: str, feature: Any) -> tuple[Readable, Keys, jax.Array | None]:
    if (
        not isinstance(feature, tuple)
        or len(feature) not in (2, 3)
        or not isinstance(feature[0], (Table, FrozenReadable))
    ):
        raise TypeError(
            f"kvjax: feature {name!r}, lookup_many: want (table, keys) or (table, keys, mask), got {feature!r}; the "
            "table is a kvjax.Table, or the as_jax() of a kvjax.serving.FrozenTable"
        )
    table, keys, mask = feature if len(feature) == 3 else (*feature, None)
    if is_integer(mask):
        raise TypeError(
            f"kvjax: feature {name!r}, lookup_many: want a mask as the third of (table, keys, mask), got {mask!r}; of "
            f"padding by an id give (table, ids, ids != {mask})"
        )
    op = f"lookup_many, feature {name!r}"
    keys = keys_of_readable(table, keys, op)
    return table, keys, mask_of(keys, mask, None, table.name, key_dtype_of(table), op)


def _lookup_group(names: list[str], parts: list[tuple[Readable, Keys, jax.Array | None]]) -> dict[str, jax.Array]:
    if len(parts) == 1:
        ((table, keys, mask),) = parts
        return {names[0]: rows_of(table, Query(keys, mask))}
    table = parts[0][0]
    words = jnp.concatenate([keys.words.reshape(-1, 2) for _, keys, _ in parts])
    mask = None
    if any(m is not None for _, _, m in parts):
        masks = [jnp.ones(keys.shape, bool) if m is None else m for _, keys, m in parts]
        mask = jnp.concatenate([m.reshape(-1) for m in masks])
    rows = rows_of(table, Query(Keys(words, any(keys.narrow for _, keys, _ in parts)), mask))
    ends = np.cumsum([keys.size for _, keys, _ in parts])
    pieces = jnp.split(rows, ends[:-1])
    return {
        name: piece.reshape(*keys.shape, table.dim)
        for name, piece, (_, keys, _) in zip(names, pieces, parts, strict=True)
    }
