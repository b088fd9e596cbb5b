"""The layers of bags, and what all layers do with padding and salts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import kvjax
from tests.support.marks import few, slow

KEYS = np.array([[1, 2, 0], [3, 0, 0], [0, 0, 0], [2, 3, 1]])
TARGETS = np.array([1.0, -1.0, 3.0, 0.5], np.float32)


class LinenNet(nn.Module):
    combiner: str = "mean"

    @nn.compact
    def __call__(self, keys):
        bag = kvjax.flax.EmbedBag("likes", 4, combiner=self.combiner, pad_id=0, empty="learned")
        return nn.Dense(1)(bag(keys))[:, 0]


@slow
@pytest.mark.parametrize("combiner", few(["sum", "mean", "sqrtn", "max"], "mean"))
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


@slow
def test_padding_and_salts_in_layers(make):
    """The id says what is padding, before the salt; features with a salt each share a module and no row."""
    table = make(4, initializer=kvjax.initializers.normal(1.0))
    ids, mask = np.array([5, 0, 7]), np.array([True, True, False])
    linen, nnx_embed = kvjax.flax.Embed(table, pad_id=0), kvjax.flax.nnx.Embed(table, pad_id=0)
    variables = linen.init(jax.random.key(0), ids)
    bag = kvjax.flax.nnx.EmbedBag(table, pad_id=0, combiner="sum")
    for salt in (0, 2):
        want = np.where([[True], [False], [False]], table.lookup(kvjax.keys(ids).salted(salt)), 0)
        np.testing.assert_array_equal(linen.apply(variables, ids, mask, salt=salt), want)
        np.testing.assert_array_equal(nnx_embed(ids, mask, salt=salt), want)
        assert want[0].any()
        np.testing.assert_array_equal(bag(ids[None], mask=mask[None], salt=salt)[0], want[0])

    def loss(params):
        zero, one = (linen.apply({"params": params}, ids, salt=salt) for salt in (0, 1))
        return (zero + 2 * one).sum()

    grads = kvjax.merge(kvjax.grad(loss)(variables["params"])["table"])
    assert int((np.asarray(grads.counts) > 0).sum()) == 4  # two ids, two features


class Features(nn.Module):
    """A candidate and a bag of one table, read together or each by itself, and features of two other tables."""

    together: bool

    def setup(self):
        self.user = kvjax.flax.Embed("users", 2, dtype=jnp.bfloat16)
        self.item = kvjax.flax.Embed("items", 3, pad_id=0, max_norm=0.5)
        self.tag = kvjax.flax.EmbedBag("tags", 3, pad_id=0, empty="learned", combiner="sum")

    def __call__(self, keys):
        liked, options = {"combiner": "mean", "salt": 1}, {"salt": 2, "missing": "zeros"}
        if self.together:
            return kvjax.lookup_many({
                "user": self.user.feature(keys, mask=keys != 1),
                "item": self.item.feature(keys[:, 0]),
                "liked": self.item.feature(keys, **liked),
                "tag": self.tag.feature(keys, **options),
            })  # fmt: skip
        return {
            "user": self.user(keys, keys != 1),
            "item": self.item(keys[:, 0]),
            "tag": self.tag(keys, **options),
            **kvjax.lookup_many({"liked": self.item.feature(keys, **liked)}),
        }


class NnxFeatures(nnx.Module):
    def __init__(self, together):
        self.together = together
        self.user = kvjax.flax.nnx.Embed("users", 2, dtype=jnp.bfloat16)
        self.item = kvjax.flax.nnx.Embed("items", 3, pad_id=0, max_norm=0.5)
        self.tag = kvjax.flax.nnx.EmbedBag("tags", 3, pad_id=0, empty="learned", combiner="sum")

    __call__ = vars(Features)["__call__"].__wrapped__


def with_linen(together):
    model = Features(together)
    params = model.init(jax.random.key(0), kvjax.keys(KEYS))["params"]
    params["tag"]["default"] = jnp.arange(3.0)
    return params, lambda params, keys: model.apply({"params": params}, keys), kvjax.value_and_grad


def with_nnx(together):
    model = NnxFeatures(together)
    model.tag.default[...] = jnp.arange(3.0)
    return model, lambda model, keys: model(keys), kvjax.flax.nnx.value_and_grad


@slow
@pytest.mark.parametrize("kind", [with_linen, with_nnx])
def test_features_of_layers_are_what_their_calls_give(kind, promotion):
    found, keys = [], kvjax.keys(KEYS)
    for together in (True, False):
        params, run, value_and_grad = kind(together)

        def loss(params, keys, run=run):
            rows = run(params, keys)
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in rows.values()), rows

        call = value_and_grad(loss, has_aux=True)
        (_, rows), grads = call(params, keys)
        of_tables = {name: grads[name]["table"] for name in ("user", "item", "tag")}
        merged = {name: kvjax.merge(getattr(x, "get_value", lambda x=x: x)()) for name, x in of_tables.items()}
        found.append((rows, merged, str(jax.make_jaxpr(call)(params, keys)).count("kvjax_lookup")))
    (many, many_grads, reads), (each, each_grads, reads_of_each) = found
    assert (reads, reads_of_each) == (3, 4)
    want = {"user": (4, 3, 2), "item": (4, 3), "liked": (4, 3), "tag": (4, 3)}
    assert {name: x.shape for name, x in many.items()} == want and many["user"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(many["tag"][2], np.arange(3.0))
    for name in many:
        np.testing.assert_allclose(many[name].astype(jnp.float32), each[name].astype(jnp.float32), 1e-6)
    for name, merged in many_grads.items():
        np.testing.assert_array_equal(merged.counts, each_grads[name].counts)
        np.testing.assert_allclose(merged.rows, each_grads[name].rows, 1e-5)


def test_tabulate_shows_features(promotion):
    keys = kvjax.keys(KEYS)
    for together in (True, False):
        text = Features(together).tabulate(jax.random.key(0), keys, console_kwargs={"width": 400})
        assert "Table(users" in text and "Table(tags" in text
        assert together == ("Feature(table=items, keys=(4,), pad_id=0" in text)


def test_features_of_one_layer_with_their_own_combiners():
    keys, rows = kvjax.keys([1, 2]), np.array([[1.0, 2.0], [3.0, 6.0]])
    layer = kvjax.flax.nnx.EmbedBag(kvjax.get_table("t", dim=2).upsert(keys, rows))
    net = kvjax.flax.EmbedBag(layer.table[...])
    params = net.init(jax.random.key(0), keys, lengths=[2])
    for combiner, want in ((None, [[2, 4]]), ("sum", [[4, 8]]), ("max", [[3, 6]])):
        of_linen = net.apply(params, keys, lengths=[2], combiner=combiner, method="feature")
        for feature in (layer.feature(keys, lengths=[2], combiner=combiner), of_linen):
            np.testing.assert_array_equal(kvjax.lookup_many({"a": feature})["a"], want)
    with pytest.raises(ValueError, match="want combiner in"):
        kvjax.lookup_many({"a": layer.feature(keys, lengths=[2], combiner="")})


def test_a_wrong_combiner_is_refused_when_the_layer_is_made():
    for make in (
        lambda: kvjax.flax.nnx.EmbedBag("t", 2, combiner="avg"),
        lambda: kvjax.flax.EmbedBag("t", 2, combiner="avg").init(jax.random.key(0), kvjax.keys([[1]])),
    ):
        with pytest.raises(ValueError, match=r"table 't', EmbedBag: want combiner in .*got 'avg'"):
            make()
