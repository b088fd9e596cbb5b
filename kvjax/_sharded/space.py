"""Space for a change of a sharded table: all its shards choose together which rows go.

They exchange how many rows the change adds. Where rows have to go for it, or a policy wants some to, they add
up tallies until each knows which of its own rows are among those chosen (``core/select.h``): a few rounds of two
kilobytes, whatever the number of rows. Other steps pay for the first exchange alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._ops import space
from kvjax._ops.space import Tally
from kvjax._sharded.collectives import agreed, position
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import varying_like


def prepare_proposed(spec: TableSpec, op: str, version: jax.Array, status: jax.Array) -> jax.Array:
    """One device's part: prepares the write that has been proposed to its shard.

    Args:
      spec: of a sharded table.
      op: for errors.
      version: ``()`` uint32.
      status: ``()`` uint32 of the proposal.

    Returns:
      What the devices agree on: 0, or the number of a failure ``()`` uint32.
    """
    summary = space.summarize(spec, op, version, status)
    return prepare(spec, op, version, jax.lax.all_gather(summary, spec.mesh_placement.axes), status)


def prepare(spec: TableSpec, op: str, version: jax.Array, summaries: jax.Array, status: jax.Array) -> jax.Array:
    """The same with the summaries ``(shards, f, 2)`` uint32 of all shards."""
    placement = spec.mesh_placement
    shard = position(placement)
    first = space.prepare(spec, op, version, summaries, shard)
    if summaries.shape[0] == 1:  # a shard that needs no summaries of others asks nobody either
        return agreed(jnp.maximum(status, first.status))
    # Whether there is more to do all shards know, unless one has failed.
    number, more = agreed(jnp.stack([jnp.maximum(status, first.status), first.more]))

    def choose(words: jax.Array) -> jax.Array:
        def add_up(tally: Tally) -> jax.Array:
            failed = (tally.status != 0).astype(jnp.uint32)
            message = jnp.concatenate([jnp.stack([tally.more, failed]), tally.words])
            return jax.lax.psum(message, placement.axes)

        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            message, before = carry
            tally = space.choose(spec, op, version, message[2:], shard)
            return varying_like(add_up(tally), message), varying_like(tally.status, before)

        start = add_up(Tally(words, more, number)), varying_like(jnp.uint32(0), words)
        return agreed(jax.lax.while_loop(lambda c: (c[0][0] > 0) & (c[0][1] == 0), step, start)[1])

    return jax.lax.cond((number == 0) & (more > 0), choose, lambda _: number, first.words)
