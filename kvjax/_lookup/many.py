"""Lookups of many features in one call, of which those on one table become one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys, KeysLike
from kvjax._keys.salt import salted_parts
from kvjax._lookup.feature import Feature, Plan, plan
from kvjax._lookup.readable import Readable
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._table.reads import Query
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail

FeatureLike: TypeAlias = Feature | tuple[Readable, KeysLike] | tuple[Readable, KeysLike, ArrayLike | None]


def lookup_many(features: Mapping[str, FeatureLike]) -> dict[str, jax.Array]:
    """Looks up several features, of one table or of several; changes nothing.

    Features on one table become one lookup, with one gradient: rows for each key and bags alike, if they have the same
    `missing`. They share the rows of equal keys, unless each has a salt of its own.

    Args:
      features: by name, `Feature`, or what the method ``feature`` of a layer returns. ``(table, keys)`` and ``(table,
        keys, mask)`` are short for features of a row for each key.

    Returns:
      By name, in the order of the features: rows ``(..., dim)``, or for a feature with a combiner one row per bag.

    Raises:
      TypeError, ValueError: a feature is not valid, or as `Table.lookup` and `kvjax.lookup_bag` do. The error names the
        feature, unless it is known only when the call runs, as the sum of lengths is.

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
        mend = "give {name: kvjax.Feature(table, keys)}"
        raise fail(TypeError, None, "lookup_many", "features by name", type(features).__name__, mend)
    plans = {name: plan(_feature_of(name, x), f"lookup_many, feature {name!r}") for name, x in features.items()}
    groups: dict[_Together, list[str]] = {}
    for name, planned in plans.items():
        groups.setdefault(_together(planned), []).append(name)
    results = {}
    for together, names in groups.items():
        rows = _rows_of([plans[name] for name in names], together)
        results |= {name: plans[name].made_of(own) for name, own in zip(names, rows, strict=True)}
    return {name: results[name] for name in plans}


def _feature_of(name: str, given: Any) -> Feature:
    if isinstance(given, Feature):
        return given
    op, of_layer = f"lookup_many, feature {name!r}", "a layer makes one by layer.feature(keys)"
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        want, got = "a kvjax.Feature, (table, keys) or (table, keys, mask)", type(given).__name__
        raise fail(TypeError, None, op, want, got, of_layer)
    if hasattr(given[0], "feature"):
        raise fail(TypeError, None, op, "a table and keys", f"{type(given[0]).__name__} and keys", of_layer)
    if len(given) == 3 and is_integer(given[2]):
        mend = f"of padding by an id give kvjax.Feature(table, ids, pad_id={given[2]})"
        raise fail(TypeError, None, op, "a mask as the third of (table, keys, mask)", repr(given[2]), mend)
    if len(given) == 3 and isinstance(given[2], Keys):
        mend = "give features of two tables, or of two keys, a name each"
        raise fail(TypeError, None, op, "a mask as the third of (table, keys, mask)", "keys", mend)
    return Feature(*given)


class _Together(NamedTuple):
    """What features have in common that one lookup reads.

    Attributes:
      reader: the identity of what reads them.
      missing: what keys without a row read as.
      ahead: what has been read ahead, which is read by itself.
      kept: the first axis of the keys, which stays where it may be spread over devices; else ().
      sharding: of this axis, as the type of the keys says it.
    """

    reader: Any
    missing: Any
    ahead: int | None
    kept: tuple[int, ...]
    sharding: tuple[Any, ...]


def _together(planned: Plan) -> _Together:
    reader, keys = planned.reader, planned.query.keys
    ahead = None if planned.query.prefetched is None else id(planned.query.prefetched)
    kept = keys.shape[:1] if reader.spread or sharding_of(keys.words, keys.ndim) else ()
    return _Together(reader.identity, _missing_of(planned), ahead, kept, sharding_of(keys.words, len(kept)))


def _missing_of(planned: Plan) -> Any:
    """What keys without a row read as, to be compared."""
    missing = planned.missing
    if missing is None or isinstance(missing, str):
        return None if missing == planned.reader.usual else missing
    return id(missing) if isinstance(missing, jax.Array) else tuple(map(float, missing))


def _rows_of(plans: list[Plan], together: _Together) -> list[jax.Array]:
    """The rows of each, ``(..., dim)``."""
    if len(plans) == 1:
        return [plans[0].rows]
    reader, missing, salts = plans[0].reader, plans[0].missing, [planned.salt for planned in plans]
    queries, axis = [planned.query for planned in plans], len(together.kept)
    flat = [(*together.kept, math.prod(q.keys.shape[axis:])) for q in queries]

    def join(words: Any, masks: Any) -> Any:
        parts = [own.reshape(*shape, 2) for own, shape in zip(words, flat, strict=True)]
        joined = salted_parts(jnp.concatenate(parts, axis), salts, [shape[axis] for shape in flat])
        if all(own is None for own in masks):
            return (joined,), ()
        own = [jnp.ones(s, bool) if mask is None else mask.reshape(s) for mask, s in zip(masks, flat, strict=True)]
        return (joined, jnp.concatenate(own, axis)), ()

    def split(rows: Any) -> Any:
        return tuple(jnp.split(rows, np.cumsum([shape[axis] for shape in flat])[:-1], axis)), ()

    words, *mask = as_auto(join, together.sharding, [q.keys.words for q in queries], [q.mask for q in queries])[0]
    narrow = any(planned.query.keys.narrow and planned.salt is None for planned in plans)
    rows = reader.rows(Query(Keys(words, narrow), *mask), missing)
    return [
        _as_keys(piece, q.keys, reader.dim)
        for piece, q in zip(as_auto(split, together.sharding, rows)[0], queries, strict=True)
    ]


def _as_keys(rows: jax.Array, keys: Keys, dim: int) -> jax.Array:
    """Rows in the shape of their keys, and spread over devices as these are."""
    shape = *keys.shape, dim
    return as_auto(lambda x: ((x.reshape(shape),), ()), sharding_of(keys.words, keys.ndim), rows)[0][0]
