"""Lookups that JAX traces once and runs several times: their gradients are those of a dense table."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few, few_rows, slow
from tests.support.tables import finished

VOCABULARY, DIM = 12, 3
IDS = np.array([[3, 7, 3], [0, 9, 7], [11, 1, 0], [3, 3, 2]], np.int32)
LENGTHS = np.array([2, 1], np.int32)
W = jax.random.normal(jax.random.key(2), (DIM, 2))
QUIET = pytest.mark.filterwarnings("ignore:kvjax.*want a call under jit")

# Each takes a function that reads rows, and something dense.


def head(w, rows):
    return jnp.sum(jnp.tanh(rows @ w) ** 2)


def scanned(read, w, **options):
    turn = lambda total, ids: (jnp.sin(total) + head(w, read(ids)), None)  # noqa: E731
    return jax.lax.scan(turn, 0.0, IDS, **options)[0]


def by_output(read, w):
    """The next ids depend on the rows of those before, so nothing could be looked up beforehand."""

    def turn(ids, _):
        rows = read(ids)
        return (jnp.argmax(rows @ w, -1) * 5 + ids * 2 + 1).astype(jnp.int32) % VOCABULARY, rows

    return head(w, jax.lax.scan(turn, IDS[0], length=5)[1])


def mapped(read, w):
    return jnp.sum(jax.lax.map(lambda ids: head(w, read(ids)), IDS) ** 2)


def in_batches(read, w):
    return jnp.sum(jax.lax.map(lambda ids: head(w, read(ids)), IDS, batch_size=3) ** 2)


def nested(read, w):
    inner = lambda total, i: (total * 0.5 + head(w, read(i)), total)  # noqa: E731

    def outer(total, ids):
        total, before = jax.lax.scan(inner, total, ids)
        return total + head(w, read(ids[:2])), jnp.sum(before)

    total, before = jax.lax.scan(outer, 0.1, IDS, reverse=True)
    return total + jnp.sum(before**2)


def saved(read, w):
    turn = jax.checkpoint(lambda total, ids: (jnp.sin(total) + head(w, read(ids)), None))
    return jax.lax.scan(turn, 0.0, IDS)[0]


def branching(read, w):
    def turn(total, x):
        i, ids = x
        twice = lambda: head(w, read(ids)) + head(w, read(ids[1:]))  # noqa: E731
        return total + jax.lax.switch(i % 3, [twice, lambda: total, lambda: 2 * head(w, read(ids))]), None

    return jax.lax.scan(turn, 0.1, (jnp.arange(len(IDS)), IDS))[0]


def by_turns(read, w):
    return jax.lax.fori_loop(1, 4, lambda i, total: total * 0.3 + head(w, read(jnp.asarray(IDS)[i])), 0.1)


def of_examples(read, w):
    return jnp.sum(
        jax.vmap(lambda ids: jax.lax.scan(lambda c, i: (c * 0.5 + head(w, read(i)), None), 0.1, ids)[0])(IDS)
    )


def over_examples(read, w):
    turn = lambda c, ids: (c * 0.5 + jax.vmap(lambda i: head(w, read(i)))(ids), None)  # noqa: E731
    return jnp.sum(jax.lax.scan(turn, jnp.zeros(IDS.shape[1]), IDS)[0] ** 2)


def called_twice(read, w):
    encode = jax.jit(lambda ids: head(w, read(ids)))
    return encode(jnp.asarray(IDS[0])) * encode(jnp.asarray(IDS[1])) + scanned(lambda ids: jax.jit(read)(ids), w)


def in_and_out(read, w):
    encode = jax.jit(lambda ids: head(w, read(ids)))
    inside = jax.lax.scan(lambda total, ids: (total * 0.3 + encode(ids), None), 0.1, IDS)[0]
    return inside * encode(jnp.asarray(IDS[1])) + head(w, read(IDS[2]))


def by_a_gradient(read, w):
    """The loss has a gradient of its own, by something dense."""
    step = lambda v, ids: (v - 0.1 * jax.grad(lambda v: head(v, read(ids)))(v), None)  # noqa: E731
    return head(jax.lax.scan(step, w, IDS)[0], read(IDS[0]))


def by_the_gradient_of_a_scan(read, w):
    return jnp.sum(jax.grad(lambda v: scanned(read, v))(w) ** 2)


def of_no_turns(read, w):
    return jax.lax.scan(lambda c, ids: (c + head(w, read(ids)), None), 0.0, IDS[:0])[0] + head(w, read(IDS[0]))


LOSSES = {
    "scan": scanned,
    "reverse": lambda read, w: scanned(read, w, reverse=True),
    "unroll": lambda read, w: scanned(read, w, unroll=2),
    **{
        f.__name__: f
        for f in (
            by_output, mapped, in_batches, nested, saved, branching, by_turns, of_examples, over_examples, called_twice,
            in_and_out, by_a_gradient, by_the_gradient_of_a_scan, of_no_turns,
        )
    },
}  # fmt: skip


@pytest.fixture
def dense():
    return jax.random.normal(jax.random.key(1), (VOCABULARY, DIM))


@pytest.fixture
def table(make, dense):
    return make(DIM, key_dtype="int32").upsert(np.arange(VOCABULARY, dtype=np.int32), dense)


def summed(grads):
    """A SparseRows as the dense gradient it stands for, and how often each key counts."""
    rows, counts = np.zeros((VOCABULARY, DIM), np.float32), np.zeros(VOCABULARY, int)
    keys, active = np.asarray(grads.keys), np.asarray(grads.counts) > 0
    np.add.at(rows, keys[active], np.asarray(grads.rows)[active])
    np.add.at(counts, keys[active], 1)
    return rows, counts


def counted(loss, dense):
    """How often a loss reads each key, with JAX's loops as Python's."""
    counts = np.zeros(VOCABULARY, int)

    def note(ids):
        np.add.at(counts, np.asarray(ids), 1)

    def read(ids):
        jax.debug.callback(note, ids)
        return dense[ids]

    with jax.disable_jit():
        # JAX has no scan of no turns as a loop of Python's.
        head(W, read(IDS[0])) if loss is of_no_turns else loss(read, W)
    return counts


@QUIET
@pytest.mark.parametrize(
    "name, jit",
    few_rows([*((name, True) for name in LOSSES), ("scan", False), ("branching", False), ("in_and_out", False)], 8),
)
def test_gradients_are_those_of_a_dense_table(name, jit, table, dense):
    loss = LOSSES[name]
    step = kvjax.value_and_grad(lambda p: loss(p["t"].lookup, p["w"]))
    value, grads = (jax.jit(step) if jit else step)({"t": table, "w": W})
    want, (of_dense, of_w) = jax.value_and_grad(lambda e, w: loss(lambda ids: e[ids], w), argnums=(0, 1))(dense, W)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], of_w, rtol=1e-4, atol=1e-5)
    rows, counts = summed(grads["t"])
    np.testing.assert_allclose(rows, of_dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(counts, counted(loss, dense))


@slow
def test_a_turn_has_the_shape_that_its_lookup_would_have_outside(table):
    grads = jax.jit(kvjax.grad(lambda t: scanned(t.lookup, W)))(table)
    assert grads.keys.tolist() == IDS.tolist() and grads.rows.shape == (*IDS.shape, DIM)
    grads = jax.jit(kvjax.grad(lambda t: nested(t.lookup, W)))(table)
    assert grads.rows.ndim == 2


@slow
@pytest.mark.usefixtures("promotion")
def test_training_equals_that_of_rows_that_were_looked_up_before(make):
    """Frequencies are those of all turns, and writes come after their reads."""
    tx, ends = optax.adam(0.1), []

    def before(t):
        turn = lambda total, rows: (jnp.sin(total) + head(W, rows), None)  # noqa: E731
        return jax.lax.scan(turn, 0.0, t.lookup(IDS))[0]

    for loss in (before, lambda t: scanned(t.lookup, W)):

        @jax.jit
        def step(t, state, loss=loss):
            return t.apply(tx, kvjax.grad(loss)(t), state)

        table, state = make(DIM, key_dtype="int32", seed=1, initializer=kvjax.initializers.normal(1.0)), None
        state = kvjax.optax.rowwise(tx).init(DIM)
        for _ in range(3):
            table, state = step(table, state)
        ends.append(table.export(slots=True))
    one, other = ends
    np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_array_equal(one.freqs, other.freqs)
    np.testing.assert_allclose(one.values, other.values, rtol=1e-4, atol=1e-5)


def test_bags_and_several_tables_in_a_scan(make):
    """Of each table the lookups of its own turns; a table that stop_gradient was done to has none."""
    one, two = (make(DIM, key_dtype="int32", seed=i, initializer=kvjax.initializers.normal(1.0)) for i in (1, 2))

    def loss(tables):
        stopped = jax.lax.stop_gradient(tables["two"])

        def turn(total, ids):
            bag = kvjax.lookup_bag(tables["two"], ids, lengths=LENGTHS, combiner="sum")
            return total + jnp.sum(tables["one"].lookup(ids[:2]) * bag) + jnp.sum(stopped.lookup(ids)), None

        return jax.lax.scan(turn, 0.0, IDS)[0]

    grads = jax.jit(kvjax.grad(loss))({"one": one, "two": two})
    rows, counts = summed(grads["one"])
    np.testing.assert_array_equal(counts, np.bincount(IDS[:, :2].ravel(), minlength=VOCABULARY))
    want = np.zeros((VOCABULARY, DIM), np.float32)
    np.add.at(want, IDS[:, :2], jax.vmap(lambda i: kvjax.lookup_bag(two, i, lengths=LENGTHS, combiner="sum"))(IDS))
    np.testing.assert_allclose(rows, want, rtol=1e-5)
    rows, counts = summed(grads["two"])
    np.testing.assert_array_equal(counts, np.bincount(IDS.ravel(), minlength=VOCABULARY))
    want = np.zeros((VOCABULARY, DIM), np.float32)
    np.add.at(want, IDS, one.lookup(IDS[:, [0, 0, 1]]))
    np.testing.assert_allclose(rows, want, rtol=1e-5)


@pytest.mark.parametrize("explicit", [False, pytest.param(True, marks=slow)], ids=["auto", "explicit"])
def test_sharded_tables(explicit, mesh, make, dense):
    on = mesh(2, explicit=explicit)
    table = make(DIM, key_dtype="int32", mesh=on).upsert(np.arange(VOCABULARY, dtype=np.int32), dense)
    ids = jax.device_put(IDS[:, :2], jax.sharding.NamedSharding(on, jax.sharding.PartitionSpec(None, "x")))
    turn = lambda read: lambda total, i: (jnp.sin(total) + head(W, read(i)), None)  # noqa: E731
    with jax.set_mesh(on):
        grads = jax.jit(kvjax.grad(lambda t: jax.lax.scan(turn(t.lookup), 0.0, ids)[0]))(table)
    want = jax.grad(lambda e: jax.lax.scan(turn(lambda i: e[i]), 0.0, IDS[:, :2])[0])(dense)
    np.testing.assert_allclose(summed(grads)[0], want, rtol=1e-4, atol=1e-5)


@slow
def test_a_lookup_in_a_shard_map_beside_others(mesh, table, dense):
    """Of the devices' uses and those of turns the most is one number."""
    P = jax.sharding.PartitionSpec
    on = mesh(2)

    def loss(read):
        part = jax.shard_map(
            lambda w, ids: head(w, read(ids))[None], mesh=on, in_specs=(P(), P(None, "x")), out_specs=P("x")
        )
        return jnp.sum(part(W, IDS[:, :2])) + scanned(read, W)

    grads = jax.jit(kvjax.grad(lambda t: loss(t.lookup)))(table)
    want = jax.grad(lambda e: loss(lambda ids: e[ids]))(dense)
    np.testing.assert_allclose(summed(grads)[0], want, rtol=1e-4, atol=1e-5)


