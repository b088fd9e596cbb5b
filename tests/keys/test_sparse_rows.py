"""Sparse gradients as values: what they show, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._keys.seal import sealed
from tests.support.marks import few


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


def refused():
    return pytest.raises(
        (TypeError, NotImplementedError, ValueError), match=r"key<kvjax, not a number>|abstract method"
    )


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("jit", [False, True])
def test_arithmetic_on_whole_gradients_is_an_error(misuse, jit, make, promotion):
    """It would count the keys in, and destroy them."""
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(np.array([7, 2**40])) ** 2))(make(initializer=1.0))
    run = jax.jit(MISUSES[misuse]) if jit else MISUSES[misuse]
    for tree in (grads, {"w": jnp.ones(2), "t": kvjax.merge(grads)}):
        with refused():
            run(tree)


@pytest.mark.parametrize("misuse", few(["squares", "norm", "scale", "cast"], "squares"))
def test_versions_do_not_count_in_a_loss(misuse, make, promotion):
    """An L2 term over all leaves of the parameters would hold the version of each table."""
    params = {"w": jnp.ones(2), "t": make(initializer=1.0)}

    def loss(params, term=lambda p: 0.0):
        return jnp.sum(params["t"].lookup(np.array([7]))) + term(params)

    with refused():
        kvjax.grad(lambda p: loss(p, lambda p: jax.tree.leaves(MISUSES[misuse](p))[0]))(params)

    def floats(p):
        return optax.tree.norm([x for x in jax.tree.leaves(p) if jnp.issubdtype(x.dtype, jnp.floating)])

    loss_of = jax.checkpoint(jax.jit(lambda p: loss(jax.tree.map(jax.lax.stop_gradient, p), floats)))
    (_, shown), grads = kvjax.value_and_grad(lambda p: (loss_of(p), (p["t"], repr(p["t"]))), has_aux=True)(params)
    assert len(grads["t"].rows) == 1 and len(shown[0].upsert(7, [1.0] * 4)) == 1
    assert "version=traced" in shown[1]


def test_no_leaf_of_parameters_refuses_arithmetic(make):
    """Why a table's version is a number outside of a loss: Optax adds to all leaves, and the sum has to be one."""
    for leaf in (sealed(jnp.uint32(3)), np.zeros((), jax.dtypes.float0)):
        for update in (leaf, np.uint32(0)):
            with pytest.raises(TypeError):
                optax.apply_updates({"t": leaf}, {"t": update})
    optax.apply_updates({"t": make().version}, {"t": np.uint32(0)})


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
