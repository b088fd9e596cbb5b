"""What is left of dense parameters after a step whose write was refused."""

import contextlib
import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax._keys.opaque import words_in
from tests.support.marks import slow
from tests.support.tables import finished, same_rows
from tests.training.test_half_way import Fuse
from tests.training.test_several import stats_of

pytestmark = pytest.mark.filterwarnings("ignore:.*a step was refused, and so are all after it")
REFUSED = (ValueError, MemoryError, RuntimeError)
DENSE = optax.sgd(0.5, momentum=0.9)
ROWS = optax.sgd(lambda n: 0.1 / (1.0 + n.astype(jnp.float32)), momentum=0.9)  # which counts steps
FULL = {"max_capacity": 2, "on_full": "error"}
ON_CPU = pytest.mark.cpu_table  # shards on devices have no max_capacity


def loss(params, keys):
    return sum(jnp.sum(params[name].lookup(keys) @ params["w"]) for name in sorted(params) if name != "w")


def step_of(tx):
    def step(params, state, keys):
        value, grads = kvjax.value_and_grad(loss)(params, keys)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def updated(tx):
    def update(params, state, dense, rows):
        updates, state = tx.update({"w": dense, "0": rows}, state, params)
        return optax.apply_updates(params, updates), state

    return update


def begun(make, tx, *options, **common):
    """The bits of w include the sign of a zero, and its third element has no gradient that is not 0."""
    tables = {str(i): make(3, initializer=np.float32([1, 1, 0]), **common, **each) for i, each in enumerate(options)}
    params = {"w": jnp.float32([1, 1, -0.0])} | tables
    return params, tx.init(params)


def bits(tree):
    return [np.asarray(words_in(x)).tobytes() for x in jax.tree.leaves(tree)]


KEEPS = kvjax.optax.partition(dense=DENSE, tables=ROWS, on_refused="keep")
kept = jax.jit(step_of(KEEPS), donate_argnums=(0, 1))
RAISES = kvjax.optax.partition(dense=DENSE, tables=ROWS)
raised = jax.jit(step_of(RAISES))


@slow
@pytest.mark.parametrize(
    "fuse, shards",
    [(False, None), (True, None), pytest.param(False, 2, marks=ON_CPU)], ids=["program", "chunks", "mesh"],
)  # fmt: skip
def test_a_refused_step_is_none_of_its_program(make, mesh, fuse, shards):
    """Two tables, of which the second is full: all is as it was, to the bit, and goes on once there is space."""
    place = {} if shards is None else {"mesh": mesh(shards)}
    first = {"constraint": Fuse()} if fuse else {}
    params, state = begun(make, KEEPS, first, FULL, **place)
    twins, twin_state = begun(make, RAISES, first, FULL, **place)
    for ids in ([1], [1, 2]):
        params, state, _ = kept(params, state, kvjax.keys(ids))
        twins, twin_state, _ = raised(twins, twin_state, kvjax.keys(ids))
    counted = [stats_of(params[name]) for name in "01"]
    before, exports = bits((params, kvjax.commit(state).inner_state)), [params[name].export() for name in "01"]
    for ids in ([1, 2, 3], [1]):  # the second has space, and comes before anybody has asked
        params, state, _ = kept(params, state, kvjax.keys(ids))
    with pytest.raises(RuntimeError, match=r"apply: want at most max_capacity=2.*kvjax.commit\(state\) raises"):
        params["0"].export()
    with pytest.raises(MemoryError, match="apply: want at most max_capacity=2"):
        kvjax.commit(state)
    assert bits((params, kvjax.commit(state).inner_state)) == before
    for name in "01":
        same_rows(params[name].export(), exports[int(name)])
        assert stats_of(params[name]) == counted[int(name)]
    for ids in ([1, 2], [2]):
        params["1"], twins["1"] = params["1"].remove(kvjax.keys([1])), twins["1"].remove(kvjax.keys([1]))
        params, state, _ = kept(params, state, kvjax.keys(ids))
        twins, twin_state, _ = raised(twins, twin_state, kvjax.keys(ids))
        kvjax.commit(state)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5)  # in another program
    for one, other in zip(
        *map(jax.tree.leaves, ((params["w"], state.inner_state), (twins["w"], twin_state))), strict=True
    ):
        close(one, other)
    for name in "01":
        one, other = params[name].export(), twins[name].export()
        assert one.keys.tolist() == other.keys.tolist() and one.freqs.tolist() == other.freqs.tolist()
        close(one.values, other.values)


@slow
def test_what_is_not_refused_costs_no_copies(make):
    """Donated states are updated in place, as without the option: a choice between old and new ones behind the update
    had each copied, and read once more."""
    size, amounts = 1 << 16, []
    for tx in (kvjax.optax.partition(dense=DENSE, tables=ROWS, on_refused=on) for on in ("error", "keep")):
        params = {"w": jnp.ones(size), "0": make(3)}
        rows = kvjax.SparseRows(kvjax.keys([1]), jnp.ones((1, 3)))
        step = jax.jit(updated(tx), donate_argnums=(0, 1))
        program = step.lower(params, tx.init(params), params["w"], rows).compile()
        amounts.append((program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["bytes accessed"]))
    for without, kept in zip(*amounts, strict=True):
        assert kept < without + size  # bytes, of which an array has four times as many


