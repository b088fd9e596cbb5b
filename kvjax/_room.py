"""What goes so that a change of a spread table can be made: all its shards choose together.

They tell each other how much room the change takes. Where rows have to go for it, or a policy wants some to, they add
up tallies until each knows which of its own rows are among those chosen (``core/room.h``, ``core/select.h``): a few
rounds of two kilobytes, whatever the number of rows. Other steps pay for the first exchange alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._spec import TableSpec
from kvjax._spread import agreed, position
from kvjax._varying import varying_like
from kvjax.ffi import host


def prepare_proposed(spec: TableSpec, op: str, version: jax.Array, status: jax.Array) -> jax.Array:
    """One device's part: prepares the write that has been proposed to its shard.

    Args:
      spec: of a table that is spread.
      op: for errors.
      version: ``()`` uint32.
      status: ``()`` uint32 of the proposal.

    Returns:
      What the devices agree on: 0, or the number of a failure ``()`` uint32.
    """
    facts = _call(
        "kvjax_summarize", jax.ShapeDtypeStruct((host.SUMMARY_WORDS, 2), jnp.uint32), spec, op, version, status
    )
    return prepare(spec, op, version, jax.lax.all_gather(facts, spec.spread.axes), status)


def prepare(spec: TableSpec, op: str, version: jax.Array, facts: jax.Array, status: jax.Array) -> jax.Array:
    """The same with the facts ``(shards, f, 2)`` uint32 of all shards."""
    placement = spec.spread
    shard = position(placement)
    word = jax.ShapeDtypeStruct((), jnp.uint32)
    # What the shards have to add up, whether they have to, and the status of the call.
    results = (jax.ShapeDtypeStruct((host.TALLY_WORDS,), jnp.uint32), word, word)
    count = {"shards": np.int64(facts.shape[0])}
    tally, more, told = _call("kvjax_prepare", results, spec, op, version, facts, shard, **count)
    if facts.shape[0] == 1:  # a shard that nobody tells anything asks nobody either
        return agreed(jnp.maximum(status, told))
    # Whether there is more to do all shards know alike, unless one has failed.
    number, more = agreed(jnp.stack([jnp.maximum(status, told), more]))

    def choose(tally: jax.Array) -> jax.Array:
        def add_up(tally: jax.Array, more: jax.Array, told: jax.Array) -> jax.Array:
            message = jnp.concatenate([jnp.stack([more, (told != 0).astype(jnp.uint32)]), tally])
            return jax.lax.psum(message, placement.axes)

        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            message, before = carry
            tally, more, told = _call("kvjax_continue", results, spec, op, version, message[2:], shard)
            return varying_like(add_up(tally, more, told), message), varying_like(told, before)

        first = add_up(tally, more, number), varying_like(jnp.uint32(0), tally)
        return agreed(jax.lax.while_loop(lambda c: (c[0][0] > 0) & (c[0][1] == 0), step, first)[1])

    return jax.lax.cond((number == 0) & (more > 0), choose, lambda _: number, tally)


def _call(target: str, results: Any, spec: TableSpec, op: str, *operands: Any, **attributes: Any) -> Any:
    call = jax.ffi.ffi_call(target, results, has_side_effect=True)
    return varying_like(call(*operands, table=spec.name, op=op, **attributes), *operands)
