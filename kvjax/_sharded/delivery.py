"""Delivery: the gradients of a training step travel to the shards that own their keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax._keys.sparse_rows import SparseRows
from kvjax._ops import routing, training
from kvjax._ops.initial_rows import initial_rows
from kvjax._programs.program import Run
from kvjax._sharded.exchange import Exchange, Received
from kvjax._spec.spec import TableSpec


def deliver(
    spec: TableSpec,
    version: jax.Array,
    grads: SparseRows,
    step: jax.Array,
    slots: str,
    run: Run | None,
    facts: bool,
    status: jax.Array,
) -> tuple[jax.Array, jax.Array, routing.Traffic]:
    """One device's part: sends its gradients, takes those of the rows it owns, and plans the step.

    Args:
      spec: of a sharded table.
      version: ``()`` uint32.
      grads: ``(n,)``, merged.
      step: ``(2,)`` uint32, the words of int64.
      slots: the layout that the optimizer wants.
      run: of the program of its update, if it is one.
      facts: whether an update that is none wants facts about rows.
      status: ``()`` uint32, of what came before.

    Returns:
      Summaries ``(shards, f, 2)`` uint32 of all shards, or ``(1, f, 2)`` of this one if no other needs them;
      the status of the delivery; and what it moved.
    """
    exchange = Exchange(spec, grads.keys, grads.counts > 0)
    counts = grads.counts.at[exchange.routed.order].get(mode="clip")
    columns = jnp.concatenate([exchange.routed.words, counts[:, None].astype(jnp.uint32)], axis=1)

    def body(r: Any, received: Received, so_far: Any) -> jax.Array:
        keys, counts = received.keys(grads.keys), received.columns[..., 2].astype(jnp.int32)
        initial = initial_rows(spec, version, keys.reshape(-1), received.valid.reshape(-1))
        status_of_round = training.receive(
            spec, version, (r, received.rounds), keys, jnp.where(received.valid, counts, 0), grads.canary,
            exchange.send(r, grads.rows), initial,
        )  # fmt: skip
        return jnp.maximum(exchange.routed.status if so_far is None else so_far, status_of_round)

    delivered, rounds = exchange.each_round(columns, body)
    status = jnp.maximum(status, delivered)
    traffic = exchange.traffic(rounds, columns=3, sent=4 * spec.dim, returned=0)
    summary = training.plan_step(spec, version, step, status, slots, run, facts)
    if not spec.needs_summaries:
        return summary[None], status, traffic
    return jax.lax.all_gather(summary, spec.mesh_placement.axes), status, traffic
