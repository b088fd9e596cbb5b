"""Programs lowered for a platform, and what they call."""

import re

import jax
import jax.numpy as jnp
import optax

import kvjax
from kvjax import ffi

TX = optax.adam(0.1)
BY_PROGRAM = {"kvjax_lookup", "kvjax_seal", "kvjax_apply"}
IN_CHUNKS = {"kvjax_lookup", "kvjax_seal", "kvjax_merge", "kvjax_begin_apply", "kvjax_gather", "kvjax_scatter"}


def step(table, state, keys):
    loss, grads = kvjax.value_and_grad(lambda t: jnp.sum((t.lookup(keys) + 1) ** 2))(table)
    return table.apply(TX, grads, state), loss


def calls_of_step(table):
    """What `step` calls, by where the table is."""
    return IN_CHUNKS if ffi.is_device(table.spec.storage.backend) else BY_PROGRAM


def lowered(f, *args, platform):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def targets(text):
    return set(re.findall(r"custom_call @(\w+)", text))
