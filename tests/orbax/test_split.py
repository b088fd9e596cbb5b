"""Splitting a state into its tables and the rest, and combining them again."""

import contextlib
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from tests.support.checkpoints import IDS
from tests.support.marks import slow


@contextlib.contextmanager
def caught(lines):
    """What JAX logs."""
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def test_split_leaves_out_what_is_not_to_be_saved(make):
    tree = {"a": make(2), "b": make(2, checkpoint=False)}
    dense, tables = kvjax.orbax.split(tree)
    assert list(tables) == [tree["a"].name] and jax.tree.leaves(dense) == []
    back = kvjax.orbax.combine(dense, tables)
    assert {k: t.name for k, t in back.items()} == {k: t.name for k, t in tree.items()}


def test_combine_wants_the_tables_that_were_split_off(make):
    """Without them it would go on from the rows of the process, which are of another time, or none."""
    tree = {"a": make(2), "w": jnp.ones(2), "b": make(2, checkpoint=False)}
    name = tree["a"].name
    dense, tables = kvjax.orbax.split(tree)
    for given in ((), ({},), ({name + "x": make(2)},)):
        with pytest.raises(KeyError, match=f"table '{name}', combine: want this table among tables=.*TableRestore"):
            kvjax.orbax.combine(dense, *given)
    for swapped in ((tables, dense), (dense, tables[name])):
        with pytest.raises(TypeError, match=r"combine\(state, tables\)"):
            kvjax.orbax.combine(*swapped)
    with pytest.raises(
        TypeError, match=f"want the tables by name as its second argument, got int as '{name}'; combine"
    ):
        kvjax.orbax.combine(dense, {name: 1})
    kvjax.drop_table(tree["b"].name)
    with pytest.raises(KeyError, match=f"'{tree['b'].name}', combine"):
        kvjax.orbax.combine(dense, tables)


def test_combine_wants_tables_of_now(make):
    """A state that was split off before the last step has its rows no more."""
    state = {"t": make()}
    dense, tables = kvjax.orbax.split(state)
    state["t"] = state["t"].upsert(7, [1.0] * state["t"].dim)
    with pytest.raises(RuntimeError, match=r"combine: want tables as they are now, got one of another time .*stale"):
        kvjax.orbax.combine(dense, tables)
    assert len(kvjax.orbax.combine(*kvjax.orbax.split(state))["t"]) == 1
    assert jax.eval_shape(lambda tables: kvjax.orbax.combine(dense, tables), tables)["t"].name == state["t"].name


def test_a_state_has_one_version_of_a_table(make):
    """A copy of the parameters from before a step has the rows of now, and not those of then."""
    table = make(2)
    live, before = table.live(), jax.tree.map(lambda x: x, {"t": table})
    after = {"t": table.upsert([1], np.ones((1, 2)))}
    for state in ({"best": before, "now": after}, {"now": after, "old": before}):
        with pytest.raises(ValueError, match=rf"'{table.name}', split: want one version of a table .*table.export"):
            kvjax.orbax.split(state)
    for state in ({"a": live, "b": after}, {"a": after, "b": live}, {"a": after, "b": dict(after)}):
        _, tables = kvjax.orbax.split(state)
        assert tables[table.name] is after["t"]


def test_combine_gives_each_place_a_leaf_of_its_own(make):
    """A step may take the buffers of both."""
    table = make(1).upsert([7], [[1.0]])
    dense, tables = kvjax.orbax.split({"a": table, "b": table.at(np.asarray(table.version))})

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        grads = kvjax.grad(lambda s: jnp.sum(s["a"].lookup([7]) * s["b"].lookup([7])))(state)
        after = state["a"].apply(optax.sgd(0.5), kvjax.merge([grads["a"], grads["b"]]))[0]
        return {"a": after, "b": after}

    state = step(kvjax.orbax.combine(dense, tables))
    assert state["b"].lookup([7])[0, 0] == 0.0


def test_combine_says_that_a_state_has_counted_other_steps(make, recwarn):
    """Rows of one step beside the optimizer of another: nothing else would tell."""
    tx, rows = kvjax.optax.partition(optax.sgd(1.0), optax.sgd(1.0)), jnp.ones((1, 2))
    params = {"t": make(2), "fixed": make(2, trainable=False)}
    states = [tx.init(params)]
    for _ in range(2):
        grads = dict.fromkeys(params, kvjax.SparseRows(kvjax.keys([1]), rows))
        updates, opt = tx.update(grads, states[-1], params)
        params = optax.apply_updates(params, updates)
        states.append(opt)
    tables = kvjax.orbax.split(params)[1]
    for fits in (states[2], states[0]):  # the second is a new one
        kvjax.orbax.combine({"params": kvjax.orbax.split(params)[0], "opt": fits}, tables)
    assert not recwarn.list
    of_another = {"params": kvjax.orbax.split(params)[0], "opt": states[1]}
    with pytest.warns(UserWarning, match=f"'{params['t'].name}', combine: .*after step 1 and rows after step 2; give"):
        kvjax.orbax.combine(of_another, tables)
    fresh = {"t": make(2), "fixed": make(2, trainable=False)}  # those of a new process, which nobody has restored
    opened = {"params": kvjax.orbax.split(fresh)[0], "opt": states[1]._replace(tables={fresh["t"].name: ()})}
    with pytest.warns(UserWarning, match="after step 1 and rows after step 0; give"):
        kvjax.orbax.combine(opened, kvjax.orbax.split(fresh)[1])


