"""Tables in Orbax checkpoints."""

import copy
import functools
import json
import pickle
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState

import kvjax
from kvjax.checkpoint import CheckpointError
from tests.support.checkpoints import IDS, assert_equal, restore, save, trained
from tests.support.marks import few, slow
from tests.support.tables import finished
from tests.support.transforms import row_by_row


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float16"], "bfloat16"))
def test_everything_comes_back(dtype, make, tmp_path, x64):
    table = trained(make(3, dtype=dtype)).upsert(np.array([5]), np.ones((1, 3)))  # row 5 has no slots
    want = table.export(slots=True)
    save(tmp_path, 1, {table.name: table})
    table = trained(table)
    table = restore(tmp_path, 1, {table.name: table})[table.name]
    assert_equal(table.export(slots=True), want)
    # and into a new process's table, made from what the checkpoint says
    kvjax.drop_table(table.name)
    again = restore(tmp_path, 1)[table.name]
    assert again.spec == table.spec
    assert_equal(again.export(slots=True), want)


@row_by_row
@pytest.mark.parametrize("tx", [optax.rmsprop(0.1), optax.adan(0.1), optax.adafactor(0.1), optax.zero_nans()])
def test_training_goes_on_after_a_restore_as_if_nothing_had_happened(tx, make, tmp_path, promotion):
    """Among them optimizers whose slots are not in alphabetical order."""
    table = trained(make(3), tx)
    save(tmp_path, 1, {"t": table})
    table = trained(table, tx)
    want = table.export(slots=True)
    assert_equal(trained(restore(tmp_path, 1, {"t": table})["t"], tx).export(slots=True), want)


def test_training_may_go_on_while_a_save_is_written(make, tmp_path):
    table = trained(make(3))
    want = table.export(slots=True)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": table})))
        table = trained(table).clear()
    assert_equal(restore(tmp_path, 1, {"t": table})["t"].export(slots=True), want)


def positive(row):
    return jnp.maximum(row, 0)


def test_a_table_is_made_as_it_was_saved(make, tmp_path):
    evict, admit = kvjax.evict, kvjax.admit
    table = make(
        2, max_capacity=100, on_full="evict", admit=admit.Sketch(2, unadmitted=-1, halve_every=5), count="batch",
        evict=(evict.MaxAge(3) | ~evict.MinNorm(0.5) & evict.LeastFrequent(2, half_life=4.0)).every(7),
        constraint=kvjax.constraints.max_norm(2.0),
    )  # fmt: skip
    table = trained(table)
    save(tmp_path, 1, {table.name: table})
    want = table.snapshot()
    kvjax.drop_table(table.name)
    again = restore(tmp_path, 1)[table.name]
    assert again.spec == table.spec
    np.testing.assert_array_equal(again.snapshot().admission["sketch"], want.admission["sketch"])


@pytest.mark.parametrize(
    "options",
    [
        {"constraint": positive},
        {"max_capacity": 9, "on_full": "evict", "evict": kvjax.evict.LowestScore(None, lambda rows: rows.freqs)},
    ],
)
def test_functions_are_not_restored_by_name(options, make, tmp_path):
    table = trained(make(2, **options))
    save(tmp_path, 1, {table.name: table})
    size = len(table)
    assert len(restore(tmp_path, 1, {table.name: table})[table.name]) == size
    kvjax.drop_table(table.name)
    with pytest.raises(ValueError, match="rules without functions"):
        restore(tmp_path, 1)
    assert table.name not in kvjax.tables()


@pytest.mark.parametrize("name", ["a/b c%", ".", "..", "ä", "a.b"])
def test_empty_tables_and_awkward_names(name, make, tmp_path):
    table = kvjax.get_table(name, dim=2)
    save(tmp_path, 1, {name: table})
    assert len(restore(tmp_path, 1)[name]) == 0


class Net(nn.Module):
    @nn.compact
    def __call__(self, keys):
        return nn.Dense(1)(kvjax.flax.Embed("t", 3)(keys))[..., 0]


def test_train_state(tmp_path):
    """Dense parameters, optimizer state and tables in one step, through split and combine."""
    keys, y = kvjax.keys(IDS), jnp.arange(5.0)
    net = Net()
    tx = kvjax.optax.partition(dense=optax.rmsprop(0.1), tables=optax.adagrad(0.1))
    params = net.init(jax.random.key(0), keys)["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.mean((net.apply({"params": params}, keys) - y) ** 2)

        value, grads = kvjax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    for _ in range(3):
        state, _ = step(state)
    dense, tables = kvjax.orbax.split(state)
    with ocp.CheckpointManager(tmp_path) as manager:
        composite = ocp.args.Composite(state=ocp.args.StandardSave(dense), tables=kvjax.orbax.TableSave(tables))
        manager.save(3, args=composite)
        for _ in range(3):
            state, want = step(state)
        manager.wait_until_finished()
        composite = ocp.args.Composite(state=ocp.args.StandardRestore(dense), tables=kvjax.orbax.TableRestore(tables))
        restored = manager.restore(3, args=composite)
    state = kvjax.orbax.combine(restored["state"], restored["tables"])
    for _ in range(3):
        state, got = step(state)
    assert float(got) == float(want) and int(state.step) == 6


def test_stock_savers_do_not_take_a_handle_for_the_table(make, tmp_path):
    """They would save a number and lose the rows; what saves, saves everything."""
    params = {"net": {"t": make(2).upsert(IDS, np.ones((5, 2))), "w": jnp.ones(2)}}
    table = params["net"]["t"]

    # Their blocking forms: Orbax's threads for others would wait for a save that has failed.
    standard = ocp.Checkpointer(ocp.StandardCheckpointHandler())
    savers = {
        "standard": lambda: standard.save(tmp_path / "s", args=ocp.args.StandardSave(params)),
        "pytree": lambda: ocp.PyTreeCheckpointer().save(tmp_path / "p", params),
        "pickle": lambda: pickle.dumps(params),
        "np.save": lambda: np.save(tmp_path / "t.npy", table),
        "asarray": lambda: jnp.asarray(table),
    }
    for saver in savers.values():
        with pytest.raises((TypeError, ValueError), match=r"want its rows, got a handle.*TableSave"):
            saver()
    with pytest.raises(TypeError, match=r"pickle: want the rows of tables, got the version of a handle.*TableSave"):
        pickle.dumps(jax.tree.leaves(params))
    grads = {"t": kvjax.SparseRows(IDS, jnp.ones((5, 2)))}
    for number, leaves in enumerate((jax.tree.leaves(params), {"v": jax.tree.leaves(table)[0]}, grads)):
        with pytest.raises(TypeError, match=r"save: want arrays, got a word of a .*kvjax.orbax.split and TableSave"):
            standard.save(tmp_path / str(number), args=ocp.args.StandardSave(leaves))
    assert copy.deepcopy(grads)["t"] is not grads["t"]
    assert copy.deepcopy(jax.tree.leaves(params))[0] == jax.tree.leaves(params)[0]
    copied = copy.deepcopy(params)["net"]["t"]
    assert copied.spec == table.spec and len(copied) == 5
    assert jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(params)[0][0]) == "['net']['t'].version"


