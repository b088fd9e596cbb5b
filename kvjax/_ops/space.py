"""Calls by which the shards of a table make space together, one function per target."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._ops.call import WORD, array, write
from kvjax._spec.spec import TableSpec
from kvjax.ffi import host


class Tally(NamedTuple):
    """What a shard knows of the rows that go.

    Attributes:
      words: ``(t,)`` uint32, what the shards have to add up.
      more: ``()`` uint32, whether they have to.
      status: ``()`` uint32.
    """

    words: jax.Array
    more: jax.Array
    status: jax.Array


_TALLY = (array((host.TALLY_WORDS,), jnp.uint32), WORD, WORD)


def summarize(spec: TableSpec, op: str, version: jax.Array, status: jax.Array) -> jax.Array:
    """This shard's summary ``(f, 2)`` uint32 of a write that has been proposed to it with this status."""
    result = array((host.SUMMARY_WORDS, 2), jnp.uint32)
    return write(op, "kvjax_summarize", result, version, status, table=spec.name, op=op)


def prepare(spec: TableSpec, op: str, version: jax.Array, summaries: jax.Array, shard: jax.Array) -> Tally:
    """Prepares what was proposed, with the summaries ``(shards, f, 2)`` uint32 of all shards."""
    attributes = {"table": spec.name, "op": op, "shards": np.int64(summaries.shape[0])}
    return Tally(*write(op, "kvjax_prepare", _TALLY, version, summaries, shard, **attributes))


def choose(spec: TableSpec, op: str, version: jax.Array, total: jax.Array, shard: jax.Array) -> Tally:
    """The next tally, after all shards have added up their last one: total ``(t,)`` uint32."""
    return Tally(*write(op, "kvjax_continue", _TALLY, version, total, shard, table=spec.name, op=op))
