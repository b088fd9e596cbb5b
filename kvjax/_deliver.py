"""The gradients of a training step travel to the shards that own their keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax import _ops
from kvjax._exchange import Arrived, Post
from kvjax._initial_rows import initial_rows
from kvjax._sparse import SparseRows
from kvjax._spec import TableSpec


def deliver(
    spec: TableSpec, version: jax.Array, grads: SparseRows, step: jax.Array, slots: str
) -> tuple[jax.Array, jax.Array, _ops.Traffic]:
    """One device's part: sends its gradients, takes those of the rows it owns, and plans the step.

    Args:
      spec: of a table that is spread.
      version: ``()`` uint32.
      grads: ``(n,)``, merged.
      step: ``(2,)`` uint32, the words of int64.
      slots: the layout that the optimizer wants.

    Returns:
      Facts ``(shards, f, 2)`` uint32 of all shards, or ``(1, f, 2)`` of this one if no other needs to know them;
      the status of the delivery; and what it moved.
    """
    post = Post(spec, grads.keys, grads.counts > 0)
    counts = grads.counts.at[post.routed.order].get(mode="clip")
    columns = jnp.concatenate([post.routed.words, counts[:, None].astype(jnp.uint32)], axis=1)

    def body(r: Any, arrived: Arrived, status: Any) -> jax.Array:
        keys, counts = arrived.keys(grads.keys), arrived.columns[..., 2].astype(jnp.int32)
        initial = initial_rows(spec, version, keys.reshape(-1), arrived.meant.reshape(-1))
        received = _ops.receive(
            spec, version, (r, arrived.rounds), keys, jnp.where(arrived.meant, counts, 0), grads.seal,
            post.send(r, grads.rows), initial,
        )  # fmt: skip
        return jnp.maximum(post.routed.status if status is None else status, received)

    status, rounds = post.each_round(columns, body)
    traffic = post.traffic(rounds, columns=3, sent=4 * spec.dim, returned=0)
    facts = _ops.plan_step(spec, version, step, status, slots)
    if not spec.tells_facts:
        return facts[None], status, traffic
    return jax.lax.all_gather(facts, spec.spread.axes), status, traffic
