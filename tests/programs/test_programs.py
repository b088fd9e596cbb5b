"""Row programs: what a table does by a program is what XLA does with the same update."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import constraints
from kvjax._training import apply as training
from kvjax._training import update
from kvjax._training.update import lowered
from kvjax.ffi import host
from tests.support import marks
from tests.support.marks import few, slow
from tests.support.transforms import row_by_row, transforms

pytestmark = [pytest.mark.usefixtures("promotion"), row_by_row]


def state_by_rows(tx):
    """The state of a transform, or None if it does not run row by row on gradients alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            state = kvjax.optax.rowwise(tx).init(4)
            jax.eval_shape(tx.update, jnp.zeros((1, 4)), tx.init(jnp.zeros((1, 4))), jnp.zeros((1, 4)))
        except (TypeError, ValueError):  # it is refused, or wants what a row has not
            return None
    return state


QUICK = ["sgd", "adam", "adagrad", "lamb"]


def steps(table, tx, n=5, seed=0, rare=False, **extra):
    """The rows after some steps of random keys, some of them often or else rare, and gradients, some of them zero."""
    rowwise = tx if isinstance(tx, kvjax.optax.Rowwise) else kvjax.optax.rowwise(tx)
    rng, state = np.random.default_rng(seed), rowwise.init(table.dim)
    step = jax.jit(lambda table, grads, state: table.apply(tx, grads, state, **extra))
    for i in range(n):
        keys, rows = rng.integers(0, 30, 50), rng.normal(size=(50, table.dim)).astype(np.float32)
        keys[5:] = np.where(rare and i > 1, keys[0], keys[5:])
        rows[rng.random(50) < 0.1] = 0
        table, state = step(table, kvjax.SparseRows(keys, jnp.asarray(rows)), state)
    return table.export(slots=True), state


