"""Programs for CUDA are made where there is none: the same calls under the same names as for the CPU."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import ffi
from tests.support.lowering import CALLS_OF_STEP, TX, lowered, step, targets

LOOKUP = {"kvjax_lookup"}
BAG = {"kvjax_bag_ids", "kvjax_bag_sum", "kvjax_bag_expand", "kvjax_bag_dot"}


def lookup(table, keys):
    return table.lookup(keys)


def bag(table, keys, weights):
    def loss(table, weights):
        return kvjax.lookup_bag(table, keys, lengths=[3, 0, 5], weights=weights, combiner="sum").sum()

    return kvjax.value_and_grad(loss, argnums=(0, 1))(table, weights)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_lowering(platform, make, x64, promotion):
    table, keys = make(dim=4, initializer=kvjax.initializers.normal(0.1)), kvjax.keys(np.arange(8))
    state = kvjax.optax.rowwise(TX).init(4)
    assert targets(lowered(lookup, table, keys, platform=platform)) == LOOKUP
    assert targets(lowered(step, table, state, keys, platform=platform)) == CALLS_OF_STEP
    got = targets(lowered(bag, table, keys, jnp.ones(8), platform=platform))
    assert got >= BAG | LOOKUP
    assert len(table) == 0 and table.refresh().version == table.version  # nothing has run


@pytest.mark.skipif(not ffi.loaded(ffi.DEVICE), reason="there is no device backend")
def test_programs_of_a_spread_table_call_what_the_device_backend_has(make, mesh, promotion):
    table, keys = make(dim=4, mesh=mesh(4)), kvjax.keys(np.arange(8))
    state = kvjax.optax.rowwise(TX).init(4)
    called = targets(lowered(step, table, state, keys, platform="cpu"))
    called |= targets(lowered(lambda t: t.upsert(keys, jnp.ones((8, 4))).remove(keys), table, platform="cpu"))
    assert {"kvjax_route", "kvjax_owned", "kvjax_receive", "kvjax_commit_step"} <= called
    assert called <= ffi.module(ffi.DEVICE).handlers().keys()
