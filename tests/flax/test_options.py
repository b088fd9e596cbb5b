"""The fields of the layers are the options of get_table, and an option that is None was not given."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._spec.options import Options
from kvjax._spec.sharding import Sharding

OPTIONS = {field.name: field for cls in (Options, Sharding) for field in dataclasses.fields(cls)}


def layers(**options):
    yield kvjax.flax.nnx.Embed("options", 4, **options).table.get_value()
    yield kvjax.flax.Embed("options", 4, **options).init(jax.random.key(0), np.array([1]))["params"]["table"]


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "dtype"] + ["param_dtype"])
def test_none_is_what_get_table_does_without_it(option):
    plain = kvjax.get_table("options", dim=4, initializer=kvjax.initializers.normal(0.5)).spec
    for table in layers(**{option: None}):
        assert table.spec == plain


@pytest.mark.parametrize("features", [0, -1, 2.5, "4"])
def test_a_width_that_is_none_is_said_as_by_get_table(features):
    match = rf"table 'e', get_table: want an integer dim in 1\.\..*, got {features!r}; "
    for layer in (kvjax.flax.Embed, kvjax.flax.EmbedBag, kvjax.flax.nnx.Embed, kvjax.flax.nnx.EmbedBag):
        with pytest.raises(ValueError, match=match):
            made = layer("e", features)
            made.init(jax.random.key(0), np.array([[1]]))


def test_the_first_four_fields_go_by_position():
    layer = kvjax.flax.Embed("positions", 4, jnp.bfloat16, "float16")
    variables = layer.init(jax.random.key(0), np.array([1]))
    assert variables["params"]["table"].spec.dtype == "float16"
    assert layer.apply(variables, np.array([1])).dtype == jnp.bfloat16


def test_options_that_come_after_the_table_are_said(mesh):
    keys, given = np.array([1]), {"max_capacity": 9, "on_full": "error", "seed": 0, "initializer": np.ones((3, 4))}
    variables = kvjax.flax.Embed("later", 4, **given).init(jax.random.key(0), keys)
    kvjax.flax.Embed("later", 4, **given).apply(variables, keys)
    kvjax.flax.Embed("later", 4, mesh=mesh(2), storage=kvjax.storage.Host(), **given).apply(variables, keys)  # may move
    kvjax.flax.EmbedBag("later", 4).apply(variables, keys[None])
    for option, says in (({"max_capacity": 5}, r"max_capacity 5 \(not 9\)"), ({"seed": 7}, r"seed 7 \(not 0\)")):
        with pytest.warns(
            UserWarning, match=rf"table 'later', Embed: want the options .* made with, got {says}; it stays"
        ):
            kvjax.flax.Embed("later", 4, **given | option).apply(variables, keys)


def test_repr_names_the_table():
    text = repr(kvjax.flax.Embed("shown", 4, max_capacity=7))
    assert "table = 'shown'" in text and "features = 4" in text and "max_capacity = 7" in text


@pytest.mark.parametrize("layer", [kvjax.flax.nnx.Embed, kvjax.flax.nnx.EmbedBag])
def test_unknown_options_are_refused_by_the_name_of_the_layer(layer):
    with pytest.raises(TypeError, match=rf"^{layer.__name__}\(\) got an unexpected keyword argument 'sede'; did"):
        layer("unknown", 4, sede=3)


def test_every_option_is_documented():
    for text in (kvjax.get_table.__doc__, kvjax.flax.Embed.__doc__):
        assert [name for name in OPTIONS if f"{name}:" not in text] == []


def test_a_layer_with_an_array_as_initializer_can_be_hashed():
    for array, row in ((np.ones((3, 2)), [1.0, 1.0]), (jnp.array([3.0, 4.0]), [3.0, 4.0]), (jnp.array(2.0), [2.0] * 2)):
        layer = kvjax.flax.Embed("hashed", 2, seed=0, initializer=array)
        assert hash(layer) == hash(kvjax.flax.Embed("hashed", 2, seed=0, initializer=array))
        rows = jax.jit(lambda layer, keys: layer.init_with_output(jax.random.key(0), keys)[0], static_argnums=0)
        assert rows(layer, kvjax.keys([7])).tolist() == [row]
        kvjax.drop_table("hashed")
