"""The exchange of a sharded table: keys travel to the shards that own them, and answers come back.

Each device sends its distinct keys, sorted by owner, in rounds: a round takes the same number of keys to each owner,
so that its shapes are static, and a batch takes as many rounds as its fullest pair of devices needs. So what is moved
beyond a round grows with the distinct keys, and a skewed batch takes longer, but loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax._keys.keys import Keys
from kvjax._ops import routing
from kvjax._sharded.collectives import agreed, position, swap
from kvjax._spec.placement import Placement
from kvjax._spec.spec import TableSpec

# What a device sends in a round, in all and to each owner, at least, before a batch is cut into several: enough for the
# cost of a collective not to matter. More rounds mean less padding where keys repeat. benchmarks/NOTES.md has figures.
_ROUND_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 14
_MOST_ROUNDS = 8


class RoundSizes(NamedTuple):
    """Sizes of the rounds in which a piece of a batch travels.

    Attributes:
      capacity: keys that a round takes to each owner.
      usual: rounds that distinct keys take if a good hash spreads them; those with many duplicates may take fewer.
    """

    capacity: int
    usual: int

    @classmethod
    def of(cls, n: int, shards: int, row_bytes: int, few: bool = False) -> RoundSizes:
        """For a piece of n keys, of which `few` says that only an eighth or so is valid."""
        even = n / shards / (8 if few else 1)
        most = min(n, math.ceil(even + 4 * math.sqrt(even)) + 8)  # four standard deviations to spare
        buffer = most * row_bytes
        rounds = max(1, min(shards * buffer // _ROUND_BYTES, buffer // _BUFFER_BYTES, _MOST_ROUNDS))
        capacity = -(-most // rounds)
        # If all keys are valid after all, that is no skew.
        return cls(capacity, min(-(-8 * most // capacity), -(-n // capacity)) if few and n > 0 else rounds)


def owners(placement: Placement, keys: Keys) -> Any:
    """The shard of each key ``(n,)`` int32 by the user's partitioner; without one ``(0,)``, and C++ knows."""
    if placement.partitioner is None:
        return jnp.zeros(0, jnp.int32)
    shards = placement.partitioner(keys, placement.num_shards)
    # What is out of range stays so in 32 bits, and C++ says it.
    low, high = (0, 2**31 - 1) if jnp.issubdtype(shards.dtype, jnp.unsignedinteger) else (-1, 2**31 - 1)
    return jnp.clip(shards, jnp.array(low, shards.dtype), jnp.array(high, shards.dtype)).astype(jnp.int32)


class Received(NamedTuple):
    """What a round has brought.

    Attributes:
      columns: ``(senders, capacity, ...)`` uint32, of what was sent.
      valid: ``(senders, capacity)`` bool, which of them are keys and no padding.
      rounds: ``()`` int32, how many there are in all.
    """

    columns: jax.Array
    valid: jax.Array
    rounds: jax.Array

    def keys(self, like: Keys) -> Keys:
        """``(senders, capacity)``."""
        return Keys(self.columns[..., :2], like.narrow)


