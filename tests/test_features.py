"""Several features on one table and several tables in one call; the Flax modules for bags; salts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import kvjax

AWKWARD = np.array([0, -1, 1, 2**31, -(2**31) - 1, 2**40 + 7, 2**63 - 1, -(2**63)])


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
    found = jax.jit(lambda t, ids: t.lookup(kvjax.keys(ids).salted(3)))(table, jnp.array([5, -6]))
    np.testing.assert_array_equal(found, np.ones((2, 2)))


def test_lookup_many(make):
    one, two = (make(d, initializer=kvjax.initializers.normal(1.0)) for d in (2, 3))
    mask = np.array([[True, False], [True, True]])
    features = {
        "a": (one, np.array([[1, 2], [3, 4]]), mask),
        "b": (two, np.array([5, 6])),
        "c": (one, kvjax.keys(np.array([1, 2])).salted(1)),
        "d": (one, np.zeros((0, 4), np.int64)),
        "e": (one, 7),
    }
    rows = kvjax.lookup_many(features)
    assert list(rows) == list("abcde")
    assert [r.shape for r in rows.values()] == [(2, 2, 2), (2, 3), (2, 2), (0, 4, 2), (2,)]
    for name, (table, *args) in features.items():
        np.testing.assert_array_equal(rows[name], table.lookup(args[0], mask=args[1] if len(args) > 1 else None))
    assert kvjax.lookup_many({}) == {}


def test_lookup_many_is_one_lookup_and_one_gradient_per_table(make):
    one, two = make(2, initializer=1.0), make(2, initializer=1.0)

    def loss(tables):
        rows = kvjax.lookup_many({
            "x": (tables[0], np.array([1, 2, 3]), np.array([True, True, False])),
            "y": (tables[0], np.array([[1]])),
            "z": (tables[1], np.array([9])),
        })  # fmt: skip
        return rows["x"].sum() + 10 * rows["y"].sum() + rows["z"].sum()

    assert str(jax.make_jaxpr(loss)((one, two))).count("kvjax_lookup") == 2
    grads = jax.jit(kvjax.grad(loss))((one, two))
    merged = kvjax.merge(grads[0])
    assert np.asarray(merged.keys).tolist()[:2] == [1, 2] and merged.counts.tolist() == [2, 1, 0, 0]
    np.testing.assert_array_equal(merged.rows[:2], [[11, 11], [1, 1]])
    table, _ = one.apply(optax.sgd(0.1), grads[0])
    assert sorted(table.export().keys.tolist()) == [1, 2]


def test_lookup_many_refuses_what_it_does_not_know(make):
    table = make(2)
    for feature in (table, (table,), (np.array([1]), table), [table, np.array([1])]):
        with pytest.raises(TypeError, match="feature 'f', lookup_many: want"):
            kvjax.lookup_many({"f": feature})
    with pytest.raises(TypeError, match="feature 'f'"):
        kvjax.lookup_many({"f": (table, np.array([1.5]))})
    with pytest.raises(ValueError, match="feature 'f': want a mask"):
        kvjax.lookup_many({"f": (table, np.array([1]), np.array([True, False]))})
    stale, live = table, table.upsert(1, np.ones(2))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="stale"):
        jax.block_until_ready(kvjax.lookup_many({"a": (live, 1), "b": (stale, 1)}))


KEYS = np.array([[1, 2, 0], [3, 0, 0], [0, 0, 0], [2, 3, 1]])
TARGETS = np.array([1.0, -1.0, 3.0, 0.5], np.float32)


class LinenNet(nn.Module):
    combiner: str = "mean"

    @nn.compact
    def __call__(self, keys):
        bag = kvjax.flax.EmbedBag("likes", 4, combiner=self.combiner, pad_id=0, empty="learned")
        return nn.Dense(1)(bag(keys))[:, 0]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", "max"])
def test_linen_trains(combiner, promotion):
    net, keys = LinenNet(combiner), kvjax.keys(KEYS)
    tx = kvjax.optax.partition(dense=optax.adam(0.05), tables=optax.adagrad(0.3))
    params = net.init(jax.random.key(0), keys)["params"]
    np.testing.assert_array_equal(params["EmbedBag_0"]["default"], np.zeros(4))
    state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    @jax.jit
    def step(state, keys, y):
        def loss(params):
            return jnp.mean((net.apply({"params": params}, keys) - y) ** 2)

        value, grads = kvjax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(60):
        state, value = step(state, keys, TARGETS)
        losses.append(float(value))
    table = state.params["EmbedBag_0"]["table"]
    assert losses[-1] < 0.05 * losses[0]
    assert sorted(table.export().keys.tolist()) == [1, 2, 3]  # no padding
    assert table.frequency(np.array([0, 1, 2, 3])).tolist() == [0, 120, 120, 120]
    assert np.abs(state.params["EmbedBag_0"]["default"]).sum() > 0.1


def test_nnx_trains(promotion):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.bag = kvjax.flax.nnx.EmbedBag("likes", 4, pad_id=0, empty="learned", rngs=rngs)
            self.out = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, keys):
            return self.out(self.bag(keys))[:, 0]

    model = Net(nnx.Rngs(0))
    tx = kvjax.optax.partition(dense=optax.adam(0.05), tables=optax.adagrad(0.3))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, keys, y):
        loss, grads = kvjax.flax.nnx.value_and_grad(lambda m: jnp.mean((m(keys) - y) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, kvjax.keys(KEYS), jnp.asarray(TARGETS))) for _ in range(60)]
    assert losses[-1] < 0.05 * losses[0]
    assert len(model.bag.table.get_value()) == 3 and np.abs(model.bag.default.get_value()).sum() > 0.1


def test_layers_give_what_lookup_bag_gives(make):
    table = make(4, initializer=kvjax.initializers.normal(1.0))
    keys, weights = np.array([1, 2, 3, 3]), np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    linen, nnx_bag = kvjax.flax.EmbedBag(table, combiner="sqrtn"), kvjax.flax.nnx.EmbedBag(table, combiner="sqrtn")
    forms = [
        (keys, dict(lengths=[1, 3], weights=weights)),
        (keys, dict(segment_ids=[1, 0, 1, 5], num_segments=3)),
        (keys.reshape(2, 2), dict(mask=np.array([[True, False], [False, False]]))),
    ]
    for k, form in forms:
        want = kvjax.lookup_bag(table, k, combiner="sqrtn", **form)
        np.testing.assert_array_equal(linen.apply(linen.init(jax.random.key(0), k, **form), k, **form), want)
        np.testing.assert_array_equal(nnx_bag(k, **form), want)
    low = kvjax.flax.nnx.EmbedBag(table, dtype=jnp.bfloat16)
    assert low(keys, lengths=[1, 3]).dtype == jnp.bfloat16
    for embed in (kvjax.flax.EmbedBag, kvjax.flax.nnx.EmbedBag):
        with pytest.raises(ValueError, match="want empty='zeros' or 'learned'"):
            module = embed(table, empty="one")
            module.init(jax.random.key(0), keys.reshape(2, 2))


def test_padding_and_salts_in_layers(make):
    """Padding is told by the id, before the salt; features with a salt each share a module and no row."""
    table = make(4, initializer=kvjax.initializers.normal(1.0))
    ids, mask = np.array([5, 0, 7]), np.array([True, True, False])
    linen, nnx_embed = kvjax.flax.Embed(table, pad_id=0), kvjax.flax.nnx.Embed(table, pad_id=0)
    variables = linen.init(jax.random.key(0), ids)
    want = np.where([[True], [False], [False]], table.lookup(kvjax.keys(ids).salted(2)), 0)
    np.testing.assert_array_equal(linen.apply(variables, ids, mask, salt=2), want)
    np.testing.assert_array_equal(nnx_embed(ids, mask, salt=2), want)
    assert want[0].any()
    bag = kvjax.flax.nnx.EmbedBag(table, pad_id=0, combiner="sum")
    np.testing.assert_array_equal(bag(ids[None], mask=mask[None], salt=2)[0], want[0])

    def loss(params):
        zero, one = (linen.apply({"params": params}, ids, salt=salt) for salt in (0, 1))
        return (zero + 2 * one).sum()

    grads = kvjax.merge(kvjax.grad(loss)(variables["params"])["table"])
    assert int((np.asarray(grads.counts) > 0).sum()) == 4  # two ids, two features
