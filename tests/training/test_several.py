"""Steps over several tables in one program: all of them do theirs, or none."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import kvjax
from tests.support.marks import few, slow
from tests.support.tables import same_rows, same_tables
from tests.training.test_half_way import Fuse

REFUSED = (ValueError, RuntimeError, jax.errors.JaxRuntimeError)
TX = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.adagrad(0.1))


def limited(mesh):
    """Whether tables over it may have a capacity."""
    return mesh is None or not kvjax.ffi.on_device()


def tables_of(make, fuse, *last, mesh=None):
    """The first counts keys before they get rows and evicts some; the second is no program; then those in `last`."""
    full = {"max_capacity": 6, "on_full": "evict", "evict": kvjax.evict.LeastFrequent()}
    if not limited(mesh):
        full, last = {}, tuple({} if "on_full" in options else options for options in last)
    first = make(2, admit=kvjax.admit.MinCount(1), mesh=mesh, **full)
    return {"a": first, "b": make(2, constraint=fuse, mesh=mesh), "w": jnp.ones(2)} | {
        str(i): make(2, mesh=mesh, **options) for i, options in enumerate(last)
    }


def step(params, state, grads):
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


compiled = jax.jit(step)


def train(params, state, ids, step=compiled):
    rows = jnp.ones((len(ids), 2))
    keys = kvjax.keys(np.array(ids))
    tables = {name for name, p in params.items() if isinstance(p, kvjax.Table)}
    grads = {name: kvjax.SparseRows(keys, rows) if name in tables else p for name, p in params.items()}
    return jax.block_until_ready(step(params, state, grads))


def stats_of(table):
    """What a step counts, but for lookups, and for what it takes whether it is done or not: memory, and exchanges."""
    stats = dataclasses.asdict(table.stats())
    for name in ("capacity", "load", "bytes", "hits", "misses", "exchanged_bytes", "exchanged_keys", "rounds"):
        del stats[name]
    return stats


@pytest.mark.parametrize(
    "eager, shards",
    [(False, None), pytest.param(True, None, marks=slow), pytest.param(False, 2, marks=slow)],
    ids=["jit", "eager", "mesh"],
)
def test_none_keeps_a_step_that_one_refuses(make, mesh, eager, shards):
    run = step if eager else compiled
    fuse, full = Fuse(), {"max_capacity": 4, "on_full": "error"}
    where = None if shards is None else mesh(shards)
    params, twins = (tables_of(make, f, full, mesh=where) for f in (fuse, Fuse()))
    state, twin_state = TX.init(params), TX.init(twins)
    for ids in ([1, 2, 3], [2, 3, 4]):
        params, state = train(params, state, ids, run)
        twins, twin_state = train(twins, twin_state, ids, run)
    stats = {name: stats_of(params[name]) for name in "ab0"}
    for refuses in ("full", "fuse") if limited(where) else ("fuse",):
        fuse.blown = refuses == "fuse"
        with pytest.raises(REFUSED, match="max_capacity=4" if refuses == "full" else "the fuse has blown"):
            train(params, state, [5, 6, 7] if refuses == "full" else [1, 2], run)
        fuse.blown = False
        for name in "ab0":
            same_tables(params[name], twins[name])
            assert stats_of(params[name]) == stats[name]  # no count has moved, nor the last step
            assert int(params[name].refresh().version) == int(params[name].version)
    params, state = train(params, state, [1, 2, 4], run)  # and these handles go on
    twins, twin_state = train(twins, twin_state, [1, 2, 4], run)
    for name in "ab0":
        same_tables(params[name], twins[name])


@pytest.mark.skipif(not kvjax.ffi.on_device(), reason="about tables of a device in one place")
@slow
@pytest.mark.parametrize("eager", [False, True], ids=["jit", "eager"])
def test_a_device_tries_all_steps_before_the_first(make, eager):
    """A sink sees rows once, when the step of its table is tried: also if that of another is refused then."""
    run, seen = step if eager else compiled, []
    params = tables_of(make, Fuse(), {"max_capacity": 4, "on_full": "error"})
    params["a"] = params["a"].on_evict(lambda keys, *rest: seen.append(sorted(keys.tolist())))
    state = TX.init(params)
    for ids in ([1, 2, 3], [2, 3, 4]):
        params, state = train(params, state, ids, run)
    with pytest.raises(REFUSED, match="max_capacity=4"):
        train(params, state, [5, 6, 7], run)
    params["0"] = params["0"].remove(kvjax.keys([1, 2, 3, 4]))
    assert seen == [[1]] and 1 in params["a"].export().keys  # it stays, as the step is not done
    params, state = train(params, state, [5, 6, 7, 8], run)
    assert len(seen) == 2 and len(seen[1]) == 2


@slow
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_shards_of_any_backend_do_theirs_together(make, mesh, inside):
    """The second table is trained by another optimizer, which only its shards know."""
    place = mesh(2)
    params = {"a": make(2, mesh=place), "b": make(2, mesh=place)}
    state = TX.init(params)
    rows = kvjax.SparseRows(kvjax.keys([1, 2, 3, 4]), jnp.ones((4, 2)))
    params["b"], _ = params["b"].apply(optax.sgd(0.1, momentum=0.9), rows)
    before = {name: t.export() for name, t in params.items()}
    run = jax.shard_map(step, mesh=place, in_specs=P(), out_specs=P(), check_vma=False) if inside else step
    with pytest.raises(REFUSED, match="the optimizer whose slots the table holds"):
        jax.block_until_ready(jax.jit(run)(params, state, {"a": rows, "b": rows}))
    for name, t in params.items():
        same_rows(t.export(), before[name])
        assert int(t.refresh().version) == int(t.version)
    params["b"] = params["b"].clear_slots()
    params, state = jax.jit(run)(params, state, {"a": rows, "b": rows})
    assert params["a"].export().freqs.tolist() == [2 if inside else 1] * 4


@pytest.mark.parametrize("on_refused", ["error", "keep"])
def test_a_table_in_one_place_beside_one_over_a_mesh_is_named(make, mesh, on_refused):
    """Where XLA would say only that a write has no sharding, or that it must not have that one."""
    params = {"a": make(2, mesh=mesh(2)), "b": make(2), "c": make(2, trainable=False)}
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1), on_refused=on_refused)
    rows = kvjax.SparseRows(kvjax.keys([1]), jnp.ones((1, 2)))
    a, b = params["a"].name, params["b"].name
    for run in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=f"table '{b}', apply: want a table over the mesh of table '{a}'"):
            run({"a": rows, "b": rows, "c": rows}, tx.init(params), params)
    assert len(params["a"]) == len(params["b"]) == 0
    params |= {"b": make(2, mesh=mesh(4))}
    b = params["b"].name
    with pytest.raises(ValueError, match=rf"'{b}', apply: .*trained with it: \[0, 1\], got one over \[0, 1, 2, 3\]"):
        jax.jit(tx.update)({"a": rows, "b": rows, "c": rows}, tx.init(params), params)


@slow
def test_a_planned_step_that_is_not_done_is_forgotten(make):
    params = tables_of(make, Fuse(), {"max_capacity": 1, "on_full": "error"})
    state = TX.init(params)
    with pytest.raises(REFUSED, match="max_capacity=1"):
        train(params, state, [1, 2])
    table = params["a"].upsert(kvjax.keys([9]), jnp.ones((1, 2)))
    assert table.export().keys.tolist() == [9] and len(params["b"].upsert(kvjax.keys([1]), jnp.zeros((1, 2)))) == 1


@slow
@pytest.mark.parametrize("shards", [None, 1, 2], ids=["one place", "one", "mesh"])
def test_results_are_those_of_each_table_alone(make, mesh, shards):
    where = None if shards is None else mesh(shards)
    params = tables_of(make, Fuse(), {}, {"trainable": False}, mesh=where)
    alone = {name: make(2, seed=t.spec.seed, constraint=t.spec.constraint, admit=t.spec.admit, mesh=where)
             for name, t in params.items() if name in "ab0"}  # fmt: skip
    state = TX.init(params)
    states = dict.fromkeys(alone, ())
    for ids in ([1, 2, 1], [2, 3, 4], [4, 4, 4]):
        params, state = train(params, state, ids)
        for name in alone:
            grads = kvjax.SparseRows(kvjax.keys(np.array(ids)), jnp.ones((3, 2)))
            alone[name], states[name] = alone[name].apply(optax.adagrad(0.1), grads, states[name])
    for name in alone:
        same_tables(params[name], alone[name])


@slow
def test_tables_of_one_program_and_other_numbers(make, promotion):
    """Tables share the machines of their program, which keep powers of the last one's numbers."""
    tx = {str(i): optax.adam(0.1, b1=0.5 + i / 10) for i in range(4)}
    both = jax.jit(kvjax.optax.partition(dense=optax.set_to_zero(), tables=lambda name: tx[places[name]]).update)
    tables = {i: make(3, initializer=1.0) for i in tx}
    places = {table.name: i for i, table in tables.items()}
    keys = kvjax.keys(np.arange(300) % 170)
    grads = kvjax.SparseRows(keys, jnp.sin(jnp.arange(900.0)).reshape(300, 3))
    state = kvjax.optax.partition(optax.set_to_zero(), lambda name: tx[places[name]]).init(tables)
    alone = {i: (make(3, initializer=1.0), kvjax.optax.rowwise(tx[i]).init(3)) for i in tx}
    for _ in range(3):
        updates, state = both(dict.fromkeys(tx, grads), state, tables)
        tables = optax.apply_updates(tables, updates)
        alone = {i: table.apply(tx[i], grads, globals_) for i, (table, globals_) in alone.items()}
    for i, (table, _) in alone.items():
        np.testing.assert_array_equal(tables[i].lookup(keys), table.lookup(keys))


