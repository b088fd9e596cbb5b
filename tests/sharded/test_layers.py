"""All that stands on a table works unchanged on a sharded one: layers, bags, transforms of JAX and of Optax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from tests.support.marks import few, few_rows, slow, wide_is_slow
from tests.support.tables import same_rows

SGD = optax.sgd(0.5)
OPTIONS = {"initializer": kvjax.initializers.normal(0.1), "seed": 5}


def split(mesh, x, *axes):
    return jax.device_put(x, NamedSharding(mesh, P(*(axes or mesh.axis_names[:1]))))


def close(one, other):
    """Equal tables but for the rounding of sums."""
    for name in ("keys", "freqs", "versions", "has_slots"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    np.testing.assert_allclose(one.values, other.values, rtol=1e-5, atol=1e-6)
    for name in one.slots:
        np.testing.assert_allclose(one.slots[name], other.slots[name], rtol=1e-5, atol=1e-6)


@pytest.fixture
def both(make, mesh):
    """A table in one place and one over a mesh, and how to place a batch for each."""

    def both(dim=4, explicit=False, shards=4, **options):
        mesh_ = mesh(shards, explicit=explicit)
        yield make(dim, **OPTIONS | options), lambda x, *axes: x
        with jax.set_mesh(mesh_):
            yield make(dim, **OPTIONS | options, mesh=mesh_), lambda x, *axes: split(mesh_, x, *axes)

    return both


class Net(nn.Module):
    options: dict

    @nn.compact
    def __call__(self, users, tags, x):
        name = self.options["table"]
        options = {k: v for k, v in self.options.items() if k != "table"}
        e = kvjax.flax.Embed(name + "_users", features=8, **options)(users)
        bags = kvjax.flax.EmbedBag(name + "_tags", features=4, pad_id=-1, empty="learned", **options)(tags)
        return nn.Dense(1)(jnp.concatenate([e, bags, x], -1))[:, 0]


def batches(n=24, steps=3):
    rng = np.random.default_rng(2)
    for _ in range(steps):
        users, tags = rng.integers(-20, 20, n), rng.integers(-1, 30, (n, 5))
        x, y = rng.normal(size=(n, 3)), rng.normal(size=n)
        yield kvjax.keys(users), kvjax.keys(tags), jnp.asarray(x, "float32"), jnp.asarray(y, "float32")


@slow
@pytest.mark.parametrize("explicit", few([False, True], 1), ids=["auto", "explicit"])
@pytest.mark.filterwarnings("ignore:.*want an init outside of jit")
def test_linen_train_state_partition_and_clipping(mesh, promotion, explicit):
    mesh = mesh(4, explicit=explicit)
    tx = optax.chain(
        kvjax.optax.joint(optax.clip_by_global_norm(0.5)),
        kvjax.optax.partition(dense=optax.adam(1e-2), tables=optax.adagrad(0.1)),
    )

    def train(options, put):
        net = Net(options)
        first = next(batches())
        params = jax.jit(net.init)(jax.random.key(0), *first[:3])["params"]
        state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)

        @jax.jit
        def step(state, users, tags, x, y):
            def loss(params):
                return jnp.mean((net.apply({"params": params}, users, tags, x) - y) ** 2)

            value, grads = kvjax.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value, kvjax.optax.global_norm(grads)

        numbers = []
        for batch in batches():
            state, *got = step(state, *put(batch))
            numbers.append([float(x) for x in got])
        return numbers, {name: t.export(slots=True) for name, t in kvjax.tables().items() if name.startswith("net")}

    want, one = train({"table": "net1"}, lambda x: x)
    for name in ("net1_users", "net1_tags"):
        kvjax.drop_table(name)
    with jax.set_mesh(mesh):
        options = {"table": "net1", "mesh": mesh, "axis": "x", "replicated": False}
        got, sharded = train(options, lambda x: split(mesh, x))
    assert kvjax.get_table("net1_tags").spec.placement is not None
    np.testing.assert_allclose(got, want, rtol=1e-4)
    for name in one:
        close(one[name], sharded[name])


@slow
def test_nnx(mesh, promotion):
    def train(put, **options):
        model = nnx.Sequential(kvjax.flax.nnx.Embed("nnx", 4, **options), nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
        optimizer = nnx.Optimizer(model, kvjax.optax.partition(optax.sgd(0.1), optax.adagrad(0.1)), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, keys, y):
            def loss(model):
                return jnp.mean((model(keys)[:, 0] - y) ** 2)

            value, grads = kvjax.flax.nnx.value_and_grad(loss)(model)
            optimizer.update(model, grads)
            return value

        losses = [float(step(model, optimizer, *put((users, y)))) for users, _, _, y in batches()]
        exported = kvjax.get_table("nnx").export(slots=True)
        kvjax.drop_table("nnx")
        return losses, exported

    want, one = train(lambda x: x)
    mesh = mesh(4)
    got, sharded = train(lambda x: split(mesh, x), mesh=mesh, wire="float32")
    np.testing.assert_allclose(got, want, rtol=1e-5)
    close(one, sharded)


@pytest.mark.parametrize(
    ("combiner", "explicit"), few_rows(itertools.product(["sum", "mean", "sqrtn", "max"], [False, True]))
)
def test_bags(both, combiner, explicit):
    rng = np.random.default_rng(0)
    keys, weights = rng.integers(-1, 30, (12, 2, 3)), rng.random((12, 2, 3)).astype(np.float32)
    options = {"combiner": combiner, "pad_id": -1, "max_norm": 0.3, "empty": np.full(4, 0.5, np.float32)}
    results = []
    for table, put in both(explicit=explicit):

        def loss(table, weights, keys):
            given = None if combiner == "max" else weights
            bags = kvjax.lookup_bag(table, keys, weights=given, **options)
            return jnp.sum(bags * bags), bags

        step = jax.jit(kvjax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, bags), (grads, weight_grads) = step(table, put(weights), put(kvjax.keys(keys)))
        results.append((bags, weight_grads, table.apply(SGD, grads)[0].export()))
    (one, one_weights, one_table), (sharded, sharded_weights, sharded_table) = results
    np.testing.assert_allclose(one, sharded, rtol=1e-6)
    np.testing.assert_allclose(one_weights, sharded_weights, rtol=1e-5, atol=1e-7)
    close(one_table, sharded_table)
    if explicit:
        assert jax.typeof(sharded).sharding.spec == P("x", None, None)


@slow
@pytest.mark.parametrize("form", few(["lengths", "segment_ids", "odd"], "odd"))
def test_bags_of_any_form(both, form):
    keys = kvjax.keys(np.arange(24) % 7)
    forms = {
        "lengths": {"lengths": np.array([3, 0, 20, 1], np.int32)},
        "segment_ids": {"segment_ids": np.arange(24, dtype=np.int32) % 5 - 1, "num_segments": 4},
        "odd": {},
    }
    keys = keys.reshape(3, 8) if form == "odd" else keys  # 3 bags on 4 devices
    rows = [kvjax.lookup_bag(t, keys, **forms[form]) for t, _ in both()]
    np.testing.assert_array_equal(*rows)


@slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_scan_merge_remat_vmap_and_many(both, explicit):
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 30, (3, 8, 2))
    results = []
    for table, put in both(explicit=explicit):

        def loss(table, keys):
            rows = table.lookup(keys[:, 0])
            many = kvjax.lookup_many({"a": (table, keys[:, 1].salted(1)), "b": (table, keys[:, 0])})
            return jnp.sum(jnp.sin(rows) * many["a"]) + jnp.sum(many["b"])

        @jax.jit
        def step(table, keys):
            def micro(total, keys):
                value, grads = kvjax.value_and_grad(jax.checkpoint(loss))(table, keys)
                return total + value, grads

            total, grads = jax.lax.scan(micro, jnp.float32(0), keys)
            merged = kvjax.merge(grads, 1 / 3)
            table, _ = table.apply(optax.adagrad(0.1), merged, step=7)
            return table, total, kvjax.optax.global_norm(grads), merged.counts

        table, *numbers = step(table, put(kvjax.keys(keys), None, "x"))
        vmapped = jax.vmap(table.lookup)(put(kvjax.keys(keys), None, "x"))
        np.testing.assert_array_equal(vmapped, table.lookup(kvjax.keys(keys)))
        results.append((numbers, table.export(slots=True), vmapped))
    (want, one, rows), (got, sharded, sharded_rows) = results
    for a, b in zip(want, got, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    close(one, sharded)
    np.testing.assert_allclose(rows, sharded_rows, rtol=1e-5, atol=1e-6)


@slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_features(both, explicit):
    """Rows and bags, of the batch's axis and of others, of a table and of a frozen one."""
    rng = np.random.default_rng(0)
    keys, ragged, results = rng.integers(0, 30, (8, 3)), rng.integers(0, 30, 20), []
    for table, put in both(explicit=explicit):
        table = table.upsert(np.arange(20), np.sin(np.arange(80.0)).reshape(20, 4))

        def features(table, keys):
            return {
                "one": (table, keys[:, 0]),
                "all": kvjax.Feature(table, keys, keys != 3, salt=1, max_norm=0.1),
                "bag": kvjax.Feature(table, keys, pad_id=7, combiner="mean", empty=np.ones(4)),
                "ragged": kvjax.Feature(table, ragged, lengths=[3, 0, 9], combiner="sum"),
                "segments": kvjax.Feature(
                    table, keys[:, 0], segment_ids=np.arange(8) % 3, num_segments=3, combiner="max"
                ),
                "empty": kvjax.Feature(table, keys[:, :0], combiner="mean"),
                "zeros": kvjax.Feature(table, keys, missing="zeros"),
                "scalar": (table, 5),
            }

        def loss(table, keys):
            rows = kvjax.lookup_many(features(table, keys))
            return sum(jnp.sum(jnp.sin(x)) for x in rows.values()), rows

        step = jax.jit(kvjax.value_and_grad(loss, has_aux=True))
        (value, rows), grads = step(table, put(kvjax.keys(keys)))
        for name, feature in features(table, put(kvjax.keys(keys))).items() if results else ():
            np.testing.assert_allclose(kvjax.lookup_many({"x": feature})["x"], rows[name], 1e-6, err_msg=name)
        results.append((value, rows, table.apply(SGD, grads)[0].export()))
    (want, rows, one), (got, sharded_rows, sharded) = results
    np.testing.assert_allclose(want, got, 1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), rows, sharded_rows)
    close(one, sharded)
    if explicit:
        assert jax.typeof(sharded_rows["bag"]).sharding.spec == P("x", None)