@ON_CPU
@slow
@pytest.mark.parametrize("inside", [False, True], ids=["sharded", "inside"])
def test_dense_parameters_of_a_mesh(make, mesh, inside):
    """With a collective; over Explicit axes, and in one device's part of a program."""
    place = mesh(2)
    typed = jax.make_mesh((2,), place.axis_names, axis_types=(AxisType.Explicit,))
    clipped = optax.chain(optax.clip_by_global_norm(0.5), DENSE)
    tx = kvjax.optax.partition(dense=clipped, tables=ROWS, on_refused="keep")
    tx = kvjax.optax.apply_if(tx, lambda grads: jnp.all(grads["0"] < 2))
    with contextlib.nullcontext() if inside else jax.set_mesh(typed):
        w = jax.device_put(jnp.arange(4.0), NamedSharding(typed, P(place.axis_names)))
        params = {"w": jnp.arange(4.0) if inside else w, "0": make(3, mesh=place if inside else typed, **FULL)}
        state, run = tx.init(params), updated(tx)
        if inside:
            run = jax.shard_map(run, mesh=place, in_specs=P(), out_specs=P())
        run = jax.jit(run)
        for ids, refused in (([1, 2], False), ([3], True), ([1], False)):
            before, rows = (
                bits((params, state.inner_state.inner_state)),
                kvjax.SparseRows(kvjax.keys(ids), jnp.ones((len(ids), 3))),
            )
            params, state = run(params, state, params["w"], rows)
            with pytest.raises(MemoryError) if refused else contextlib.nullcontext():
                kvjax.commit(state)
            assert (bits((params, state.inner_state.inner_state)) == before) == refused


@slow
def test_a_sink_that_fails_is_the_cause(make):
    def sink(*rows):
        raise ArithmeticError("the disk is full")

    params, state = begun(make, KEEPS, {"max_capacity": 2, "on_full": "evict"})
    params["0"] = params["0"].on_evict(sink)
    for ids in ([1, 2], [3, 4]):
        params, state, _ = kept(params, state, kvjax.keys(ids))
    with pytest.raises(ValueError, match="the disk is full") as caught:
        kvjax.commit(state)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert sorted(params["0"].export().keys.tolist()) == [1, 2]


@slow
def test_a_stale_handle_and_accumulation(make):
    """What is wrong with the program's arguments is kept, too; and the state may be inside of another."""
    tx = kvjax.optax.accumulate(KEEPS, 2)
    params, state = begun(make, tx, {})
    params["0"].upsert(kvjax.keys([9]), jnp.ones((1, 3)))
    grads = {"w": params["w"], "0": kvjax.SparseRows(kvjax.keys([1]), jnp.ones((1, 3)))}
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(grads, state, params)
    assert bits(optax.apply_updates(params, updates)["w"]) == bits(params["w"])
    with pytest.raises(RuntimeError, match="a stale one"):
        kvjax.commit(state)
    params["0"] = params["0"].refresh()
    for _ in range(2):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert params["0"].export().keys.tolist() == [1, 9] and kvjax.commit(state) is state


@pytest.mark.cpu_table
def test_a_loop_that_asks_seldom_is_warned_once(make):
    params, state = begun(make, KEEPS, FULL, {})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for ids in ([1, 2], [3], [1], [2]):
            params, state, value = kept(params, state, kvjax.keys(ids))
            jax.block_until_ready(value)
            jax.effects_barrier()
    (warning,) = said
    assert f"table '{params['0'].name}', apply: want at most max_capacity=2" in str(warning.message)
    assert "kvjax.commit(state) has raised this" in str(warning.message) and warning.filename == __file__
    with pytest.raises(MemoryError):
        kvjax.commit(state)


def refuse(make, tx=KEEPS, name="0"):
    """A state with a step that its table, which is full, has refused."""
    params = {name: make(1, max_capacity=1, on_full="error")}
    rows = kvjax.SparseRows(kvjax.keys([1, 2]), jnp.ones((2, 1)))
    return params[name], tx.update({name: rows}, tx.init(params), params)[1]


def test_every_refused_state_is_asked_for_by_itself(make):
    """What one model was refused keeps nobody from the tables of another; lost or dropped, nobody from any."""
    (a, first), (b, second) = refuse(make), refuse(make)
    with pytest.raises(MemoryError, match=f"table '{b.name}', apply: want at most"):
        kvjax.commit(second)
    assert len(b.export().keys) == 0 and len(make().export().keys) == 0
    with pytest.raises(RuntimeError, match=r"want no refused step.*kvjax.commit\(\) does where that state is lost"):
        a.export()
    kvjax.drop_table(b.name)
    del first
    with pytest.raises(MemoryError, match=f"table '{a.name}', apply: want at most"):
        kvjax.commit()
    assert len(a.export().keys) == 0 and kvjax.commit() is None
    c, third = refuse(make)
    kvjax.drop_table(c.name)
    assert len(kvjax.get_table(c.name, dim=1).export().keys) == 0  # another table of that name
    with pytest.raises(MemoryError):
        kvjax.commit(third)


