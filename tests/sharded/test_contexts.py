"""Handles in programs under other meshes than those that made them: Auto, Explicit, none, and ``pmap``'s."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax.optax import catch_up, caught_up, rowwise
from tests.support import processes
from tests.support.marks import few, few_rows, slow

IDS = np.arange(8) * 7 - 20
KEYS = kvjax.keys(IDS)


@jax.jit
def look(table, keys):
    return table.lookup(keys)


@jax.jit
def add(table, keys):
    return table.add(keys, jnp.ones((8, 2), jnp.float32))


def under(mesh):
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


# What makes a handle: the host, a write outside of jit, a compiled one.
MAKERS = {"host": lambda t: t.refresh(), "eager": lambda t: t.add(KEYS, np.ones((8, 2))), "jit": lambda t: add(t, KEYS)}


@slow
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("mesh_of_table", ["auto", "explicit"])
def test_a_handle_is_used_under_any_mesh_of_its_devices(maker, mesh_of_table, make, mesh):
    """By all ways to use it, in any order, with the rows that all writes so far have made."""
    auto, explicit = mesh(4), mesh(4, explicit=True)
    table, count = make(dim=2, mesh={"auto": auto, "explicit": explicit}[mesh_of_table]), 0
    for before in (None, explicit, auto):
        for now in (explicit, None, auto, explicit):
            with under(before):
                table, count = MAKERS[maker](table), count + (maker != "host")
            with under(now):
                want = np.full((8, 2), count, np.float32)
                np.testing.assert_array_equal(look(table, KEYS), want)
                np.testing.assert_array_equal(table.lookup(KEYS), want)
                if now is not None:  # or JAX takes no array of Explicit axes that a program closes over
                    np.testing.assert_array_equal(jax.jit(lambda keys, table=table: table.lookup(keys))(KEYS), want)
                assert table.size() == 8 * (count > 0)
                table, count = add(jax.tree.map(lambda x: x, table), KEYS), count + 1
            np.testing.assert_array_equal(look(table, KEYS), want + 1)
    assert set(table.frequency(KEYS).tolist()) == {0}


def test_a_program_is_traced_once_for_each_mesh(make, mesh):
    """Around it, and of the step before it where there is none around it."""
    traces = []

    @jax.jit
    def step(table, keys):
        traces.append(None)
        return table.add(keys, jnp.ones((8, 2), jnp.float32))

    explicit = mesh(4, explicit=True)
    table = add(make(dim=2, mesh=explicit), KEYS)
    for _ in range(3):
        for now in (None, explicit):
            with under(now):
                table = step(step(table, KEYS), KEYS)
    assert len(traces) == 3


def test_a_handle_that_is_donated_under_another_mesh_is_known(make, mesh):
    explicit = mesh(4, explicit=True)
    table = add(make(dim=2, mesh=explicit), KEYS)
    step = jax.jit(lambda table: table.add(KEYS, np.ones((8, 2), np.float32)), donate_argnums=0)
    with under(explicit):
        step(table)
    with pytest.raises(RuntimeError, match="one that was donated"):
        table.lookup(KEYS)


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("set_mesh", [False, True])
def test_a_shard_map_closes_over_a_trained_handle(explicit, set_mesh, make, mesh):
    mesh = mesh(4, explicit=explicit)
    table = add(make(dim=2, mesh=mesh), KEYS)
    keys = jax.device_put(KEYS, NamedSharding(mesh, P("x")))
    for _ in range(2):
        with under(mesh if set_mesh else None):
            np.testing.assert_array_equal(look(table, KEYS), np.ones((8, 2)))
            local = jax.shard_map(
                lambda keys: table.lookup(keys), mesh=None if set_mesh else mesh, in_specs=P("x"), out_specs=P("x")
            )
            np.testing.assert_array_equal(jax.jit(local)(keys), np.ones((8, 2)))


@pytest.mark.parametrize("maker", MAKERS)
def test_a_wrong_mesh_is_refused_and_leaves_the_handle_as_it_was(maker, make, mesh):
    explicit = mesh(4, explicit=True)
    table = MAKERS[maker](make(dim=2, mesh=explicit))
    for wrong in (mesh(data=2, model=2), mesh(data=2, model=2, explicit=True)) * 2:
        with under(wrong), pytest.raises(ValueError, match=f"table '{table.name}', lookup: want a program on the ta"):
            look(table, KEYS)
        with under(explicit):
            assert look(table, KEYS).shape == (8, 2)


@pytest.mark.parametrize("places", few(["explicit one", "explicit auto", "auto one", "explicit auto one"], 0, 3))
def test_gradients_outside_of_programs_of_tables_in_several_places(places, make, mesh):
    where = {"one": None, "auto": mesh(4), "explicit": mesh(4, explicit=True)}
    tables = [make(2, initializer=0.5, mesh=where[place]) for place in places.split()]
    grads = kvjax.grad(lambda tables: jnp.sum(sum(t.lookup(KEYS) for t in tables) ** 2))(tables)
    for each in grads:
        np.testing.assert_array_equal(each.keys, IDS)
        np.testing.assert_array_equal(each.rows, np.full((8, 2), len(tables)))


def test_gradients_beside_a_table_that_is_only_read(make, mesh):
    """Whose rows are on Explicit axes, too, though nothing is differentiated by it."""
    trained, read = make(2, initializer=0.5), make(2, initializer=0.5, mesh=mesh(4, explicit=True))
    value, _ = kvjax.value_and_grad(lambda t, read: jnp.sum(t.lookup(KEYS) + read.lookup(KEYS)))(trained, read)
    assert float(value) == 16.0 and jax.sharding.get_abstract_mesh().empty


def test_a_program_knows_the_kinds_of_axes_of_its_table(make, mesh):
    """Which are those that the table was made or moved with last."""
    meshes = [mesh(4), mesh(4, explicit=True)]
    table, weights = make(2, initializer=0.5, mesh=meshes[0]), jnp.ones((1, 2))
    for number in (0, 1, 0):
        table = kvjax.reshard(table, meshes[number])
        rows = look(table, KEYS) * jax.device_put(weights, NamedSharding(meshes[number], P()))
        np.testing.assert_array_equal(rows, np.full((8, 2), 0.5))
        for other in meshes:
            assert kvjax.get_table(table.name, dim=2, initializer=0.5, mesh=other).spec == table.spec


# What is looked at with values, before the first step: its first slots, its constants, its curve, rows of a function.
LOOKED_AT = {
    "slots": lambda: (rowwise(optax.adagrad(0.123)), {}),
    "constants": lambda: (rowwise(optax.chain(optax.clip_by_block_rms(0.7), optax.sgd(0.124))), {}),
    "constraint": lambda: (rowwise(optax.sgd(0.125)), {"constraint": kvjax.constraints.max_norm(1.1)}),
    "closed form": lambda: (catch_up(optax.adam(0.126)), {}),
    "replay": lambda: (catch_up(optax.adabelief(0.127), replay=200), {}),
    "initializer": lambda: (rowwise(optax.adagrad(0.128)), {"initializer": jax.nn.initializers.normal(0.1)}),
}


@pytest.mark.filterwarnings("ignore:kvjax. rows depend")
@pytest.mark.parametrize(
    ("case", "explicit", "check_vma"),
    few_rows(itertools.product(LOOKED_AT, [False, True], [True, False]), 0),
)
def test_a_first_step_in_shard_map_under_set_mesh(case, explicit, check_vma, make, mesh, promotion):
    """Where JAX takes what is computed for one device's, it is no other than in one place."""
    (tx, options), axes, exports = LOOKED_AT[case](), mesh(4, explicit=explicit), []

    def step(table, state, keys):
        def loss(table):
            rows = table.lookup(keys)
            return jnp.sum(rows**2 + rows)

        grads = kvjax.grad(loss)(caught_up(table, state, tx))
        return table.apply(tx, grads, state)

    for where in (axes, None):
        table = make(2, mesh=where, seed=3, **options)
        state, keys, run = tx.init(2), KEYS, step
        if where is not None:
            keys = jax.device_put(KEYS, NamedSharding(where, P("x")))
            specs = {"in_specs": (P(), P(), P("x")), "out_specs": P(), "check_vma": check_vma}
            run = jax.jit(jax.shard_map(step, mesh=where, **specs))
        with under(where):
            table, state = run(table, state, keys)
        exports.append(caught_up(table, state, tx).export(slots=True))
    one, other = exports
    np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_allclose(one.values, other.values, rtol=1e-5)
    assert len(one) == 8 and one.slots.keys() == other.slots.keys()


