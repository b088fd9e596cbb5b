"""One system of ``rivals.py`` in a process of its own: makes its table, and times what it is asked for on a pipe.

It imports NumPy and the system alone, so that the interpreter of any system can run it. Each line of the input is
``<what> <keys> <calls>``; the answer is a line of JSON with the seconds of each call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
from common import zipf

RATE, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8
RING = 16  # batches of each kind, in turn


def ids_of(rows: np.ndarray) -> np.ndarray:
    """A 63-bit id for each row number: a bijection (the finalizer of MurmurHash3, twice) without its last bit."""
    x = rows.astype(np.uint64) << np.uint64(1)
    for _ in range(2):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return (x >> np.uint64(1)).astype(np.int64)


class Kvjax:
    """Any id; rows appear in training. The step is that of the README, without a model."""

    any_id = True

    def __init__(self, rows: int, dim: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import kvjax

        self.wait, self.keys, self.rows = jax.block_until_ready, kvjax.keys, jax.device_put
        tx = kvjax.optax.partition(dense=optax.set_to_zero(), tables=optax.adam(RATE, b1=BETA1, b2=BETA2, eps=EPSILON))
        self.params = {"table": kvjax.get_table("rivals", dim=dim)}
        self.state = tx.init(self.params)

        def step(params: Any, state: Any, keys: Any, wanted: Any) -> Any:
            value, grads = kvjax.value_and_grad(lambda p: jnp.sum(p["table"].lookup(keys) * wanted))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self._step = jax.jit(step, donate_argnums=(0, 1))
        self._lookup = jax.jit(lambda params, keys: params["table"].lookup(keys))

    def lookup(self, keys: Any) -> None:
        self.wait(self._lookup(self.params, keys))

    def step(self, keys: Any, wanted: Any) -> None:
        self.params, self.state, value = self._step(self.params, self.state, keys, wanted)
        self.wait((self.params, value))


class Embed:
    """Flax's `nn.Embed` and `optax.adam`: a dense array of a size that is known, all of which each step reads."""

    any_id = False

    def __init__(self, rows: int, dim: int) -> None:
        import flax.linen as nn
        import jax
        import jax.numpy as jnp
        import optax

        self.wait, self.rows = jax.block_until_ready, jax.device_put
        self.keys = lambda ids: jax.device_put(ids.astype(np.int32))
        net = nn.Embed(rows, dim)
        tx = optax.adam(RATE, b1=BETA1, b2=BETA2, eps=EPSILON)
        self.params = net.init(jax.random.key(0), jnp.zeros(1, jnp.int32))
        self.state = tx.init(self.params)

        def step(params: Any, state: Any, keys: Any, wanted: Any) -> Any:
            value, grads = jax.value_and_grad(lambda p: jnp.sum(net.apply(p, keys) * wanted))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        self._step, self._lookup = jax.jit(step, donate_argnums=(0, 1)), jax.jit(net.apply)

    lookup, step = Kvjax.lookup, Kvjax.step


class Torch:
    """PyTorch's `nn.Embedding(sparse=True)` and `SparseAdam`: an array of a size that is known."""

    any_id = False

    def __init__(self, rows: int, dim: int) -> None:
        import torch

        torch.set_num_threads(os.cpu_count() or 1)
        self.keys = self.rows = torch.from_numpy
        self.torch, self.net = torch, torch.nn.Embedding(rows, dim, sparse=True)
        self.tx = torch.optim.SparseAdam(self.net.parameters(), lr=RATE, betas=(BETA1, BETA2), eps=EPSILON)

    def lookup(self, keys: Any) -> None:
        with self.torch.no_grad():
            self.net(keys)

    def step(self, keys: Any, wanted: Any) -> None:
        (self.net(keys) * wanted).sum().backward()
        self.tx.step()
        self.tx.zero_grad()


class Tfra:
    """TFRA's `dynamic_embedding.Variable` (its table of the CPU) and `DynamicEmbeddingOptimizer`: any id."""

    any_id = True

    def __init__(self, rows: int, dim: int) -> None:
        os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", TF_USE_LEGACY_KERAS="1", CUDA_VISIBLE_DEVICES="")
        import tensorflow as tf
        import tensorflow_recommenders_addons.dynamic_embedding as de

        self.keys = self.rows = tf.constant
        table = de.get_variable("rivals", key_dtype=tf.int64, value_dtype=tf.float32, dim=dim, devices=["/CPU:0"])
        tx = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.legacy.Adam(RATE, BETA1, BETA2, EPSILON))
        shadow = de.shadow_ops.ShadowVariable(table, name="rivals-shadow")

        def step(keys: Any, wanted: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(shadow)
                value = tf.reduce_sum(de.shadow_ops.embedding_lookup_unique(shadow, keys, dim) * wanted)
            tx.apply_gradients(zip(tape.gradient(value, [shadow]), [shadow], strict=True))
            return value

        self._table, keys = table, tf.TensorSpec([None], tf.int64)
        self._lookup = tf.function(table.lookup, input_signature=[keys])
        self._step = tf.function(step, input_signature=[keys, tf.TensorSpec([None, dim], tf.float32)])

    def lookup(self, keys: Any) -> None:
        self._lookup(keys)

    def step(self, keys: Any, wanted: Any) -> None:
        self._step(keys, wanted).numpy()


SYSTEMS = {"kvjax": Kvjax, "nn.Embed": Embed, "torch": Torch, "TFRA": Tfra}


def main(name: str, rows: int, dim: int, batch: int) -> None:
    rng = np.random.default_rng(0)
    system = SYSTEMS[name](rows, dim)
    of = ids_of if system.any_id else np.asarray
    wanted = system.rows(rng.normal(size=(batch, dim)).astype(np.float32))
    for at in range(0, rows, batch):  # all rows are trained once; the last batch has some again
        numbers = np.arange(at, at + batch) % rows
        system.step(system.keys(of(numbers)), wanted)
    batches = {
        "uniform": [system.keys(of(rng.integers(0, rows, batch))) for _ in range(RING)],
        "zipf": [system.keys(of(zipf(rng, rows, batch))) for _ in range(RING)],
    }
    say("made")
    turn = 0
    for line in sys.stdin:
        what, kind, calls = line.split()
        call, seconds = getattr(system, what), []
        for _ in range(int(calls)):
            turn += 1
            arguments = (batches[kind][turn % RING], *([wanted] if what == "step" else []))
            begun = time.perf_counter()
            call(*arguments)
            seconds.append(time.perf_counter() - begun)
        say(seconds)


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
