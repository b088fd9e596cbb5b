"""Reads of a following handle over a mesh: shard by shard, each by a program of its own device.

Programs over several devices that two threads start may wait for each other for ever. Those of one device wait for
nobody, so such a read may run beside a training step. Each shard answers from its newest finished version, so rows of
two shards may be a step apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from kvjax._keys.keys import Keys
from kvjax._ops import routing
from kvjax._spec.placement import Placement
from kvjax._spec.spec import TableSpec
from kvjax._values.errors import fail


def over_shards(
    part: Callable[..., Any], spec: TableSpec, op: str, version: jax.Array, keys: Keys, mask: Any, **options: Any
) -> Any:
    """`kvjax._sharded.mesh.over_keys` of a following handle.

    Raises:
      ValueError: it is traced.
    """
    if any(isinstance(x, Tracer) for x in (version, keys.words, mask)):
        raise fail(
            ValueError, spec.name, op, "a read outside jit, or a table in one place",
            "a compiled one, through what table.live() gives, of a table over a mesh", "in a program it would be a "
            "collective, and those of two threads may wait for each other for ever: look the rows up before the "
            "program and give it them, or read by the handle that is trained, in the thread that trains",
        )  # fmt: skip
    shape = keys.shape
    mask = None if mask is None else jnp.asarray(mask).reshape(-1)
    by_key, common = part(spec, version, keys.reshape(-1), mask, ask=ask, **options)
    return tuple(x.reshape(*shape, *x.shape[1:]) for x in by_key), common


def ask(
    spec: TableSpec,
    op: str,
    keys: Keys,
    mask: Any,
    answer: Callable[..., tuple[tuple[Any, ...], Any]],
    few: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """As `kvjax._sharded.exchange.ask`, of one caller alone."""
    placement = spec.mesh_placement
    words, valid = np.asarray(keys.words), np.ones(keys.size, bool) if mask is None else np.asarray(mask)
    owners = placement.owners(np.asarray(keys))
    asked: list[tuple[np.ndarray, tuple[jax.Array, ...]]] = []
    for shard, device in enumerate(devices(placement)):
        mine = valid & (owners == shard)
        if mine.any() or (shard + 1 == placement.num_shards and not asked):
            with jax.set_mesh(Mesh(np.array([device]), ("device",))):  # whatever mesh is around
                there = jax.device_put((words, mine), device)
                found, status = answer(Keys(there[0], keys.narrow), there[1])
                asked.append((mine, routing.agree(spec, op, status, found)))
    answers = [np.zeros(x.shape, x.dtype) for x in asked[0][1]]
    for mine, found in asked:  # once all shards are under way
        for all_of_it, part in zip(answers, found, strict=True):
            all_of_it[mine] = np.asarray(part)[mine]
    return tuple(map(jnp.asarray, answers)), jnp.float32(1)


def devices(placement: Placement) -> list[Any]:
    """A device of this process for each shard, or None where it has none."""
    return [next((d for d in row if d.process_index == jax.process_index()), None) for row in placement.devices]