ON_MESH = {"nowhere": None, "whole": P(), "spread": P("x")}


@pytest.mark.parametrize("compiled", few([True, False], 0))
@pytest.mark.parametrize(("keys", "weights"), few_rows(itertools.product(ON_MESH, ["nowhere", "whole"])))
def test_rows_go_with_parameters_on_a_mesh_with_explicit_axes(keys, weights, compiled, make, mesh):
    """Wherever the keys are, and without jax.set_mesh, a step is what it is for a table in one place."""
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.adagrad(0.5))

    def step(params, state, ahead, following):
        def loss(params):
            return jnp.mean(jax.nn.relu(params["t"].lookup(ahead) * params["w"]) ** 2)

        value, grads = kvjax.value_and_grad(loss)(params)
        ahead, params["t"] = kvjax.prefetch(params["t"], following)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, ahead, value

    explicit, results, step = mesh(4, explicit=True), [], jax.jit(step) if compiled else step
    for axes in (None, explicit):

        def put(x, where, axes=axes):
            spec = ON_MESH[where]
            return x if axes is None or spec is None else jax.device_put(x, NamedSharding(axes, spec))

        params = {"t": make(2, initializer=1.0, mesh=axes), "w": put(jnp.array([[1.0, 2.0]]), weights)}
        state, ahead, values = tx.init(params), put(KEYS, keys), []
        for i in range(4):
            params, state, ahead, value = step(params, state, ahead, put(kvjax.keys(np.arange(8) + i), keys))
            values.append(float(value))
        rows = params["t"].lookup(ahead) * params["w"]
        results.append((values, np.asarray(rows), params["t"].export().values))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