@slow
def test_features_of_a_table_in_one_place_whose_keys_are_spread(make, mesh):
    """By Explicit axes: each result is spread as its keys are."""
    table = make(4, **OPTIONS)
    mesh_ = mesh(4, explicit=True)
    with jax.set_mesh(mesh_):
        one, many = split(mesh_, kvjax.keys(np.arange(8))), split(mesh_, kvjax.keys(np.arange(24).reshape(8, 3)))
        features = {
            "one": (table, one),
            "many": kvjax.Feature(table, many, pad_id=3),
            "whole": (table, np.arange(10)),
            "scalar": (table, 5),
            "segments": kvjax.Feature(table, one, segment_ids=np.arange(8) % 3, num_segments=3, combiner="sum"),
            "bag": kvjax.Feature(table, many, combiner="mean"),
        }
        for call in (kvjax.lookup_many, jax.jit(lambda t, keys: kvjax.lookup_many(features))):
            rows = call(features) if call is kvjax.lookup_many else call(table, one)
            for name, feature in features.items():
                np.testing.assert_allclose(rows[name], kvjax.lookup_many({name: feature})[name], 1e-6)
        assert jax.typeof(rows["many"]).sharding.spec == P("x", None, None)


@wide_is_slow
@pytest.mark.parametrize("n", few([0, 1, 7, 13], 3))
def test_batches_that_the_devices_do_not_divide(both, x64, n):
    keys = np.arange(n) * 2**40 - 3
    exports = []
    for table, _ in both(shards=8):
        assert table.lookup(keys).shape == (n, 4)
        grads = jax.jit(kvjax.grad(lambda t, k: jnp.sum(t.lookup(k))))(table, kvjax.keys(keys))
        table, _ = table.apply(SGD, grads)
        table = table.add(keys, np.ones((n, 4), np.float32))
        exports.append(table.export())
        assert table.frequency(keys).dtype == (jnp.int64 if x64 else jnp.int32)
    same_rows(*exports)


