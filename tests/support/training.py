"""The same net on a dense table and on one of kvjax, and steps that train both."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import kvjax

VOCABULARY, DIM, BATCH = 16, 8, 16


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: optax.adagrad(0.1),
    "adam": lambda: optax.adam(0.05),
    "adamw": lambda: optax.adamw(0.05, weight_decay=0.01),
    "rmsprop": lambda: optax.rmsprop(0.05),
    "lion": lambda: optax.lion(0.01),
    "scheduled": lambda: optax.adam(optax.linear_schedule(0.1, 0.0, 20)),
}


def wide(ids):
    return kvjax.keys(np.asarray(ids, np.int64) * 2**40 - 7)


class Net(nn.Module):
    table: str | None
    dtype: object = None

    @nn.compact
    def __call__(self, ids):
        if self.table is None:
            rows = nn.Embed(VOCABULARY, DIM, dtype=self.dtype)(ids)
        else:
            rows = kvjax.flax.Embed(self.table, DIM, dtype=self.dtype)(ids)
        return nn.Dense(1)(jnp.tanh(rows))[..., 0].astype(jnp.float32)


def loss_fn(net, params, ids, y):
    return jnp.mean((net.apply({"params": params}, ids) - y) ** 2)


def states(optimizer, tables=None, dtype=None, clip=None):
    """A dense and a kvjax TrainState with the same parameters."""
    dense_net, net = Net(None, dtype), Net("t", dtype)
    params = dense_net.init(jax.random.key(0), jnp.arange(3))["params"]
    tx = optimizer()
    dense_tx = optax.chain(clip, tx) if clip else tx
    dense = TrainState.create(apply_fn=dense_net, params=params, tx=dense_tx)
    table = kvjax.get_table("t", dim=DIM, initializer=kvjax.initializers.normal(DIM**-0.5))
    table = table.upsert(wide(np.arange(VOCABULARY)), params["Embed_0"]["embedding"])
    mixed = {"Embed_0": {"table": table}, "Dense_0": params["Dense_0"]}
    tx = kvjax.optax.partition(dense=tx, tables=tables or optimizer())
    tx = optax.chain(kvjax.optax.joint(clip), tx) if clip else tx
    return dense, TrainState.create(apply_fn=net, params=mixed, tx=tx)


@jax.jit
def dense_step(state, ids, y):
    loss, grads = jax.value_and_grad(lambda p: loss_fn(state.apply_fn, p, ids, y))(state.params)
    return state.apply_gradients(grads=grads), loss


def kv_step(state, ids, y):
    loss, grads = kvjax.value_and_grad(lambda p: loss_fn(state.apply_fn, p, ids, y))(state.params)
    return state.apply_gradients(grads=grads), loss


def rows_of(state):
    return np.asarray(state.params["Embed_0"]["table"].lookup(wide(np.arange(VOCABULARY))))


def batches(kind, steps=8):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        if kind == "permutation":
            ids = rng.permutation(VOCABULARY)
        elif kind == "all":  # every row, some of them often
            ids = np.concatenate([rng.permutation(VOCABULARY), rng.integers(0, 4, BATCH)])
        else:
            ids = rng.integers(0, VOCABULARY // 2, BATCH // 4)
        yield ids, jnp.asarray(rng.normal(size=len(ids)), jnp.float32)


def train_both(dense, state, kind, **jit_options):
    step = jax.jit(kv_step, **jit_options)
    for ids, y in batches(kind):
        dense, want = dense_step(dense, jnp.asarray(ids), y)
        state, got = step(state, wide(ids), y)
        np.testing.assert_allclose(got, want, rtol=1e-5)
    return dense, state
