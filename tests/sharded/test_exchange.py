"""What a sharded table moves between devices: as many bytes as the formula says, and never a key less."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax.ffi import host
from tests.support.marks import few, few_rows, slow
from tests.support.tables import same_rows

SGD = optax.sgd(0.5)
KINDS = ["distinct", "duplicated", "one owner"]


def batch(kind, n, shards, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "distinct":
        return kvjax.hash_keys(rng.permutation(4 * n)[:n])
    if kind == "duplicated":
        return kvjax.hash_keys(rng.integers(0, n // 8, n))
    some = kvjax.hash_keys(np.arange(4 * n * shards))
    return some[host.owners(some, shards) == shards - 1][:n]


@dataclasses.dataclass
class Formula:
    """Bytes that all devices together send to others, for reads and for training steps, by the text of the docs.

    A device has a piece of n keys. To each of the S owners it may send E + 4 sqrt(E) + 8 keys, E = n / S, and at most
    n; that is cut into as many rounds as there are whole MiB of rows in it, or 16 KiB in the part of one owner, but at
    least 1 and at most 8. The rounds that a batch takes are those of the fullest pair of devices. A round sends to each
    other device key words for its capacity and one line more (8 bytes; 12 with the counts of gradients), and rows for
    its capacity.
    """

    keys: np.ndarray
    shards: int
    dim: int

    def __post_init__(self):
        n, shards = len(self.keys) // self.shards, self.shards
        most = min(n, math.ceil(n / shards + 4 * math.sqrt(n / shards)) + 8)
        rows = 4 * self.dim * most
        self.usual = max(1, min(shards * rows // 2**20, rows // 2**14, 8))
        self.capacity = math.ceil(most / self.usual)
        pieces = [np.unique(piece) for piece in self.keys.reshape(shards, n)]
        fullest = max(np.bincount(host.owners(piece, shards), minlength=shards).max() for piece in pieces)
        self.distinct, self.rounds = sum(map(len, pieces)), math.ceil(fullest / self.capacity)

    def bytes(self, per_line, per_key):
        pairs = self.shards * (self.shards - 1)
        return pairs * self.rounds * (per_line * (1 + self.capacity) + per_key * self.capacity)


@pytest.mark.parametrize("kind", few(KINDS, 0))
@pytest.mark.parametrize(("shards", "n", "dim"), few_rows([(2, 65536, 16), (4, 4096, 8), (8, 1000, 3), (1, 64, 4)]))
def test_bytes_are_those_of_the_formula_and_nothing_is_lost(make, mesh, kind, shards, n, dim):
    one, sharded = make(dim), make(dim, mesh=mesh(shards))
    keys = batch(kind, n, shards)
    formula = Formula(keys, shards, dim)
    grads = kvjax.SparseRows(keys, jnp.ones((n, dim)))
    one, sharded = (t.apply(SGD, grads)[0] for t in (one, sharded))
    trained = sharded.stats()
    np.testing.assert_array_equal(sharded.lookup(keys), one.lookup(keys))
    same_rows(one.export(), sharded.export())
    stats = sharded.stats()
    assert trained.exchanged_bytes == {"to_owners": formula.bytes(12, 4 * dim), "from_owners": 0}
    assert stats.exchanged_bytes["to_owners"] == formula.bytes(12, 4 * dim) + formula.bytes(8, 0)
    assert stats.exchanged_bytes["from_owners"] == formula.bytes(0, 4 * dim)
    if shards == 1:  # nothing is exchanged, and what is counted is of the table's memory
        return
    assert stats.exchanged_keys == 2 * formula.distinct
    assert stats.rounds == 2 * formula.rounds
    assert stats.extra_rounds == 2 * max(0, formula.rounds - formula.usual)
    assert (stats.extra_rounds > 0) == (kind == "one owner")


def test_duplicates_travel_once(make, mesh):
    """Bytes go with the distinct keys: an eighth of them, an eighth of the bytes, up to a round."""
    dim, moved = 64, {}
    for kind in ("distinct", "duplicated"):
        table = make(dim, mesh=mesh(2), initializer=kvjax.initializers.normal(1.0))
        table.lookup(batch(kind, 65536, 2)).block_until_ready()
        moved[kind] = table.stats().exchanged_bytes["from_owners"]
    assert moved["duplicated"] <= moved["distinct"] / 8 * 2
    # Of keys that only the one or only the other device sends in many rounds, none is lost.
    uneven = np.concatenate([batch("duplicated", 65536, 2)[:32768], batch("one owner", 32768, 2)])
    np.testing.assert_array_equal(np.asarray(table.lookup(uneven)), np.asarray(table.lookup(uneven[::-1]))[::-1])


@slow
def test_rows_travel_in_the_type_of_the_wire_and_found_only_if_asked_for(make, mesh):
    keys = batch("distinct", 512, 4)
    amounts = []
    for options, asked in (({}, False), ({}, True), ({"dtype": "bfloat16"}, False)):
        table = make(4, mesh=mesh(4), **options)
        jax.block_until_ready(table.lookup(keys, return_found=asked))
        amounts.append(table.stats().exchanged_bytes["from_owners"])
    per_byte = amounts[0] // 16
    assert amounts == [16 * per_byte, 17 * per_byte, 8 * per_byte]


def test_a_table_in_one_place_exchanges_nothing(make):
    table, _ = make().apply(SGD, kvjax.SparseRows(np.arange(5), jnp.ones((5, 4))))
    table.lookup(np.arange(5)).block_until_ready()
    flat = table.stats().flat()
    names = ("exchanged_bytes/to_owners", "exchanged_bytes/from_owners", "exchanged_keys", "rounds", "extra_rounds")
    assert [flat[name] for name in names] == [0] * 5


@pytest.mark.parametrize("check_vma", few([False, True]))
def test_groups_of_devices_may_take_different_numbers_of_rounds(make, mesh, check_vma):
    """One half of the devices asks for keys of one owner, the other for keys of all."""
    grid = mesh(data=2, model=4)
    table = make(initializer=kvjax.initializers.normal(1.0), mesh=grid, axis="model")
    keys = np.concatenate([batch("one owner", 256, 4), batch("distinct", 256, 4)])
    look = jax.shard_map(
        lambda words: table.lookup(kvjax.Keys(words)), mesh=grid, in_specs=P(("data", "model")),
        out_specs=P(("data", "model")), check_vma=check_vma,
    )  # fmt: skip
    rows = jax.jit(look)(kvjax.keys(keys).words)
    np.testing.assert_array_equal(rows, table.lookup(keys))


@slow
@pytest.mark.parametrize(("shape", "replicated"), [((0,), False), ((3, 0), True), ((0, 0), False)])
def test_no_keys_are_read_in_every_way(make, mesh, replicated, shape):
    """Also where XLA finds nothing to split, and where a size is computed from another."""
    tx = optax.chain(SGD, kvjax.optax.ema_rows(0.9))
    table, _ = make(mesh=mesh(2), replicated=replicated).apply(tx, kvjax.SparseRows(np.arange(2), jnp.ones((2, 4))))
    none = np.zeros(shape, np.int64)
    assert table.lookup(none).shape == table.lookup(none, slot="ema").shape == (*shape, 4)
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(none)))(table)
    assert grads.rows.shape == (*shape, 4)
    ahead, table = kvjax.prefetch(table.refresh(), none)
    assert table.lookup(ahead).shape == (*shape, 4)
    for combiner in ("mean", "max"):
        bags = kvjax.lookup_bag(table, none, pad_id=-1, combiner=combiner, empty=jnp.full(4, 7.0))
        assert bags.shape == (*shape[:-1], 4) and (bags == 7.0).all()
