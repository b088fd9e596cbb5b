"""kvjax.value_and_grad gives what jax.value_and_grad gives for a dense table, through every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few, slow, wide_is_slow
from tests.support.tables import finished

# JAX raises what a handler reports as one or the other, depending on whether the call ran at once.
REFUSED = (ValueError, jax.errors.JaxRuntimeError)

VOCABULARY, DIM, BATCH = 20, 4, 6
IDS = np.array([3, 17, 3, 0, 9, 17])
MORE = np.array([[0, 3], [11, 11], [5, 3]])


@pytest.fixture
def dense():
    return jax.random.normal(jax.random.key(1), (VOCABULARY, DIM))


@pytest.fixture
def table(make, dense):
    """The same rows under keys that need 64 bits."""
    return make(DIM).upsert(wide(np.arange(VOCABULARY)), dense)


def wide(ids):
    return kvjax.keys(np.asarray(ids, np.int64) * 2**40 - 7)


def to_dense(grad):
    """A SparseRows as the dense gradient it stands for."""
    merged = kvjax.merge(grad)
    active = np.asarray(merged.counts) > 0
    ids = (np.asarray(merged.keys)[active] + 7) // 2**40
    out = np.zeros((VOCABULARY, DIM), np.float32)
    out[ids] = np.asarray(merged.rows)[active]
    return out


def head(w, rows):
    return jnp.sum(jnp.tanh(rows @ w) ** 2)


W = jax.random.normal(jax.random.key(2), (DIM, 3))


def plain(read, w):
    return head(w, read(IDS))


def remat(read, w):
    return jax.checkpoint(lambda w: head(w, read(IDS)))(w)


def nested_jit(read, w):
    return jax.jit(lambda w: head(w, read(IDS)))(w)


def remat_of_jit(read, w):
    return jax.checkpoint(jax.jit(lambda w: head(w, read(IDS))))(w)


def several(read, w):
    return head(w, read(IDS)) + 2 * head(w, read(MORE)) + head(w, read(np.array(4)))


def cond_taken(read, w):
    return jax.lax.cond(w[0, 0] < 1e9, lambda: head(w, read(IDS)), lambda: jnp.float32(0))


def cond_not_taken(read, w):
    return jax.lax.cond(w[0, 0] > 1e9, lambda: head(w, read(IDS)), lambda: jnp.float32(0)) + head(w, read(MORE))


def linear(read, w):
    return jnp.sum(read(IDS) * 2.0) + jnp.sum(w)


def unused(read, w):
    read(IDS)
    return jnp.sum(w)


def by_values(read, w):
    rows = read(MORE)
    return head(w, rows[jnp.sum(rows, -1) > 0]) if jnp.sum(rows) > 0 else head(w, read(np.arange(int(rows.size / 4))))


LOSSES = [
    plain, remat, nested_jit, remat_of_jit, several, cond_taken, cond_not_taken, linear, unused,
]  # fmt: skip
QUICK = [remat_of_jit, cond_taken, unused]


@pytest.mark.filterwarnings("ignore:kvjax.*want a call under jit")
@wide_is_slow
@pytest.mark.parametrize(
    ("loss", "jit"),
    [pytest.param(f, jit, marks=() if jit and f in QUICK else slow) for f in LOSSES for jit in (False, True)],
)
def test_equals_dense(loss, jit, table, dense, x64):
    equals_dense(loss, jax.jit if jit else lambda f: f, table, dense)


@pytest.mark.filterwarnings("ignore:kvjax.*want a call under jit")
@pytest.mark.parametrize("loss", few(LOSSES, LOSSES.index(cond_taken)))
def test_equals_dense_without_jit(loss, table, dense):
    """Then a cond is the branch that is taken alone, also for who asks beforehand which lookups a loss makes."""
    with jax.disable_jit():
        equals_dense(loss, jax.jit, table, dense)


@pytest.mark.parametrize("sign", few([1, -1], 1))
def test_outside_jit_a_loss_may_go_by_values(sign, make, dense):
    equals_dense(by_values, lambda f: f, make(DIM).upsert(wide(np.arange(VOCABULARY)), sign * dense), sign * dense)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        equals_dense(by_values, jax.jit, make(DIM), dense)


def test_a_loss_that_goes_by_values_changes_no_array_of_the_user(table, dense):
    """It gets tracers, as under jax.grad, also of NumPy arrays and Python numbers."""

    def loss(p):
        w = p["w"]
        w *= 2
        return jnp.sum(read(p["t"], IDS)) * p["n"].sum() if jnp.sum(w.at[0].set(1.0)) > 0 else 0.0

    given = {"w": np.ones(3, np.float32), "n": 2.0}
    read = lambda t, ids: t.lookup(wide(ids)) if isinstance(t, kvjax.Table) else t[ids]  # noqa: E731
    value, grads = kvjax.value_and_grad(loss)({"t": table, **given})
    want, want_grads = jax.value_and_grad(loss)({"t": dense, **given})
    np.testing.assert_allclose((value, grads["n"]), (want, want_grads["n"]), rtol=1e-6)
    np.testing.assert_array_equal(given["w"], 1.0)


def equals_dense(loss, run, table, dense):
    def sparse_loss(params):
        return loss(lambda ids: params["t"].lookup(wide(ids)), params["w"])

    def dense_loss(params):
        return loss(lambda ids: params["t"][ids], params["w"])

    function = kvjax.value_and_grad(sparse_loss)
    value, grads = run(function)({"t": table, "w": W})
    want, want_grads = jax.value_and_grad(dense_loss)({"t": dense, "w": W})
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(grads["w"], want_grads["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(to_dense(grads["t"]), want_grads["t"], rtol=1e-5, atol=1e-6)


def test_leading_axes_are_those_of_the_lookup(table):
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(wide(MORE))))(table)
    assert grads.keys.shape == MORE.shape and grads.rows.shape == (*MORE.shape, DIM)


def test_empty_batch(table):
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(wide(np.zeros((0, 2))))))(table)
    assert grads.rows.shape == (0, 2, DIM) and kvjax.merge(grads).rows.shape == (0, DIM)


def test_aux_argnums_and_several_tables(table, make):
    other = make(2, initializer=1.0)

    def loss(scale, tables, w):
        a, b = tables["a"].lookup(wide(IDS)), tables["b"].lookup(wide(IDS))
        return scale * jnp.sum(a) + jnp.sum(b * w), {"rows": a}

    (value, aux), (_, grads) = kvjax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        2.0, {"a": table, "b": other}, jnp.float32(3.0)
    )
    assert aux["rows"].shape == (BATCH, DIM) and value.shape == ()
    np.testing.assert_allclose(grads["a"].rows, np.full((BATCH, DIM), 2.0))
    np.testing.assert_allclose(grads["b"].rows, np.full((BATCH, 2), 3.0))


def test_bfloat16_compute_sums_in_float32(make):
    """512 gradients of 0.01: summed as bfloat16 they would stop at 4.0."""
    table = make(1)
    keys = kvjax.keys(np.zeros(512, np.int64))
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(keys).astype(jnp.bfloat16) * jnp.bfloat16(0.01)))(table)
    np.testing.assert_allclose(kvjax.merge(grads).rows[0], 512 * float(jnp.bfloat16(0.01)), rtol=1e-6)


def test_microbatches_by_scan(table, dense):
    """Gradients stacked by scan and merged are the gradient of the whole batch."""
    ids, y = np.stack([IDS, IDS[::-1], IDS + 1]), jnp.arange(3.0)

    def loss(t, ids, y):
        return y * head(W, t.lookup(ids))

    @jax.jit
    def microbatches(table, ids, y):
        def body(total, batch):
            value, grads = kvjax.value_and_grad(loss)(table, *batch)
            return total + value, grads

        total, grads = jax.lax.scan(body, 0.0, (ids, y))
        return total, kvjax.merge(grads, scale=1 / 3)

    _, grads = microbatches(table, wide(ids), y)
    want = jax.grad(lambda t: sum(y[i] * head(W, t[ids[i]]) for i in range(3)) / 3)(dense)
    np.testing.assert_allclose(to_dense(grads), want, rtol=1e-5, atol=1e-6)


def test_lookups_outside_a_loss_may_be_vmapped_and_scanned(table, dense):
    np.testing.assert_allclose(jax.vmap(lambda k: table.lookup(k))(wide(MORE)), dense[MORE])
    _, rows = jax.lax.scan(lambda c, k: (c, table.lookup(k)), 0, wide(MORE))
    np.testing.assert_allclose(rows, dense[MORE])


def double(grads):
    return jax.tree.map(lambda a, b: a + b, grads, grads)


def halve(grads):
    return jax.tree.map(lambda a: a * jnp.asarray(0.5, a.dtype) if a.dtype == jnp.float32 else a // 2, grads)


@pytest.mark.parametrize("arithmetic", [double, halve])
def test_arithmetic_on_the_gradient_tree_is_refused(arithmetic, table):
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(wide(IDS))))(table)
    with pytest.raises(TypeError, match="does not accept dtype"):
        arithmetic(grads)
    # What gets around the type of the canary meets its words.
    broken = grads.replace(canary=jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32)))
    with pytest.raises(REFUSED, match=r"went through arithmetic.*joint"):
        merged = jax.block_until_ready(kvjax.merge(broken))
        assert kvjax.ffi.on_device()  # which says it only to a table
        finished(table.apply(optax.sgd(0.1), merged))


def test_the_lookups_of_all_handles_of_a_table_add_up(table):
    """The first place has them, so that a sum over the places is their gradient."""
    first, second = kvjax.grad(lambda ts: jnp.sum(ts[0].lookup(IDS) + 2 * ts[1].lookup(IDS)))([table, table])
    assert (first.keys.size, second.keys.size) == (2 * len(IDS), 0)
    one = kvjax.grad(lambda t: jnp.sum(t.lookup(IDS) + 2 * t.lookup(IDS)))(table)
    jax.tree.map(np.testing.assert_array_equal, kvjax.merge([first, second]).rows, kvjax.merge(one).rows)


def test_nesting_is_refused(table):
    with pytest.raises(ValueError, match="inside another"):
        kvjax.grad(lambda t: jnp.sum(kvjax.grad(lambda t: jnp.sum(t.lookup(IDS)))(t).rows))(table)


def test_plain_jax_grad_says_no(table):
    with pytest.raises(TypeError, match=r"kvjax table, not a number; kvjax\.grad"):
        jax.grad(lambda t: jnp.sum(t.lookup(wide(IDS))))(table)


def test_untrainable_table_has_an_empty_gradient(make):
    table = make(initializer=1.0, trainable=False)
    grads = kvjax.grad(lambda t: jnp.sum(t.lookup(IDS)))(table)
    assert grads.rows.shape == (0, 4)


def test_write_waits_for_every_lookup(table):
    """The gradient of a linear loss does not depend on the rows; still the write comes after the read."""

    @jax.jit
    def step(table):
        (value, aux), grads = kvjax.value_and_grad(
            lambda t: (jnp.sum(t.lookup(wide(IDS))), t.lookup(wide(MORE))), has_aux=True
        )(table)
        return table.apply(optax.sgd(0.1), grads)[0], value, aux

    for _ in range(20):
        before = table.lookup(wide(MORE))
        table, _, aux = step(table)
        np.testing.assert_array_equal(aux, before)


def test_write_waits_for_reads_that_only_dense_gradients_use(table):
    """A read that remat repeats in the backward pass and whose rows are a constant of the loss."""

    def loss(params):
        def block(w):
            rows = jax.lax.stop_gradient(params["t"].lookup(wide(MORE)))
            return jnp.sum(jnp.sin(rows @ w) ** 2)

        return jax.checkpoint(block)(params["w"]) + jnp.sum(params["t"].lookup(wide(IDS)))

    @jax.jit
    def step(params):
        value, grads = kvjax.value_and_grad(loss)(params)
        return {"t": params["t"].apply(optax.sgd(0.1), grads["t"])[0], "w": params["w"]}, value, grads["w"]

    params = {"t": table, "w": W}
    for _ in range(20):
        params, *_ = jax.block_until_ready(step(params))


def test_empty_lookup_still_orders_the_write(table):
    @jax.jit
    def step(table):
        def loss(t):
            return jnp.sum(t.lookup(wide([]))) + jnp.sum(t.frequency(wide(IDS)).astype(jnp.float32))

        value, grads = kvjax.value_and_grad(loss)(table)
        return table.apply(optax.sgd(0.1), grads)[0], value

    for _ in range(20):
        table, _ = jax.block_until_ready(step(table))
    assert len(table) == VOCABULARY


def test_vmap_keeps_examples_apart(table, dense):
    grads = jax.vmap(kvjax.grad(lambda t, ids: jnp.sum(t.lookup(ids))), in_axes=(None, 0))(table, wide(MORE))
    each = jax.vmap(kvjax.merge)(grads)
    assert each.counts.tolist() == [[1, 1], [2, 0], [1, 1]]
    np.testing.assert_allclose(to_dense(grads), jax.grad(lambda t: jnp.sum(t[MORE]))(dense))
    np.testing.assert_array_equal(
        jax.vmap(lambda x: table.after(x).version)(jnp.ones(4)), np.full(4, int(table.version))
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.lookup_or_insert(wide(IDS))[0],
        lambda t: t.upsert(wide(IDS), jnp.ones((BATCH, DIM))).lookup(wide(IDS)),
        lambda t: t.refresh().lookup(wide(IDS)),
        lambda t: t.remove(wide(IDS)).lookup(wide(IDS)),
    ],
)
def test_writes_inside_a_loss_are_refused(write, table):
    with pytest.raises(ValueError, match="inside it; its rows would have no gradient"):
        kvjax.grad(lambda t: jnp.sum(write(t)))(table)
    assert int(table.refresh().version) == int(table.version)


def test_a_table_handed_out_by_the_loss_is_an_ordinary_one(table):
    with jax.checking_leaks():
        (_, aux), _ = kvjax.value_and_grad(lambda t: (jax.jit(jnp.sum)(t.lookup(wide(IDS))), t), has_aux=True)(table)
    assert aux.tape is None and aux.lookup(wide(IDS)).shape == (BATCH, DIM)


def test_arguments_are_differentiated_by_position(table):
    with pytest.raises(TypeError, match="by position"):
        kvjax.grad(lambda t: jnp.sum(t.lookup(wide(IDS))))(t=table)


def test_after_orders_a_read_before_a_write(table):
    @jax.jit
    def step(table):
        rows = table.lookup(wide(IDS))
        return table.after(rows).upsert(wide(IDS), jnp.zeros((BATCH, DIM))), rows

    for _ in range(20):
        new, rows = step(table)
        assert np.asarray(rows).shape == (BATCH, DIM)
        table = new.upsert(wide(IDS), jnp.ones((BATCH, DIM)))


@slow
def test_second_derivatives_of_dense_parameters(make):
    """Curvature and gradient penalties: derivatives go through the gradient, and by what orders writes."""
    table, w = make(3, initializer=1.0), jnp.array([0.3, 0.4, -1.0])

    def loss(p, rows):
        return jnp.sum(jnp.tanh(p[None] * rows) ** 2)

    def ours(w):
        return kvjax.value_and_grad(lambda p: loss(p["w"], p["t"].lookup([1, 2])))({"w": w, "t": table})

    rows = jnp.ones((2, 3))
    want = jax.hessian(loss)(w, rows)
    np.testing.assert_allclose(jax.hessian(lambda w: ours(w)[0])(w), want, rtol=1e-5)
    for jacobian in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jax.jit(jacobian(lambda w: ours(w)[1]["w"]))(w), want, rtol=1e-5)
        mixed = jacobian(lambda w: ours(w)[1]["t"].rows)(w)
        np.testing.assert_allclose(mixed, jacobian(jax.grad(loss, 1))(w, rows), rtol=1e-5)