@jax.custom_vjp
def scaled(x):
    return 2 * x


scaled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def test_what_has_a_derivative_of_its_own_stays_as_it_is(table, dense):
    """Beside lookups of turns, also in the same scan."""
    loss = lambda read: scanned(lambda ids: jax.nn.relu(scaled(read(ids))), W)  # noqa: E731
    grads = jax.jit(kvjax.grad(lambda t: loss(t.lookup)))(table)
    np.testing.assert_allclose(summed(grads)[0], jax.grad(lambda e: loss(lambda i: e[i]))(dense), rtol=1e-4, atol=1e-5)


def selecting(read, w):
    """Each example goes its own way, which vmap makes a selection: the other branch shall send no keys home."""
    one = lambda i: jax.lax.cond(i % 2 == 0, lambda: head(w, read(i)), lambda: jnp.sum(w))  # noqa: E731
    return jax.lax.scan(lambda total, ids: (total + jnp.sum(jax.vmap(one)(ids)), None), 0.0, IDS)[0]


def recomputed(read, w):
    """JAX looks up once for the value and again for the derivative; that a key occurs twice nobody could tell."""
    value, grads = jax.value_and_grad(jax.checkpoint(lambda w: head(w, read(IDS[0]))))(w)
    return value + jnp.sum(grads**2)


