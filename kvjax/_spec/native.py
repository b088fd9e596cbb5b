"""The native form of a table's options: each under the name that the C++ side knows.

Each function is the ``native`` of an entry of `kvjax._spec.options.Options`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax._spec.engines import Calls
from kvjax.evict import Every
from kvjax.initializers import Generated, Pool, Segments
from kvjax.storage import External

Native = dict[str, Any]
TableSpec = Any  # which is made of the options, and so comes after them


def dtype(spec: TableSpec) -> Native:
    return {"dtype": spec.dtype}


def initializer(spec: TableSpec) -> Native:
    """Kind, how the elements of each segment are distributed, and the rows of a pool ``(p * dim,)`` float32."""
    made, no_pool = spec.initializer, np.zeros(0, np.float32)
    if isinstance(made, Pool):
        return {"kind": "pool", "segments": [], "pool": made.array().reshape(-1)}
    if isinstance(made, Generated):  # its rows come with each call
        return {"kind": "given", "segments": [], "pool": no_pool}
    whole = made if isinstance(made, Segments) else Segments((spec.dim,), (made,))
    segments = [(end, part.kind, part.a, part.b) for end, part in zip(whole.ends, whole.parts, strict=True)]
    return {"kind": "elements", "segments": segments, "pool": no_pool}


def seed(spec: TableSpec) -> Native:
    return {"seed": spec.seed}


def capacity(spec: TableSpec) -> Native:
    """Of each shard."""
    return {"capacity": -(-(spec.capacity or 0) // spec.num_shards)}


def max_capacity(spec: TableSpec) -> Native:
    return {"max_capacity": spec.max_capacity or 0}


def on_full(spec: TableSpec) -> Native:
    return {"on_full": spec.on_full}


def admission(spec: TableSpec) -> Native:
    admit = spec.admit
    if admit is None:
        return {"admit": None}
    common = {
        "unadmitted": "shared" if spec.shares_row else admit.unadmitted,
        "shared_key": int(spec.shared_words.view(np.int64)[0]),
        "threshold": 1,
        "cells": 0,
        "halve_every": 0,
        "max_age": 0,
        "max_waiting": 0,
        "probability": 1.0,
        "seed": spec.seed,
    }
    own = common | admit.own_options()
    return {"admit": own | {"max_waiting": -(-own["max_waiting"] // spec.num_shards)}}


def eviction(spec: TableSpec) -> Native:
    policy = spec.evict.policy if isinstance(spec.evict, Every) else spec.evict
    return {
        "policy": "" if policy is None else policy.text(),
        "evict_every": spec.evict.steps if isinstance(spec.evict, Every) else 0,
    }


def count(spec: TableSpec) -> Native:
    return {"count_batches": spec.count == "batch"}


def storage(spec: TableSpec) -> Native:
    engine = Calls(spec) if isinstance(spec.storage, External) else None
    return {"storage": spec.storage.text, "engine": engine}