def test_combine_without_a_template(tmp_path):
    """StandardRestore() gives dicts and lists, with None where a table stood."""
    table = kvjax.get_table("t", dim=2).upsert(IDS, np.ones((5, 2)))
    tx = optax.adam(0.1)
    params = {"net": {"t": table, "w": jnp.arange(2.0)}, "list": [table, jnp.ones(1)]}
    state = TrainState(step=jnp.int32(3), apply_fn=None, params=params, tx=tx, opt_state=tx.init({"w": jnp.ones(2)}))
    dense, tables = kvjax.orbax.split(state)
    with ocp.CheckpointManager(tmp_path) as manager:
        saved = {"state": ocp.args.StandardSave(dense), "tables": kvjax.orbax.TableSave(tables)}
        manager.save(0, args=ocp.args.Composite(**saved))
        manager.wait_until_finished()
        wanted = {"state": ocp.args.StandardRestore(), "tables": kvjax.orbax.TableRestore()}
        restored = manager.restore(0, args=ocp.args.Composite(**wanted))
    with pytest.raises(KeyError, match=r"'t', combine: want a state with the places of its tables.*like="):
        kvjax.orbax.combine(restored["state"], restored["tables"])
    for like in (state, dense, jax.eval_shape(lambda: state)):
        back = kvjax.orbax.combine(restored["state"], restored["tables"], like=like)
        assert isinstance(back, TrainState) and int(back.step) == 3 and len(back.params["list"][0]) == 5
        np.testing.assert_array_equal(back.params["net"]["w"], [0.0, 1.0])
    with pytest.raises(ValueError, match=r"combine: want a restored state like the other, got one with params/list/1"):
        kvjax.orbax.combine(restored["state"], restored["tables"], like=state.replace(params={"t": table}))
    with pytest.raises(ValueError, match=r"got one without params/x"):
        kvjax.orbax.combine(restored["state"], restored["tables"], like=state.replace(params=params | {"x": 1.0}))


