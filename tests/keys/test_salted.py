"""Salted keys: one id of several features, one key each."""

import logging
from array import array

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax.flax
from tests.support.marks import wide_is_slow

arrow = pytest.importorskip("pyarrow")
AWKWARD = np.array([0, -1, 1, 2**31, -(2**31) - 1, 2**40 + 7, 2**63 - 1, -(2**63)])


@wide_is_slow
@pytest.mark.parametrize("salt", [0, 1, -1, 2**63, 2**64 - 1])
def test_salted_is_hash_keys(salt, x64):
    want = kvjax.hash_keys(AWKWARD, salt)
    keys = kvjax.keys(AWKWARD).reshape(2, 4)
    for salted in (lambda k: k.salted(salt), jax.jit(lambda k: k.salted(salt)), jax.vmap(lambda k: k.salted(salt))):
        np.testing.assert_array_equal(np.asarray(salted(keys)), want.reshape(2, 4))
    assert kvjax.keys(np.zeros((0, 2), np.int64)).salted(salt).shape == (0, 2)


def test_salted_keys_are_wide_also_when_the_ids_were_not(make):
    """A table of salted keys takes the salted keys of 32-bit ids: they are keys of 64 bits, and the same ones."""
    table = make(2).upsert(kvjax.keys(np.array([5, -6])).salted(3), np.ones((2, 2)))
    found = jax.jit(lambda t, ids: t.lookup(kvjax.keys(ids, key_dtype="int32").salted(3)))(table, jnp.array([5, -6]))
    np.testing.assert_array_equal(found, np.ones((2, 2)))


SALTS = np.array([0, 1, -1, 2**40, 1, 2**63 - 1, 0, -(2**63)])


@wide_is_slow
def test_a_salt_for_each_key(x64):
    """One call gives what one call for each salt gives."""
    keys, small = kvjax.keys(AWKWARD).reshape(2, 4), np.arange(8, dtype=np.int32).reshape(2, 4) % 3 - 1
    for salts in (SALTS.reshape(2, 4), small, small.astype(np.uint8), np.array([[5], [2**50]]), np.array([1, 2, 3, 4])):
        want = keys
        for salt in np.unique(salts).tolist():
            want = keys.salted(salt).where(np.broadcast_to(salts == salt, (2, 4)), want)
        got = keys.salted(salts)
        assert got.shape == (2, 4) and isinstance(got.words, np.ndarray) and got.has_salt
        assert got.tolist() == want.tolist() == kvjax.hash_keys(np.asarray(keys), salts).tolist()
        as_key = kvjax.keys(salts)
        for program in (jax.jit(lambda k, s: k.salted(s)), jax.vmap(lambda k, s: k.salted(s))):
            rows = kvjax.keys(np.broadcast_to(salts, (2, 4)))
            assert program(keys, rows).tolist() == want.tolist()
        assert jax.tree.map(jnp.asarray, keys).salted(as_key).tolist() == want.tolist()
        if salts.dtype.itemsize < 8:
            assert jax.jit(lambda s: keys.salted(s))(jnp.asarray(salts)).tolist() == want.tolist()
    assert jax.jit(keys.salted)(3).tolist() == keys.salted(3).tolist()
    columns = arrow.array([1, 2, 3, 4]), arrow.chunked_array([[5], [6, 7, 8]])
    for salts in ([[5], [-7]], *columns, array("q", [5, -6, 7, 8])):
        want = keys.salted(np.asarray(salts))
        assert keys.salted(salts).tolist() == want.tolist() == kvjax.hash_keys(np.asarray(keys), salts).tolist()
    words = ["a", "b", "", "é"]
    want = [kvjax.hash_keys(w, int(s)).item() for w, s in zip(words, SALTS, strict=False)]
    assert kvjax.hash_keys(words, SALTS[:4]).tolist() == want
    for use in (
        keys.salted,
        jax.tree.map(jnp.asarray, keys).salted,
        lambda s: kvjax.hash_keys(np.ones((2, 4), int), s),
    ):
        with pytest.raises(ValueError, match=r"want a salt for each key \(2, 4\), got salts \(3,\); give one salt"):
            use(np.arange(3))
        with pytest.raises(TypeError, match="salt: want integers"):
            use(np.ones((2, 4)))