KINDS = {
    "generated": {"initializer": jax.nn.initializers.lecun_normal()},
    "pool": {"initializer": np.arange(12, dtype=np.float32).reshape(3, 4)},
    "stochastic": {"dtype": "bfloat16", "rounding": "stochastic"},
    "constraint": {"constraint": kvjax.constraints.non_negative()},
    "admit": {"admit": kvjax.admit.MinCount(2)},
}


@pytest.mark.parametrize("kind", few(KINDS))
def test_kinds_of_tables(both, kind):
    rng = np.random.default_rng(1)
    batches = [rng.permutation(30)[:16] for _ in range(3)]
    exports, train = [], jax.jit(lambda t, g: t.apply(SGD, g)[0])
    for table, put in both(**KINDS[kind]):
        for keys in batches:
            rows = table.lookup(put(kvjax.keys(keys)))
            grads = kvjax.SparseRows(put(kvjax.keys(keys)), put(jnp.tanh(rows.astype(jnp.float32)) + 0.5))
            table = train(table, grads)
        exports.append((table.export(), np.asarray(table.lookup(np.arange(40)))))
    same_rows(exports[0][0], exports[1][0])
    np.testing.assert_array_equal(exports[0][1], exports[1][1])


def test_rows_on_a_narrow_wire(make, mesh):
    """Rows come rounded to the type of the wire; the table and its gradients keep their own."""
    rows = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    table = make(mesh=mesh(4), wire="bfloat16").upsert(np.arange(16), rows)
    read = table.lookup(np.arange(16))
    assert read.dtype == jnp.float32
    np.testing.assert_array_equal(read, jnp.asarray(rows, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(np.sort(table.export().values, 0), np.sort(rows, 0))


@slow
def test_no_array_of_the_batch_is_gathered_whole(mesh):
    """A step sends keys and rows to their owners, not the batch to everybody."""
    mesh = mesh(8)
    table = kvjax.get_table("gathered", dim=8, mesh=mesh, **OPTIONS)

    @jax.jit
    def step(table, keys, y):
        def loss(table):
            bags = kvjax.lookup_bag(table, keys.salted(3), mask=keys != kvjax.keys(-1))
            out = jnp.sum(bags, -1)
            return jnp.mean((out - y) ** 2), out

        (_, out), grads = kvjax.value_and_grad(loss, has_aux=True)(table)
        return table.after(out).apply(optax.adagrad(0.1), grads)[0], out

    args = split(mesh, (kvjax.keys(np.arange(512).reshape(128, 4)), jnp.ones(128)))
    text = step.lower(table, *args).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather" in line and "f32[1]{" not in line]
    assert not gathers, gathers
    assert "all-to-all" in text
