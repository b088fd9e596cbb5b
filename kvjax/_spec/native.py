"""The native form of a spec: what the C++ side is told of a table and of its shards, under the names that it knows."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvjax._process import PROCESS
from kvjax._spec.engines import Calls
from kvjax._spec.spec import TableSpec
from kvjax.evict import Every, policy_of
from kvjax.initializers import Generated, Pool, Segments
from kvjax.storage import External, given_by_user


def native_options(spec: TableSpec) -> dict[str, Any]:
    """The options of a table, the same for each shard."""
    policy = policy_of(spec.evict)
    return {
        "dim": spec.dim,
        "placement": spec.placement_number,
        "sharded": spec.sharded,
        "score": functools.partial(PROCESS.call_score, spec.exported),
        "dtype": spec.dtype,
        **_initial_rows(spec),
        "seed": spec.seed,
        "capacity": _of_shard(spec, spec.capacity or 0),
        "max_capacity": spec.max_capacity or 0,
        "on_full": spec.on_full,
        "admit": _admission(spec),
        "policy": "" if policy is None else policy.text(),
        "evict_every": spec.evict.steps if isinstance(spec.evict, Every) else 0,
        "count_batches": spec.count == "batch",
        "storage": spec.storage.text,
        "engine": _engine(spec),
    }


def native_shards(spec: TableSpec) -> dict[str, Any]:
    """Where the shards of this process shall be."""
    if spec.placement is None:
        return {"devices": [spec.host.HOME], "shards": [0], "owns_shared": [True]}
    local = spec.placement.local
    owner = spec.placement.owners(spec.shared_words.view(np.int64))[0] if spec.shares_row else 0
    return {
        "devices": [shard.device for shard in local],
        "shards": [shard.shard for shard in local],
        "owns_shared": [bool(shard.shard == owner) for shard in local],
    }


def _engine(spec: TableSpec) -> Calls | None:
    given = given_by_user(spec.storage) if isinstance(spec.storage, External) else None
    return None if given is None else Calls(spec, given)


def _of_shard(spec: TableSpec, number: int) -> int:
    """The share of each shard."""
    return -(-number // spec.num_shards)


def _initial_rows(spec: TableSpec) -> dict[str, Any]:
    """Kind, how the elements of each segment are distributed, and the rows of a pool ``(p * dim,)`` float32."""
    made, no_pool = spec.initializer, np.zeros(0, np.float32)
    if isinstance(made, Pool):
        return {"kind": "pool", "segments": [], "pool": made.array().reshape(-1)}
    if isinstance(made, Generated):  # its rows come with each call
        return {"kind": "given", "segments": [], "pool": no_pool}
    whole = made if isinstance(made, Segments) else Segments((spec.dim,), (made,))
    segments = [(end, part.kind, part.a, part.b) for end, part in zip(whole.ends, whole.parts, strict=True)]
    return {"kind": "elements", "segments": segments, "pool": no_pool}


def _admission(spec: TableSpec) -> dict[str, Any] | None:
    if spec.admit is None:
        return None
    common: dict[str, Any] = {
        "unadmitted": "shared" if spec.shares_row else spec.admit.unadmitted,
        "shared_key": int(spec.shared_words.view(np.int64)[0]),
        "threshold": 1,
        "cells": 0,
        "halve_every": 0,
        "max_age": 0,
        "max_waiting": 0,
        "probability": 1.0,
        "seed": spec.seed,
    }
    own = common | spec.admit.own_options()
    return own | {"max_waiting": _of_shard(spec, own["max_waiting"])}
