"""Reads of a following handle over a mesh: shard by shard, and nobody has to call them together.

Programs over several devices that two threads start may wait for each other for ever, so no such read is a collective.
Each shard answers from its newest finished version, so rows of two shards may be a step apart. Shards in the memory of
the host are read one after the other by the program that asks, wherever it runs. Those of devices are read by a program
on each, which waits for nobody, and so outside of compiled programs alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from kvjax._keys.keys import Keys
from kvjax._ops import routing
from kvjax._sharded.exchange import owners
from kvjax._spec.placement import Placement
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto, sharding_of
from kvjax._values.errors import fail
from kvjax.ffi import is_device


def over_shards(
    part: Callable[..., Any], spec: TableSpec, op: str, version: jax.Array, keys: Keys, mask: Any, **options: Any
) -> Any:
    """`kvjax._sharded.mesh.over_keys` of a following handle.

    Raises:
      ValueError: it is traced, and the shards are in the memory of devices.
    """
    traced = any(isinstance(x, Tracer) for x in (version, keys.words, mask, jnp.zeros(())))
    if not is_device(spec.storage.backend):
        read = functools.partial(_read_here, part, spec, op, tuple(sorted(options.items())))
        return read(version, keys, mask) if traced else _on_one_device(spec, read, version, keys, mask)
    if traced:
        raise fail(
            ValueError, spec.name, op, "a read outside jit, or a table in one place, or in the memory of the host",
            "a compiled one, through what table.live() gives, of a table in the memory of several devices", "in a "
            "program it would be a collective, and those of two threads may wait for each other for ever: look the "
            "rows up before the program and give it them, or read by the handle that is trained, in its thread",
        )  # fmt: skip
    mask = None if mask is None else jnp.asarray(mask).reshape(-1)
    by_key, common = part(spec, op, version, keys.reshape(-1), mask, ask=_ask_devices, **options)
    return _shaped(keys, by_key), common


@contextlib.contextmanager
def _alone(device: Any) -> Generator[Any]:
    """Programs on this device, whatever mesh is around."""
    with jax.set_mesh(Mesh(np.array([device]), ("device",))):
        yield device


def _shaped(keys: Keys, by_key: Any) -> tuple[Any, ...]:
    return tuple(x.reshape(*keys.shape, *x.shape[1:]) for x in by_key)


def _on_one_device(spec: TableSpec, read: Callable[..., Any], version: Any, keys: Keys, mask: Any) -> Any:
    """A read outside of programs, on one device, wherever its keys are: to gather those would be a collective."""
    words, mask = np.asarray(keys.words), None if mask is None else np.asarray(mask)
    with _alone(devices(spec.mesh_placement)[0]) as device:
        there = jax.device_put((np.asarray(version), words, mask), device)
        found = read(there[0], Keys(there[1], keys.narrow), there[2])
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), found)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _read_here(
    part: Callable[..., Any], spec: TableSpec, op: str, options: Any, version: Any, keys: Keys, mask: Any
) -> Any:
    def run(version: Any, words: Any, mask: Any) -> Any:
        flat = Keys(words, keys.narrow).reshape(-1), None if mask is None else mask.reshape(-1)
        by_key, common = part(spec, op, version, *flat, ask=_ask_here, **dict(options))
        return _shaped(keys, by_key), common

    return as_auto(run, sharding_of(keys.words, keys.ndim), version, keys.words, mask)


Answer = Callable[..., tuple[tuple[Any, ...], Any]]


def _ask_here(
    spec: TableSpec, op: str, keys: Keys, mask: Any, answer: Answer, few: bool = False
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """As `kvjax._sharded.exchange.ask`, of the shards of this process, which must be all."""
    placement, found = spec.mesh_placement, None
    to = owners(placement, keys)
    for place, shard in placement.kept:
        mine, status = routing.owned(spec, placement.num_shards, keys, to, jnp.int32(shard.shard), place)
        (mine,) = routing.agree(spec, op, status, (mine,))
        there, _ = answer(keys, mine if mask is None else mine & mask, place)
        chosen = [jnp.expand_dims(mine, range(1, x.ndim)) for x in there]
        found = there if found is None else tuple(map(jnp.where, chosen, there, found))
    assert found is not None
    return found, jnp.float32(1)


def _ask_devices(
    spec: TableSpec, op: str, keys: Keys, mask: Any, answer: Answer, few: bool = False
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """As `kvjax._sharded.exchange.ask`, of one caller alone, outside of programs."""
    placement = spec.mesh_placement
    words, valid = np.asarray(keys.words), np.ones(keys.size, bool) if mask is None else np.asarray(mask)
    owner = placement.owners(np.asarray(keys))
    asked: list[tuple[np.ndarray, tuple[jax.Array, ...]]] = []
    for shard, device in enumerate(devices(placement)):
        mine = valid & (owner == shard)
        if mine.any() or (shard + 1 == placement.num_shards and not asked):
            with _alone(device):
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
