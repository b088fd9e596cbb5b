"""Models on frozen tables: layers, bags and features read them in plain JAX, as they read tables."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax.serving import FrozenTable
from tests.lookup.test_bags import COMBINERS, calls
from tests.support.marks import slow
from tests.support.tables import AWKWARD, drop_all


def frozen(table, folder, **options):
    return FrozenTable.write(folder / table.name, table, **options).as_jax()


@pytest.fixture
def both(make, tmp_path):
    """A table, and the same frozen."""
    table = make(3, initializer=0.25).upsert(AWKWARD, np.arange(24.0).reshape(8, 3) - 9)
    return table, frozen(table, tmp_path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    table = kvjax.get_table("bags", dim=3, initializer=0.25).upsert(np.arange(-2, 3), np.arange(15.0).reshape(5, 3) - 6)
    return table.export(), frozen(table, tmp_path_factory.mktemp("pair"))


@slow
@settings(max_examples=8)
@given(calls(), st.sampled_from(COMBINERS), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_bags_are_those_of_the_table(pair, call, combiner, weighted, jit, seed):
    export, arrays = pair
    table = kvjax.get_table("bags", dim=3, initializer=0.25).upsert(export.keys, export.values)
    shape, form, _, _ = call
    rng = np.random.default_rng(seed)
    keys = kvjax.keys(rng.integers(-3, 4, shape))
    options = {"combiner": combiner, "empty": [7.0, 8.0, 9.0], "max_norm": 5.0}
    weights = rng.normal(size=shape).astype(np.float32) if weighted and combiner != "max" else None
    sizes = {name: form.pop(name) for name in ("num_segments",) if name in form}

    def bags(source, keys, form, weights):
        return kvjax.lookup_bag(source, keys, weights=weights, **form, **sizes, **options)

    run = jax.jit(bags) if jit else bags
    np.testing.assert_allclose(run(arrays, keys, form, weights), bags(table, keys, form, weights), 2e-4, 2e-4)


class Model(nn.Module):
    @nn.compact
    def __call__(self, users, watched):
        user = kvjax.flax.Embed("user", 4, initializer=0.5, max_norm=1.0)(users, salt=1)
        bag = kvjax.flax.EmbedBag("video", 4, pad_id=-1, combiner="mean", empty="learned")(watched)
        return nn.Dense(3)(jnp.concatenate([user, bag], -1))


@slow
def test_a_linen_model_is_served_without_a_custom_call(tmp_path):
    users, watched = kvjax.keys([1, 2**40]), kvjax.keys([[5, 6, -1], [-1, -1, -1]])
    model = Model()
    variables = model.init(jax.random.key(0), users, watched)
    params = variables["params"]
    params["Embed_0"]["table"] = params["Embed_0"]["table"].upsert(users.salted(1)[:1], np.ones((1, 4)))
    params["EmbedBag_0"]["table"] = params["EmbedBag_0"]["table"].upsert([5, 6], np.arange(8.0).reshape(2, 4))
    want = model.apply(variables, users, watched)
    state, tables = kvjax.orbax.split(variables)
    served = kvjax.orbax.combine(state, {name: frozen(table, tmp_path) for name, table in tables.items()})
    apply = jax.jit(model.apply)
    np.testing.assert_allclose(apply(served, users, watched), want, 1e-6, 1e-6)
    assert "custom_call" not in apply.lower(served, users, watched).as_text()
    program = kvjax.export(model.apply, served, users, watched, shapes=(None, "b, ...", "b, 3, ..."))
    drop_all()
    more = (kvjax.Keys.concatenate([users, users]), kvjax.Keys.concatenate([watched, watched]))
    np.testing.assert_allclose(program(served, *more), np.tile(want, (2, 1)), 1e-6, 1e-6)


@slow
def test_nnx_layers(both):
    table, arrays = both
    for layer, keys in (
        (kvjax.flax.nnx.Embed(table, pad_id=7), kvjax.keys(AWKWARD)),
        (kvjax.flax.nnx.EmbedBag(table, combiner="sum"), kvjax.keys(AWKWARD).reshape(2, 4)),
    ):
        want = layer(keys)
        layer.table = nnx.Param(arrays)
        np.testing.assert_allclose(layer(keys), want, 1e-6)
        np.testing.assert_allclose(nnx.jit(lambda model, keys: model(keys))(layer, keys), want, 1e-6)


def test_features(both):
    table, arrays = both
    keys = kvjax.keys(AWKWARD)

    def rows(source):
        features = {
            "a": (source, keys),
            "b": (source, keys.reshape(2, 4).salted(1)),
            "c": (source, keys[:2], [True, False]),
            "d": kvjax.Feature(source, keys.reshape(2, 4), pad_id=0, combiner="sum"),
            "e": kvjax.Feature(source, keys, lengths=[2, 0, 3], combiner="mean", salt=1),
        }
        return kvjax.lookup_many(features)

    got, want = jax.jit(rows)(arrays), rows(table)
    assert list(got) == list(want)
    for name in want:
        np.testing.assert_array_equal(got[name], want[name])


@slow
def test_what_is_refused(both, tmp_path):
    table, arrays = both
    file, name = FrozenTable.write(tmp_path / "f", table), table.name
    embed, reads = kvjax.flax.Embed(name, 3), kvjax.value_and_grad(lambda source: source.lookup([1]).sum())
    for call, error, words in (
        (lambda: embed.apply({"params": {"table": file}}, [1]), TypeError, "as_jax"),
        (lambda: kvjax.lookup_bag(file, [[1]]), TypeError, "as_jax"),
        (lambda: embed.apply({"params": {"table": arrays}}, kvjax.prefetch(table, [1])[0]), TypeError, "prefetched"),
        (lambda: kvjax.flax.Embed(name, 5).apply({"params": {"table": arrays}}, [1]), ValueError, "features=3"),
        (lambda: reads(arrays), TypeError, "another argument"),
        (lambda: kvjax.lookup_bag(arrays, AWKWARD, lengths=[9]), ValueError, "sum to at most 8, got"),
        (lambda: kvjax.lookup_bag(arrays, AWKWARD, lengths=[3, -1]), ValueError, "at least 0"),
        (lambda: kvjax.lookup_bag(arrays, jnp.arange(2)[None]), TypeError, "ids of 64 bits"),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert "kvjax" in str(caught.value)
    bags = jax.jit(lambda lengths: kvjax.lookup_bag(arrays, AWKWARD, lengths=lengths, empty=[1.0, 2.0, 3.0]))
    assert np.isnan(bags(jnp.array([9, 0, 0]))).all() and np.isnan(bags(jnp.array([-1, 2, 2]))).all()
    np.testing.assert_allclose(bags(jnp.array([4, 4, 0]))[2], [1, 2, 3])
    with pytest.raises(TypeError, match=r"combine: want arrays of a frozen table, got a file; give its as_jax\(\)"):
        kvjax.orbax.combine({}, {name: file})


@slow
def test_the_dense_part_trains_beside_a_frozen_table(both):
    table, arrays = both
    weights = jnp.arange(8.0).reshape(2, 4)

    def loss(weights, source):
        return jnp.sum(kvjax.lookup_bag(source, kvjax.keys(AWKWARD).reshape(2, 4), weights=weights) ** 2)

    want = jax.grad(loss)(weights, table)
    np.testing.assert_allclose(kvjax.grad(loss)(weights, arrays), want, 1e-4)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.hessian(loss)(weights, arrays)))


@slow
def test_a_program_belongs_to_the_files_that_it_was_exported_with(make, tmp_path):
    """What another file has as constants would be read by those of the first: its window, its initial rows."""
    programs, sources = [], []
    for value in (0.5, 0.25):
        table = kvjax.get_table("released", dim=1, initializer=value).upsert(np.arange(50), np.ones((50, 1)))
        sources.append(FrozenTable.write(tmp_path / str(value), table).as_jax())
        program = kvjax.export(lambda params, keys: params["t"].lookup(keys), {"t": sources[-1]}, kvjax.keys([1]))
        programs.append(kvjax.Program.deserialize(program.serialize()))
        kvjax.drop_table("released")
    for program, source, other in zip(programs, sources, sources[::-1], strict=True):
        assert program({"t": source}, kvjax.keys([3])).tolist() == [[1.0]]
        with pytest.raises(kvjax.ProgramError, match="want the frozen table that it was exported with at 0/t, name="):
            program({"t": other}, kvjax.keys([3]))


@slow
def test_a_program_reads_the_releases_of_one_capacity(make, tmp_path):
    table, program = make(1, initializer=0.5), None
    for n in (50, 80):
        table = table.upsert(np.arange(n), np.full((n, 1), float(n)))
        params = {"t": FrozenTable.write(tmp_path / str(n), table).as_jax(capacity=100)}
        if program is None:
            program = kvjax.export(lambda params, keys: params["t"].lookup(keys), params, kvjax.keys([1]))
            program = kvjax.Program.deserialize(program.serialize())
        assert program(params, kvjax.keys([49])).tolist() == [[n]]
        assert program(params, kvjax.keys([79])).tolist() == [[n if n == 80 else 0.5]]


@slow
def test_explicit_axes(both, mesh):
    table, arrays = both
    mesh = mesh(4, explicit=True)
    keys = jax.device_put(kvjax.keys(AWKWARD), NamedSharding(mesh, P("x")))
    for call in (
        lambda source, keys: source.lookup(keys, pad_id=1, return_found=True),
        lambda source, keys: kvjax.lookup_bag(source, keys[:, None], combiner="max", empty=[1.0, 2.0, 3.0]),
        lambda source, keys: kvjax.lookup_bag(source, keys, segment_ids=jnp.zeros(8, jnp.int32), num_segments=2),
        lambda source, keys: source.lookup(keys.where(keys == kvjax.keys(-1), 7)),
    ):
        with jax.set_mesh(mesh):
            got = jax.jit(call)(arrays, keys)
        for one, want in zip(jax.tree.leaves(got), jax.tree.leaves(call(table, kvjax.keys(AWKWARD))), strict=True):
            np.testing.assert_allclose(one, want, 1e-6)
