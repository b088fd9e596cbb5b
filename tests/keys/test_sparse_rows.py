"""Sparse gradients as values: what they show, and what they refuse."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few


def test_repr_of_a_tree_of_anything():
    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    assert repr(grads) == repr(jax.eval_shape(lambda: grads)) == "SparseRows(keys=(1,), rows=(1, 2), merged=False)"
    assert "rows=(1, 2)" in repr(jax.tree.map(jnp.shape, grads))
    for x in (None, "x", jax.sharding.PartitionSpec("x"), jnp.float32):
        assert repr(jax.tree.map(lambda _, x=x: x, grads)).startswith("SparseRows(keys=")


@pytest.mark.parametrize("way", ["whole", "through jit", "a part", "in another shape", "merged"])
def test_rows_of_ones_own_keep_the_padding_of_a_gradient(make, way):
    """SparseRows(grads.keys, ...) would make keys of it."""
    keys = kvjax.keys(np.array([3, -1, 5, 3]))
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(keys, pad_id=-1)))(make(1))
    mine = {
        "whole": lambda g: kvjax.SparseRows(g.keys, g.rows * 2),
        "through jit": jax.jit(lambda g: kvjax.SparseRows(g.keys, g.rows * 2)),
        "a part": lambda g: kvjax.SparseRows(g.keys[1:], g.rows[1:] * 2),
        "in another shape": lambda g: kvjax.SparseRows(g.keys.reshape(2, 2), g.rows.reshape(2, 2, 1) * 2),
        "merged": lambda g: kvjax.SparseRows(kvjax.merge(g).keys, kvjax.merge(g).rows * 2),
    }[way](grads)
    table = make(1, initializer=0.0).apply(optax.sgd(1.0), mine)[0]
    assert sorted(table.export().keys.tolist()) == [3, 5]
    assert table.frequency(np.array([3, 5, -1])).tolist() == [1 if way == "a part" else 2, 1, 0]
    assert table.lookup(np.array([3]))[0, 0] == (-2 if way == "a part" else -4)


INDEXED = [(..., 0), (..., slice(None, 2)), (..., None), (None, ...), 0, slice(1, None), (-1, ...)]


@pytest.mark.parametrize("shape", few([(3,), (2, 3), (2, 2)], 1))
def test_what_is_made_of_a_gradients_keys_has_their_counts(shape):
    """Each key has another count, so one that is taken for another is found."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    keys = kvjax.SparseRows(numbers, jnp.ones((*shape, 1)), numbers).keys
    mask = numbers % 2 == 0
    made = [keys[i] for i in INDEXED]
    made += [keys.reshape(-1), keys.ravel(), kvjax.Keys.concatenate([keys, keys], axis=-1)]
    for part in made:
        np.testing.assert_array_equal(part.counts, np.asarray(part))
    others = kvjax.Keys.concatenate([keys, kvjax.keys(numbers + 100)], axis=0)
    np.testing.assert_array_equal(others.counts, np.concatenate([numbers, np.ones(shape)], 0))
    np.testing.assert_array_equal(keys.where(mask, 100).counts, np.where(mask, numbers, 1))
    np.testing.assert_array_equal(kvjax.keys(numbers + 100).where(mask, keys).counts, np.where(mask, 1, numbers))
    np.testing.assert_array_equal(keys.salted(3).counts, numbers)
    assert kvjax.keys(numbers)[..., 0].counts is None


def test_counts_that_are_given_are_taken():
    grads = kvjax.SparseRows(np.array([7, 9]), jnp.ones((2, 1)), [0, 3])
    assert kvjax.SparseRows(grads.keys, grads.rows).counts.tolist() == [0, 3]
    assert kvjax.SparseRows(grads.keys, grads.rows, [1, 1]).counts.tolist() == [1, 1]
    assert kvjax.SparseRows(kvjax.keys(np.asarray(grads.keys)), grads.rows).counts.tolist() == [1, 1]