def assert_same(one, other, rtol=2e-6):
    (rows, state), (want, want_state) = one, other
    np.testing.assert_array_equal(rows.keys, want.keys)
    np.testing.assert_array_equal(rows.freqs, want.freqs)
    np.testing.assert_array_equal(rows.versions, want.versions)
    for got, expected in zip((rows.values, *rows.slots.values()), (want.values, *want.slots.values()), strict=True):
        got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
        scale = np.nanmax(np.abs(expected), initial=1e-30)
        np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * scale)
    for got, expected in zip(*map(jax.tree.leaves, (state, want_state)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=rtol)


@pytest.mark.parametrize("name", few(sorted(transforms()), *QUICK))
def test_every_transform_of_optax(name, both):
    tx = transforms()[name]
    if (state := state_by_rows(tx)) is None:
        pytest.skip("is refused row by row, or wants more than gradients")
    one, other = both(lambda table: steps(table, tx), dim=16)
    assert_same(one, other)
    table = kvjax.get_table("lowered", dim=16)
    assert lowered(table.spec, kvjax.optax.rowwise(tx), tuple(jax.tree.leaves(state)), {}) is not None


@slow
def test_all_of_optax_is_there():
    found = {name for name, tx in transforms().items() if state_by_rows(tx) is not None}
    assert len(found) >= 95 and set(QUICK) <= found


FUSABLE = {
    "adam": optax.adam(0.1), "adamw": optax.adamw(0.1), "nadam": optax.nadam(0.1), "adadelta": optax.adadelta(0.1),
    "rmsprop": optax.rmsprop(0.1), "adagrad": optax.adagrad(0.1), "lion": optax.lion(0.1),
}  # fmt: skip


def instructions(tx, dim):
    table = kvjax.get_table(f"listed{dim}", dim=dim)
    rowwise = tx if isinstance(tx, kvjax.optax.Rowwise) else kvjax.optax.rowwise(tx)
    return (
        lowered(table.spec, rowwise, tuple(jax.tree.leaves(rowwise.init(dim))), {})
        .run.program.listing.split("update:\n")[1]
        .splitlines()
    )


def test_common_optimizers_take_every_fused_instruction():
    txs = [*FUSABLE.values(), kvjax.optax.catch_up(optax.adam(0.1))]
    taken = {line.split()[2] for tx in txs for line in instructions(tx, 8)}
    assert set(host.FUSED) <= taken
    assert len(instructions(FUSABLE["adam"], 8)) == 12  # of 21


@pytest.mark.parametrize("name", few(sorted(FUSABLE), "adam"))
def test_fused_instructions_change_no_bit(name, make, monkeypatch):
    results = []
    for fuse in (update.fused, lambda section: section):
        monkeypatch.setattr(update, "fused", fuse)
        update._made_alone.cache_clear()
        table = make(dim=5, seed=1, initializer=kvjax.initializers.normal(0.5))
        results.append(steps(table, FUSABLE[name])[0])
        taken = {line.split()[2] for line in instructions(FUSABLE[name], 5)}
        assert taken.isdisjoint(host.FUSED) == (len(results) == 2)
    update._made_alone.cache_clear()
    one, other = results
    for got, want in zip((one.values, *one.slots.values()), (other.values, *other.slots.values()), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dim", few([1, 2, 33, 300], 0, 2))
def test_any_dim(dim, both):
    assert_same(*both(lambda table: steps(table, optax.lamb(0.1)), dim=dim))


@pytest.mark.parametrize("x64", [False, True], indirect=True)
def test_counts_of_rows_in_any_width(x64, both):
    """With 64-bit numbers switched on, optax computes powers of counts in float64."""
    table = kvjax.get_table("wide", dim=4)
    assert lowered(table.spec, kvjax.optax.rowwise(optax.adam(0.1)), (), {}) is not None
    assert_same(*both(lambda table: steps(table, optax.adam(0.1)), dim=8), rtol=3e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rows_of_16_bits(dtype, rounding, both):
    """The product of a power of two is exact, so both ways round the same number by the same random bits."""
    tx = optax.sgd(0.25)
    if dtype == "float16":  # each part knows where in the row it is
        tx = kvjax.optax.segments({"one": (2, optax.sgd(0.5)), "some": (slice(-4, None), optax.sgd(1.0))}, rest=tx)
    options = {"dtype": dtype, "rounding": rounding, "constraint": lambda row: row.at[1].set(1.0)}
    (one, _), (other, _) = both(lambda table: steps(table, tx), dim=20, **options)
    np.testing.assert_array_equal(np.asarray(one.values, np.float32), np.asarray(other.values, np.float32))


def test_slots_of_16_bits_and_of_one_element(both):
    assert_same(*both(lambda table: steps(table, optax.adam(0.1, mu_dtype=jnp.bfloat16)), dim=8), rtol=1e-2)
    assert_same(*both(lambda table: steps(table, optax.scale_by_amsgrad()), dim=8))


def saved(row):
    return jax.checkpoint(jnp.tanh)(row)


@pytest.mark.parametrize("constraint", few([constraints.non_negative(), constraints.max_norm(0.5), saved], 1))
def test_constraints(constraint, both):
    table = kvjax.get_table("constrained", dim=6, constraint=constraint)
    assert lowered(table.spec, kvjax.optax.rowwise(optax.sgd(0.3)), (), {}) is not None
    assert_same(*both(lambda table: steps(table, optax.adagrad(0.3)), dim=6, constraint=constraint))


def test_globals_and_extra_arguments(both):
    def run(table):
        tx = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.exponential_decay(0.5, 2, 0.5))
        return steps(table, tx)

    assert_same(*both(run, dim=4))

    def scaled():
        return optax.GradientTransformationExtraArgs(
            lambda params: optax.EmptyState(),
            lambda updates, state, params=None, *, rate, **_: (jax.tree.map(lambda g: -rate * g, updates), state),
        )

    assert_same(*both(lambda table: steps(table, scaled(), rate=jnp.float32(0.5)), dim=4))


def test_what_is_no_program_goes_in_chunks(make):
    """Functions of the row that no instruction does, and one with a side effect."""
    seen = []

    def watched(row):
        jax.debug.callback(lambda x: seen.append(x.shape), row)
        return row

    def of_integers(row):
        return row * jnp.prod(jnp.where(row < 0, 3, 1).astype(jnp.int32), dtype=jnp.int32) / 81

    for constraint in (lambda row: jnp.sort(row), of_integers, watched):
        table = make(dim=4, initializer=0.0, constraint=constraint)
        assert lowered(table.spec, kvjax.optax.rowwise(optax.sgd(1.0)), (), {}) is None
        grads = kvjax.SparseRows(np.array([7]), jnp.array([[1.0, 2.0, 3.0, 4.0]]))
        table, _ = table.apply(optax.sgd(1.0), grads)
        assert sorted(table.lookup(7).tolist()) == [-4.0, -3.0, -2.0, -1.0]
    jax.effects_barrier()
    assert seen


@pytest.mark.parametrize("constraint", [None, jnp.sort], ids=["program", "chunks"])
def test_a_new_transform_of_the_same_kind_compiles_nothing(constraint, make):
    table, grads = make(dim=4, constraint=constraint), kvjax.SparseRows(np.array([7]), jnp.ones((1, 4)))
    for _ in range(2):  # a new table's version is NumPy's, for which jit has an entry of its own
        table, _ = table.apply(optax.adam(0.1), grads)
    before = training._compiled(training._apply).program._cache_size()
    for _ in range(3):
        table, _ = table.apply(optax.adam(0.1), grads)
    assert training._compiled(training._apply).program._cache_size() == before
    assert int(table.frequency(7)) == 5


def test_transforms_that_differ_by_the_type_of_a_number_are_two():
    """By which an integer of Python's takes the type of the slot, or gives it its own."""

    def counting(add):
        def init(params):
            return {"c": jnp.zeros((), jnp.int32), "s": jnp.full(params.shape, 100, jnp.int8)}

        def update(updates, state, params=None):
            updates = jnp.sort(updates) * 0 - add(state["s"], state["c"]).astype(jnp.float32)  # no row program
            return updates, {"c": state["c"] + 1, "s": state["s"]}

        return kvjax.optax.rowwise(optax.GradientTransformation(init, update), count="global")

    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    for add, want in ((lambda s, c: s + c, 56.0), (lambda s, c: s.astype(jnp.int32) + c, -200.0)):
        table = kvjax.get_table("weak", dim=2, initializer=0.0)
        table, _ = table.apply(counting(add), grads, {"c": 100, "s": None})
        assert table.lookup(7).tolist() == [want, want]
        kvjax.drop_table("weak")  # a program belongs to a table, also to one that is made again


def test_duplicates_and_padding_need_no_merge(make):
    keys, rows = np.array([9, 7, 9, 9, 3]), np.arange(10, dtype=np.float32).reshape(5, 2)
    counts = jnp.array([1, 2, 1, 0, 1], jnp.int32)
    table, _ = make(dim=2, initializer=0.0).apply(optax.sgd(1.0), kvjax.SparseRows(keys, jnp.asarray(rows), counts))
    assert table.lookup(np.array([9, 7, 3])).tolist() == [[-4.0, -6.0], [-2.0, -3.0], [-8.0, -9.0]]
    assert table.frequency(np.array([9, 7, 3])).tolist() == [2, 2, 1]
    empty = kvjax.SparseRows(np.zeros(0, np.int64), jnp.zeros((0, 2)))
    table, _ = table.apply(optax.sgd(1.0), empty)
    assert len(table) == 3


def test_a_program_is_plain_data(make):
    spec = make(dim=4).spec
    one, other = (lowered(spec, kvjax.optax.rowwise(optax.adagrad(0.1)), (), {}) for _ in range(2))
    assert one.run.program == other.run.program and hash(one.run.program) == hash(other.run.program)
    assert str(one.run.program).splitlines() == [
        "initial slots:",
        "  slot0 = mov g0",
        "update:",
        "  slot0 = fma_f grad grad slot0",
        *str(one.run.program).splitlines()[4:],
    ]


OPERATIONS = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum,
    "neg": jnp.negative, "abs": jnp.abs, "sign": jnp.sign, "tanh": jnp.tanh,
    "where": lambda x, y: jnp.where(x > y, x, y),
    "sum": lambda x: jnp.sum(x) * jnp.ones_like(x), "norm": lambda x: x / (jnp.linalg.norm(x) + 1.0),
    "greatest": lambda x: x - jnp.max(x), "clip": lambda x: jnp.clip(x, -0.5, 2.0), "square": jnp.square,
    "root": lambda x: jnp.sqrt(jnp.abs(x)), "half": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "count": lambda x: x * jnp.sum(x > 0).astype(jnp.float32), "cube": lambda x: x**3,
    "dot": lambda x: jnp.vdot(x, x) * jnp.ones_like(x),
    "equal": lambda x: jnp.vdot(jnp.full_like(x, 1.0) * jnp.sum(x), jnp.ones_like(x)) * jnp.ones_like(x),
}  # fmt: skip


@st.composite
def updates(draw):
    """A random function of gradient, value and two slots, as a transform; and what shows which, for reports."""
    program = [
        (draw(st.sampled_from(sorted(OPERATIONS))), draw(st.integers(0, 50)), draw(st.integers(0, 50)))
        for _ in range(draw(st.integers(1, 8)))
    ]
    outs = draw(st.tuples(*[st.integers(0, 50)] * 3))

    def update(grad, state, value):
        values = [grad, value, *state]
        for name, a, b in program:
            operands = [values[a % len(values)], values[b % len(values)]]
            arity = 2 if name in ("add", "sub", "mul", "max", "min", "where") else 1
            values.append(jnp.clip(OPERATIONS[name](*operands[:arity]), -10, 10))
        step, *slots = (values[i % len(values)] for i in outs)
        return -0.1 * step, tuple(slots)

    return optax.GradientTransformation(lambda value: (jnp.zeros_like(value), value * 2), update), program, outs


@settings(max_examples=marks.examples(4, 150))
@given(updates(), st.sampled_from([3, 16]))
def test_any_update(update, dim):
    tx, *_ = update
    results = []
    for way in (lowered, lambda *_: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training, "lowered", way)
            kvjax.drop_table("any") if "any" in kvjax.tables() else None
            results.append(steps(kvjax.get_table("any", dim=dim, seed=1, initializer=0.5), tx, n=2))
    assert_same(*results, rtol=1e-5)


FOUND_IN_REVIEW = {
    "int dot": lambda x: x / (jnp.vdot((x > 0).astype(jnp.int32), (x > 0).astype(jnp.int32)) + 1),
    "uint32": lambda x: x * jnp.max(jax.lax.bitcast_convert_type(x, jnp.uint32)).astype(jnp.float32) * 1e-9,
    "clamp": lambda x: jax.lax.clamp(jnp.uint32(5), (x > 0).astype(jnp.uint32) - 1, jnp.uint32(100)).astype(
        jnp.float32
    ),
    "and": lambda x: x * jax.lax.reduce_and((x > 0).astype(jnp.int32) * 5 + 2, (0, 1)),
    "reduce_precision": lambda x: jax.lax.reduce_precision(x, 8, 3),
    "bfloat16 sum": lambda x: (
        x * jax.lax.reduce_sum_p.bind(x.astype(jnp.bfloat16), axes=(0, 1), **EXTRA).astype(x.dtype)
    ),
}
EXTRA = {"out_sharding": None} if "out_sharding" in str(jax.make_jaxpr(jnp.sum)(jnp.ones(2))) else {}


@pytest.mark.parametrize("name", sorted(FOUND_IN_REVIEW))
def test_what_looks_like_an_instruction_and_is_none(name, both):
    of = FOUND_IN_REVIEW[name]
    tx = optax.stateless(lambda grads, params: jax.tree.map(lambda g: -0.1 * jnp.clip(of(g), -9, 9), grads))
    with jax.numpy_dtype_promotion("standard"):
        assert_same(*both(lambda table: steps(table, tx, n=2), dim=4), rtol=1e-5)


@pytest.mark.parametrize("dim", few([5, 8], 0))
def test_constants_that_differ_by_column(dim, both):
    """Known as the program is made, and known as it runs; of any type that registers have."""
    columns, mask = np.arange(dim, dtype=np.float32), np.arange(dim) % 2 == 0
    bits = np.arange(dim, dtype=np.uint32) * np.uint32(0x9E3779B9)

    def update(grads, state, params=None, *, rates, **extra):
        words = (state["n"] + 1)[..., None] * jnp.asarray(bits)
        noise = ((words ^ (words >> 7) ^ (words << 3)) >> 8).astype(jnp.float32) * 2.0**-24
        grads = jnp.where(mask, grads * columns, params) * rates + noise.reshape(grads.shape)
        return -0.1 * grads, {"n": state["n"] + 1, "start": state["start"] + jnp.arange(dim)}

    def init(params):
        return {"n": jnp.zeros(params.shape[:-1], jnp.uint32), "start": jnp.arange(params.size).reshape(params.shape)}

    tx, rates = optax.GradientTransformationExtraArgs(init, update), jnp.linspace(0.5, 1.5, dim)
    table = kvjax.get_table(f"constants{dim}", dim=dim)
    assert "constants" in str(lowered(table.spec, kvjax.optax.rowwise(tx), (), {"rates": rates}).run.program)
    assert_same(*both(lambda table: steps(table, tx, rates=rates), dim=dim), rtol=1e-5)


def test_zeros_of_both_signs_are_no_uniform_row(both):
    zeros = np.float32([0.0, -0.0, 0.0, -0.0])
    tx = optax.stateless(lambda grads, params: jax.tree.map(lambda g: jnp.copysign(g, zeros), grads))
    assert_same(*both(lambda table: steps(table, tx), dim=4))


@slow
def test_numbers_of_64_bits_that_are_chosen_between(both):
    def init(row):
        return jnp.zeros((), jnp.int32), jnp.zeros_like(row)

    def update(grads, state, row):
        count, moment = state
        rate = jnp.where(count > 0, 0.5**count, 0.25)
        return -rate.astype(grads.dtype) * grads, (count + 1, moment + grads)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert_same(*both(lambda table: steps(table, optax.GradientTransformation(init, update)), dim=4))


@slow
def test_a_long_update_goes_in_chunks(make):
    def update(grads, state, row):
        for i in range(5000):
            grads = grads * (1.0 + i * 1e-9)
        return grads, state

    spec = make(dim=4).spec
    tx = optax.GradientTransformation(lambda row: (), update)
    assert lowered(spec, kvjax.optax.rowwise(tx), (), {}) is None


@slow
def test_threads_change_nothing(make):
    """More rows than one thread takes, in one batch and in many."""
    keys, rng = np.arange(5000), np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(5000, 16)).astype(np.float32))
    whole, _ = make(dim=16).apply(optax.adam(0.1), kvjax.SparseRows(keys, rows), step=1)
    parts = make(dim=16, seed=whole.spec.seed)
    for i in range(0, 5000, 500):
        parts, _ = parts.apply(optax.adam(0.1), kvjax.SparseRows(keys[i : i + 500], rows[i : i + 500]), step=1)
    np.testing.assert_array_equal(whole.export().values, parts.export().values)