def test_what_another_process_was_refused_is_not_asked_about(make):
    """A checkpoint of a refused state, which is whole: its number means nothing here."""
    table, state = refuse(make)
    with pytest.raises(MemoryError):
        kvjax.commit(state)
    old = state._replace(refused=state.refused ^ jnp.uint32(1 << 19))  # no number of this process
    assert kvjax.commit(old) is old
    params = {"0": table}
    rows = kvjax.SparseRows(kvjax.keys([1]), jnp.ones((1, 1)))
    updates, state = KEEPS.update({"0": rows}, old, params)
    assert len(optax.apply_updates(params, updates)["0"]) == 1 and int(state.refused) == 0


@slow
def test_calls_on_whole_tables_wait_for_a_step_that_will_be_refused(make):
    """A model before the write, so that the step is under way when they are asked."""
    params, state = begun(make, KEEPS, FULL)

    @jax.jit
    def step(params, state, big):
        for _ in range(4):
            big = jnp.tanh(big @ big)
        rows = kvjax.SparseRows(kvjax.keys([1, 2, 3]), jnp.ones((3, 3)) * big[0, 0])
        return updated(KEEPS)(params, state, params["w"], rows)

    step(*(params, state), jnp.ones((1000, 1000)))  # compiles
    with contextlib.suppress(MemoryError):
        kvjax.commit()
    params, state = step(params, state, jnp.ones((1000, 1000)))
    with pytest.raises(RuntimeError, match="want no refused step"):
        params["0"].export()
    with pytest.raises(MemoryError):
        kvjax.commit(state)


def test_states_of_flax(make):
    """NNX makes dictionaries of optimizers' states."""
    _, state = refuse(make)
    with pytest.raises(MemoryError):
        kvjax.commit({"opt_state": {"refused": state.refused, "inner_state": {"count": jnp.int32(0)}}})


def test_what_is_wrong_with_dense_gradients_is_said_before_a_table_is_written(make):
    params, state = begun(make, KEEPS, {})
    with pytest.raises((TypeError, ValueError), match="shape"):
        updated(KEEPS)(params, state, jnp.ones(7), kvjax.SparseRows(kvjax.keys([1]), jnp.ones((1, 3))))
    assert len(params["0"]) == 0


def test_what_commit_takes(make):
    with pytest.raises(TypeError, match=r"commit: want, outside jit, .* got none"):
        kvjax.commit({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match="got none in this tree; make the optimizer with that"):
        kvjax.commit(RAISES.init({"w": jnp.ones(2)}))
    with pytest.raises(TypeError, match=r"commit: want, outside jit, .* got a traced one"):
        jax.eval_shape(kvjax.commit, KEEPS.init({"w": jnp.ones(2)}))
    with pytest.raises(ValueError, match="want on_refused='error' or 'keep', got 'raise'"):
        kvjax.optax.partition(dense=DENSE, tables=DENSE, on_refused="raise")
    state = KEEPS.init({"w": jnp.ones(2)})
    updates, after = KEEPS.update({"w": jnp.ones(2)}, state, {"w": jnp.ones(2)})  # no table at all
    assert updates["w"].tolist() == [-0.5, -0.5] and kvjax.commit(after) is after
    lost = state._replace(refused=jnp.uint32(77 << 20 | 5))  # of the process of that number
    with pytest.raises(RuntimeError, match="a failure in another process"):
        kvjax.commit(lost)


@pytest.mark.parametrize("donate", [False, True])
def test_one_program_loses_what_it_was_given(make, donate):
    """So says the README; if a JAX to come keeps it, the README can say so, too."""
    params, state = begun(make, RAISES, FULL)
    step = jax.jit(step_of(RAISES), donate_argnums=(0, 1) if donate else ())
    table = params["0"]
    with pytest.raises(REFUSED, match="max_capacity=2"):
        finished(step(params, state, kvjax.keys([1, 2, 3])))
    assert params["w"].is_deleted() == donate
    assert len(table.refresh()) == 0


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax, kvjax
table = kvjax.get_table("t", dim=1, max_capacity=1, on_full="error")
tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0), on_refused="keep")
@jax.jit
def step(table, big):  # which is under way when the process ends
    for _ in range(8):
        big = jnp.tanh(big @ big)
    return tx.update(kvjax.SparseRows(np.arange(2), jnp.ones((2, 1)) * big[0, 0]), tx.init(table), table)
step = step.lower(table, jnp.ones((1000, 1000))).compile()
step(table, jnp.ones((1000, 1000)))
"""


@slow
def test_what_nobody_asks_for_is_said_at_the_end():
    program = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    said = "kvjax: a step was refused, and kvjax.commit has not been called: kvjax: table 't', apply: want at most"
    assert program.stderr.startswith(said)
