"""What a module's init makes: fresh tables, seeded by its key, and never one that has been trained."""

import functools
import gc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kvjax
from tests.support.checkpoints import restore, save
from tests.support.marks import few
from tests.support.tables import finished

IDS = np.arange(6)
KEYS = kvjax.keys(IDS)
TX = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(1.0))


class Net(nn.Module):
    features: int = 4
    reuse: bool = False
    seed: int | None = None

    @nn.compact
    def __call__(self, keys):
        return kvjax.flax.Embed("t", self.features, reuse=self.reuse, seed=self.seed, name="embed")(keys)


class Two(nn.Module):
    @nn.compact
    def __call__(self, keys):
        return kvjax.flax.Embed("t", 4)(keys), kvjax.flax.Embed("t", 4)(keys)


def linen(key=0, **options):
    return Net(**options).init(jax.random.key(key), KEYS)["params"]["embed"]["table"]


def nnx_layer(key=0, features=4, **options):
    return kvjax.flax.nnx.Embed("t", features, rngs=nnx.Rngs(key), **options).table.get_value()


LAYERS = pytest.mark.parametrize("init", [linen, nnx_layer])


def trained(table):
    return table.apply(optax.sgd(1.0), kvjax.SparseRows(KEYS, jnp.ones((6, table.dim))))[0]


@LAYERS
def test_a_second_experiment_starts_anew(init):
    first = trained(init())
    want = kvjax.get_table("other", dim=4, initializer=kvjax.initializers.normal(0.5), seed=first.spec.seed).lookup(IDS)
    with pytest.warns(UserWarning, match=r"table 't', init: made anew.*reuse=True"):
        second = init()
    assert len(second) == 0
    np.testing.assert_array_equal(second.lookup(IDS), want)
    with pytest.raises((ValueError, RuntimeError), match="stale"):
        finished(first.lookup(IDS))


@LAYERS
def test_the_key_of_init_seeds_the_table(init):
    rows = [np.asarray(init(key).lookup(IDS)) for key in (0, 1, 0)]
    assert (rows[0] == rows[2]).all() and (rows[0] != rows[1]).any()
    assert init(2, seed=5).spec.seed == 5 if init is nnx_layer else True


@LAYERS
def test_what_nobody_has_written_is_taken_again(init):
    table = init()
    again = init()
    assert int(again.version) == int(table.version)
    np.testing.assert_array_equal(table.lookup(IDS), again.lookup(IDS))


@LAYERS
def test_other_options_make_a_table_anew(init):
    init()
    assert init(features=8).dim == 8


@LAYERS
def test_reuse_goes_on(init):
    table = trained(init())
    again = init(1, reuse=True)
    assert len(again) == 6 and int(again.version) == int(table.version) and again.spec == table.spec
    with pytest.raises(ValueError, match="want the arguments it was made with"):
        init(features=8, reuse=True)


@LAYERS
def test_tables_made_by_hand_are_never_made_anew(init):
    options = {"dim": 4, "initializer": kvjax.initializers.normal(0.5)}
    table = kvjax.get_table("t", dim=4, max_capacity=50)
    assert init().spec == table.spec  # by what the layer does not say it may be as it is
    with pytest.raises(ValueError, match=r"got seed 5 \(not"):
        init(seed=5)
    kvjax.drop_table("t")
    table = kvjax.get_table("t", **options)
    assert init().spec == table.spec
    trained(table)
    with pytest.raises(
        ValueError, match=r"that nobody has written yet, or reuse=True.*first, then restore.*drop_table"
    ):
        init()
    assert len(init(reuse=True)) == 6


def test_modules_of_one_model_share_a_table():
    trained(linen())
    with pytest.warns(UserWarning, match="made anew"):
        params = Two().init(jax.random.key(3), KEYS)["params"]
    one, two = (params[f"Embed_{i}"]["table"] for i in (0, 1))
    assert one.spec == two.spec and int(one.version) == int(two.version)
    one.lookup(IDS), two.lookup(IDS)