def test_keys_of_jax_are_salted_by_one_program(caplog):
    """Outside of jit, an operation of JAX's for each line would be 13 programs for each shape; and salts share one."""
    keys = jax.tree.map(jnp.asarray, kvjax.keys(np.arange(1234)))
    for salts in (range(3), [jax.tree.map(jnp.asarray, kvjax.keys(np.full(1234, s))) for s in range(3)]):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            salted = [keys.salted(salt).words for salt in salts]
        assert sum("Finished XLA compilation" in r.message for r in caplog.records) == 1
        want = [kvjax.hash_keys(np.arange(1234), salt) for salt in range(3)]
        np.testing.assert_array_equal([kvjax.Keys(words) for words in salted], want)


def test_salts_are_integers(make):
    keys, embed = kvjax.keys([1]), kvjax.flax.Embed(make(2))
    uses = {
        keys.salted: "Keys.salted",
        jax.tree.map(jnp.asarray, keys).salted: "Keys.salted",
        lambda s: embed.init(jax.random.key(0), keys, salt=s): "table 'table0', Embed",
    }
    for use, op in uses.items():
        match = f"kvjax: {op}: want an integer of at most 64 bits as salt, got .*; number the features by integers"
        for salt in (1.5, True, {1}):
            with pytest.raises(TypeError, match=match):
                use(salt)
        with pytest.raises(TypeError, match=f"kvjax: {op}, salt: want integers"):
            jax.jit(use)(1.5)
    assert (keys.salted(np.int64(3)) == keys.salted(3)).all()


def test_padding_of_salted_keys_is_not_that_of_the_ids(make, tmp_path):
    """The salt has made another key of its id, so it would be looked up and trained as any other."""
    table = make(1).upsert(kvjax.keys([5]).salted(1), [[3.0]])
    ids = kvjax.keys([[5, -1]])
    frozen = kvjax.serving.FrozenTable.write(tmp_path / "t", table)
    embed = kvjax.flax.Embed(table.name, 1, pad_id=-1)
    params = {"params": {"table": table}}
    for call in (
        lambda keys: table.lookup(keys, pad_id=-1),
        lambda keys: kvjax.lookup_bag(table, keys, pad_id=-1),
        lambda keys: kvjax.prefetch(table, keys, pad_id=-1),
        lambda keys: embed.apply(params, keys),
        lambda keys: frozen.lookup(keys, pad_id=-1),
        lambda keys: frozen.as_jax().lookup(keys, pad_id=-1),
    ):
        stays = jax.tree.map(jnp.asarray, ids).salted(1)[:, ::-1].reshape(1, 2)
        for keys in (ids.salted(1), kvjax.keys(ids.salted(1)), stays):
            with pytest.raises(ValueError, match="in which that id is another key; give mask="):
                call(keys)
    np.testing.assert_array_equal(embed.apply(params, ids, salt=1), [[[3.0], [0.0]]])
    np.testing.assert_array_equal(table.lookup(ids.salted(1), pad_id=kvjax.keys(-1).salted(1)), [[[3.0], [0.0]]])
    hashed = kvjax.keys(kvjax.hash_keys([[5, -1]], 1))
    np.testing.assert_array_equal(table.lookup(hashed, pad_id=kvjax.keys(-1).salted(1)), [[[3.0], [0.0]]])
    padded = ids.salted(1).where(ids != -1, -1)  # so that the padding is its own id again
    np.testing.assert_array_equal(table.lookup(padded, pad_id=-1), [[[3.0], [0.0]]])


def test_salted_keys_are_a_pytree_as_others_are():
    keys = kvjax.keys([1, 2])
    both = jax.tree.map(lambda *words: jnp.stack(words), keys, keys.salted(1))
    assert both.shape == (2, 2)
    chosen = jax.jit(lambda salts, keys: jax.lax.cond(salts, lambda k: k.salted(1), lambda k: k, keys))(True, keys)
    assert chosen.tolist() == keys.salted(1).tolist()