UNFIT = {
    "more rows": lambda g: {"rows": jnp.ones((4, 4))},
    "fewer rows": lambda g: {"rows": g.rows[:1]},
    "no axis": lambda g: {"rows": g.rows[:, 0]},
    "keys": lambda g: {"keys": [7, 8, 9]},
    "counts": lambda g: {"counts": [1]},
}


@pytest.mark.parametrize("case", UNFIT)
def test_rows_that_do_not_fit_the_keys_are_an_error(case, make):
    """At replace, and where a tree was changed leaf by leaf, in merge and in the write."""
    table, grads = make(), kvjax.SparseRows(np.array([7, 9]), jnp.ones((2, 4)))
    fields = UNFIT[case](grads)
    fits = r"want keys \(\.\.\.\), rows \(\.\.\., dim\) and counts \(\.\.\.\), got keys .*; give one row a key"
    for run in (lambda f: f(), lambda f: jax.jit(f)()):
        with pytest.raises(ValueError, match=r"SparseRows\.replace: " + fits):
            run(lambda: grads.replace(**fields))
    leaves, tree = jax.tree.flatten(grads)
    leaves[1] = jnp.ones((4, 4))
    bad = jax.tree.unflatten(tree, leaves)
    for use in (kvjax.merge, kvjax.optax.global_norm, lambda g: table.apply(optax.sgd(1.0), g)):
        with pytest.raises(ValueError, match=fits):
            use(bad)
    assert len(table.apply(optax.sgd(1.0), grads)[0]) == 2


def test_rows_are_real_numbers(make):
    """Complex ones would be cut to their real part."""
    grads = kvjax.SparseRows(np.array([7, 9]), jnp.ones((2, 4)))
    leaves, tree = jax.tree.flatten(grads)
    leaves[1] = leaves[1].astype(jnp.complex64)
    bad = jax.tree.unflatten(tree, leaves)
    for use in (
        lambda: kvjax.SparseRows(grads.keys, leaves[1]),
        lambda: grads.replace(rows=np.ones((2, 4), complex)),
        lambda: grads.replace(rows=np.zeros((2, 4), jax.dtypes.float0)),
        lambda: kvjax.merge(bad),
        lambda: make().apply(optax.sgd(1.0), bad),
    ):
        with pytest.raises(TypeError, match=r"want rows of real numbers, got .*jnp\.real|float0"):
            use()


@pytest.mark.parametrize("dtype", few([np.int32, np.uint8, np.int64, bool], 0))
def test_rows_of_integers_are_floats(make, dtype):
    """In integers a clip would round its norm, and its scale to 0."""
    rows = np.array([[0, 1], [1, 1]], dtype)
    for grads in (kvjax.SparseRows([7, 9], rows), kvjax.SparseRows([7, 9], np.zeros((2, 2))).replace(rows=rows)):
        assert grads.rows.dtype == jnp.float32
        clipped, _ = kvjax.optax.joint(optax.clip_by_global_norm(1.0)).update({"t": grads}, optax.EmptyState())
        np.testing.assert_allclose(kvjax.optax.global_norm(clipped), 1.0, rtol=1e-6)
    assert kvjax.SparseRows([7, 9], jnp.asarray(rows, jnp.bfloat16)).rows.dtype == jnp.bfloat16


