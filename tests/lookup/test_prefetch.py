"""Prefetching: a lookup made a step ahead gives what it would without, whatever is written in between."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from tests.support.marks import examples, few_rows, slow

KEYS = np.arange(12)
KEY_LISTS = st.lists(st.integers(0, 11), max_size=6)
WRITES = {
    "apply": lambda t, keys: t.apply(optax.sgd(0.5), kvjax.SparseRows(keys, jnp.ones((len(keys), 2))))[0],
    "upsert": lambda t, keys: t.upsert(keys, np.full((len(keys), 2), 9.0)),
    "remove": lambda t, keys: t.remove(keys),
    "restrict": lambda t, keys: t.restrict(len(keys)),
}


def check(table, keys, writes, padding=11):
    ahead, table = kvjax.prefetch(table, keys, pad_id=padding)
    for name, written in writes:
        table = WRITES[name](table, np.array(written, np.int64))
    want, want_found = table.lookup(keys, pad_id=padding, return_found=True)
    got, found = table.lookup(ahead, return_found=True)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(found, want_found)
    return table


@settings(max_examples=examples(8, 40))
@given(keys=KEY_LISTS, writes=st.lists(st.tuples(st.sampled_from(sorted(WRITES)), KEY_LISTS), max_size=2))
def test_rows_are_exact(keys, writes):
    for options in (
        {},
        {"max_capacity": 8, "on_full": "evict"},
        {"admit": kvjax.admit.MinCount(3, unadmitted=100)},
        {"admit": kvjax.admit.MinCount(3, unadmitted=5)},
    ):
        table = kvjax.get_table("ahead", dim=2, initializer=kvjax.initializers.normal(1.0), **options)
        table = table.upsert(KEYS[:8], np.ones((8, 2)))
        check(table, np.array(keys, np.int64), writes)
        kvjax.drop_table("ahead")


def test_the_row_that_unadmitted_keys_share_is_read_again(make):
    """A step without its key trains it, too."""
    table = make(2, initializer=1.0, admit=kvjax.admit.MinCount(9, unadmitted=5)).pin(5)
    table = check(table, np.array([5, 6]), [("apply", [9])])
    assert table.lookup(5).tolist() == [0.5, 0.5]


@pytest.mark.parametrize(("shards", "replicated"), few_rows([(2, True), (2, False), (4, False)]))
def test_rows_of_a_table_on_a_mesh_are_exact(make, mesh, shards, replicated):
    table = make(2, initializer=5.0, mesh=mesh(shards), replicated=replicated).upsert(KEYS, np.ones((12, 2)))
    for writes in ([], [("apply", [1, 2, 3])], [("remove", [4])], [("apply", [1]), ("apply", [5])]):
        table = check(table, KEYS, writes)


@pytest.mark.cpu_table
def test_only_changed_rows_are_read_again(make):
    """The rows of the step's keys are missed or hit once more, no others."""
    table = make(2).upsert(KEYS, np.ones((12, 2)))
    ahead, table = kvjax.prefetch(table, KEYS)
    table = WRITES["apply"](table, np.array([1, 2, 50]))
    before = table.stats()
    jax.block_until_ready(table.lookup(ahead))
    assert (table.stats().hits - before.hits, table.stats().misses - before.misses) == (2, 0)


@slow
def test_a_training_loop_that_looks_ahead_is_the_one_that_does_not(make, mesh):
    rng = np.random.default_rng(0)
    batches = [kvjax.keys(rng.integers(0, 40, (8, 2))) for _ in range(5)]
    w = jnp.asarray(rng.normal(size=(2,)), jnp.float32)

    def loss(table, keys):
        return jnp.sum(jnp.tanh(table.lookup(keys) @ w + 0.1) ** 2)

    @jax.jit
    def plain(table, keys):
        value, grads = kvjax.value_and_grad(loss)(table, keys)
        return table.apply(optax.sgd(0.1), grads)[0], value

    @jax.jit
    def looking(table, keys, following):
        value, grads = kvjax.value_and_grad(loss)(table, keys)
        ahead, table = kvjax.prefetch(table, following)
        return table.apply(optax.sgd(0.1), grads)[0], ahead, value

    for options in ({}, {"mesh": mesh(4)}):
        one, two = make(2, seed=5, **options), make(2, seed=5, **options)
        ahead, two = kvjax.prefetch(two, batches[0])
        for i, keys in enumerate(batches):
            one, want = plain(one, keys)
            two, ahead, got = looking(two, ahead, batches[(i + 1) % 5])
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(one.export().values, two.export().values)
        np.testing.assert_array_equal(one.export().freqs, two.export().freqs)


def test_padding_is_that_of_the_prefetch(make):
    table = make(2, initializer=1.0)
    ahead, table = kvjax.prefetch(table, np.array([1, -1]), pad_id=-1)
    np.testing.assert_array_equal(table.lookup(ahead), [[1, 1], [0, 0]])
    with pytest.raises(ValueError, match="want the mask that the keys were prefetched with, got another"):
        table.lookup(ahead, mask=np.array([True, True]))


def test_not_inside_a_loss(make):
    table = make(2)
    with pytest.raises(ValueError, match="want a loss that only reads its tables, got prefetch inside it"):
        kvjax.grad(lambda t: jnp.sum(kvjax.prefetch(t, np.array([1]))[0].rows))(table)


@pytest.mark.parametrize("layer", [kvjax.flax.nnx.Embed, kvjax.flax.nnx.EmbedBag])
def test_layers_take_prefetched_keys_and_read_nothing_again(make, layer):
    table = make(dim=2, initializer=1.0)
    embed, keys = layer(table, pad_id=-1), kvjax.keys(np.array([[3, -1], [2**40, 5]]))
    plain = embed(keys)
    prefetched, table = kvjax.prefetch(table, keys, pad_id=-1)
    before = table.stats()
    np.testing.assert_array_equal(embed(prefetched), plain)
    if not kvjax.ffi.is_device(table.spec.storage.backend):  # where every row may have changed, and is read again
        after = table.stats()
        assert (before.hits, before.misses) == (after.hits, after.misses)
    with pytest.raises(ValueError, match=f"got some from table '{table.name}'"):
        make(dim=2).lookup(prefetched)
    with pytest.raises(ValueError, match="want no salt beside prefetched keys"):
        embed(prefetched, salt=1)
