"""Tables in Orbax checkpoints."""

import copy
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


def test_a_folder_that_is_not_there_is_not_called_damaged(tmp_path):
    handler = kvjax.orbax.TableHandler()
    for op in (handler.restore, handler.metadata):
        with pytest.raises(kvjax.checkpoint.CheckpointError, match=r"none in .*gone; nothing is there: check the path"):
            op(tmp_path / "gone")


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