def test_replace_takes_what_the_constructor_takes_and_anything_that_is_no_array():
    grads = kvjax.merge(kvjax.SparseRows(np.array([7, 9]), jnp.ones((2, 4))))
    new = grads.replace(keys=np.array([5, 2**40, 5]), rows=[[1.0], [2.0], [3.0]], counts=[1, 1, 2])
    assert kvjax.merge(new).counts.tolist() == [3, 1, 0] and kvjax.merge(new).rows.tolist() == [[4.0], [2.0], [0.0]]
    assert not new.merged and grads.replace(rows=np.ones((2, 3))).merged
    with pytest.raises(TypeError, match="did you mean 'rows'"):
        grads.replace(row=grads.rows)
    shapes = jax.eval_shape(lambda g: g, grads)
    assert shapes.replace(rows=jax.ShapeDtypeStruct((2, 8), jnp.float32)).rows.shape == (2, 8)
    with pytest.raises(ValueError, match="give one row a key"):
        shapes.replace(rows=jax.ShapeDtypeStruct((3, 8), jnp.float32))
    assert jax.tree.map(lambda _: "x", grads).replace(rows=None).rows is None


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
    kinds = (TypeError, NotImplementedError, ValueError)
    return pytest.raises(kinds, match=r"kvjax .*not a number|abstract method")


@pytest.mark.parametrize("misuse", MISUSES)
@pytest.mark.parametrize("jit", [False, True])
def test_arithmetic_on_whole_gradients_is_an_error(misuse, jit, make, promotion):
    """It would count the keys in, and destroy them."""
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(np.array([7, 2**40])) ** 2))(make(initializer=1.0))
    run = jax.jit(MISUSES[misuse]) if jit else MISUSES[misuse]
    for tree in (grads, {"w": jnp.ones(2), "t": kvjax.merge(grads)}):
        with refused():
            run(tree)


@pytest.mark.filterwarnings("ignore:kvjax.*want a call under jit")
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
    assert "rows=0" in shown[1]


ON_PARAMETERS = MISUSES | {
    "average": lambda p: optax.incremental_update(p, p, 0.1),
    "mean with another": lambda p: jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, p, p),
    "adam": lambda p: optax.adam(1e-3).update(p, optax.adam(1e-3).init(p)),
}
ON_HOST = {
    "arrays": lambda p: jax.tree.map(np.asarray, p),
    "savez": lambda p: np.savez(io.BytesIO(), *jax.tree.leaves(p)),
    "numpy norm": lambda p: sum(np.linalg.norm(x) for x in jax.tree.leaves(p)),
}


@pytest.mark.parametrize("misuse", ON_PARAMETERS | ON_HOST)
@pytest.mark.parametrize("jit", [False, True])
def test_arithmetic_on_parameters_is_an_error(misuse, jit, make, promotion):
    """It would count the version of each table in, break its handle, or save that for the rows."""
    if jit and misuse in ON_HOST:
        return
    params = {"w": jnp.ones(2), "t": make().upsert(7, [1.0] * 4)}
    run = (ON_PARAMETERS | ON_HOST)[misuse]
    with refused() if misuse in ON_PARAMETERS else pytest.raises(TypeError, match="cannot be converted to a NumPy"):
        (jax.jit(run) if jit else run)(params)


@pytest.mark.parametrize("donate", [False, True])
def test_handles_go_where_arrays_go(make, mesh, donate):
    """Through programs, donated, out to the host, over devices, in a scan; and Optax adds what partition returns."""
    table = make().upsert(7, [1.0] * 4)
    everywhere = jax.sharding.NamedSharding(mesh(2), jax.sharding.PartitionSpec())
    program = jax.jit(lambda t: t, donate_argnums=(0,) if donate else ())
    same = program(jax.tree.map(jnp.copy, table))
    for move in (jax.device_get, lambda t: jax.device_put(t, everywhere), lambda t: jax.tree.map(jnp.copy, t)):
        assert move(same).lookup(7).tolist() == [1.0] * 4
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))

    def step(table, state):
        updates, state = tx.update(kvjax.grad(lambda t: jnp.sum(t.lookup(7)))(table), state, table)
        return optax.apply_updates(table, updates), state

    carry, _ = jax.lax.scan(lambda carry, _: (step(*carry), None), (same, tx.init(same)), None, length=2)
    after, _ = step(*carry)
    assert after.lookup(7).tolist() == [-2.0] * 4 and after.leaf.dtype == table.leaf.dtype
    with refused():
        after.leaf.astype(jnp.float32)


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