REFUSED = {
    "in a cond that vmap makes a selection": selecting,
    "in a function that is called twice and selects": lambda read, w: selecting(jax.jit(read), w),
    "in a checkpoint that an inner derivative does again": recomputed,
}


@pytest.mark.parametrize("loss", REFUSED.values(), ids=REFUSED)
def test_lookups_that_cannot_have_taps_for_each_run_are_refused(loss, table):
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=r"used [0-9]+ times|a cond that vmap makes a selection"
    ):
        finished(jax.jit(kvjax.grad(lambda t: loss(t.lookup, W)))(table))


@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp])
@pytest.mark.parametrize("times", few([1, 3], 0))
def test_lookups_in_functions_with_derivatives_of_their_own_are_refused(kind, times, table):
    """Their rules would give the table no gradient, whether they get it as an argument or close over it."""

    def own(f):
        function = kind(f)
        if kind is jax.custom_jvp:
            function.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
        else:
            function.defvjp(lambda *args: jax.vjp(f, *args), lambda pull, g: pull(g))
        return function

    given, closed = (
        own(lambda t, w: head(w, t.lookup(IDS[0]))),
        lambda t, w: own(lambda w: head(w, t.lookup(IDS[0])))(w),
    )
    for f in (given, closed):
        loss = lambda t, f=f: jax.lax.fori_loop(0, times, lambda _, x: x + f(t, W), 0.0) if times > 1 else f(t, W)  # noqa: E731
        with pytest.raises(ValueError, match="want lookups outside of functions with derivatives of their own"):
            jax.jit(kvjax.grad(loss))(table)


