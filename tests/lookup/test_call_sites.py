"""Gradients of losses that use a lookup's code more than once: call by call, and for many examples at once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._ops import call
from tests.support.marks import few, few_rows, slow
from tests.support.tables import finished

IDS = np.array([3, 17, 3, 0, 9, 17])
MORE = np.array([[0, 3], [11, 11], [5, 3]])
W = jax.random.normal(jax.random.key(2), (4, 3))
X = jnp.array([1.0, -2.0, 0.5])


def head(w, rows):
    return jnp.sum(jnp.tanh(rows @ w) ** 2)


# Each takes the table, or the dense array that stands for it; a function that reads it; and one that makes keys.


def twice(t, read, keys, w):
    encode = jax.jit(lambda t, ids: head(w, read(t, ids)))
    return encode(t, keys(IDS)) + 2 * encode(t, keys(IDS + 1))


def nested(t, read, keys, w):
    inner = jax.jit(lambda t, ids: head(w, read(t, ids)))
    outer = jax.jit(lambda t, ids: inner(t, ids) * inner(t, ids))
    return outer(t, keys(IDS)) + outer(t, keys(IDS[::-1] + 2))


def remat(t, read, keys, w):
    encode = jax.checkpoint(lambda t, ids: head(w, read(t, ids)))
    return encode(t, keys(IDS)) + encode(t, keys(IDS + 1))


def remat_of_jit(t, read, keys, w):
    encode = jax.checkpoint(jax.jit(lambda t, ids: head(w, read(t, ids))))
    return encode(t, keys(IDS)) + encode(t, keys(IDS + 1))


def vmapped(t, read, keys, w):
    return jnp.sum(jax.vmap(lambda ids, x: x * head(w, read(t, ids)))(keys(MORE), X))


def vmapped_scalars(t, read, keys, w):
    return jnp.sum(jax.vmap(lambda t, i: head(w, read(t, i)), in_axes=(None, 0))(t, keys(IDS)))


def vmapped_twice(t, read, keys, w):
    return jnp.sum(jax.vmap(jax.vmap(lambda i, x: x * head(w, read(t, i)), (0, None)))(keys(MORE), X))


def vmap_of_jit(t, read, keys, w):
    encode = jax.jit(lambda t, ids: head(w, read(t, ids)))
    batch = jax.vmap(encode, in_axes=(None, 0))
    return jnp.sum(batch(t, keys(MORE))) + jnp.sum(batch(t, keys(MORE[:2] + 1))) + encode(t, keys(MORE[0]))


def vmap_of_remat(t, read, keys, w):
    return jnp.sum(jax.vmap(jax.checkpoint(lambda ids, x: x * head(w, read(t, ids))))(keys(MORE), X))


def vmap_of_cond(t, read, keys, w):
    def example(ids, x):
        return jax.lax.cond(x > 0, lambda: x * head(w, read(t, ids)), lambda: jnp.zeros(()))

    return jnp.sum(jax.vmap(example)(keys(MORE), X))


def same_keys_for_all(t, read, keys, w):
    return jnp.sum(jax.vmap(lambda x: x * head(w, read(t, keys(IDS))))(X))


def beside_each_other(t, read, keys, w):
    t = jax.tree.map(lambda a, b: a, {"t": t}, {"t": t})["t"]  # two trees with the table are equal
    return vmapped(t, read, keys, w) + head(w, read(t, keys(IDS))) + twice(t, read, keys, w)


LOSSES = [
    beside_each_other, vmap_of_jit, nested, twice, remat, remat_of_jit, vmapped, vmapped_scalars, vmapped_twice,
    vmap_of_remat, vmap_of_cond, same_keys_for_all,
]  # fmt: skip


def wide(ids):
    return kvjax.keys(np.asarray(ids, np.int64) * 2**40 - 7)


@pytest.mark.parametrize("loss", few(LOSSES, 1))
def test_equals_dense(make, loss):
    dense = jax.random.normal(jax.random.key(1), (20, 4))
    table = make(4).upsert(wide(np.arange(20)), dense)

    @jax.jit
    def of_table(t, w):
        value, (g, gw) = kvjax.value_and_grad(
            lambda t, w: loss(t, lambda t, ids: t.lookup(ids), wide, w), argnums=(0, 1)
        )(t, w)
        return value, kvjax.merge(g), gw

    value, grads, gw = of_table(table, W)
    want, (gd, gwd) = jax.value_and_grad(lambda t, w: loss(t, lambda t, ids: t[ids], jnp.asarray, w), (0, 1))(dense, W)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(gw, gwd, rtol=1e-4, atol=1e-5)
    active = np.asarray(grads.counts) > 0
    got = np.zeros((20, 4), np.float32)
    got[(np.asarray(grads.keys)[active] + 7) // 2**40] = np.asarray(grads.rows)[active]
    np.testing.assert_allclose(got, gd, rtol=1e-4, atol=1e-5)


@slow
def test_each_example_counts(make):
    """Occurrences, padding and duplicates are those of all examples together."""
    table = make(2)
    ids, mask = kvjax.keys(MORE), np.array([[True, True], [True, True], [False, True]])

    def loss(t):
        return jnp.sum(jax.vmap(lambda k, m: t.lookup(k, mask=m))(ids, mask))

    grads = kvjax.grad(loss)(table)
    assert grads.keys.shape == (3, 2) and grads.counts.tolist() == mask.astype(int).tolist()
    table, _ = table.apply(optax.sgd(1.0), grads)
    assert table.frequency([0, 3, 11, 5]).tolist() == [1, 2, 2, 0]
    assert table.lookup([0, 3, 11, 5])[:, 0].tolist() == [-1.0, -2.0, -2.0, 0.0]


@slow
def test_on_a_mesh(make, mesh):
    table = make(2, mesh=mesh(2), initializer=1.0)

    def loss(t):
        encode = jax.jit(lambda t, k: jnp.sum(t.lookup(k) ** 2))
        return encode(t, kvjax.keys(IDS)) + encode(t, kvjax.keys(IDS + 1))

    merged = kvjax.merge(jax.jit(kvjax.grad(loss))(table))
    pairs = zip(np.asarray(merged.keys).tolist(), np.asarray(merged.counts).tolist(), strict=True)
    assert {key: count for key, count in pairs if count} == {3: 2, 17: 2, 0: 1, 9: 1, 4: 2, 18: 2, 1: 1, 10: 1}
    by_example = jax.jit(kvjax.grad(lambda t: jnp.sum(jax.vmap(lambda k: t.lookup(k) ** 2)(kvjax.keys(MORE)))))(table)
    assert by_example.rows.tolist() == np.full((3, 2, 2), 2.0).tolist()


def whole(p):
    return p["t"].lookup(IDS)


STOPS = {
    "plain": whole,
    "jit": jax.jit(whole),
    "checkpoint": jax.checkpoint(whole),
    "cond": lambda p: jax.lax.cond(p["w"] > 0, whole, lambda p: 0 * whole(p), p),
    "vmap": lambda p: jax.vmap(p["t"].lookup)(kvjax.keys(IDS)),
    "scan": lambda p: jax.lax.scan(lambda c, _: (c, whole(c)), p, None, 1)[1][0],
}


@pytest.mark.parametrize("read", STOPS.values(), ids=STOPS)
def test_stop_gradient_stops_tables(read, make):
    """As it does dense parameters: a target network is not trained."""

    def loss(p):
        target = jax.lax.stop_gradient(p)
        return p["w"] * jnp.sum(p["t"].lookup(MORE) ** 2) + target["w"] * jnp.sum(read(target) ** 2)

    params = {"t": make(2, initializer=2.0), "w": jnp.float32(3.0)}
    grads = jax.jit(kvjax.grad(loss))(params)
    want = jax.grad(lambda w: w * MORE.size * 2 * 4.0)(params["w"])
    np.testing.assert_allclose(grads["w"], want)
    keys, rows = np.asarray(grads["t"].keys), np.asarray(grads["t"].rows)
    real = np.asarray(grads["t"].counts) > 0
    assert sorted(keys[real]) == sorted(MORE.ravel()) and (rows[real] == 12).all() and not rows[~real].any()
    assert len(params["t"].apply(optax.sgd(1.0), grads["t"])[0]) == len(np.unique(MORE))


def recomputed(t, ids):
    """The value and the derivative use a lookup that JAX does again for the latter."""
    value, grads = jax.value_and_grad(jax.checkpoint(lambda w: jnp.sum(jnp.sin(t.lookup(ids) * w))))(2.0)
    return value + grads


def beside_another(t, ids):
    return recomputed(t, ids) + jnp.sum(t.lookup(ids[0]))


def beside_a_scan(t, ids):
    return recomputed(t, ids) + jax.lax.scan(lambda c, k: (c + jnp.sum(t.lookup(k)), None), 0.0, ids)[0]


OWN = {
    "rows": lambda g: kvjax.SparseRows(g.keys, jnp.clip(g.rows, -1, 1)),
    "keys alone": lambda g: g.keys,
    "some rows": lambda g: kvjax.SparseRows(g.keys[:1], g.rows[:1]),
    "keys and counts": lambda g: kvjax.SparseRows(g.keys, g.rows, g.counts),
}


@pytest.mark.parametrize(
    ("loss", "own"),
    few_rows(itertools.product([recomputed, beside_another, beside_a_scan], OWN.values()), 0, 1, 2, 7, 11),
)
def test_sums_of_keys_come_to_nobody(make, loss, own):
    """Whatever is made of a gradient, its keys hang on the check that each lookup was used once."""
    grads = jax.jit(lambda t: own(kvjax.grad(lambda t: loss(t, kvjax.keys(MORE[:2])))(t)))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="used 2 times"):
        finished(grads(make(2)))


@pytest.mark.parametrize("read", [jax.jit, jax.checkpoint])
def test_a_loss_that_is_traced_in_each_call_warns(make, read):
    table = make(2)
    encode = read(lambda t: jnp.sum(t.lookup(IDS)))
    with pytest.warns(UserWarning, match=r"traces and compiles .*put the whole step under jax\.jit"):
        kvjax.grad(encode)(table)
    jax.jit(kvjax.grad(encode))(table)
    kvjax.grad(lambda t: jnp.sum(jax.vmap(lambda k: t.lookup(k))(kvjax.keys(MORE))))(table)


def test_no_examples_have_no_gradient(make):
    none = kvjax.keys(np.zeros((0, 3), np.int64))
    grads = kvjax.grad(lambda t: jnp.sum(jax.vmap(lambda k: t.lookup(k))(none)))(make(2))
    assert grads.keys.shape == (0, 3) and grads.rows.shape == (0, 3, 2)


@pytest.mark.filterwarnings("ignore:kvjax.*want a call under jit")
@pytest.mark.parametrize("keep", [jax.jit, jax.checkpoint])
def test_a_trace_from_before_the_loss_is_no_silent_zero(make, keep):
    """JAX keeps the trace of a function that reaches the table by itself, and so no lookup of the second trace."""
    table, model = make(2), {}
    encode = keep(lambda ids: jnp.sum(model["table"].lookup(ids)))

    def loss(t):
        model["table"] = t
        return encode(kvjax.keys(IDS))

    with pytest.raises(ValueError, match=r"got 0 lookups after 1; .*wants the table as an argument"):
        kvjax.grad(loss)(table)
    given = keep(lambda t, ids: jnp.sum(t.lookup(ids)))
    for _ in range(2):
        assert kvjax.grad(lambda t: given(t, kvjax.keys(IDS)))(table).counts.tolist() == [1] * len(IDS)


def test_gradients_outside_of_jit_leave_nothing_behind(make):
    table, function = make(2), kvjax.value_and_grad(lambda t: jnp.sum(t.lookup([1, 2])))
    sizes = []
    for _ in range(3):
        function(table)
        jax.grad(lambda x, t=table: x * jnp.sum(t.lookup([1, 2])))(1.0)
        sizes.append(call._program._cache_size())
    assert sizes[1] == sizes[2]
