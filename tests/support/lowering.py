"""Programs lowered for a platform, and what they call."""

import re

import jax
import jax.numpy as jnp
import optax

import kvjax

TX = optax.adam(0.1)
CALLS_OF_STEP = {"kvjax_lookup", "kvjax_canary", "kvjax_apply"}
"""What `step` calls, wherever the table is."""


def step(table, state, keys):
    loss, grads = kvjax.value_and_grad(lambda t: jnp.sum((t.lookup(keys) + 1) ** 2))(table)
    return table.apply(TX, grads, state), loss


def lowered(f, *args, platform):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def targets(text):
    return set(re.findall(r"custom_call @(\w+)", text))
