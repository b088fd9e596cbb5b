"""Transforms that keep something between steps, on meshes with Explicit axes: what they do without a mesh."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax.optax import accumulate, apply_if_finite, catch_up, ema_rows, group_lasso, joint, partition
from tests.support.marks import few, few_rows

pytestmark = pytest.mark.usefixtures("promotion")
PLAIN = optax.adagrad(0.1)


@functools.cache
def adam():
    return catch_up(optax.adam(0.1))  # which compiles: not where tests are collected


CASES = {
    "accumulate": lambda: (PLAIN, lambda tx: accumulate(tx, 2)),
    "catch_up": lambda: (adam(), lambda tx: tx),
    "both": lambda: (adam(), lambda tx: accumulate(tx, 2)),
    "group_lasso": lambda: (group_lasso(PLAIN, l21=0.1), lambda tx: tx),
    "joint": lambda: (adam(), lambda tx: optax.chain(joint(optax.clip_by_global_norm(0.5)), tx)),
    "finite": lambda: (PLAIN, lambda tx: accumulate(apply_if_finite(tx, 3), 2)),
    "averages": lambda: (optax.chain(PLAIN, ema_rows(0.9)), lambda tx: tx),
}


SPREAD = (False, True, False)
OTHERS = [(True, False, False), (True, True, False), (True, True, True)]


@pytest.mark.parametrize(
    ("name", "placed", "spread", "within"),  # the state, on the mesh; the batch, over it; the step, in jax.set_mesh
    few_rows([*((name, *SPREAD) for name in CASES), *(("both", *other) for other in OTHERS)]),
)
def test_on_explicit_axes(name, placed, spread, within, make, mesh):
    axes, (rows, wrap), results = mesh(4, explicit=True), CASES[name](), []
    tx = wrap(partition(dense=optax.sgd(0.1), tables=rows))
    ids = np.array([[1, 2, 3, 4], [3, 3, 4, 5], [1, 6, 6, 2], [2, 7, 7, 1]])

    @jax.jit
    def step(params, state, keys):
        def loss(p):
            return jnp.sum((p["t"].lookup(keys) - 1.0) ** 2)

        grads = kvjax.grad(loss)(kvjax.optax.caught_up(params, state, rows))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for where in (None, axes):
        params = {"t": make(2, initializer=0.5, mesh=where, seed=1)}
        state = tx.init(params)
        if where is not None and placed:
            state = jax.device_put(state, NamedSharding(axes, P()))
        with jax.set_mesh(axes) if where is not None and within else contextlib.nullcontext():
            for each in ids:
                keys = kvjax.keys(each)
                if where is not None and spread:
                    keys = jax.device_put(keys, NamedSharding(axes, P("x")))
                params, state = step(params, state, keys)
        results.append(kvjax.optax.caught_up(params, state, rows)["t"].export())
    one, other = results
    np.testing.assert_allclose(one.values, other.values, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal((one.keys, one.freqs, one.versions), (other.keys, other.freqs, other.versions))
    assert len(one) == 7


WRAPPERS = {
    "apply_if": lambda tx: kvjax.optax.apply_if(tx, lambda grads: optax.tree.norm(grads["t"]) < 9),
    "apply_if_finite": lambda tx: apply_if_finite(tx, 3),
    "scale_loss": lambda tx: kvjax.optax.scale_loss(tx, initial=1.0),
    "accumulate": lambda tx: accumulate(tx, 1),
}


@pytest.mark.parametrize("name", few(WRAPPERS))
def test_parameters_that_each_device_has_its_own_of(name, make, mesh):
    place, tx = mesh(4), WRAPPERS[name](partition(dense=optax.adam(0.1), tables=PLAIN))

    def step(params, keys):
        grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(keys)[:, 0] * p["w"]))(params)
        updates, _ = tx.update(grads, tx.init(params), params)
        new = optax.apply_updates(params, updates)
        return new["t"], new["w"]

    found = []
    for check_vma in (False, True):
        params = {"t": make(2, initializer=0.5, mesh=place, seed=1), "w": jnp.ones(4)}
        split = {"t": P(), "w": P("x")}
        specs = {"in_specs": (split, P("x")), "out_specs": (P(), P("x"))}
        run = jax.jit(jax.shard_map(step, mesh=place, check_vma=check_vma, **specs))
        table, w = run(params, kvjax.keys(np.arange(8)))
        found.append((table.export().values, w))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_allclose(found[0][1], 0.9, rtol=1e-5)
