"""Evaluation of schedule-free training: tables read as Optax has dense parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
import kvjax.flax
from kvjax.optax import schedule_free_eval_params
from tests.support.marks import few

pytestmark = pytest.mark.usefixtures("promotion")
FREE = optax.contrib.schedule_free_sgd(0.1, b1=0.7)
TRANSFORMS = {
    "alone": FREE,
    "global": kvjax.optax.rowwise(optax.chain(optax.clip(1.0), FREE), count="global"),
    "adam": optax.contrib.schedule_free_adamw(0.1),
    "bfloat16": optax.contrib.schedule_free_sgd(0.1, state_dtype=jnp.bfloat16),
}


@pytest.mark.parametrize("name", few(TRANSFORMS))
def test_tables_and_dense_parameters_read_as_optax_has_them(name, make):
    tables, near = TRANSFORMS[name], 3e-3 if name == "bfloat16" else 1e-5  # 16-bit steps are rounded in other places
    dense = tables.tx if isinstance(tables, kvjax.optax.Rowwise) else tables
    tx = optax.chain(kvjax.optax.joint(optax.clip(10.0)), kvjax.optax.partition(dense, tables))
    keys, rows = np.array([7, 8]), np.array([[1.0, -2.0], [3.0, 0.5]], np.float32)
    params = {"t": make(2, initializer=5.0).upsert(keys, rows), "w": jnp.asarray(rows)}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(keys) ** 2 + p["w"] ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(4):
        params, state = step(params, state)
    x = schedule_free_eval_params(state, params, tables)
    assert np.abs(x["w"] - params["w"]).max() > 0.01
    np.testing.assert_allclose(x["t"].lookup(keys), x["w"], rtol=near)
    seen = jax.jit(lambda s, p: schedule_free_eval_params(s, p, tables)["t"].lookup(keys))(state, params)
    np.testing.assert_allclose(seen, x["w"], rtol=near)
    layer = kvjax.flax.EmbedBag(params["t"].name, combiner="sum")
    bag = layer.apply({"params": {"table": x["t"]}}, np.array([[7, 8]]))
    np.testing.assert_allclose(bag[0], x["w"].sum(0), rtol=near)
    assert x["t"].lookup(99).tolist() == [5.0, 5.0]
    exported = x["t"].export()
    np.testing.assert_allclose(exported.values, x["t"].lookup(exported.keys), rtol=1e-6)
    with pytest.raises(ValueError, match="schedule_free_eval_params"):
        kvjax.grad(lambda p: jnp.sum(p["t"].lookup(keys)))(x)


def test_what_is_not_schedule_free(make):
    params, sgd = {"t": make(2).upsert(7, [1.0, 1.0]), "w": jnp.ones(2)}, optax.sgd(0.1)
    half = schedule_free_eval_params(kvjax.optax.partition(sgd, FREE).init(params), params, FREE)
    assert half["w"] is params["w"] and half["t"].view is not None
    half = schedule_free_eval_params(kvjax.optax.partition(FREE, sgd).init(params), params, sgd)
    assert half["t"] is params["t"] and half["w"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"want the state and tables= of one optax\.contrib\.schedule_free"):
        schedule_free_eval_params(kvjax.optax.partition(sgd, sgd).init(params), params, sgd)
