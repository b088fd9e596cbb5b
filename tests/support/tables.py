"""Tables to compare: the same rows, the same everything; partitioners; a training step that gives equal bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvjax

AWKWARD = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**40 + 7, 2**32, -(2**31)], np.int64)
KEYS = np.concatenate([np.arange(40), [-1, 2**63 - 1, -(2**63), 2**40 + 7]])
TX = optax.adagrad(0.1)


def on_gpu():
    """Whether programs, and so tables, are on a GPU itself, where XLA's arithmetic and memory are others."""
    return jax.default_backend() == "gpu"


def finished(x):
    """What calls have given, once it is there. Raises what they were refused for: those on a device say it later."""
    x = jax.block_until_ready(x)
    kvjax.stats()
    return x


def drop_all():
    for name in list(kvjax.tables()):
        kvjax.drop_table(name)


def same_rows(one, other):
    """Equal tables, to the bit."""
    for name in ("keys", "freqs", "versions", "values", "has_slots", "pinned"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.slots.keys() == other.slots.keys()
    for name in one.slots:
        np.testing.assert_array_equal(one.slots[name], other.slots[name], err_msg=name)


def same_tables(one, other):
    same_rows(one.snapshot().rows, other.snapshot().rows)
    assert one.snapshot().rows.last_step == other.snapshot().rows.last_step
    assert one.snapshot().slot_types == other.snapshot().slot_types
    np.testing.assert_array_equal(one.snapshot().offsets, other.snapshot().offsets)
    for name, array in one.snapshot().admission.items():
        np.testing.assert_array_equal(array, other.snapshot().admission[name], err_msg=name)


def by_low_bits(keys, n):
    return (keys.words[:, 0] % jnp.uint32(n)).astype(jnp.int32)


def by_high_bits(keys, n):
    return (keys.words[:, 1] % jnp.uint32(n)).astype(jnp.int32)


@jax.jit
def step(table, keys):
    """Its gradients have the same bits however the batch is cut, which those of tanh, say, need not have."""
    _, grads = kvjax.value_and_grad(lambda t: jnp.sum((t.lookup(keys) + 1) ** 2))(table)
    return table.apply(TX, grads)[0]


def trained(table, steps=2, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        table = step(table, kvjax.keys(rng.permutation(KEYS)[:24]))  # no key twice: sums have one order
    return table


@dataclasses.dataclass(frozen=True)
class Small(kvjax.storage.Hybrid):
    """With slabs so small that few rows of few columns are in many of them."""

    @property
    def text(self):
        return f"hybrid:{self.device_bytes}:256"
