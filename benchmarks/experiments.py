"""What must not happen in silence: four experiments in one process, and NumPy's ids in a compiled step.

    python benchmarks/experiments.py

An experiment initialises the model, trains it for one pass over the same clicks and prints its AUC on others. Four with
keys 0 to 3 must differ by chance alone; where each goes on with the rows of the one before, they climb. The second part
is the README's model with ids beyond 32 bits: as many rows as ids, or an error. Exit code 1 if either is otherwise.

It runs with any version of kvjax since the first (a folder of one, built, in PYTHONPATH).
"""

import sys
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import kvjax
import kvjax.flax
import kvjax.optax

USERS, ITEMS, CLICKS, BATCH = 1000, 500, 20_000, 250


class Net(nn.Module):
    """The README's."""

    @nn.compact
    def __call__(self, users, x):
        e = kvjax.flax.Embed("user", features=64)(users)
        return nn.Dense(1)(jnp.concatenate([e, x], -1))[:, 0]


class Clicks(nn.Module):
    """The probability that a user likes an item."""

    @nn.compact
    def __call__(self, users, items):
        options = {"features": 8, "initializer": kvjax.initializers.normal(0.001)}
        user = kvjax.flax.Embed("clicks_user", **options)(users)
        item = kvjax.flax.Embed("clicks_item", **options)(items)
        return jnp.sum(user + item, -1) + self.param("bias", nn.initializers.zeros, ())


def auc(scores, labels):
    rank = np.empty(len(scores))
    rank[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    ones = int(labels.sum())
    return (rank[labels > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(labels) - ones))


def experiment(key, users, items, labels):
    """The AUC on the last quarter of the clicks, after one pass over the others."""
    net = Clicks()
    tx = kvjax.optax.partition(dense=optax.adam(1e-2), tables=optax.adagrad(0.007))
    params = net.init(jax.random.key(key), kvjax.keys(users[:1]), kvjax.keys(items[:1]))["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    @jax.jit
    def step(state, users, items, labels):
        def loss(params):
            return jnp.sum(optax.sigmoid_binary_cross_entropy(net.apply({"params": params}, users, items), labels))

        _, grads = kvjax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads)

    end = len(labels) * 3 // 4
    for start in range(0, end, BATCH):
        part = slice(start, start + BATCH)
        state = step(state, kvjax.keys(users[part]), kvjax.keys(items[part]), jnp.asarray(labels[part]))
    scores = net.apply({"params": state.params}, kvjax.keys(users[end:]), kvjax.keys(items[end:]))
    return auc(np.asarray(scores), labels[end:])


def four_experiments():
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, USERS, CLICKS), rng.integers(0, ITEMS, CLICKS)
    logits = rng.normal(size=USERS)[users] + rng.normal(size=ITEMS)[items]
    labels = (rng.random(CLICKS) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    found = []
    for key in range(4):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found.append(experiment(key, users * 2**33 + 1, items * 2**33 + 2, labels))
        words = "; ".join(dict.fromkeys(str(w.message).split(";")[0] for w in said if "kvjax" in str(w.message)))
        print(f"experiment {key}: AUC {found[-1]:.4f}{'  (' + words + ')' if words else ''}")
    spread = max(found) - min(found)
    print(f"spread {spread:.4f}, the last above the first by {found[-1] - found[0]:+.4f}")
    return spread < 0.003


def numpy_ids():
    ids = np.array([7, -1, 2**40 + 7, 2**63 - 1])
    x, y, net = jnp.ones((4, 3)), jnp.arange(4.0), Net()
    tx = kvjax.optax.partition(dense=optax.adam(1e-2), tables=optax.adagrad(0.5))

    @jax.jit
    def step(state, users):
        def loss(params):
            return jnp.mean((net.apply({"params": params}, users, x) - y) ** 2)

        return state.apply_gradients(grads=kvjax.value_and_grad(loss)(state.params)[1])

    state = TrainState.create(
        apply_fn=net.apply, params=net.init(jax.random.key(0), kvjax.keys(ids), x)["params"], tx=tx
    )
    try:
        table = step(state, ids).params["Embed_0"]["table"]
        print(f"NumPy ids in a compiled step: {len(table)} rows of {len(ids)}, keys {table.export().keys.tolist()}")
        return len(table) == len(ids)
    except TypeError as error:
        print(f"NumPy ids in a compiled step: {type(error).__name__}: {error}")
        return True


if __name__ == "__main__":
    sys.exit(0 if all([four_experiments(), numpy_ids()]) else 1)