class Exchange:
    """The way of one device's keys to their owners.

    Args:
      spec: of a sharded table.
      keys: ``(n,)``, this device's piece.
      mask: ``(n,)`` bool, false for padding; or None.
      few: whether the mask leaves out most keys.

    Attributes:
      routed: see `kvjax._ops.routing.Routed`.
      sizes: of the rounds.
    """

    def __init__(self, spec: TableSpec, keys: Keys, mask: jax.Array | None, few: bool = False):
        self.placement, self.n, shards = spec.mesh_placement, keys.size, spec.mesh_placement.num_shards
        self.sizes = RoundSizes.of(self.n, shards, 4 * spec.dim, few)
        to, here = owners(self.placement, keys), position(self.placement)
        self.routed = routing.route(spec, shards, self.sizes.capacity, keys, mask, to, here)
        # Where routing has failed, its results mean nothing, and nothing is sent.
        self._lengths = jnp.where(self.routed.status == 0, jnp.diff(self.routed.starts), 0)
        longest, capacity = jnp.max(self._lengths), max(self.sizes.capacity, 1)
        self._rounds = jnp.maximum(1, jax.lax.div(longest + jnp.int32(capacity - 1), jnp.int32(capacity)))

    def send(self, r: Any, rows: jax.Array) -> jax.Array:
        """What round r takes of rows ``(n, ...)``, those of the piece: ``(senders, capacity, ...)`` received."""
        return self._move(_taken(rows, _taken(self.routed.order, self._in_round(r))))

    def send_keys(self, r: Any, columns: jax.Array) -> Received:
        """The same of columns ``(n, ...)`` uint32, of which the first two are `routed.words`.

        Before them stands a line with the number of valid keys, and the number of rounds that the sender needs. Each
        device gets the lines of all, so they know without another exchange when to stop.
        """
        capacity = jnp.int32(max(self.sizes.capacity, 1))
        left = jnp.clip(self._lengths - jnp.int32(r) * capacity, 0, capacity)
        rounds = jnp.broadcast_to(self._rounds, left.shape)
        line = jnp.stack([left, rounds], axis=-1).astype(jnp.uint32)[:, None]
        line = jnp.pad(line, ((0, 0), (0, 0), (0, columns.shape[1] - 2)))
        keys = _taken(columns, self._in_round(r))
        came = self._move(jnp.concatenate([line, keys], axis=1))
        valid, needed = came[:, 0, 0].astype(jnp.int32), came[:, 0, 1].astype(jnp.int32)
        positions = jnp.arange(self.sizes.capacity, dtype=jnp.int32)
        return Received(came[:, 1:], positions[None] < valid[:, None], jnp.max(needed))

    def back(self, r: Any, answers: jax.Array, old: jax.Array | None) -> jax.Array:
        """Answers ``(shards, capacity, ...)`` of round r to the keys of the piece; `old` are those of rounds before."""
        came = swap(self.placement, answers).reshape(-1, *answers.shape[2:])
        mine = _taken(came, self.routed.position)
        now = (self.routed.round == r).reshape(-1, *[1] * (mine.ndim - 1))
        return jnp.where(now, mine, jnp.zeros((), mine.dtype) if old is None else old)

    def each_round(self, columns: jax.Array, body: Callable[[Any, Received, Any], Any]) -> tuple[Any, jax.Array]:
        """body(r, received, state) for each round, of the columns of `send_keys`; it gives the next state, which is
        None at first. Returns the last one, and the number of rounds."""
        received = self.send_keys(jnp.int32(0), columns)
        state, rounds = body(jnp.int32(0), received, None), received.rounds
        if self.sizes.capacity >= self.n:
            return state, rounds

        def step(carry: Any) -> Any:
            r, state = carry
            return r + 1, body(r, self.send_keys(r, columns), state)

        return jax.lax.while_loop(lambda carry: carry[0] < rounds, step, (jnp.int32(1), state))[1], rounds

    def traffic(self, rounds: jax.Array, columns: int, sent: int, returned: int) -> routing.Traffic:
        """What `rounds` of so many columns move, with bytes sent and returned per key."""
        capacity, others = self.sizes.capacity, self.placement.num_devices - 1
        to_owners = others * (4 * columns * (1 + capacity) + sent * capacity)
        return routing.Traffic(rounds, self.routed.starts, to_owners, others * returned * capacity, self.sizes.usual)

    def _in_round(self, r: Any) -> jax.Array:
        """``(shards, capacity)`` int32, where among the distinct keys those of round r are, and what is behind them."""
        capacity = self.sizes.capacity
        return self.routed.starts[:-1, None] + r * jnp.int32(capacity) + jnp.arange(capacity, dtype=jnp.int32)[None]

    def _move(self, x: jax.Array) -> jax.Array:
        """From a replicated table's device to all of them; else each part to its shard."""
        if self.placement.replicated:
            return jax.lax.all_gather(x, self.placement.axes, axis=0, tiled=True)
        return swap(self.placement, x)


def _taken(rows: jax.Array, places: jax.Array) -> jax.Array:
    """Rows ``(..., ...)`` at places ``(...)`` of int32; the last one for what is behind it."""
    return rows.at[places].get(mode="clip", wrap_negative_indices=False)


def ask(
    spec: TableSpec,
    op: str,
    keys: Keys,
    mask: jax.Array | None,
    answer: Callable[[Keys, jax.Array | None], tuple[tuple[jax.Array, ...], jax.Array]],
    few: bool = False,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Asks the owners of keys.

    Args:
      spec: of a sharded table.
      op: for errors.
      keys: ``(n,)``, this device's piece.
      mask: ``(n,)`` bool or None.
      answer: ``(keys (m,), mask (m,))`` to arrays ``(m, ...)`` and a status ``()`` uint32, run by the owner.
      few: whether the mask leaves out most keys.

    Returns:
      The arrays ``(n, ...)``, zeros where the mask is false, and 1.0, which exists only once all have been asked.
    """
    if spec.mesh_placement.replicated or spec.mesh_placement.alone:  # all rows are here
        answers, status = answer(keys, mask)
        traffic = None
    else:
        exchange = Exchange(spec, keys, mask, few)

        def body(r: Any, received: Received, state: Any) -> Any:
            found, status = answer(received.keys(keys).reshape(-1), received.valid.reshape(-1))
            found = [x.reshape(*received.valid.shape, *x.shape[1:]) for x in found]
            old, so_far = ([None] * len(found), exchange.routed.status) if state is None else state
            now = [exchange.back(r, x, o) for x, o in zip(found, old, strict=True)]
            return tuple(now), jnp.maximum(so_far, status)

        (answers, status), rounds = exchange.each_round(exchange.routed.words, body)
        returned = sum(x.dtype.itemsize * math.prod(x.shape[1:]) for x in answers)
        traffic = exchange.traffic(rounds, columns=2, sent=0, returned=returned)
    number = agreed(status)
    *answers, used = routing.agree(spec, op, number, [*answers, jnp.float32(1)], traffic)
    return tuple(answers), used
