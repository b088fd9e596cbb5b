"""Tables in Orbax checkpoints."""

import dataclasses
import json
import shutil
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from flax.training.train_state import TrainState

import kvjax

IDS = np.array([2**40, -1, 0, -(2**63), 2**63 - 1])


def save(folder, step, tables, **options):
    with ocp.CheckpointManager(folder) as manager:
        args = ocp.args.Composite(tables=kvjax.orbax.TableSave(tables, **options))
        manager.save(step, args=args)
        manager.wait_until_finished()


def restore(folder, step, tables=None):
    with ocp.CheckpointManager(folder) as manager:
        args = ocp.args.Composite(tables=kvjax.orbax.TableRestore(tables))
        return manager.restore(step, args=args)["tables"]


def trained(table, tx=None, steps=3):
    tx = tx or optax.rmsprop(0.1)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        grads = kvjax.SparseRows(rng.choice(IDS, 8), jnp.asarray(rng.normal(size=(8, table.dim)), jnp.float32))
        table, _ = table.apply(tx, grads)
    return table


def assert_equal(a, b):
    for name in ("keys", "values", "freqs", "versions", "has_slots"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.slots.keys() == b.slots.keys() and a.last_step == b.last_step
    for name in a.slots:
        np.testing.assert_array_equal(a.slots[name], b.slots[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
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


@pytest.mark.parametrize(
    "tx", [optax.rmsprop(0.1), optax.adan(0.1), optax.adafactor(0.1), optax.apply_if_finite(optax.sgd(0.1, 0.9), 3)]
)
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


def test_golden_checkpoint():
    """A checkpoint that an earlier kvjax wrote; this one and every later must read it."""
    folder = Path(__file__).parent / "golden/checkpoint"
    table = kvjax.orbax.TableHandler().restore(folder)["golden"]
    out = table.export(slots=True)
    assert out.keys.tolist() == [2**40, -(2**63), -1, 7]
    assert out.freqs.tolist() == [2, 1, 1, 0] and out.versions.tolist() == [2, 2, 1, 2] and out.last_step == 2
    assert out.has_slots.tolist() == [True, True, True, False] and list(out.slots) == ["trace"]
    np.testing.assert_array_equal(out.values[3], [7.0, 8.0])
    np.testing.assert_allclose(out.slots["trace"][0], [1.5, 1.5])
    np.testing.assert_allclose(out.values[0], [0.75, 0.75])


def test_prune_on_save(make, tmp_path):
    table = trained(make(3))
    prune = kvjax.Prune(min_frequency=5)
    want = table.export(prune, slots=True)
    assert 0 < len(want) < len(table)
    save(tmp_path, 1, {"t": table}, prune=prune)
    assert_equal(restore(tmp_path, 1, {"t": table})["t"].export(slots=True), want)
    folder = tmp_path / "1/tables/t/shard-00000-of-00001"
    offsets = ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/offsets"}).result().read().result()
    assert offsets[0] == 0 and offsets[-1] == len(want) and (np.diff(offsets) >= 0).all()


def test_equal_tables_give_equal_files(make, tmp_path):
    one, other = make(2), make(2)
    one = one.upsert(IDS, np.ones((5, 2)))
    other = other.upsert(IDS[::-1], np.ones((5, 2)))
    save(tmp_path / "a", 1, {"t": one})
    save(tmp_path / "b", 1, {"t": other})
    for path in sorted((tmp_path / "a/1/tables/t/shard-00000-of-00001").rglob("c/*")):
        if path.is_file():
            twin = tmp_path / "b" / path.relative_to(tmp_path / "a")
            assert path.read_bytes() == twin.read_bytes(), path


def test_others_can_read_the_arrays(make, tmp_path):
    table = trained(make(3))
    save(tmp_path, 1, {"t": table})
    folder = tmp_path / "1/tables/t/shard-00000-of-00001"
    keys = ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/keys"}).result().read().result()
    np.testing.assert_array_equal(keys, table.export().keys)


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


def test_a_handle_saved_without_its_rows_is_refused(make, tmp_path):
    """Stock handlers save the version of a handle and nothing else: neither using it nor refresh may hide that."""
    table = make(2).upsert(IDS, np.ones((5, 2)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"t": table})
        checkpointer.wait_until_finished()
        name, spec = table.name, table.spec
        kvjax.drop_table(name)
        host_version = int(table.version)
        fresh = kvjax.Table(jnp.uint32(0), spec)
        restored = checkpointer.restore(tmp_path / "c", {"t": fresh})["t"]
    assert int(restored.version) == host_version
    ahead = kvjax.Table(kvjax.get_table(name, dim=2).version + jnp.uint32(host_version), spec)
    for use in (lambda: ahead.lookup(IDS), ahead.size, ahead.refresh):
        with pytest.raises((ValueError, RuntimeError), match=r"no write here has made.*TableSave"):
            jax.block_until_ready(use())


def test_split_leaves_out_what_is_not_to_be_saved(make):
    tree = {"a": make(2), "b": make(2, checkpoint=False)}
    dense, tables = kvjax.orbax.split(tree)
    assert list(tables) == [tree["a"].name] and jax.tree.leaves(dense) == []
    back = kvjax.orbax.combine(dense, tables)
    assert {k: t.name for k, t in back.items()} == {k: t.name for k, t in tree.items()}


# ---- what is wrong is found before anything changes ----------------------------------------------------------------


def damage_delete(folder):
    shutil.rmtree(folder / "shard-00000-of-00001/values")


def damage_chunk_missing(folder):
    next(p for p in (folder / "shard-00000-of-00001/values/c").rglob("*") if p.is_file()).unlink()


def damage_bit(folder):
    path = next(p for p in (folder / "shard-00000-of-00001/values/c").rglob("*") if p.is_file())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def damage_rows(folder):
    meta = json.loads((folder / "kvjax.json").read_text())
    (folder / "kvjax.json").write_text(json.dumps(meta | {"rows": 10**12}))


def damage_format(folder):
    (folder / "kvjax.json").write_text('{"format": "kvjax.table.v9", "num_buckets": 1, "num_shards": 1}')


def damage_field(folder):
    meta = json.loads((folder / "kvjax.json").read_text())
    del meta["slots"]
    (folder / "kvjax.json").write_text(json.dumps(meta))


def damage_json(folder):
    (folder / "kvjax.json").write_text("{")


DAMAGES = [
    damage_delete, damage_chunk_missing, damage_bit, damage_rows, damage_format, damage_field, damage_json,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage, make, tmp_path):
    good, bad = trained(make(3)), trained(make(3))
    save(tmp_path, 1, {"good": good, "bad": bad})
    damage(tmp_path / "1/tables/bad")
    good, bad = good.clear(), bad.clear()
    with pytest.raises(ValueError, match="table 'bad', restore"):
        restore(tmp_path, 1, {"good": good, "bad": bad})
    assert len(good) == len(bad) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dim": 4}, "dim 4, got 3"),
        ({"seed": 1}, "seed"),
        ({"initializer": 1.0}, "initializer"),
        ({"dtype": "bfloat16"}, "dtype"),
    ],
)
def test_another_table_is_refused(options, message, make, tmp_path):
    save(tmp_path, 1, {"t": trained(make(3, seed=0))})
    other = make(**{"dim": 3, "seed": 0} | options)
    with pytest.raises(ValueError, match=message):
        restore(tmp_path, 1, {"t": other})


def test_missing_table_is_named(make, tmp_path):
    save(tmp_path, 1, {"t": make(3)})
    with pytest.raises(ValueError, match=r"'u', restore.*holds \['t'\]"):
        restore(tmp_path, 1, {"u": make(3)})


def test_load_checks_its_arrays(make):
    table = trained(make(3))
    rows = table.export(slots=True)
    twice = rows.take(np.r_[np.arange(len(rows)), 0])
    with pytest.raises(ValueError, match="distinct keys"):
        table.load(twice)
    with pytest.raises(ValueError, match="want values"):
        make(4).load(rows)
    with pytest.raises(TypeError, match="keys"):
        table.load(dataclasses.replace(rows, keys=rows.keys.astype(np.float64)))
    assert_equal(table.export(slots=True), rows)
