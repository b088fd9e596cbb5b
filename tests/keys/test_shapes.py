"""Shapes of keys that are asked for wrongly, and indices and axes that they do not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax


@pytest.mark.parametrize("sizes", [(3,), (-1, 3), (-1, -1), (-4,), (2.0,), (None,), ("4",), (True, 4), ((2, 2), 1)])
def test_shapes_of_other_numbers_of_keys(sizes):
    """Of keys, not of their words, which have another axis."""
    with pytest.raises((TypeError, ValueError), match=r"^kvjax: Keys.reshape: want another shape of (these )?keys"):
        kvjax.keys([1, 2, 3, 4]).reshape(*sizes)
    assert kvjax.keys(np.zeros((0, 3), np.int64)).reshape(-1, 3).shape == (0, 3)


@pytest.mark.parametrize("lib", [np, jnp])
@pytest.mark.parametrize("index", [[3], [0, -4], 3, [[0], [7]]], ids=str)
def test_arrays_of_indices_are_within_bounds(lib, index):
    """JAX would take another key in silence."""
    host = kvjax.keys([1, 2, 3])
    for keys in (host, jax.tree.map(jnp.asarray, host)):
        with pytest.raises(IndexError, match=r"^kvjax: Keys: want an index of axis 0 of keys \(3,\), got .* bounds"):
            keys[lib.asarray(index)]
        with pytest.raises(IndexError, match="axis 1"):
            keys[None, :, None].reshape(1, 3)[:, lib.asarray(index)]
        assert keys[lib.asarray([2, -3])].tolist() == [3, 1]
        assert keys[:0][lib.zeros(0, np.int32)].shape == (0,)
        assert jax.jit(lambda k, i: k[i])(keys, lib.zeros(2, np.int32)).tolist() == [1, 1]


def test_indices_of_symbolic_sizes_are_for_the_program_to_check():
    words = jax.ShapeDtypeStruct((jax.export.symbolic_shape("b")[0], 2), jnp.uint32)
    made = jax.export.export(jax.jit(lambda w: kvjax.Keys(w)[3].words))(words)
    assert made.out_avals[0].shape == (2,)


@pytest.mark.parametrize("axis", [1, -2, "0", None, True])
def test_keys_are_joined_along_an_axis_of_theirs(axis):
    """The words have one more, along which NumPy would join them to something else."""
    with pytest.raises((TypeError, ValueError), match=r"^kvjax: Keys.concatenate: want .*axis"):
        kvjax.Keys.concatenate([kvjax.keys([1, 2])] * 2, axis)


def test_keys_of_other_shapes_are_not_joined():
    keys = kvjax.keys([[1, 2, 3]])
    for other in (keys.reshape(3, 1), keys.ravel()):
        with pytest.raises(ValueError, match=r"^kvjax: Keys.concatenate: want .*\(1, 3\), \(3"):
            kvjax.Keys.concatenate([keys, other])
    with pytest.raises(ValueError, match="the axis"):
        kvjax.Keys.concatenate([keys[0, 0], keys[0, 1]])
