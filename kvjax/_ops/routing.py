"""Calls by which the devices of a sharded table agree and find the owners of keys, one function per target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys
from kvjax._ops.call import WORD, array, mask_operand, nothing, read
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import varying_like

AHEAD = 2**32 - 1
"""The number by which `agree` raises that rows are ahead of their optimizer's state."""


@dataclasses.dataclass(frozen=True)
class Routed:
    """A batch of one device, sorted by the shards that own its keys.

    Attributes:
      words: ``(n, 2)`` uint32, the distinct keys by owner.
      order: ``(n,)`` int32, where each of them first occurs in the batch.
      starts: ``(num_shards + 1,)`` int32, where the keys of each owner begin.
      position: ``(n,)`` int32, for each key of the batch owner * capacity + its place in the round.
      round: ``(n,)`` int32, the round in which it travels; -1 where the mask is false.
      status: ``()`` uint32.
    """

    words: jax.Array
    order: jax.Array
    starts: jax.Array
    position: jax.Array
    round: jax.Array
    status: jax.Array


def route(
    spec: TableSpec, shards: int, capacity: int, keys: Keys, mask: jax.Array | None, owners: Any, shard: jax.Array
) -> Routed:
    n = keys.size
    ints = array((n,), jnp.int32)
    results = (array((n, 2), jnp.uint32), ints, array((shards + 1,), jnp.int32), ints, ints, WORD)
    operands = (keys.words, mask_operand(spec, mask), owners, shard)
    attributes: dict[str, Any] = {"table": spec.name, "shards": np.int64(shards), "round_capacity": np.int64(capacity)}
    return Routed(*read("kvjax_route", results, *operands, **attributes))


def owned(
    spec: TableSpec, shards: int, keys: Keys, owners: Any, shard: jax.Array, place: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Which keys the shard owns ``(n,)`` bool, and status. With `place`, see `kvjax._ops.reads`."""
    results = (array((keys.size,), jnp.bool_), WORD)
    attributes: dict[str, Any] = {"table": spec.name, "shards": np.int64(shards)}
    attributes |= {} if place is None else {"place": np.int64(place)}
    return read("kvjax_owned", results, keys.words, owners, shard, **attributes)


def check_equal(spec: TableSpec, op: str, low: jax.Array, high: jax.Array) -> jax.Array:
    """Status: that of a failure unless the smallest and the largest sum are one."""
    return read("kvjax_check_same", WORD, low, high, table=spec.name, op=op)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a call moves between devices, to be counted.

    Attributes:
      rounds: ``()`` int32.
      starts: of `Routed`; or ``(0,)``, and nothing is counted.
      to_owners: bytes that a device sends to others in a round, to the owners of its keys.
      from_owners: the same of the answers.
      usual_rounds: that such a batch takes if its keys are evenly spread.
    """

    rounds: Any
    starts: Any
    to_owners: int
    from_owners: int
    usual_rounds: int


def agree(
    spec: TableSpec,
    op: str,
    number: jax.Array,
    values: Sequence[jax.Array],
    traffic: Traffic | None = None,
) -> tuple[jax.Array, ...]:
    """The values, unless the number is that of a failure, which is raised."""
    traffic = traffic or Traffic(np.int32(0), nothing(spec, (0,), np.int32), 0, 0, 0)
    results = tuple(array(x.shape, x.dtype) for x in values)
    aliases = {i + 3: i for i in range(len(values))}
    call = jax.ffi.ffi_call("kvjax_agree", results, input_output_aliases=aliases, vmap_method="sequential")
    amounts = ("to_owners", "from_owners", "usual_rounds")
    attributes: dict[str, Any] = {"table": spec.name, "op": op}
    attributes |= {name: np.int64(getattr(traffic, name)) for name in amounts}
    # What all devices agree on varies no more than it did before.
    agreed = call(number, traffic.rounds, traffic.starts, *values, **attributes)
    return tuple(varying_like(new, old) for new, old in zip(agreed, values, strict=True))
