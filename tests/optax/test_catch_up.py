"""Exact laziness: rows of tables are those of dense training in float64, whichever rows batches leave out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvjax
from kvjax._training.update import lowered
from kvjax.optax import catch_up, caught_up, check_compatibility, mean_of_duplicates, partition, segments, sweep
from tests.support.marks import few, slow
from tests.support.tables import finished, on_gpu

pytestmark = pytest.mark.usefixtures("promotion")
ROWS, DIM, BATCH = 9, 3, 8
WARM = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 20, 120, end_value=1e-4)
STAIRS = optax.piecewise_constant_schedule(1e-2, {40: 0.1, 41: 10.0, 80: 0.01})
CASES = {
    "adam": lambda: optax.adam(1e-2),
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(WARM, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "slow momentum": lambda: optax.sgd(0.1, momentum=0.99),
    "decay": lambda: optax.chain(optax.sgd(0.1), optax.add_decayed_weights(-1e-3)),
    "adamw": lambda: optax.adamw(WARM, weight_decay=0.1),
    "adamw in stairs": lambda: optax.adamw(STAIRS, weight_decay=0.1),
    "adam of large eps": lambda: optax.adam(1e-2, eps=1e-2),
    "adam without momentum": lambda: optax.adam(1e-2, b1=0.0),
    "nadam": lambda: optax.nadam(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "rmsprop with momentum": lambda: optax.rmsprop(1e-2, momentum=0.9),
    "adadelta": lambda: optax.adadelta(1.0),
    "adagrad": lambda: optax.adagrad(0.1),
}


@functools.cache
def caught(name):
    return catch_up(CASES[name]())


def batches(steps, seed=0):
    """Keys, some of them twice, and gradients: some rows nearly always, some seldom, one in the end, one never."""
    rng = np.random.default_rng(seed)
    chance = np.array([0.9, 0.9, 0.5, 0.3, 0.2, 0.05, 0.02, 0.0, 0.0])
    for i in range(steps):
        keys = np.flatnonzero(rng.random(ROWS) < (chance if i < steps - 3 else np.eye(ROWS)[7]))[: BATCH - 1]
        keys = np.concatenate([keys, keys[:1]])
        rows = np.zeros((BATCH, DIM), np.float32)
        rows[: len(keys)] = rng.normal(size=(len(keys), DIM))
        if seed % 2:  # above epsilon and far below
            rows = np.float32(10.0 ** rng.uniform(-10, -5, (BATCH, 1))) * rows
        yield np.pad(keys, (0, BATCH - len(keys)), constant_values=-1), rows


def dense(tx, start, steps):
    """Rows after each step of dense training in float64."""
    with jax.enable_x64(True):
        params = jnp.asarray(start, jnp.float64)
        state, seen = tx.init(params), []

        @jax.jit
        def step(params, state, keys, rows):
            grads = jnp.zeros_like(params).at[jnp.where(keys < 0, ROWS, keys)].add(rows, mode="drop")
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for keys, rows in steps:
            params, state = step(params, state, keys, rows.astype(np.float64))
            seen.append(np.asarray(params))
    return seen


def functions(tx):
    """A write of gradients, and the rows of now."""

    @jax.jit
    def step(table, state, keys, rows):
        valid = (keys.words != jnp.uint32(2**32 - 1)).any(-1)
        return table.apply(tx, kvjax.SparseRows(keys, rows, valid.astype(jnp.int32)), state)

    @jax.jit
    def look(table, state):
        return caught_up(table, state, tx).lookup(np.arange(ROWS))

    return step, look


@functools.cache
def functions_of(name):
    return functions(caught(name))


def compare(name, table, steps, tolerance=1e-5, seed=0, between=lambda i, table: table):
    tx, (step, look) = caught(name), functions_of(name)
    if name == "adamw" and on_gpu():  # where powers are CUDA's
        tolerance *= 2
    start = np.asarray(table.lookup(np.arange(ROWS)), np.float64)
    want = dense(CASES[name](), start, batches(steps, seed))
    state = tx.init(DIM)
    for i, (keys, rows) in enumerate(batches(steps, seed)):
        table = between(i, table)
        table, state = step(table, state, kvjax.keys(keys), rows)
        if i % 7 == 0 or i >= steps - 4:
            far = np.abs(want[i] - start).max()
            # float32 has no more digits of the rows themselves.
            least = 3e-7 * np.abs(want[i]).max()
            np.testing.assert_allclose(look(table, state), want[i], rtol=0, atol=max(tolerance * far, least), err_msg=i)
    return table, state, want[-1]


@pytest.mark.parametrize("name", few(list(CASES), "adam"))
def test_rows_are_those_of_dense_training(name, make):
    steps = 90 if name != "adam" else 30
    table = make(DIM, initializer=kvjax.initializers.normal(1.0), seed=3)
    compare(name, table, steps)


@slow
@pytest.mark.parametrize("place", ["one", "4", "replicated"])
@given(st.integers(1, 2**32), st.integers(1, 39))
@settings(max_examples=1, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_touches(place, make, places, tmp_path, seed, at):
    """Also of small gradients, in tables that grow, and that are saved and restored in the middle."""
    options = {} if place == "one" else places[place]
    table = make(DIM, initializer=kvjax.initializers.normal(0.01), seed=3, capacity=1, **options)

    def between(i, table):
        if i != at:
            return table
        folder = tmp_path / f"{seed} {at} {np.random.default_rng().integers(2**62)}"
        kvjax.checkpoint.save(folder, {"t": table})
        return kvjax.checkpoint.restore(folder, {"t": table})["t"]

    compare("adam", table, 40, seed=seed, between=between)


@slow
@pytest.mark.parametrize("seed", [0, 1])
def test_with_wide_integers(make, seed):
    """The bias of moments is computed in float64 then, and in float32 without: 8e-6 of 1e-5, as in dense training."""
    with jax.enable_x64(True):
        compare("adamw", make(DIM, initializer=kvjax.initializers.normal(1.0), seed=3), 20)
        compare("adam", make(DIM), 60, 2e-6, seed)


@slow
@pytest.mark.parametrize("b2, small, around", [(0.999, 1e-5, 5e-5), (0.95, 1e-5, 5e-4), (0.9, 2e-3, 5e-3)])
def test_gradients_around_epsilon(b2, small, around):
    """From far below epsilon to far above, each row measured by what it moves itself, from the first step on."""
    tx, sizes = optax.adam(1e-2, b2=b2), np.float32(np.logspace(-12, -2, 41))[:, None]
    late, steps = catch_up(tx), 60
    with jax.enable_x64(True):
        want = jnp.zeros(sizes.shape, jnp.float64)
        first = tx.update(jnp.asarray(sizes, jnp.float64), tx.init(want))
        rest = jax.lax.scan(lambda s, _: tx.update(0 * want, s)[::-1], first[1], None, steps)[1]
        want = np.asarray(first[0] + rest.sum(0))
    rows, state = jax.jit(late.step)(sizes, late.tx.init(jnp.zeros(sizes.shape)), jnp.zeros(sizes.shape))
    clock = jax.lax.fori_loop(0, steps, lambda _, s: late.step(sizes[:1], s, sizes[:1])[1],
                              late.step(sizes[:1], late.tx.init(sizes[:1]), sizes[:1])[1])  # fmt: skip
    got = late.catch_up(state._replace(steps=clock.steps, clock=clock.clock), rows)[1]
    np.testing.assert_allclose(got, want, rtol=around)
    np.testing.assert_allclose(got[sizes >= 1e-6], want[sizes >= 1e-6], rtol=small)


@slow
@pytest.mark.parametrize("b2", [0.99, 0.999, 0.9999])
def test_slots_of_rows_that_are_left_for_thousands_of_steps(b2):
    """They fade by the power of the number that is given, and not of what float32 makes of it."""
    late, rows, steps = catch_up(optax.adam(1e-2, b2=b2)), jnp.ones((1, DIM)), 3000
    state = late.step(rows, late.tx.init(rows), rows)[1]
    now = jax.jit(late.catch_up)(state._replace(steps=state.steps + steps), rows)[0]
    np.testing.assert_allclose(now.inner[0].nu, state.inner[0].nu * b2**steps, rtol=2e-6)


@slow
@pytest.mark.parametrize("make", [lambda: optax.adadelta(0.1), lambda: optax.adam(1e-4)], ids=["adadelta", "adam"])
def test_the_rounding_of_small_steps_is_no_difference(make):
    assert check_compatibility(catch_up(make()), 8).verdict == "equal"


@slow
@pytest.mark.cpu_table
def test_it_is_a_row_program_and_equal_to_dense(make):
    tx = caught("adam")
    assert lowered(make(4).spec, tx, tuple(jax.tree.leaves(tx.init(4))), {}) is not None
    found = check_compatibility(tx, 4)
    assert found.verdict == "equal" and found.every_step < 1e-6 and 0 < found.some_steps < 1e-4


@slow
def test_training_through_partition(make):
    """The gradient is that of rows of now; one of rows as they are stored is refused, and so is a write of a view."""
    rows = caught("adam")
    tx = partition(dense=optax.adam(1e-2), tables=rows)
    params = {"t": make(DIM, initializer=1.0), "w": jnp.ones(DIM)}
    state = tx.init(params)

    def loss(params, keys):
        return jnp.mean((params["t"].lookup(keys) @ params["w"]) ** 2)

    @jax.jit
    def step(params, state, keys):
        grads = kvjax.grad(loss)(caught_up(params, state, rows), keys)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    want = {"t": jnp.ones((ROWS, DIM)), "w": jnp.ones(DIM)}
    want_tx = optax.adam(1e-2)
    want_state = want_tx.init(want)
    for ids in ([1, 2], [2, 2], [3, 1], [4, 4], [1, 3]):
        params, state = step(params, state, kvjax.keys(np.array(ids)))
        grads = jax.grad(lambda p, ids=ids: jnp.mean((p["t"][np.array(ids)] @ p["w"]) ** 2))(want)
        updates, want_state = want_tx.update(grads, want_state, want)
        want = optax.apply_updates(want, updates)
    now = caught_up(params, state, rows)
    np.testing.assert_allclose(now["t"].lookup(np.arange(ROWS)), want["t"], atol=2e-6)
    np.testing.assert_allclose(now["w"], want["w"], atol=1e-6)
    assert len(now["t"]) == 4 and now["w"] is params["w"]
    with pytest.raises(ValueError, match=r"want gradients at rows of now.*caught_up"):
        tx.update(kvjax.grad(loss)(params, kvjax.keys(np.array([1]))), state, params)
    grads = kvjax.grad(loss)(now, kvjax.keys(np.array([1])))
    for write in (lambda: tx.update(grads, state, now), lambda: now["t"].upsert(1, np.ones(DIM)), now["t"].refresh,
                  lambda: caught_up(now, state, rows)):  # fmt: skip
        with pytest.raises(ValueError, match="want the handle itself"):
            write()
    with pytest.raises(ValueError, match="caught_up: want the state of its transform"):
        caught_up(params["t"], (), rows)
    for other in (optax.adam(1e-2), tx):
        with pytest.raises(ValueError, match=r"caught_up: want what kvjax\.optax\.catch_up made"):
            caught_up(params, state, other)


@slow
def test_the_state_of_an_nnx_optimizer(make):
    """Each of its leaves is in a variable."""
    rows, table = caught("adam"), make(DIM)
    state = nnx.Optimizer(nnx.Dict(t=nnx.Param(table)), partition(dense=optax.sgd(1.0), tables=rows), wrt=nnx.Param)
    now = caught_up({"t": table}, state.opt_state, rows)["t"]
    np.testing.assert_array_equal(now.lookup(1), table.lookup(1))


@slow
def test_exports_and_sweeps_have_rows_of_now(make):
    """So have tables that are loaded from what a checkpoint would save; training goes on from either."""
    tx = caught("adamw")
    step, look = functions(tx)
    table, state, want = compare("adamw", make(DIM, initializer=kvjax.initializers.normal(1.0), seed=3), 30)
    with pytest.warns(UserWarning, match=r"are behind \(\d of 8, by up to \d+ steps\)"):
        stored = table.export()
    now = caught_up(table, state, tx)
    rows, snapshot = now.export(slots=True), now.snapshot()
    np.testing.assert_allclose(rows.values, want[rows.keys], atol=1e-5)
    assert rows.has_slots.all() and set(rows.slots["last_step"].tolist()) == {30}
    assert not np.allclose(stored.values, rows.values)
    np.testing.assert_array_equal(now.export().values, rows.values)
    swept = sweep(table, state, tx)
    np.testing.assert_array_equal(swept.export().values, rows.values)
    np.testing.assert_array_equal(caught_up(swept, state, tx).export().values, rows.values)
    other = make(DIM, initializer=kvjax.initializers.normal(1.0), seed=3).load(snapshot)
    later = state
    for keys, grads in batches(9, 5):
        swept, _ = step(swept, later, kvjax.keys(keys), grads)
        other, later = step(other, later, kvjax.keys(keys), grads)
    np.testing.assert_array_equal(look(other, later), look(swept, later))
    want = np.asarray(look(other, later))
    plain = sweep(other, later, tx).clear_slots()  # and nothing is said
    np.testing.assert_allclose(plain.lookup(np.arange(7)), want[:7], rtol=0, atol=1e-6)


@slow
def test_a_table_without_rows_or_slots(make):
    tx = caught("adam")
    table, state = make(DIM), tx.init(DIM)
    table = sweep(table, state, tx)
    assert len(table) == 0
    table = table.upsert(np.arange(2), np.ones((2, DIM)))
    assert caught_up(table, state, tx).export(slots=True).has_slots.all()
    np.testing.assert_array_equal(caught_up(table, state, tx).lookup(np.arange(3))[:, 0], [1, 1, 0])
    np.testing.assert_array_equal(jax.jit(lambda t, s: caught_up(t, s, tx).lookup(0))(table, state), np.ones(DIM))
    table, _ = table.clear_slots().apply(optax.adagrad(0.1), kvjax.SparseRows(np.array([1]), jnp.ones((1, DIM))))
    with pytest.raises((ValueError, RuntimeError), match="slots"):  # of another optimizer
        finished(caught_up(table, state, tx).lookup(0))


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"admit": kvjax.admit.MinCount(2)},
        {"admit": kvjax.admit.MinCount(2, unadmitted="zeros")},
        {"max_capacity": 6, "on_full": "evict", "evict": kvjax.evict.LeastRecent()},
    ],
    ids=["init", "zeros", "evicted"],
)
def test_rows_that_come_and_go(options, make):
    """Keys without a row read as their initial row after as many steps without a gradient, or as zeros."""
    tx, table = caught("adamw"), make(DIM, initializer=1.0, **options)
    step, look = functions(tx)
    state = tx.init(DIM)
    for keys, rows in batches(40, 2):
        table, state = step(table, state, kvjax.keys(keys), rows)
    got, absent = np.asarray(look(table, state)), ~np.asarray(table.contains(np.arange(ROWS)))
    want = dense(CASES["adamw"](), np.ones((ROWS, DIM)), ((k, r * 0) for k, r in batches(40, 2)))[-1]
    assert absent.sum() >= 2 and np.isfinite(got).all()
    waits = getattr(options.get("admit"), "unadmitted", "init") == "zeros"
    zeros = waits & (got[absent] == 0).all(1)
    np.testing.assert_allclose(got[absent], np.where(np.reshape(zeros, (-1, 1)), 0, want[absent]), rtol=1e-5)


@slow
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rows_of_16_bits(rounding, make):
    """What moves less than their spacing moves them only as rounding says; the slots are those of float32."""
    tx = caught("adam")
    wide, narrow = (make(DIM, initializer=1.0, dtype=d, **o) for d, o in (
        ("float32", {}), ("bfloat16", {"rounding": rounding})))  # fmt: skip
    step, look = functions(tx)
    one, other = tx.init(DIM), tx.init(DIM)
    for keys, rows in batches(60, 4):
        wide, one = step(wide, one, kvjax.keys(keys), rows)
        narrow, other = step(narrow, other, kvjax.keys(keys), rows)
    got = look(narrow, other)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float32), look(wide, one), atol=0.05)


@pytest.mark.parametrize(
    "tx, message",
    [
        (lambda: optax.lion(0.1), "steps without a gradient have a closed form, got one that moves rows otherwise"),
        (lambda: optax.adam(0.1, b1=0.999, b2=0.99), "want moments that fade, .*beta1 0.999 over the root of beta2"),
        (lambda: optax.inject_hyperparams(optax.adam)(0.1), "want rates that follow from the step"),
        (lambda: optax.adabelief(0.1), "got slot 'nu', which changes by more than a factor"),
        (lambda: optax.novograd(0.1), "want a transform that keeps for each element"),
        (lambda: optax.radam(0.1), "otherwise than by its slots"),
        (lambda: kvjax.optax.ftrl(0.1), "got slot 'z', which changes by more than a factor"),
        (lambda: optax.adamw(0.1, weight_decay=10.0), "decay by less than all .*, got one that multiplies a row by"),
        (lambda: optax.adamw(0.1, weight_decay=1.0), "decay more slowly than moments fade"),
        (lambda: optax.chain(optax.adam(0.1), optax.keep_params_nonnegative()), "otherwise than by its slots"),
        (lambda: optax.chain(mean_of_duplicates(), optax.sgd(0.1)), "got one that takes row_facts"),
        (lambda: segments({"a": (0, optax.adam(0.1))}, optax.adam(0.1)), "got one that has kvjax.optax.segments in it"),
        (
            lambda: optax.chain(segments({"a": (7, optax.adam(0.1))}, optax.sgd(0.1))),
            "got one that has kvjax.optax.seg",
        ),
    ],
    ids=[
        "lion", "betas", "injected", "belief", "novograd", "radam", "ftrl", "decay", "fast decay", "non-negative",
        "facts", "segments", "segments of wide rows",
    ],
)  # fmt: skip
@slow
@pytest.mark.filterwarnings("ignore:kvjax. rows depend")
def test_what_has_no_closed_form_is_refused(tx, message):
    with pytest.raises(ValueError, match=f"catch_up: .*{message}") as seen:
        catch_up(tx())
    if "replay=200 takes missed steps one by one" in str(seen.value):  # no advice that does not work
        catch_up(tx(), replay=200)
    elif "replay=" in str(seen.value):
        with pytest.raises(ValueError, match="catch_up: "):
            catch_up(tx(), replay=200)


@slow
def test_tables_that_cannot_be_behind(make):
    grads = kvjax.SparseRows(np.array([1]), jnp.ones((1, DIM)))
    for options in ({"constraint": kvjax.constraints.max_norm(1.0)}, {"admit": kvjax.admit.MinCount(2, unadmitted=7)}):
        table = make(DIM, **options)
        for call in (lambda t=table: t.apply(caught("adam"), grads, caught("adam").init(DIM)),
                     lambda t=table: caught_up(t, caught("adam").init(DIM), caught("adam"))):  # fmt: skip
            with pytest.raises(ValueError, match="want a table for"):
                call()
    with pytest.raises(TypeError, match="catch_up: want an optax transform"):
        catch_up("adam")
