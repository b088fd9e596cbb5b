"""Lookups of many features in one call, of which those on one table become one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys, KeysLike
from kvjax._lookup.feature import Feature, Plan, plan
from kvjax._lookup.readable import Readable, rows_of
from kvjax._spmd.explicit import sharding_of
from kvjax._table.reads import Query
from kvjax._table.table import Table
from kvjax._values.arrays import ArrayLike
from kvjax._values.numbers import is_integer

FeatureLike: TypeAlias = Feature | tuple[Readable, KeysLike] | tuple[Readable, KeysLike, ArrayLike | None]


def lookup_many(features: Mapping[str, FeatureLike]) -> dict[str, jax.Array]:
    """Looks several features up, of one table or of several; changes nothing.

    Features on one table become one lookup, with one gradient: rows for each key and bags alike, if they have the same
    `missing`. They share the rows of equal keys, unless each has a salt of its own.

    Args:
      features: by name, `Feature`, or what the method ``feature`` of a layer returns. ``(table, keys)`` and ``(table,
        keys, mask)`` are short for features of a row for each key.

    Returns:
      By name, in the order of the features, rows ``(..., dim)``, or of a feature with a combiner one row a bag.

    Raises:
      TypeError, ValueError: a feature is none, or as `Table.lookup` and `kvjax.lookup_bag` do. The error names it.

    Source:
      DeepRec's ``group_embedding_lookup_sparse``, TorchRec's ``EmbeddingBagCollection``.

    Example:
      >>> import kvjax, numpy as np
      >>> tags, users = kvjax.get_table("doc_tags", dim=2), kvjax.get_table("doc_users", dim=3)
      >>> rows = kvjax.lookup_many({
      ...     "user": (users, np.array([7, 8])),
      ...     "liked": kvjax.Feature(tags, np.array([[1, 2], [3, -1]]), pad_id=-1, salt=0, combiner="mean"),
      ...     "shown": kvjax.Feature(tags, np.array([1, 2]), salt=1),
      ... })
      >>> {name: r.shape for name, r in rows.items()}
      {'user': (2, 3), 'liked': (2, 2), 'shown': (2, 2)}
      >>> kvjax.drop_table("doc_tags"), kvjax.drop_table("doc_users")
      (None, None)
    """
    if not isinstance(features, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's
        raise TypeError(
            f"kvjax: lookup_many: want features by name, got {type(features).__name__}; give {{name: "
            "kvjax.Feature(table, keys)}"
        )
    plans = {name: plan(_feature_of(name, x), f"lookup_many, feature {name!r}") for name, x in features.items()}
    groups: dict[Any, list[str]] = {}
    for name, planned in plans.items():
        groups.setdefault(_together(planned), []).append(name)
    results = {}
    for names in groups.values():
        rows = _rows_of_group([plans[name] for name in names])
        results |= {name: plans[name].made_of(own) for name, own in zip(names, rows, strict=True)}
    return {name: results[name] for name in plans}


def _feature_of(name: str, given: Any) -> Feature:
    if isinstance(given, Feature):
        return given
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise TypeError(
            f"kvjax: feature {name!r}, lookup_many: want a kvjax.Feature, (table, keys) or (table, keys, mask), got "
            f"{given!r}; a layer makes one by layer.feature(keys)"
        )
    if is_integer(given[-1]) and len(given) == 3:
        raise TypeError(
            f"kvjax: feature {name!r}, lookup_many: want a mask as the third of (table, keys, mask), got {given[2]!r}; "
            f"of padding by an id give kvjax.Feature(table, ids, pad_id={given[2]})"
        )
    return Feature(*given)


def _together(planned: Plan) -> Any:
    """What features have in common that one lookup can read."""
    table, missing, query = planned.table, planned.missing, planned.query
    # Handles that differ are asked each for itself, so that a stale one is refused.
    handle = table.given if isinstance(table, Table) else table
    substitute = missing if missing is None or isinstance(missing, str) else id(missing)
    # What has been read ahead is read by itself.
    ahead = None if query.prefetched is None else id(query.prefetched)
    return table.name, id(handle), substitute, ahead, _kept(planned), sharding_of(query.keys.words, len(_kept(planned)))


def _kept(planned: Plan) -> tuple[int, ...]:
    """The first axis of the keys where it may be spread over devices, which stays then."""
    in_place = isinstance(planned.table, Table) and planned.table.spec.placement is None
    return () if in_place else planned.query.keys.shape[:1]


def _rows_of_group(plans: list[Plan]) -> list[jax.Array]:
    """The rows of each."""
    table, query, missing, _ = plans[0]
    if len(plans) == 1:
        return [rows_of(table, query, missing)]
    queries, kept = [planned.query for planned in plans], _kept(plans[0])
    axis = len(kept)
    flat = [(*kept, math.prod(query.keys.shape[axis:])) for query in queries]
    keys = Keys.concatenate([q.keys.reshape(*shape) for q, shape in zip(queries, flat, strict=True)], axis)
    mask = None
    if any(q.mask is not None for q in queries):
        masks = [jnp.ones_like(q.keys.words[..., 0], bool) if q.mask is None else q.mask for q in queries]
        mask = jnp.concatenate([own.reshape(shape) for own, shape in zip(masks, flat, strict=True)], axis)
    rows = rows_of(table, Query(keys, mask), missing)
    pieces = jnp.split(rows, np.cumsum([shape[axis] for shape in flat])[:-1], axis)
    return [piece.reshape(*q.keys.shape, table.dim) for piece, q in zip(pieces, queries, strict=True)]