def test_lookups_in_what_cannot_be_evaluated_anew_are_refused(mesh, table):
    P = jax.sharding.PartitionSpec
    on = mesh(2)
    split = jax.sharding.NamedSharding(on, P("x"))

    def in_a_shard_map(read):
        def part(w, ids):
            zero = jnp.sum(w) * 0 + ids[0, 0].astype(jnp.float32) * 0  # which differs between devices
            return jax.lax.scan(lambda total, i: (total + head(w, read(i)), None), zero, ids)[0][None]

        return jnp.sum(jax.shard_map(part, mesh=on, in_specs=(P(), P(None, "x")), out_specs=P("x"))(W, IDS[:, :2]))

    def with_shardings(read):
        place = jax.jit(read, out_shardings=split)
        return head(W, place(IDS[0, :2])) + head(W, place(IDS[1, :2]))

    for loss in (in_a_shard_map, with_shardings):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"used [0-9]+ times"):
            finished(jax.jit(kvjax.grad(lambda t, loss=loss: loss(t.lookup)))(table))


def test_what_is_evaluated_anew_stays_what_it_was(table):
    """A checkpoint keeps its policy, and so the memory that it saves; a scan its direction and unrolling."""
    policy = jax.checkpoint_policies.dots_saveable

    def loss(t):
        turn = jax.checkpoint(lambda total, ids: (jnp.sin(total) + head(W, t.lookup(ids)), None), policy=policy)
        return jax.lax.scan(turn, 0.0, IDS, reverse=True, unroll=2)[0]

    text = str(jax.make_jaxpr(kvjax.grad(loss))(table))
    assert "dots_saveable" in text or "DotsSaveable" in text
    assert "reverse=True" in text and "unroll=2" in text


@QUIET
def test_a_loss_that_goes_by_values_has_no_taps_for_each_run(table):
    loss = lambda t: scanned(t.lookup, W) if jnp.sum(t.lookup(IDS)) != 0 else 0.0  # noqa: E731
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"used 4 times.*look the rows up before"):
        finished(kvjax.grad(loss)(table))


@QUIET
def test_results_beside_the_loss_are_the_callers(table):
    """Arrays, handles and what is no array."""

    def loss(t):
        total = scanned(t.lookup, W)
        return total, {"total": total, "table": t, "name": "x", "none": None, "known": np.arange(2)}

    (value, aux), grads = kvjax.value_and_grad(loss, has_aux=True)(table)
    assert aux["total"] == value and aux["name"] == "x" and aux["none"] is None and aux["known"].tolist() == [0, 1]
    np.testing.assert_array_equal(aux["table"].lookup(IDS), table.lookup(IDS))
    assert grads.keys.tolist() == IDS.tolist()


@QUIET
def test_a_loss_that_makes_other_lookups_when_it_is_traced_again_is_refused(table):
    turns = iter([3, 2])

    def loss(t):
        return jax.lax.scan(lambda total, ids: (total + head(W, t.lookup(ids)), None), 0.0, IDS[: next(turns)])[0]

    with pytest.raises(ValueError, match="makes the same lookups whenever it is traced"):
        kvjax.grad(loss)(table)
