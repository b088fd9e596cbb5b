"""Sparse gradients as values: what they show, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax


def test_repr_of_a_tree_of_anything():
    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    assert repr(grads) == repr(jax.eval_shape(lambda: grads)) == "SparseRows(keys=(1,), rows=(1, 2), merged=False)"
    assert "rows=(1, 2)" in repr(jax.tree.map(jnp.shape, grads))
    for x in (None, "x", jax.sharding.PartitionSpec("x"), jnp.float32):
        assert repr(jax.tree.map(lambda _, x=x: x, grads)).startswith("SparseRows(keys=")


MISUSES = {
    "norm": optax.tree.norm,
    "clip": lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState()),
    "scale": lambda g: jax.tree.map(lambda x: x * 0.5, g),
    "sum": lambda g: jax.tree.map(jnp.add, g, g),
    "squares": lambda g: sum(jnp.sum(x**2) for x in jax.tree.leaves(g)),
    "mean": lambda g: jax.tree.map(lambda x: jnp.mean(x, 0), g),
    "cast": lambda g: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g),
}


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("jit", [False, True])
def test_arithmetic_on_whole_gradients_is_an_error(misuse, jit, make, promotion):
    """It would count the keys in, and destroy them."""
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(np.array([7, 2**40])) ** 2))(make(initializer=1.0))
    run = jax.jit(MISUSES[misuse]) if jit else MISUSES[misuse]
    for tree in (grads, {"w": jnp.ones(2), "t": kvjax.merge(grads)}):
        with pytest.raises((TypeError, NotImplementedError, ValueError), match=r"key<fry>|abstract method"):
            run(tree)


def test_gradients_go_where_arrays_go(make, mesh):
    """Through programs, donated, out to the host, over devices, in a scan."""
    table = make(initializer=1.0)
    ids = kvjax.keys(np.array([7, 2**40]))
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(ids) ** 2))(table)
    everywhere = jax.sharding.NamedSharding(mesh(2), jax.sharding.PartitionSpec())
    for same in (jax.jit(lambda g: g), jax.device_get, lambda g: jax.device_put(g, everywhere)):
        np.testing.assert_array_equal(kvjax.merge(same(grads)).rows, kvjax.merge(grads).rows)
    _, many = jax.lax.scan(lambda c, _: (c, grads), 0, None, length=3)
    np.testing.assert_allclose(kvjax.merge(many, scale=1 / 3).rows[:2], kvjax.merge(grads).rows, rtol=1e-6)
    again = jax.jit(lambda g: g, donate_argnums=0)(jax.tree.map(jnp.copy, grads))
    assert len(table.apply(optax.sgd(1.0), again)[0]) == 2
