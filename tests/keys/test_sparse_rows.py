"""Sparse gradients as values: what they show, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np

import kvjax


def test_repr_of_a_tree_of_anything():
    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    assert repr(grads) == repr(jax.eval_shape(lambda: grads)) == "SparseRows(keys=(1,), rows=(1, 2), merged=False)"
    assert "rows=(1, 2)" in repr(jax.tree.map(jnp.shape, grads))
    for x in (None, "x", jax.sharding.PartitionSpec("x"), jnp.float32):
        assert repr(jax.tree.map(lambda _, x=x: x, grads)).startswith("SparseRows(keys=")