def test_a_transform_sees_no_rows_but_those_of_the_batch(make, promotion):
    """A chunk has space for more rows than there are; what was in that memory might be anything."""
    seen = []

    def update(updates, state, params=None):
        del params
        out = jax.ShapeDtypeStruct(updates.shape, updates.dtype)
        look = lambda g: (seen.append(np.array(g)), g)[1]  # noqa: E731
        return jax.pure_callback(look, out, updates, vmap_method="expand_dims"), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody knows what a callback does to rows
        table, _ = make(3).apply(tx, kvjax.SparseRows(np.arange(4), jnp.full((4, 3), 2.5)))
    jax.block_until_ready(table)
    assert seen and set(seen[-1].ravel().tolist()) == {2.5}


RATES = {"adagrad": optax.adagrad(0.1), "rates": optax.inject_hyperparams(optax.adagrad)(0.1)}


@pytest.mark.parametrize("name", few(RATES, "adagrad"))
def test_a_step_transfers_nothing_of_its_own(name, make):
    """Not even the one that is traced, in which a transform makes numbers."""
    params = {"t": make(2), "w": jnp.ones(2)}
    both = kvjax.optax.partition(dense=optax.sgd(0.1), tables=RATES[name])

    @jax.jit
    def step(params, state, keys):
        grads = kvjax.grad(lambda p: jnp.sum(p["t"].lookup(keys) @ p["w"]))(params)
        updates, state = both.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state, keys = jax.device_put((params, both.init(params), kvjax.keys(np.array([7, 8]))))
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            params, state = step(params, state, keys)
        jax.block_until_ready(params)
    assert len(params["t"]) == 2