def test_a_handle_of_another_process_is_refused(make):
    """However its number came here: neither using it nor refresh may hide that its rows did not."""
    table = make(2)
    ahead = table.at(table.version + jnp.uint32(9))
    for use in (lambda: ahead.lookup(IDS), ahead.size, ahead.refresh):
        with pytest.raises((ValueError, RuntimeError), match=r"no write here has made.*TableSave"):
            finished(use())


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
def test_the_manager_keeps_what_its_policy_says(make, tmp_path):
    """The best steps, saved in the background beside a dense state; each restores as it was."""
    table, wants = trained(make(3)), {}
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step, loss in enumerate([3.0, 1.0, 4.0, 2.0]):
            wants[step] = table.export(slots=True)
            args = ocp.args.Composite(
                tables=kvjax.orbax.TableSave({"t": table}), dense=ocp.args.StandardSave({"w": jnp.full(2, step)})
            )
            manager.save(step, args=args, metrics={"loss": loss})
            table = trained(table)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 3] and manager.best_step() == 1
        for step in (1, 3):
            args = ocp.args.Composite(tables=kvjax.orbax.TableRestore({"t": table}))
            table = manager.restore(step, args=args)["tables"]["t"]
            assert_equal(table.export(slots=True), wants[step])


def test_a_step_may_say_late_when_it_was_begun(make, tmp_path):
    """Orbax writes it down in a thread of its own, and a table may be saved before."""
    item = tmp_path / "7.orbax-checkpoint-tmp" / "tables"
    item.mkdir(parents=True)
    begun = json.dumps({"init_timestamp_nsecs": 77})
    late = threading.Timer(0.1, (item.parent / "_CHECKPOINT_METADATA").write_text, [begun])
    late.start()
    kvjax.orbax.TableHandler().save(item, kvjax.orbax.TableSave({"t": make(2)}))
    late.join()
    assert json.loads((item / "kvjax.json").read_text())["contents"]["step"] == 77


def test_an_item_of_another_step_is_refused(make, tmp_path):
    """Each is whole by itself. Steps that are renamed or copied whole are what they were."""
    table = make(2)
    for step in (1, 2):
        table = table.upsert(np.arange(3), np.full((3, 2), step))
        save(tmp_path, step, {"t": table})
    (tmp_path / "2").rename(tmp_path / "7")
    assert (restore(tmp_path, 7, {"t": table})["t"].lookup(np.arange(3)) == 2).all()
    (tmp_path / "7/tables").rename(tmp_path / "7/other")
    (tmp_path / "1/tables").rename(tmp_path / "7/tables")
    with pytest.raises(CheckpointError, match=r"want what was saved with the step .*7, begun at .* move it out"):
        restore(tmp_path, 7, {"t": table.refresh()})
    (tmp_path / "7/tables").rename(tmp_path / "alone")
    assert (kvjax.checkpoint.restore(tmp_path / "alone", {"t": table.refresh()})["t"].lookup(np.arange(3)) == 1).all()


def test_a_manager_that_deletes_what_deltas_build_on_is_said(make, tmp_path):
    table = make(2).upsert(np.arange(3), np.ones((3, 2)))
    options = ocp.CheckpointManagerOptions(max_to_keep=1)

    def save(manager, step, **how):
        manager.save(step, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": table}, **how)))
        manager.wait_until_finished()

    manager = ocp.CheckpointManager(tmp_path / "short", options=options)
    save(manager, 0, cursor="c")
    save(manager, 1, delta_since="c")
    with pytest.warns(UserWarning, match=r"got none beside it.*, whether it was saved before this one or"):
        manager.close()
    with ocp.CheckpointManager(tmp_path / "long", options=options) as manager:
        save(manager, 0, cursor="c")
        save(manager, 1, delta_since="c")  # which can be restored until 0 is gone, and that is after it
        with pytest.warns(UserWarning, match=r"got none beside it.*, whether it was saved before this one or"):
            save(manager, 2, delta_since="c")
        save(manager, 3, cursor="c")
        assert len(manager.restore(3, args=ocp.args.Composite(tables=kvjax.orbax.TableRestore()))["tables"]["t"]) == 3
    kvjax.drop_table("t")


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
