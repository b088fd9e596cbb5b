"""Reads of a table, one function per target. The last result of each, `status`, is 0, or on a sharded table the
number of its failure.

Each reads the shard of the device that it runs on; through a following handle, with `place`, the one at that place
among those of this process, alone: then nobody else makes the call, and it raises by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys
from kvjax._ops.call import WORD, array, flag, initial_operand, mask_operand, read
from kvjax._spec.spec import TableSpec


def _about(spec: TableSpec, version: Any, keys: Keys, place: int | None = None) -> dict[str, Any]:
    about: dict[str, Any] = {"table": spec.name, "narrow": flag(keys.narrow)}
    about["sharded"] = flag(spec.placement is not None and place is None)
    if version.shape == (0,):  # which says nothing of where the rows are
        about["placement"] = np.int64(spec.placement_number)
    return about if place is None else about | {"place": np.int64(place)}


def lookup(
    spec: TableSpec,
    version: jax.Array,
    keys: Keys,
    mask: jax.Array | None,
    initial: jax.Array | None,
    initial_rows: bool,
    own_rows: bool = False,
    place: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows ``(..., dim)``, found ``(...)`` bool, 1.0, which exists only once the rows have been read, and status.

    With `own_rows`, keys that read as their initial row are found, too.
    """
    results = (
        array((*keys.shape, spec.dim), spec.row_dtype),
        array(keys.shape, jnp.bool_),
        array((), jnp.float32),
        WORD,
    )
    about = _about(spec, version, keys, place)
    attributes = about | {"initial_rows": flag(initial_rows), "own_rows": flag(own_rows)}
    # Rows that come with the call belong to its keys as a whole.
    vmap = "sequential" if spec.generated else "broadcast_all"
    operands = (version, keys.words, mask_operand(spec, mask), initial_operand(spec, initial))
    return read("kvjax_lookup", results, *operands, vmap=vmap, **attributes)


def find_missing(
    spec: TableSpec, version: jax.Array, keys: Keys, mask: jax.Array | None, place: int | None
) -> tuple[jax.Array, jax.Array]:
    """Words ``(n + 1, 2)`` of the distinct keys without a row, and how many of them are valid."""
    results = (array((keys.size + 1, 2), jnp.uint32), array((), jnp.int32), WORD)
    operands = (version, keys.words, mask_operand(spec, mask))
    words, count, status = read("kvjax_find_missing", results, *operands, **_about(spec, version, keys, place))
    # After a failure the count means nothing; the op that wants the rows fails too, and says so.
    return words, jnp.where(status == 0, count, 0) if spec.placement else count


def inspect(
    spec: TableSpec, op: str, version: jax.Array, keys: Keys, place: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Found ``(...)`` bool, frequency and version ``(..., 2)`` uint32, the words of int64, pinned ``(...)`` bool, and
    status."""
    flags, words = array(keys.shape, jnp.bool_), array((*keys.shape, 2), jnp.uint32)
    results = (flags, words, words, flags, WORD)
    attributes = _about(spec, version, keys, place) | {"op": op}
    return read("kvjax_inspect", results, version, keys.words, vmap="expand_dims", **attributes)


def read_slot(
    spec: TableSpec,
    slot: str,
    version: jax.Array,
    keys: Keys,
    dtype: Any,
    shape: Sequence[int],
    place: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The slot ``(..., *shape)``, and status."""
    results = (array((*keys.shape, *shape), dtype), WORD)
    attributes = _about(spec, version, keys, place) | {"slot": slot}
    return read("kvjax_read_slot", results, version, keys.words, vmap="expand_dims", **attributes)


def changed(spec: TableSpec, version: jax.Array, since: jax.Array, keys: Keys) -> tuple[jax.Array, jax.Array]:
    """Whether keys may read otherwise than at the version `since`, ``(...)`` bool; and status."""
    results = (array(keys.shape, jnp.bool_), WORD)
    attributes = _about(spec, version, keys)
    return read("kvjax_changed", results, version, since, keys.words, vmap="expand_dims", **attributes)
