"""The Linen and NNX layers."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import kvjax
from tests.support.marks import few, slow

KEYS = kvjax.keys(np.array([[2**40, -1], [7, 2**40]]))


class LinenNet(nn.Module):
    wrap: object = None

    @nn.compact
    def __call__(self, keys):
        embed = kvjax.flax.Embed if self.wrap is None else self.wrap(kvjax.flax.Embed)
        return nn.Dense(1)(jnp.tanh(embed("t", 4)(keys)))


@pytest.mark.parametrize("wrap", few([None, nn.remat, nn.jit], 1), ids=["plain", "remat", "jit"])
@pytest.mark.parametrize("jit", few([False, True], 1), ids=["eager", "jit"])
@pytest.mark.filterwarnings("ignore:.*want an init outside of jit")
@pytest.mark.filterwarnings("ignore:kvjax.*want a call under jit")
def test_linen_lifted_transforms(wrap, jit):
    net = LinenNet(wrap)
    params = (jax.jit(net.init) if jit else net.init)(jax.random.key(0), KEYS)["params"]
    (path,) = [k for k in params if "Embed" in k]
    assert isinstance(params[path]["table"], kvjax.Table)
    function = kvjax.value_and_grad(lambda p: jnp.sum(net.apply({"params": p}, KEYS) ** 2))
    value, grads = (jax.jit(function) if jit else function)(params)
    rows = params[path]["table"].lookup(KEYS)

    def dense(rows):
        return jnp.sum((jnp.tanh(rows) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]) ** 2)

    with jax.numpy_rank_promotion("allow"):
        want, want_rows = jax.value_and_grad(dense)(rows)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads[path]["table"].rows, want_rows, rtol=1e-4, atol=1e-6)


def test_init_touches_no_rows_and_evaluation_changes_nothing():
    net = LinenNet()
    variables = net.init(jax.random.key(0), KEYS)
    net.apply(variables, KEYS)
    assert len(variables["params"]["Embed_0"]["table"]) == 0
    assert jax.eval_shape(net.init, jax.random.key(0), KEYS)["params"]["Embed_0"]["table"].dim == 4


def test_default_initial_rows_are_those_of_embed():
    table = kvjax.flax.Embed("t", 64).init(jax.random.key(0), KEYS)["params"]["table"]
    rows = table.lookup(np.arange(2000))
    assert abs(float(rows.std()) - 64**-0.5) < 2e-3 and abs(float(rows.mean())) < 2e-3


def test_a_table_or_a_name(make):
    table = make(4, initializer=2.0)
    for given in (table, table.name):
        module = kvjax.flax.Embed(given)
        assert module.apply(module.init(jax.random.key(0), KEYS), KEYS).shape == (2, 2, 4)
        assert kvjax.flax.nnx.Embed(given)(KEYS).shape == (2, 2, 4)
    with pytest.raises(ValueError, match="features=4"):
        kvjax.flax.nnx.Embed(table, 8)
    with pytest.raises(ValueError, match="want initializer where the table is made"):
        kvjax.flax.nnx.Embed(table, initializer=0.0)
    assert kvjax.flax.nnx.Embed(table, dtype=jnp.bfloat16)(KEYS).dtype == jnp.bfloat16


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = kvjax.flax.nnx.Embed("t", 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, keys):
        return self.out(self.norm(jnp.tanh(self.embed(keys))))


def test_nnx_training_loop():
    """A stock nnx.Optimizer and nnx.jit; batch statistics move, rows are trained."""
    model = NnxNet(nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        tx = kvjax.optax.partition(dense=optax.adam(0.02), tables=optax.adagrad(0.3))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        y = jnp.array([[[1.0], [0.0]], [[-1.0], [1.0]]])

        @nnx.jit
        def step(model, optimizer, keys, y):
            loss, grads = kvjax.flax.nnx.value_and_grad(lambda m: jnp.mean((m(keys) - y) ** 2))(model)
            optimizer.update(model, grads)
            return loss

        losses = [float(step(model, optimizer, KEYS, y)) for _ in range(60)]
    table = model.embed.table.get_value()
    assert losses[-1] < 0.05 * losses[0]
    assert len(table) == 3 and int(table.frequency(np.int64(2**40))) == 120
    assert float(jnp.abs(model.norm.mean.get_value()).sum()) > 0


@slow
def test_nnx_gradients_are_those_of_linen(make):
    table = make(4, initializer=kvjax.initializers.normal(1.0))
    embed = kvjax.flax.nnx.Embed(table)
    (value, aux), grads = kvjax.flax.nnx.value_and_grad(lambda m: (jnp.sum(m(KEYS) ** 2), m(KEYS)), has_aux=True)(embed)
    np.testing.assert_allclose(grads["table"].get_value().rows.sum(), 2 * aux.sum(), rtol=1e-5)
    only, _ = kvjax.flax.nnx.grad(lambda m: (jnp.sum(m(KEYS) ** 2), 0), has_aux=True)(embed)
    assert only["table"].get_value().rows.shape == (2, 2, 4)
    np.testing.assert_allclose(only["table"].get_value().rows, 2 * aux, rtol=1e-5)
    assert value.shape == ()


@pytest.mark.parametrize("kind", ["numpy", "keys", "prefetched"])
def test_tabulate_shows_tables(kind):
    ids = np.array([[1, 2]])
    if kind != "numpy":
        ids = kvjax.keys(ids)
    if kind == "prefetched":
        initializer = kvjax.initializers.normal(0.5)
        ids, _ = kvjax.prefetch(kvjax.get_table("tab", dim=4, initializer=initializer), ids)
    text = kvjax.flax.Embed("tab", features=4).tabulate(jax.random.key(0), ids, console_kwargs={"width": 400})
    assert "Table(tab, dim=4" in text
    assert "Keys(" in text or kind == "numpy"


def test_nnx_tabulate_shows_tables(promotion):
    """It compiles each public method that is called, so none that a call needs may return a Feature."""

    class Net(nnx.Module):
        def __init__(self):
            self.one, self.bag = kvjax.flax.nnx.Embed("one", 4), kvjax.flax.nnx.EmbedBag("bag", 4, empty="learned")
            self.dense = nnx.Linear(8, 1, rngs=nnx.Rngs(0))

        def __call__(self, ids, x):
            return self.dense(jnp.concatenate([self.one(ids)[:, 0], self.bag(ids)], -1)) + x

    text = nnx.tabulate(Net(), ids=kvjax.keys(np.array([[1, 2]])), x=jnp.ones((1, 1)), console_kwargs={"width": 400})
    assert all(name in text for name in ("one", "EmbedBag", "Linear", "Total Parameters: 15"))


@slow
def test_nnx_argnums():
    """Two models and an array of one loss, each by its own filter, as nnx.value_and_grad."""

    class Tower(nnx.Module):
        def __init__(self, name):
            self.embed = kvjax.flax.nnx.Embed(name, 4)
            self.scale, self.calls = nnx.Param(jnp.ones(())), nnx.BatchStat(jnp.zeros(()))

        def __call__(self, keys):
            self.calls.set_value(self.calls.get_value() + 1)
            return self.embed(keys) * self.scale.get_value()

    def loss(user, item, bias, keys):
        return jnp.sum(user(keys) * item(keys)) + bias, "aux"

    user, item, bias = Tower("user"), Tower("item"), jnp.float32(3)
    function = kvjax.flax.nnx.value_and_grad(loss, has_aux=True, argnums=(0, nnx.DiffState(1, nnx.Param), 2))
    (value, aux), (of_user, of_item, of_bias) = function(user, item, bias, KEYS)
    rows = [tower.embed.table.get_value().lookup(KEYS) for tower in (user, item)]
    assert aux == "aux" and float(of_bias) == 1 and float(value) == pytest.approx(float(jnp.sum(rows[0] * rows[1]) + 3))
    np.testing.assert_allclose(of_user["embed"]["table"].get_value().rows.reshape(rows[1].shape), rows[1])
    np.testing.assert_allclose(of_item["embed"]["table"].get_value().rows.reshape(rows[0].shape), rows[0])
    assert float(user.calls.get_value()) == float(item.calls.get_value()) == 1
    only = kvjax.flax.nnx.grad(loss, has_aux=True, argnums=1)(user, item, bias, KEYS)[0]
    np.testing.assert_allclose(only["scale"].get_value(), of_item["scale"].get_value())
    assert float(user.calls.get_value()) == float(item.calls.get_value()) == 2
    with pytest.raises(TypeError, match=r"^kvjax: flax.nnx.value_and_grad: want the arguments \(4,\)"):
        kvjax.flax.nnx.grad(loss, argnums=4)(user, item, bias, KEYS)
    with pytest.raises(TypeError, match="positional argument"):  # as nnx.grad: it is no has_aux
        kvjax.flax.nnx.grad(loss, 1)


def test_flax_serializes_what_split_leaves_and_no_handle(make):
    params = {"t": make(2).upsert(np.arange(5), np.ones((5, 2))), "w": jnp.arange(2.0)}
    dense, tables = kvjax.orbax.split(params)
    with pytest.raises(TypeError, match="can not serialize 'Table' object"):  # which docs/troubleshooting.md explains
        serialization.to_bytes(params)
    saved = serialization.to_bytes(dense)
    with pytest.raises(TypeError, match=r"from_state_dict: want a target without tables.*kvjax.orbax.combine"):
        serialization.from_bytes(params, saved)
    back = kvjax.orbax.combine(serialization.from_bytes(jax.tree.map(jnp.zeros_like, dense), saved), tables)
    assert back["w"].tolist() == [0, 1] and len(back["t"]) == 5
    whole = serialization.from_state_dict(params, {"t": back["t"], "w": back["w"]})  # of what combine gave
    assert whole["t"] is back["t"]


def test_nnx_takes_the_handle_of_a_write(tmp_path):
    """In its Param, so that the state has it, and so have layers that share that."""
    layer = kvjax.flax.nnx.Embed("t", 2, rngs=nnx.Rngs(0))
    param = layer.table
    layer.table = layer.table[...].upsert([7], np.ones((1, 2)))
    assert layer.table is param and len(nnx.state(layer, nnx.Param)["table"][...]) == 1
    np.testing.assert_array_equal(layer(kvjax.keys([7])), [[1, 1]])
    with pytest.raises(ValueError, match=r"Embed.table: want a table of dim=2, as the layer has, got 3"):
        layer.table = kvjax.get_table("wider", dim=3)
    for other in (jnp.ones(3), np.ones(3), "t", 3):
        with pytest.raises(TypeError, match=r"Embed.table: want a kvjax.Table or frozen arrays, got .*; give what"):
            layer.table = other
    with pytest.raises(TypeError, match=r"layer\.table = table"):
        layer.table[...] = layer.table[...]
    layer.table = kvjax.serving.FrozenTable.write(tmp_path / "f", layer.table[...]).as_jax()
    np.testing.assert_array_equal(layer(kvjax.keys([7])), [[1, 1]])


class Cell(nn.Module):
    """One step of a recurrent model."""

    @nn.compact
    def __call__(self, carry, ids):
        carry = jnp.tanh(nn.Dense(3)(jnp.concatenate([carry, kvjax.flax.Embed("cell", 3)(ids)], -1)))
        return carry, carry


class Recurrent(nn.Module):
    scanned: bool

    @nn.compact
    def __call__(self, ids):
        if self.scanned:
            options = {"variable_broadcast": "params", "split_rngs": {"params": False}, "in_axes": 1, "out_axes": 1}
            return jnp.sum(nn.scan(Cell, **options)(name="cell")(jnp.zeros((2, 3)), ids)[1] ** 2)
        carry, cell, total = jnp.zeros((2, 3)), Cell(name="cell"), 0.0
        for i in range(ids.shape[1]):
            carry, _ = cell(carry, ids[:, i])
            total += jnp.sum(carry**2)
        return total


@slow
def test_a_layer_in_nn_scan_trains_as_in_a_loop():
    ids = kvjax.keys(np.array([[1, 2, 1, 2**40], [5, 1, -1, 5]]))
    params = Recurrent(True).init(jax.random.key(0), ids)["params"]
    one, other = (
        jax.jit(kvjax.grad(lambda p, s=s: Recurrent(s).apply({"params": p}, ids)))(params) for s in (True, False)
    )
    np.testing.assert_allclose(one["cell"]["Dense_0"]["kernel"], other["cell"]["Dense_0"]["kernel"], rtol=1e-5)
    one, other = (kvjax.merge(g["cell"]["Embed_0"]["table"]) for g in (one, other))
    n = int(jnp.sum(other.counts > 0))  # behind these there is padding: Flax traces the body once more
    assert one.keys.tolist()[:n] == other.keys.tolist()[:n] and jnp.sum(one.counts > 0) == n == 5
    np.testing.assert_array_equal(one.counts[:n], other.counts[:n])
    np.testing.assert_allclose(one.rows[:n], other.rows[:n], rtol=1e-5, atol=1e-6)