@pytest.mark.parametrize("places", [1, 2])
def test_modules_that_share_a_table_train_it_once(places):
    """As one module with all the lookups."""

    class Pair(nn.Module):
        @nn.compact
        def __call__(self, keys):
            modules = [kvjax.flax.Embed("t", 4, seed=3, name=f"e{i}") for i in range(places)]
            return sum((i + 1) * modules[i % places](keys) for i in range(2))

    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(1.0))
    net = Pair()
    params = net.init(jax.random.key(0), KEYS)["params"]
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = kvjax.grad(lambda p: jnp.sum(net.apply({"params": p}, KEYS)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    before = params["e0"]["table"].lookup(IDS)
    for _ in range(2):
        params, state = step(params, state)
    tables = [params[name]["table"] for name in params]
    for table in tables:
        np.testing.assert_allclose(table.lookup(IDS), before - 6, rtol=1e-5)
        assert table.frequency(IDS).tolist() == [4] * 6
    dense, saved = kvjax.orbax.split(params)
    assert list(saved) == ["t"] and kvjax.orbax.combine(dense, saved)["e0"]["table"] is tables[-1]


@pytest.mark.parametrize("program", few(["eval_shape", "tabulate", "jit", "lower", "lookup"], "eval_shape", "jit"))
def test_an_init_that_is_traced_touches_no_live_table(program):
    net, key = Net(), jax.random.key(1)
    table = trained(linen())
    if program == "tabulate":
        net.tabulate(key, IDS)
    elif program == "lower":
        with pytest.warns(UserWarning, match="outside of jit"):
            jax.jit(net.init).lower(key, KEYS)
    elif program == "eval_shape":
        params = jax.eval_shape(net.init, key, KEYS)["params"]
        assert params["embed"]["table"].spec == table.spec
        other = jax.eval_shape(Net(features=8).init, key, KEYS)["params"]
        assert other["embed"]["table"].dim == 8
    else:
        with pytest.warns(UserWarning, match=r"'t', Embed: want an init outside of jit .* table is not made anew"):
            stale = jax.jit(net.init)(key, KEYS)["params"]["embed"]["table"]
        with pytest.raises((ValueError, RuntimeError), match=r"stale.*init"):
            finished(stale.lookup(IDS))
    assert len(table) == 6  # it is as it was, and its handle is the live one


def test_a_layer_whose_table_goes_to_another_is_told():
    rngs = nnx.Rngs(0)
    first = kvjax.flax.nnx.Embed("t", 4, rngs=rngs)
    same = kvjax.flax.nnx.Embed("t", 4, rngs=rngs)
    with pytest.warns(UserWarning, match=r"made anew for a layer that differs \(.*max_capacity 9 \(not None\)\)"):
        other = kvjax.flax.nnx.Embed("t", 4, rngs=rngs, max_capacity=9)
    assert other.table.get_value().spec.max_capacity == 9
    del first, same, other
    gc.collect()
    kvjax.flax.nnx.Embed("t", 4, rngs=rngs)  # of which nobody is left


@LAYERS
def test_an_init_under_jit_says_that_its_key_seeds_nothing(init):
    with pytest.warns(
        UserWarning, match=r"'t', Embed: want an init outside of jit and nn.remat, where its key seeds"
    ) as said:
        table = jax.jit(init)()
    assert len(said) == 1 and said[0].filename == __file__ and len(trained(table)) == 6
    kvjax.drop_table("t")
    rows = jax.jit(lambda: init(seed=3))().lookup(IDS)  # which says nothing
    kvjax.drop_table("t")
    assert rows.tolist() == init(seed=3).lookup(IDS).tolist()


def test_layers_of_one_model_agree_about_their_table():
    """In other models it is another experiment, which has its table made anew."""

    class Pair(nn.Module):
        second: int = 4

        @nn.compact
        def __call__(self, keys):
            return [kvjax.flax.Embed("t", features)(keys) for features in (4, self.second)]

    for net in (Pair(), Pair(8), Pair(), Two()):
        if net == Pair(8):
            with pytest.raises(ValueError, match=r"'t', init: want all layers of a model .* dim 8 \(not 4\)"):
                net.init(jax.random.key(0), KEYS)
        else:
            net.init(jax.random.key(0), KEYS)


def test_a_handle_from_before_other_rows_says_so():
    before = linen()
    lookup = jax.jit(lambda table: table.lookup(IDS))
    lookup(before)
    kvjax.drop_table("t")
    linen(features=8)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"'t', lookup: .* made anew with other"):
        lookup(before).block_until_ready()


def test_apply_makes_no_table():
    params = Net().init(jax.random.key(0), KEYS)["params"]
    kvjax.drop_table("t")
    with pytest.raises((ValueError, KeyError, jax.errors.JaxRuntimeError), match="want a table of this name"):
        jax.block_until_ready(Net().apply({"params": params}, KEYS))
    assert "t" not in kvjax.tables()


def test_params_that_do_not_fit_the_layer_are_refused():
    params = Net().init(jax.random.key(0), KEYS)["params"]
    with pytest.raises(ValueError, match="want features=4"):
        Net(features=8).apply({"params": params}, KEYS)
    for without in ({}, {"params": {}}):
        with pytest.raises(
            ValueError, match=r"'t', Embed: want variables with its table.*; give init a key.*apply what init"
        ):
            Net().apply(without, KEYS)
    dense, _ = kvjax.orbax.split(params)
    with pytest.raises(TypeError, match=r"want a kvjax.Table in params, got TableRef\('t'\); .*combine"):
        Net().apply({"params": dense}, KEYS)


def towers(first, second, **options):
    """Two modules of one model that name one table, each in a transform of its own."""

    class Tower(nn.Module):
        @nn.compact
        def __call__(self, keys):
            return kvjax.flax.Embed("t", 4, **options)(keys)

    class Both(nn.Module):
        @nn.compact
        def __call__(self, keys):
            return first(Tower)(name="a")(keys) * second(Tower)(name="b")(keys)

    return Both()


@pytest.mark.filterwarnings("ignore:.*want an init outside of jit")
@pytest.mark.filterwarnings("ignore:.*traces and compiles these again")
@pytest.mark.parametrize(
    "order", few([(nn.jit, lambda m: m), (lambda m: m, nn.jit), (nn.jit, nn.jit), (nn.remat, nn.jit)], 1)
)
def test_towers_under_a_transform_share_a_table(order):
    net = towers(*order)
    for _ in range(2):  # the second init finds a table that nobody has written
        params = net.init(jax.random.key(0), KEYS)["params"]
    handles = [int(params[name]["Embed_0"]["table"].version) for name in "ab"]
    assert handles == [int(kvjax.tables()["t"].version)] * 2
    rows = kvjax.tables()["t"].lookup(IDS)
    np.testing.assert_allclose(net.apply({"params": params}, KEYS), rows * rows, rtol=1e-6)
    updates, _ = TX.update(
        kvjax.grad(lambda p: jnp.sum(net.apply({"params": p}, KEYS)))(params), TX.init(params), params
    )
    assert len(optax.apply_updates(params, updates)["a"]["Embed_0"]["table"]) == len(IDS)


def test_a_layer_under_jit_decides_the_seed_and_says_so():
    with pytest.warns(UserWarning) as said:
        towers(nn.jit, lambda m: m).init(jax.random.key(0), KEYS)
    texts = [str(warning.message) for warning in said]
    assert len(texts) == 2 and all("want an init outside of jit" in text for text in texts)
    assert "got a table that a compiled init has made" in texts[1] and "drop_table('t')" in texts[1]
    seed = kvjax.tables()["t"].spec.seed
    kvjax.drop_table("t")
    assert linen().spec.seed != seed  # that of the key
    kvjax.drop_table("t")
    towers(nn.jit, lambda m: m, seed=5).init(jax.random.key(0), KEYS)  # no warning: the seed is said
    assert kvjax.tables()["t"].spec.seed == 5


class Rematted(nn.Module):
    @nn.remat
    @nn.compact
    def __call__(self, keys):
        return kvjax.flax.Embed("t", 4)(keys)


@pytest.mark.filterwarnings("ignore:.*want an init outside of jit")
@pytest.mark.parametrize(
    "net",
    few([nn.remat(Net)(), Rematted(), nn.remat(nn.remat(Net))(), towers(nn.remat, lambda m: m),
         towers(lambda m: m, nn.remat), towers(nn.remat, nn.jit)], 0, 3),
    ids=["class", "method", "nested", "first", "second", "jit"],
)  # fmt: skip
def test_a_second_experiment_under_remat_starts_anew(net):
    """JAX traces it, and runs it at once."""
    tables = []
    for _ in range(2):
        params = net.init(jax.random.key(0), KEYS)["params"]
        assert len(kvjax.tables()["t"]) == 0
        updates, _ = TX.update(
            jax.jit(kvjax.grad(lambda p: jnp.sum(net.apply({"params": p}, KEYS))))(params), TX.init(params), params
        )
        tables += kvjax.orbax.split(optax.apply_updates(params, updates))[1].values()
        assert len(tables[-1]) == 6
        if len(tables) == 1:
            with pytest.warns(UserWarning, match="made anew, without the 6 rows"):
                net.init(jax.random.key(0), KEYS)
    first, second = tables
    assert first.spec == second.spec
    with pytest.raises((ValueError, RuntimeError), match="stale"):
        finished(first.lookup(IDS))


def test_another_table_under_remat_is_made_anew():
    """Also one that nobody has written, as in a search for a width or a seed."""
    for options in ({"features": 4, "seed": 1}, {"features": 4, "seed": 2}, {"features": 8, "seed": 2}):
        net = nn.remat(kvjax.flax.Embed)("t", **options)
        params = net.init(jax.random.key(0), KEYS)["params"]
        rows = jax.jit(lambda p, net=net: net.apply({"params": p}, KEYS))(params)
        assert rows.shape[-1] == options["features"] and kvjax.tables()["t"].spec.seed == options["seed"]


def test_an_init_under_remat_says_that_its_key_seeds_nothing():
    with pytest.warns(UserWarning, match="want an init outside of jit and nn.remat, where its key seeds"):
        Rematted().init(jax.random.key(0), KEYS)
    kvjax.drop_table("t")
    nn.remat(Net)(seed=3).init(jax.random.key(0), KEYS)  # which says nothing


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_no_key_would_seed_a_table_made_by_hand(wrap):
    kvjax.get_table("t", dim=4, initializer=kvjax.initializers.normal(0.5))
    wrap(Net().init)(jax.random.key(0), KEYS)  # which says nothing


@pytest.mark.filterwarnings("ignore:.*want an init outside of jit")
@pytest.mark.parametrize("program", ["eval_shape", "jit"])
def test_remat_in_a_program_touches_no_live_table(program):
    table = trained(linen())
    init = nn.remat(Net)().init
    traced = {"jit": jax.jit(init).lower, "eval_shape": functools.partial(jax.eval_shape, init)}[program]
    traced(jax.random.key(0), KEYS)
    assert len(table) == 6 and int(table.refresh().version) == int(table.version)


def test_shapes_alone_do_not_decide_the_seed():
    jax.eval_shape(Net().init, jax.random.key(0), KEYS)
    seed = linen().spec.seed
    kvjax.drop_table("t")
    assert linen().spec.seed == seed


def test_a_stack_of_layers_is_no_table():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, carry, keys):
            return carry + kvjax.flax.Embed("t", 4, seed=0)(keys), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, keys):
            layers = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=nn.broadcast, length=3
            )
            return layers()(jnp.zeros((*keys.shape, 4)), keys)[0]

    params = Stack().init(jax.random.key(0), KEYS)["params"]
    with pytest.raises(ValueError, match=r"'t', value_and_grad: want one handle, got 3 stacked, .*before the scan"):
        kvjax.grad(lambda p: jnp.sum(Stack().apply({"params": p}, KEYS)))(params)


def test_a_restore_brings_the_seed(tmp_path):
    """The state of a new process is made with any key: what it restores reads as it did, also keys without a row."""
    table = trained(linen(0))
    want = table.lookup(np.arange(20))
    save(tmp_path, 1, {"t": table})
    kvjax.drop_table("t")
    made = linen(1)
    for _ in range(2):
        table = restore(tmp_path, 1, {"t": made})["t"]
    np.testing.assert_array_equal(table.lookup(np.arange(20)), want)
    kvjax.drop_table("t")
    linen(2)
    np.testing.assert_array_equal(restore(tmp_path, 1)["t"].lookup(np.arange(20)), want)
