"""Keys are exact: every dtype, every value, x64 on and off, through every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax

AWKWARD = np.array([0, -1, 1, 2**31, -(2**31) - 1, 2**40 + 7, 2**63 - 1, -(2**63)])


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_numpy_round_trip(ids):
    assert np.asarray(kvjax.keys(np.array(ids, np.int64))).tolist() == ids


def test_unsigned_and_signed_share_bits():
    assert np.asarray(kvjax.keys(np.array([2**64 - 1], np.uint64))).tolist() == [-1]


def test_shapes():
    keys = kvjax.keys(np.arange(24).reshape(2, 3, 4))
    assert (keys.shape, keys.ndim, keys.size, len(keys)) == ((2, 3, 4), 3, 24, 2)
    assert keys.reshape(6, -1).shape == keys.reshape((6, 4)).shape == (6, 4)
    np.testing.assert_array_equal(np.asarray(keys[1, :, 2]), np.arange(24).reshape(2, 3, 4)[1, :, 2])
    np.testing.assert_array_equal(np.asarray(keys[..., 0]), np.arange(24).reshape(2, 3, 4)[..., 0])
    assert kvjax.keys(5).shape == () and kvjax.keys([]).shape == (0,)
    assert kvjax.keys(np.zeros((0, 3), np.int64)).reshape(0, -1).shape[0] == 0
    assert [np.asarray(k).item() for k in kvjax.keys(np.arange(3))] == [0, 1, 2]
    for index in (2, -3, (5, 0)):
        with pytest.raises(IndexError, match="out of bounds"):
            keys[index]
    with pytest.raises(IndexError, match="at most 3"):
        keys[0, 0, 0, 0]


def test_pass_through_jit_and_scan(x64):
    keys = kvjax.keys(AWKWARD)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda k: k)(keys)), AWKWARD)
    _, out = jax.lax.scan(lambda c, k: (c, k), 0, keys)
    np.testing.assert_array_equal(np.asarray(out), AWKWARD)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "int64", "uint64"])
def test_jax_integers_at_their_own_width(dtype, x64):
    if "64" in dtype and not x64:
        pytest.skip("JAX has no 64-bit integers with x64 off")
    info = np.iinfo(dtype)
    ids = np.array([info.min, info.max, 1], dtype)
    np.testing.assert_array_equal(np.asarray(kvjax.keys(jnp.asarray(ids))), ids.astype(np.int64))


@pytest.mark.parametrize("bad", [np.array([1.5]), np.array([True]), ["a"], np.array([2**70], object), np.array([None])])
def test_other_types_are_refused(bad):
    with pytest.raises(TypeError, match="hash_keys"):
        kvjax.keys(bad)


def test_jax_floats_are_refused(make):
    with pytest.raises(TypeError, match="integers"):
        make().lookup(jnp.ones(3))


def test_arithmetic_on_words_is_refused(make):
    keys = jax.tree.map(lambda w: w * jnp.float32(1), kvjax.keys(AWKWARD).words.astype(jnp.float32))
    with pytest.raises(TypeError, match="uint32"):
        make().lookup(kvjax.Keys(keys))


READS = {
    "lookup": lambda t, ids: t.lookup(ids),
    "embed": lambda t, ids: kvjax.flax.Embed(t).apply({"params": {"table": t}}, ids, salt=3),
    "bag": lambda t, ids: kvjax.lookup_bag(t, ids[None]),
    "many": lambda t, ids: kvjax.lookup_many({"a": (t, ids)})["a"],
}
WRITES = {
    "upsert": lambda t, ids: t.upsert(ids, jnp.ones((1, 4))),
    "apply": lambda t, ids: t.apply(optax.sgd(0.1), kvjax.SparseRows(ids, jnp.ones((1, 4))))[0],
    "partition": lambda t, ids: updated(t, kvjax.SparseRows(ids, jnp.ones((1, 4)))),
    "prefetch": lambda t, ids: kvjax.prefetch(t, ids)[1],
}


def updated(table, grads):
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1))
    updates, _ = tx.update({"t": grads}, tx.init({"t": table}), {"t": table})
    return optax.apply_updates({"t": table}, updates)["t"]


@pytest.mark.parametrize("use", [*READS, *WRITES])
def test_ids_that_jax_may_have_cut_are_refused(use, make):
    """With x64 off, JAX cuts 2**40 + 7 to 7 without a word: nobody can train on what is left unless they say so."""
    table, ids = make(), np.array([2**40 + 7])
    call = (READS | WRITES)[use]
    for cut in (ids, ids.astype(np.uint64)):
        with pytest.raises(TypeError, match=r"want keys of 64 bits.*pass kvjax\.keys\(numpy_ids\).*key_dtype='int32'"):
            jax.jit(call)(table, cut)
    with pytest.raises(TypeError, match=r"kvjax\.keys"):
        call(table, jnp.asarray(ids.astype(np.int32)))
    assert len(table) == 0
    jax.block_until_ready(jax.jit(call)(table, kvjax.keys(ids)))


def test_ids_of_32_bits_are_taken_where_somebody_says_so(make):
    rows = jnp.arange(8.0).reshape(2, 4)
    table = make(key_dtype="int32").upsert(jnp.array([7, -1]), rows)
    read = jax.jit(lambda t, ids: t.lookup(ids))
    np.testing.assert_array_equal(read(table, np.array([-1, 7], np.int32)), rows[::-1])
    other = make().upsert(kvjax.keys(jnp.array([7, -1])), rows)
    np.testing.assert_array_equal(jax.jit(lambda t, ids: t.lookup(kvjax.keys(ids)))(other, np.array([7, -1])), rows)


def test_truncated_keys_are_refused_by_a_table_of_wide_ones(make):
    """Also by one of ids that are said to have 32 bits: the table notices that it holds wider keys."""
    table = make(key_dtype="int32").upsert(np.array([2**40 + 7]), np.ones((1, 4)))
    read = jax.jit(lambda table, ids: table.lookup(ids))
    train = jax.jit(lambda table, ids: table.apply(optax.sgd(0.1), kvjax.SparseRows(ids, jnp.ones((1, 4))))[0])
    for use in (read, train):
        for dtype in (np.int64, np.uint64):
            with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"kvjax\.keys\(numpy_ids\)"):
                jax.block_until_ready(use(table, np.array([2**40 + 7], dtype)))
    assert len(table) == 1
    np.testing.assert_array_equal(read(table, kvjax.keys(np.array([2**40 + 7]))), np.ones((1, 4)))
    np.testing.assert_array_equal(read(table, kvjax.keys(jnp.array([7]))), np.zeros((1, 4)))


def test_with_x64_jax_cuts_nothing(make):
    with jax.enable_x64(True):
        table = make().upsert(jnp.array([7, -1], jnp.int32), jnp.ones((2, 4)))
        assert table.contains(np.array([7, -1, 8])).tolist() == [True, True, False]


def test_hash_keys():
    assert kvjax.hash_keys([["a", "b"], ["c", "a"]]).shape == (2, 2)
    assert kvjax.hash_keys("a") == kvjax.hash_keys(b"a") != kvjax.hash_keys("a", salt=1)
    assert kvjax.hash_keys([b"a", b"a\0"])[0] != kvjax.hash_keys([b"a", b"a\0"])[1]
    ids = np.arange(-500, 500)
    hashed = np.concatenate([kvjax.hash_keys(ids, salt=s) for s in range(5)])
    assert hashed.dtype == np.int64 and len(np.unique(hashed)) == 5000
    assert kvjax.hash_keys([]).shape == (0,)
    np.testing.assert_array_equal(kvjax.hash_keys(np.array([1, 2**60], object)), kvjax.hash_keys([1, 2**60]))
    with pytest.raises(TypeError, match="float"):
        kvjax.hash_keys([1.5])
