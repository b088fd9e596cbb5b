"""Transforms beside dense parameters, by table, joined, and row by row."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kvjax
import kvjax.flax
from tests.support.marks import few, slow
from tests.support.tables import same_rows
from tests.support.training import OPTIMIZERS, dense_step, kv_step, rows_of, states, wide

pytestmark = pytest.mark.usefixtures("promotion")


def test_transforms_by_table_name(make):
    tables = {"a": make(2, initializer=1.0), "b": make(2, initializer=1.0), "c": make(2, trainable=False)}
    by_name = {tables["a"].name: optax.sgd(1.0), tables["b"].name: optax.sgd(0.5)}
    for choice in (by_name, by_name.get):
        params = {k: t.refresh().clear() for k, t in tables.items()}
        tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=choice)
        state = tx.init(params)
        grads = kvjax.grad(lambda p: sum(jnp.sum(t.lookup(np.array([1]))) for t in p.values()))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        got = {k: params[k].lookup(1).tolist() for k in params}
        assert got == {"a": [0.0, 0.0], "b": [0.5, 0.5], "c": [0.0, 0.0]}
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables={})
    with pytest.raises(ValueError, match="want a transform for every table"):
        tx.init(params)
    misspelt = by_name | {tables["a"].name + "s": optax.sgd(1.0)}
    with pytest.raises(ValueError, match=f"'{tables['a'].name}s', partition: .*did you mean '{tables['a'].name}'"):
        kvjax.optax.partition(dense=optax.sgd(1.0), tables=misspelt).init(params)


def test_rows_are_stamped_with_the_number_of_the_update(make):
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
    params = make(2)
    state = tx.init(params)
    for keys in ([1, 2], [2, 3], [3]):
        updates, state = tx.update(kvjax.SparseRows(np.array(keys), jnp.ones((len(keys), 2))), state, params)
        params = optax.apply_updates(params, updates)
    assert params.version_of(np.array([1, 2, 3])).tolist() == [1, 2, 3] and int(state.count) == 3


AROUND = {
    "partition": lambda tx: tx,
    "keep": lambda tx: tx,
    "accumulate": lambda tx: kvjax.optax.accumulate(tx, 1),
    "apply_if": lambda tx: kvjax.optax.apply_if(tx, lambda grads: jnp.bool_(True)),
    "apply_if_finite": lambda tx: kvjax.optax.apply_if_finite(tx, 3),
    "scale_loss": kvjax.optax.scale_loss,
    "joint": lambda tx: optax.chain(kvjax.optax.joint(optax.clip_by_global_norm(9.0)), tx),
}


@pytest.mark.parametrize("around", few(AROUND, "partition"))
def test_steps_that_the_caller_says(around, make, promotion, x64):
    """In jit or not, through all that stands around; the next update counts on. So a clock can say how old rows are."""
    tx = AROUND[around](
        kvjax.optax.partition(
            dense=optax.sgd(1.0), tables=optax.sgd(1.0), on_refused="keep" if around == "keep" else "error"
        )
    )
    clock = 1_800_000_000
    params = {"w": jnp.ones(1), "t": make(1, evict=kvjax.evict.MaxAge(60).every(1))}
    state = tx.init(params)

    def train(params, state, key, **said):
        grads = {"w": jnp.ones(1), "t": kvjax.SparseRows(key, jnp.ones((1, 1)))}
        updates, state = tx.update(grads, state, params, **said)
        return optax.apply_updates(params, updates), state

    step = jax.jit(lambda params, state, key, now: train(params, state, key, step=now))
    params, state = train(params, state, kvjax.keys([1]), step=clock)
    assert params["t"].version_of([1]).tolist() == [clock]
    params, state = step(params, state, kvjax.keys([2]), clock + 50)
    assert optax.tree_utils.tree_get(state, "count") == clock + 50
    params, state = train(params, state, kvjax.keys([3]))
    assert params["t"].version_of([1, 2, 3]).tolist() == [clock, clock + 50, clock + 51]
    params, state = step(params, state, kvjax.keys([4]), jnp.int32(clock + 100))
    assert sorted(params["t"].export().keys.tolist()) == [2, 3, 4]
    kvjax.orbax.combine(*kvjax.orbax.split((params, state)))  # of one step, or it warns


def test_steps_beyond_the_count(make, x64):
    """The table has them, and goes on by itself."""
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
    params = make(1)
    state = tx.init(params)
    milliseconds = 1_800_000_000_000
    for key, said in ((1, {"step": milliseconds}), (2, {}), (3, {"step": milliseconds + 9})):
        updates, state = tx.update(kvjax.SparseRows([key], jnp.ones((1, 1))), state, params, **said)
        params = optax.apply_updates(params, updates)
        assert int(state.count) == 2**31 - 1
    rows = params.export()
    assert dict(zip(rows.keys.tolist(), rows.versions.tolist(), strict=True)) == {
        1: milliseconds, 2: milliseconds + 1, 3: milliseconds + 9
    }  # fmt: skip
    for wrong in (-1, 1.5, jnp.ones(2, jnp.int32)):
        with pytest.raises((TypeError, ValueError), match="step"):
            tx.update(kvjax.SparseRows([1], jnp.ones((1, 1))), state, params, step=wrong)


def test_a_step_below_zero_in_a_program(make):
    """Is the next one, as a program cannot refuse it."""
    tx, params = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0)), make(1)
    grads = kvjax.SparseRows([7], jnp.ones((1, 1)))
    step = jax.jit(lambda state, params, now: tx.update(grads, state, params, step=now))
    updates, state = step(tx.init(params), params, jnp.int32(-1))
    params = optax.apply_updates(params, updates)
    assert int(state.count) == 1 and params.version_of([7]).tolist() == [1]
    with pytest.raises(TypeError, match=rf"'{params.name}', partition: want an integer step .*give int\(step\)"):
        tx.update(grads, state, params, step=1e9)


def test_partition_checks_all_tables_before_it_writes_one(make):
    params = {"a": make(2), "b": make(3)}
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
    state = tx.init(params)
    good = kvjax.SparseRows(np.array([1]), jnp.ones((1, 2)))
    for bad, kind in ((kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))), ValueError), (jnp.ones(3), TypeError)):
        with pytest.raises(kind, match=r"SparseRows|gradient rows"):
            tx.update({"a": good, "b": bad}, state, params)
    assert len(params["a"]) == 0 and int(params["a"].refresh().version) == int(params["a"].version)


def test_dense_gradients_are_checked_before_tables_are_written(make):
    tx = kvjax.optax.partition(optax.sgd(1.0), optax.sgd(1.0))
    params = {"t": make(2), "w": jnp.ones(2)}
    state, rows = tx.init(params), kvjax.SparseRows([1], jnp.ones((1, 2)))
    for wrong, got in ((jnp.ones(3), r"\(3,\)"), (rows, "SparseRows")):
        with pytest.raises(ValueError, match=rf"partition: want dense gradients .*, got {got} for \(2,\)"):
            tx.update({"t": rows, "w": wrong}, state, params)
    assert len(params["t"]) == 0


def test_parameters_without_tables_that_are_trained(make):
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
    for params in ({"w": jnp.ones(2)}, {"w": jnp.ones(2), "t": make(2, trainable=False)}):
        updates, _ = tx.update(kvjax.grad(lambda p: jnp.sum(p["w"]))(params), tx.init(params), params)
        assert optax.apply_updates(params, updates)["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "behind",
    [optax.scale(-1.0), optax.clip(1.0), optax.clip_by_global_norm(1.0), optax.zero_nans(), optax.centralize()],
    ids=["scale", "clip", "norm", "zeros", "centralize"],
)
def test_what_changes_updates_behind_partition_is_an_error(behind, make):
    """It would change the version that comes next, and no row; the table is as it was."""
    params = {"t": make(2), "w": jnp.ones(2)}
    tx = optax.chain(kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0)), behind)
    grads = {"t": kvjax.SparseRows(kvjax.keys([1]), jnp.ones((1, 2))), "w": jnp.ones(2)}
    with pytest.raises(TypeError, match=r"kvjax .*not a number|float0"):
        jax.jit(tx.update)(grads, tx.init(params), params)
    assert len(params["t"]) == 0


@pytest.mark.parametrize("behind", [optax.add_decayed_weights(1e-4), optax.adam(1e-3)], ids=["decay", "adam"])
def test_what_reads_parameters_behind_partition_is_an_error(behind, make):
    """It would do nothing to rows."""
    params = {"t": make(2), "w": jnp.ones(2)}
    tx = optax.chain(kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0)), behind)
    grads = {"t": kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))), "w": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"kvjax.*TableUpdate"):
        jax.eval_shape(tx.update, grads, tx.init(params), params)


def test_what_is_no_state_and_no_gradient_of_a_partition_is_said(make):
    params, tx = {"t": make(2), "w": jnp.ones(2)}, kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
    grads = {"t": kvjax.SparseRows(np.array([1]), jnp.ones((1, 2))), "w": jnp.ones(2)}
    for state in (None, (tx.init(params),), optax.adam(0.1).init({"w": jnp.ones(2)})):
        with pytest.raises(TypeError, match=rf"its own state, a PartitionState, got {type(state).__name__}; give what"):
            tx.update(grads, state, params)
    twice = optax.chain(tx, tx)
    with pytest.raises(TypeError, match="the update that another partition has made of them; one partition"):
        jax.eval_shape(twice.update, grads, twice.init(params), params)
    for tables in (0.1, {"t": 0.1}):
        with pytest.raises(TypeError, match=r"partition.* want an optax transform, got 0.1"):
            kvjax.optax.partition(dense=optax.sgd(1.0), tables=tables)
    with pytest.raises(TypeError, match=r"got two arguments; kvjax.merge\(\[a, b\]\)"):
        kvjax.merge(grads["t"], grads["t"])


SHARED = optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(optax.linear_schedule(0.5, 0.0, 9)))


@slow
@pytest.mark.parametrize(
    "rows_of, every",
    [
        (lambda: SHARED, 1),
        (lambda: kvjax.optax.rowwise(optax.adam(0.1), count="global"), 2),
        (lambda: kvjax.optax.catch_up(SHARED), 2),
    ],
    ids=["schedule", "global", "catch_up"],
)
def test_a_fork_goes_on_by_the_state_of_the_table(rows_of, every, make, request):
    rows = rows_of()
    tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.adam(0.1), tables=rows), every)

    def trained(params, state, steps):
        for step in steps:

            def loss(p, step=step):
                return jnp.sum((p["t"].lookup([1, 2 + step]) * p["w"] - 1) ** 2)

            grads = kvjax.grad(loss)(kvjax.optax.caught_up(params, state, rows))
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    params = {"t": make(2, initializer=0.5), "w": jnp.ones(2)}
    params, state = trained(params, tx.init(params), range(3))
    request.addfinalizer(lambda: kvjax.drop_table("fork"))
    fork = params | {"t": params["t"].copy("fork")}
    with pytest.raises(ValueError, match=r"'fork', partition: want its part.*rename_tables\(state, \{old: new\}\)"):
        tx.update(kvjax.grad(lambda p: jnp.sum(p["t"].lookup([1, 2]) * p["w"]))(fork), state, fork)
    names = {params["t"].name: "fork"}
    got, got_state = trained(fork, kvjax.optax.rename_tables(state, names), range(3, 6))
    want, want_state = trained(params, state, range(3, 6))
    same_rows(want["t"].snapshot().rows, got["t"].snapshot().rows)
    np.testing.assert_array_equal(want["w"], got["w"])
    jax.tree.map(np.testing.assert_array_equal, kvjax.optax.rename_tables(want_state, names), got_state)
    with pytest.raises(ValueError, match="'other', rename_tables: want one of the state's tables"):
        kvjax.optax.rename_tables(state, {"other": "fork"})
    assert kvjax.optax.rename_tables(state, {}) is state


def test_two_tables_of_a_state_keep_names_of_their_own(make):
    params = {"a": make(2), "b": make(2)}
    state = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0)).init(params)
    one, other = (table.name for table in params.values())
    assert set(kvjax.optax.rename_tables(state, {one: other, other: one}).tables) == {one, other}
    with pytest.raises(ValueError, match="rename_tables: want one table of this name, got two"):
        kvjax.optax.rename_tables(state, {one: other})


def test_rowwise_checks_its_arguments():
    with pytest.raises(ValueError, match="count"):
        kvjax.optax.rowwise(optax.sgd(0.1), count="bogus")
    with pytest.raises(TypeError, match="optax transform"):
        kvjax.optax.rowwise(0.1)
    rows = kvjax.optax.rowwise(optax.adam(0.1))
    for wrong in (
        lambda: kvjax.optax.partition(dense=rows, tables=rows),
        lambda: kvjax.optax.segments({"bias": (0, rows)}, rest=optax.adam(0.1)),
    ):
        with pytest.raises(TypeError, match=r"want .* got .*which a table takes as a whole"):
            wrong()
    with pytest.raises(ValueError, match="random keys"):
        kvjax.optax.rowwise(optax.add_noise(0.1, 0.5, jax.random.key(0))).init(3)


@slow
def test_global_count_equals_dense_at_a_late_first_touch():
    tx = kvjax.optax.rowwise(optax.adam(0.05), count="global")
    dense, state = states(OPTIMIZERS["adam"], tables=tx)
    step = jax.jit(kv_step)
    for ids in ([0, 1, 2, 3],) * 5 + ([8, 9, 10, 11],):
        before = dense.params["Embed_0"]["embedding"][8:12]
        dense, _ = dense_step(dense, jnp.array(ids), jnp.ones(4))
        state, _ = step(state, wide(ids), jnp.ones(4))
    moved = dense.params["Embed_0"]["embedding"][8:12] - before
    np.testing.assert_allclose(rows_of(state)[8:12] - before, moved, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(optax.sgd(0.5), 2),
        optax.chain(optax.clip(1.0), optax.MultiSteps(optax.adam(0.5), 2).gradient_transformation()),
        optax.apply_every(2),
    ],
    ids=["MultiSteps", "chained", "apply_every"],
)
def test_transforms_that_hold_updates_back_are_refused(tx, make):
    """Each row would wait for its own second touch, and a rare row for ever."""
    table = make(2)
    with pytest.raises(ValueError, match=r"updates a row in each step that touches it.*accumulate"):
        kvjax.optax.partition(dense=optax.sgd(1.0), tables=tx).init({"t": table})
    with pytest.raises(ValueError, match=r"accumulate"):
        table.apply(tx, kvjax.SparseRows(np.array([7]), jnp.ones((1, 2))))
    kvjax.optax.partition(dense=tx, tables=optax.sgd(1.0)).init({"t": table, "w": jnp.ones(2)})


def test_optax_finds_hyperparameters_and_counts_of_tables_by_name(make):
    """As in any state: globals stand where the transform has them."""
    injected = optax.inject_hyperparams(optax.adam)
    params = {"t": make(2, initializer=1.0), "w": jnp.ones(2)}
    tx = kvjax.optax.partition(dense=injected(learning_rate=0.1), tables=injected(learning_rate=0.1))
    state = tx.init(params)
    (name,) = state.tables
    assert len(optax.tree_utils.tree_get_all_with_path(state, "learning_rate")) == 2
    state = optax.tree_utils.tree_set(state, learning_rate=jnp.float32(0.25))
    assert float(optax.tree_utils.tree_get(state.tables[name], "learning_rate")) == 0.25
    grads = {"t": kvjax.SparseRows(np.array([7]), jnp.ones((1, 2))), "w": jnp.ones(2)}
    for n in (1, 2):
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params["t"].lookup(7), 1 - 0.25 * n, rtol=1e-5)
        np.testing.assert_allclose(params["w"], 1 - 0.25 * n, rtol=1e-5)
    assert int(state.tables[name].count) == 2 and state.tables[name].inner_state[0].mu is None


@slow
def test_optax_finds_one_table_of_several_by_its_name(make, mesh):
    """In the state of an nnx.Optimizer, over a mesh."""
    names = [make(2, mesh=mesh(2), initializer=1.0).name for _ in range(2)]
    model = nnx.List([kvjax.flax.nnx.Embed(name) for name in names])
    tables = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=tables)
    optimizer, keys = nnx.Optimizer(model, tx, wrt=nnx.Param), kvjax.keys(np.arange(4))

    def of_first(path, value):
        return any(getattr(part, "key", None) == names[0] for part in path)

    state = optimizer.opt_state
    assert len(optax.tree_utils.tree_get_all_with_path(state, "learning_rate")) == 2
    optimizer.opt_state = optax.tree_utils.tree_set(state, of_first, learning_rate=jnp.float32(0.0))
    optimizer.update(model, kvjax.flax.nnx.grad(lambda m: sum(jnp.sum(embed(keys)) for embed in m))(model))
    assert [float(embed(keys)[0, 0]) for embed in model] == [1.0, 0.75]
    assert float(optax.tree_utils.tree_get(optimizer.opt_state, "learning_rate", filtering=of_first)[...]) == 0.0


def test_globals_of_a_scan_keep_their_form(make):
    """Also where a transform has none and the state begins as ()."""
    for tx, state in ((optax.adam(0.1), ()), (rate := kvjax.optax.rowwise(optax.adam(0.1), "global"), rate.init(2))):
        grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
        step = lambda carry, _, tx=tx: (carry[0].apply(tx, grads, carry[1]), None)  # noqa: E731, B023
        (table, after), _ = jax.lax.scan(step, (make(2), state), length=3)
        assert jax.tree.structure(after) == jax.tree.structure(state) and int(table.frequency(7)) == 3
    assert int(after[0].count) == 3
