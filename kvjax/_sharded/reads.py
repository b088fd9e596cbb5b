"""Reads of a table, wherever its rows are: in one place, or sharded over the devices of a mesh.

A read of a sharded table goes to the owners of its keys (`kvjax._sharded.exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._keys.keys import Keys
from kvjax._ops import reads, routing
from kvjax._ops.initial_rows import initial_rows
from kvjax._sharded import following
from kvjax._sharded.exchange import ask
from kvjax._sharded.mesh import over_keys
from kvjax._spec.spec import TableSpec


def lookup(
    spec: TableSpec,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    as_initial: bool,
    few: bool = False,
    with_found: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows ``(..., dim)``, found ``(...)`` bool, and 1.0, which exists only once the rows have been read.

    `few` says that the mask leaves out most keys, `with_found` false that nobody asks for it: then it is nothing.
    """
    if spec.placement is None:
        initial = initial_rows(spec, version, keys, mask)
        return reads.lookup(spec, version, keys, mask, initial, as_initial)[:3]
    options = {"as_initial": as_initial, "few": few, "with_found": with_found}
    (rows, *found), (used,) = _over(version)(_lookup_part, spec, "lookup", version, keys, mask, **options)
    return rows, found[0] if found else jnp.zeros(0, bool), used


def _over(version: jax.Array) -> Callable[..., Any]:
    """How a read gets to the shards: through a following handle, whose version is ``(0,)``, to each by itself."""
    return following.over_shards if version.shape == (0,) else over_keys


def _lookup_part(
    spec: TableSpec,
    op: str,
    version: Any,
    keys: Keys,
    mask: Any,
    as_initial: bool,
    few: bool,
    with_found: bool,
    ask: Callable[..., Any] = ask,
) -> Any:
    wire = spec.placement.wire if spec.placement else None

    shares = spec.shares_row and not as_initial and spec.num_shards > 1

    def answer(keys: Keys, mask: Any, place: int | None = None) -> Any:
        initial = initial_rows(spec, version, keys, mask, place)
        rows, found, _, status = reads.lookup(spec, version, keys, mask, initial, as_initial, shares, place)
        rows = rows if wire is None else rows.astype(wire)
        answers = (rows, found) if with_found or shares else (rows,)
        if with_found and shares:
            answers += (reads.inspect(spec, op, version, keys, place)[0],)
        return answers, status

    if shares:  # the owner of a key need not be that of the row that stands for it
        keys, mask = _with_shared(spec, keys, mask)
    (rows, *found), used = ask(spec, op, keys, mask, answer, few)
    if shares:
        own, *found = found
        stands_in = ~own[:-1] if mask is None else mask[:-1] & ~own[:-1]
        rows, found = jnp.where(stands_in[:, None], rows[-1:], rows[:-1]), [x[:-1] for x in found]
    return (rows.astype(spec.row_dtype), *found), (used,)


def _with_shared(spec: TableSpec, keys: Keys, mask: Any) -> tuple[Keys, Any]:
    """Keys and mask ``(n + 1,)``, the last of which is that of the row that unadmitted keys share."""
    words = jnp.concatenate([keys.words, jnp.asarray(spec.shared_words)[None]])
    return Keys(words, keys.narrow), None if mask is None else jnp.concatenate([mask, jnp.ones(1, bool)])


def changed(spec: TableSpec, version: jax.Array, since: jax.Array, keys: Keys, mask: jax.Array | None) -> jax.Array:
    """Whether keys may read otherwise than at the version `since`, ``(...)`` bool; false where the mask is."""
    if spec.placement is None:
        found = reads.changed(spec, version, since, keys)[0]
    else:
        versions = jnp.stack([version, since])
        found = over_keys(_answered, spec, "prefetch", versions, keys, mask, by=_changed)[0][0]
    return found if mask is None else found & mask


def _changed(spec: TableSpec, op: str, versions: Any, keys: Keys, place: None) -> tuple[jax.Array, ...]:
    return reads.changed(spec, versions[0], versions[1], keys)


def _answered(
    spec: TableSpec,
    op: str,
    version: Any,
    keys: Keys,
    mask: Any,
    by: Callable[..., tuple[jax.Array, ...]],
    ask: Callable[..., Any] = ask,
    **options: Any,
) -> Any:
    """One device's part of a read in which owners answer, and nothing is made of the answers.

    by: ``(spec, op, version, keys (n,), place, **options)`` to the answers ``(n, ...)`` and a status; a function of a
    module.
    """

    def answer(keys: Keys, mask: Any, place: int | None = None) -> Any:
        *answers, status = by(spec, op, version, keys, place, **options)
        return tuple(answers), status

    answers, used = ask(spec, op, keys, mask, answer)
    return answers, (used,)


def inspect(
    spec: TableSpec, op: str, version: jax.Array, keys: Keys
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Found ``(...)`` bool, frequency and version ``(..., 2)`` uint32, the words of int64, pinned ``(...)`` bool."""
    if spec.placement is None:
        return reads.inspect(spec, op, version, keys)[:4]
    (found, freq, written, pinned), _ = _over(version)(_answered, spec, op, version, keys, None, by=reads.inspect)
    return found, freq, written, pinned


def read_slot(
    spec: TableSpec, slot: str, version: jax.Array, keys: Keys, dtype: Any, shape: Sequence[int]
) -> jax.Array:
    """The slot ``(..., *shape)``; all of them as words ``(..., n)`` uint32, if its name is the text of a layout."""
    if spec.placement is None:
        return reads.read_slot(spec, slot, version, keys, dtype, shape)[0]
    kind = {"slot": slot, "dtype": jnp.dtype(dtype), "shape": tuple(shape)}
    return _over(version)(_answered, spec, "slot", version, keys, None, by=_slot, **kind)[0][0]


def _slot(
    spec: TableSpec, op: str, version: Any, keys: Keys, place: int | None, slot: str, dtype: Any, shape: Any
) -> tuple[jax.Array, ...]:
    return reads.read_slot(spec, slot, version, keys, dtype, shape, place)


def read_slots_until(
    spec: TableSpec, layout: str, version: jax.Array, keys: Keys, words: int, at: int, steps: jax.Array
) -> jax.Array:
    """All slots of rows as words ``(..., words)`` uint32.

    An error is raised if one of them is ahead: if its word `at`, an int32, is more than `steps`, ``()`` int32.
    """
    if spec.placement is None:
        found = reads.read_slot(spec, layout, version, keys, jnp.uint32, (words,))[0]
        return routing.agree(spec, "lookup", _ahead(found, at, steps), [found])[0]
    versions = jnp.stack([version, jax.lax.bitcast_convert_type(steps, jnp.uint32)])
    options = {"layout": layout, "words": words, "at": at}
    return over_keys(_answered, spec, "lookup", versions, keys, None, by=_slots_until, **options)[0][0]


def _slots_until(
    spec: TableSpec, op: str, versions: Any, keys: Keys, place: None, layout: str, words: int, at: int
) -> tuple[jax.Array, ...]:
    values, status = reads.read_slot(spec, layout, versions[0], keys, jnp.uint32, (words,))
    steps = jax.lax.bitcast_convert_type(versions[1], jnp.int32)
    return values, jnp.maximum(status, _ahead(values, at, steps))


def _ahead(words: jax.Array, at: int, steps: jax.Array) -> jax.Array:
    """The number of the failure that rows are ahead, or 0; ``()`` uint32."""
    last = jax.lax.bitcast_convert_type(words[..., at], jnp.int32)
    return jnp.where(jnp.any(last > steps), jnp.uint32(routing.AHEAD), jnp.uint32(0))