@slow
def test_tables_under_other_names_take_their_part_of_the_optimizer_along(make, tmp_path):
    tx = kvjax.optax.partition(
        dense=optax.sgd(1.0), tables=lambda name: optax.sgd(optax.linear_schedule(1.0, 0.0, 9))
    )  # whose count is of all rows

    def step(state):
        grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(IDS)))(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    params = {"t": make(2)}
    state = step(step({"params": params, "opt": tx.init(params)}))
    dense, tables = kvjax.orbax.split(state)
    old = params["t"].name
    new = make(2, seed=params["t"].spec.seed)
    with ocp.CheckpointManager(tmp_path) as manager:
        saved = {"state": ocp.args.StandardSave(dense), "tables": kvjax.orbax.TableSave(tables)}
        manager.save(0, args=ocp.args.Composite(**saved))
        manager.wait_until_finished()
        want = step(state)["params"]["t"].lookup(IDS)
        for template in (dense, None):
            wanted = {"state": ocp.args.StandardRestore(template), "tables": kvjax.orbax.TableRestore({old: new})}
            restored = manager.restore(0, args=ocp.args.Composite(**wanted))
            fresh = {"params": {"t": new.refresh()}, "opt": tx.init({"t": new})}
            like = None if template is not None else fresh
            back = kvjax.orbax.combine(restored["state"], restored["tables"], like=like)
            assert list(back["opt"].tables) == [new.name] and back["params"]["t"].name == new.name
            np.testing.assert_array_equal(step(back)["params"]["t"].lookup(IDS), want)


def test_a_part_of_a_state_in_the_form_of_another():
    table, new = (kvjax.get_table(f"partial_{i}", dim=2) for i in range(2))
    like = {"w": np.zeros(3), "b": np.ones(2), "t": table, "new": new}
    restored = {"w": np.ones(3), "b": np.zeros(4), "gone": np.ones(1)}
    trained = {"t": table.upsert([7], [[1.0, 2.0]])}
    with pytest.warns(UserWarning, match="come b, table 'partial_1'; not used of what was restored: gone") as said:
        state = kvjax.orbax.combine(restored, trained, like=like, partial=True)
    assert said[0].filename == __file__ and len(said) == 1
    assert state["w"].tolist() == [1, 1, 1] and state["b"].tolist() == [1, 1] and "gone" not in state
    assert (len(state["t"]), len(state["new"])) == (1, 0)
    whole, both = {"w": np.ones(3), "b": np.zeros(2)}, trained | {"new": new}
    assert kvjax.orbax.combine(whole, both, like=like, partial=True)["b"].tolist() == [0, 0]  # without a warning
    with pytest.warns(
        UserWarning, match="From like= come nothing; not used of what was restored: table 'partial_gone'"
    ):
        gone = {"gone": kvjax.get_table("partial_gone", dim=1)}
        kvjax.orbax.combine(whole, both | gone, like=like, partial=True)
    with pytest.raises(ValueError, match="like= with partial=True"):
        kvjax.orbax.combine(restored, trained, partial=True)
    with pytest.raises(ValueError, match=r"a value for b, .*got a shape alone"):
        kvjax.orbax.combine(restored, trained, like=like | {"b": jax.ShapeDtypeStruct((2,), np.float32)}, partial=True)
    with pytest.raises(KeyError, match=r"docs/restarts\.md"):
        kvjax.orbax.combine(kvjax.orbax.split(like)[0], trained)


@pytest.mark.parametrize("devices", [1, 2])
def test_combine_puts_versions_where_a_step_leaves_them(devices, make, mesh):
    """Beside what Orbax restores, which is on its devices: else the second step would be compiled anew."""
    axes = mesh(data=devices, explicit=True) if devices > 1 else None
    place = jax.devices()[0] if axes is None else NamedSharding(axes, PartitionSpec())
    table = make(2, mesh=axes)
    dense, tables = kvjax.orbax.split({"t": table, "w": np.ones(2, np.float32)})

    @jax.jit
    def step(state):
        grads = kvjax.grad(lambda s: jnp.sum(s["t"].lookup([7])[0] * s["w"]))(state)
        return {"t": state["t"].apply(optax.sgd(0.5), grads["t"])[0], "w": state["w"] - grads["w"]}

    state = kvjax.orbax.combine(jax.device_put(dense, place), tables)
    before = state["t"].version.sharding
    assert state["t"].version.committed and before == state["w"].sharding
    compiled = []
    with jax.log_compiles(), caught(compiled):
        for _ in range(3):
            state = step(state)
    assert sum("compilation of jit(step)" in line for line in compiled) == 1
    assert kvjax.orbax.combine(*kvjax.orbax.split(state))["t"] is state["t"]  # it is there already
    elsewhere = {"t": table.at(np.asarray(state["t"].version)), "w": jax.device_put(dense["w"], jax.devices()[-1])}
    apart = kvjax.orbax.combine(*kvjax.orbax.split(elsewhere))
    assert (apart["t"].version is elsewhere["t"].version) == (devices > 1)


def test_combine_says_where_frozen_tables_go_without_a_state(make, tmp_path):
    arrays = kvjax.serving.FrozenTable.write(tmp_path / "f", make(2)).as_jax()
    with pytest.raises(KeyError, match=r"params\['Embed_0'\]\['table'\] = arrays"):
        kvjax.orbax.combine({"user": {"table": None}}, {"user": arrays})


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.out = kvjax.flax.nnx.Embed("users", 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, keys):
        return self.out(self.embed(keys))


@pytest.mark.filterwarnings("ignore:kvjax.*made anew")
def test_an_nnx_model_and_its_optimizer_go_on_as_they_would_have(tmp_path, promotion):
    def new():
        model = Net()
        return model, nnx.Optimizer(model, kvjax.optax.partition(optax.adam(0.1), optax.adam(0.1)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, keys):
        loss, grads = kvjax.flax.nnx.value_and_grad(lambda model: jnp.mean((model(keys) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    keys, (model, optimizer) = kvjax.keys([1, 2]), new()
    step(model, optimizer, keys)
    dense, tables = kvjax.orbax.split(nnx.state((model, optimizer)))
    with ocp.CheckpointManager(tmp_path) as manager:
        saved = {"state": ocp.args.StandardSave(dense), "tables": kvjax.orbax.TableSave(tables)}
        manager.save(0, args=ocp.args.Composite(**saved))
        manager.wait_until_finished()
        want = [float(step(model, optimizer, keys)) for _ in range(3)]
        model, optimizer = new()
        dense, tables = kvjax.orbax.split(nnx.state((model, optimizer)))
        wanted = {"state": ocp.args.StandardRestore(dense), "tables": kvjax.orbax.TableRestore(tables)}
        restored = manager.restore(0, args=ocp.args.Composite(**wanted))
    nnx.update((model, optimizer), kvjax.orbax.combine(restored["state"], restored["tables"]))
    assert [float(step(model, optimizer, keys)) for _ in range(3)] == want