# ---- several processes -----------------------------------------------------------------------------------------------


def explicit_in_two():
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    split = NamedSharding(mesh, P("x"))
    keys = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, split, lambda i: np.asarray(x)[i]), KEYS)
    step = jax.jit(
        lambda t, k: t.apply(optax.sgd(0.5), kvjax.grad(lambda t: jnp.sum((t.lookup(k) - 1) ** 2) / 2)(t))[0]
    )
    table, value = kvjax.get_table("t", dim=2, mesh=mesh), 0.0
    for now in (mesh, None, mesh):
        with under(now):
            for refresh in (True, False):
                table, value = step(table.refresh() if refresh else table, keys), (value + 1) / 2
                rows = look(table, KEYS)
                np.testing.assert_array_equal(rows.addressable_shards[0].data, value)
                np.testing.assert_array_equal(table.lookup(KEYS), np.full((8, 2), value, np.float32))
                table = table.upsert([100], [[value, value]])
    print("done", table.size(all_processes=True))


def pmap_in_two():
    table = kvjax.get_table("t", dim=2, devices=jax.devices())

    def local(table, keys):
        grads = kvjax.grad(lambda t: jnp.sum((t.lookup(keys) - 1) ** 2) / 2)(table)
        return table.apply(optax.sgd(0.25), grads)[0]

    step = jax.pmap(local, axis_name="devices", in_axes=(None, 0), out_axes=None)
    keys, value = kvjax.keys(np.tile(IDS[:4], (jax.local_device_count(), 1))), 0.0
    for _ in range(2):
        table = step(step(table, keys), keys)
        for _ in range(2):  # all four devices have each key
            value += 1 - value
        np.testing.assert_array_equal(table.lookup(KEYS[:4]), np.full((4, 2), value, np.float32))
        np.testing.assert_array_equal(look(table, KEYS[:4]).addressable_data(0), np.full((1, 2), value))
        assert set(np.asarray(table.frequency(KEYS[:4])).tolist()) <= {8, 16}
        table = table.upsert(KEYS[4:], np.full((4, 2), 7.0))
    print("done", table.size(all_processes=True))


@slow
@pytest.mark.parametrize(("target", "devices", "size"), [(explicit_in_two, 1, 9), (pmap_in_two, 2, 8)])
def test_in_two_processes(target, devices, size):
    assert all(f"done {size}" in output for output in processes.run(target, devices=devices, timeout=300))
