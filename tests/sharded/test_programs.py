"""A sharded table works unchanged in every kind of JAX program.

Each case trains a table over a mesh and one in a single place in a plain program, and compares them:
rows, frequencies and versions to the bit (no key stands twice in a batch), losses and dense parameters to rounding.
"""

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
from tests.support.marks import few, few_rows, slow
from tests.support.tables import same_rows

OPTIONS = {"dim": 4, "initializer": kvjax.initializers.normal(0.1), "seed": 3}
TX = optax.adagrad(0.5)
_rng = np.random.default_rng(0)
BATCHES = [_rng.permutation(90)[:24] * 7919**3 for _ in range(3)]
X = _rng.normal(size=(24, 4)).astype(np.float32)


def loss(params, keys, x):
    # The gradient of a row is one product, so that there is no sum whose order or rounding could differ.
    rows = params["t"].lookup(keys)
    return jnp.sum(rows * jax.lax.stop_gradient(rows) * x) + jnp.sum(params["b"] * jnp.sum(x, 0))


def step(params, state, keys, x, value_and_grad=None):
    value, grads = (value_and_grad or kvjax.value_and_grad(loss))(params, keys, x)
    table, state = params["t"].apply(TX, grads["t"], state)
    return {"t": table, "b": params["b"] - 0.1 * grads["b"]}, state, value


def summed(axes):
    """`step` of one device, for ``shard_map`` and ``pmap``."""

    def value_and_grad(params, keys, x):
        value, grads = kvjax.value_and_grad(loss)(params, keys, x)
        varies = jax.typeof(value).manual_axis_type.varying  # then check_vma is on, and JAX sums what is dense itself
        grads["b"] = grads["b"] if varies else jax.lax.psum(grads["b"], axes)
        return jax.lax.psum(value, axes), grads

    return lambda params, state, keys, x: step(params, state, keys, x, value_and_grad)


def train(step, table, put=lambda keys, x: (keys, x), params=lambda params: params):
    """Losses, the table and the dense parameter after three steps; put and params place a batch and the parameters."""
    state = kvjax.optax.rowwise(TX).init(4)
    params, losses = params({"t": table, "b": jnp.zeros(4)}), []
    for ids in BATCHES:
        params, state, value = step(params, state, *put(kvjax.keys(ids), X))
        losses.append(float(np.ravel(value)[0]))
    return losses, table.refresh().export(slots=True), np.reshape(params["b"], (-1, 4))[0]


@pytest.fixture
def check(make):
    want = train(jax.jit(step), make(**OPTIONS))

    def check(got):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
        np.testing.assert_allclose(got[2], want[2], rtol=1e-5, atol=1e-6)
        same_rows(want[1], got[1])

    return check


def split(mesh, *axes):
    sharding = NamedSharding(mesh, P(*axes))
    return lambda *arrays: jax.device_put(arrays, sharding)


def whole(mesh):
    return lambda params: {"t": params["t"], "b": jax.device_put(params["b"], NamedSharding(mesh, P()))}


def on(mesh, set_mesh):
    return jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext()


@pytest.mark.parametrize(("explicit", "set_mesh"), few_rows(itertools.product(*[[False, True]] * 2), 0))
def test_jit(make, mesh, check, explicit, set_mesh):
    mesh = mesh(4, explicit=explicit)
    table = make(**OPTIONS, mesh=mesh)
    with on(mesh, set_mesh):
        check(train(jax.jit(step), table, split(mesh, "x"), whole(mesh)))


@slow
def test_jit_of_arrays_that_are_in_one_place(make, mesh, check):
    check(train(jax.jit(step), make(**OPTIONS, mesh=mesh(8))))


@slow
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_eager(make, mesh, check, explicit):
    mesh = mesh(4, explicit=explicit)
    table = make(**OPTIONS, mesh=mesh)
    with on(mesh, explicit):  # or JAX itself cannot differentiate
        check(train(step, table, split(mesh, "x"), whole(mesh)))


@slow
def test_keys_of_numpy(make, mesh, check):
    check(train(step, make(**OPTIONS, mesh=mesh(4)), lambda keys, x: (np.asarray(keys), x)))


@pytest.mark.parametrize(("check_vma", "explicit", "set_mesh"), few_rows(itertools.product(*[[False, True]] * 3), 5))
def test_shard_map(make, mesh, check, check_vma, explicit, set_mesh):
    mesh = mesh(4, explicit=explicit)
    table = make(**OPTIONS, mesh=mesh)
    with on(mesh, set_mesh):
        mapped = jax.shard_map(
            summed("x"), mesh=None if set_mesh else mesh, in_specs=(P(), P(), P("x"), P("x")), out_specs=P(),
            check_vma=check_vma,
        )  # fmt: skip
        check(train(jax.jit(mapped), table, split(mesh, "x"), whole(mesh)))


@pytest.mark.parametrize("check_vma", few([False, True]))
def test_shard_map_that_closes_over_the_table(make, mesh, check, check_vma):
    mesh = mesh(4)

    @jax.jit
    def step(params, state, keys, x):
        def local(keys, x):
            return summed("x")(params, state, keys, x)

        return jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=check_vma)(keys, x)

    check(train(step, make(**OPTIONS, mesh=mesh), split(mesh, "x")))


@pytest.mark.parametrize(("check_vma", "set_mesh"), few_rows(itertools.product(*[[False, True]] * 2)))
def test_value_and_grad_around_a_shard_map(make, mesh, check, check_vma, set_mesh):
    mesh = mesh(4)

    def mapped(params, keys, x):
        def local(params, keys, x):
            return jax.lax.psum(loss(params, keys, x), "x")

        specs = {"in_specs": (P(), P("x"), P("x")), "out_specs": P()}
        return jax.shard_map(local, mesh=mesh, **specs, check_vma=check_vma)(params, keys, x)

    with on(mesh, set_mesh):
        around = jax.jit(lambda *args: step(*args, kvjax.value_and_grad(mapped)))
        check(train(around, make(**OPTIONS, mesh=mesh), split(mesh, "x")))


def test_value_and_grad_around_a_shard_map_that_hides_what_it_needs(make, mesh):
    def grads(mesh, check_vma):
        table = make(**OPTIONS, mesh=mesh, axis="data")

        def loss(table, keys):
            local = jax.shard_map(
                lambda table, keys: jax.lax.psum(jnp.sum(table.lookup(keys)), "data"),
                mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma,
            )  # fmt: skip
            return local(table, keys)

        return jax.jit(kvjax.grad(loss))(table, *split(mesh, "data")(kvjax.keys(BATCHES[0])))

    assert grads(mesh(data=2, model=2), True).rows.sum() == 24 * 4
    with pytest.raises(ValueError, match=r"check_vma=False hides .*; call value_and_grad inside the shard_map"):
        grads(mesh(data=2, model=2), False)
    explicit = mesh(data=2, model=2, explicit=True)
    with jax.set_mesh(explicit), pytest.raises(ValueError, match="under Explicit axes; call value_and_grad inside"):
        grads(explicit, True)


def pieces(keys, x):
    return keys.reshape(4, -1), x.reshape(4, -1, 4)


def test_pmap(make, mesh, check):
    options = {"axis_name": "x", "devices": list(mesh(4).devices)}
    mapped = jax.pmap(summed("x"), in_axes=(None, None, 0, 0), out_axes=None, **options)
    check(train(mapped, make(**OPTIONS, mesh=mesh(4)), pieces))


@slow
def test_pmap_of_replicated_state(make, mesh, check):
    def copies(params):
        return jax.tree.map(lambda x: jnp.broadcast_to(x[None], (4, *x.shape)), params)

    mapped = jax.pmap(summed("x"), axis_name="x", devices=list(mesh(4).devices))
    check(train(mapped, make(**OPTIONS, mesh=mesh(4)), pieces, copies))


PLACEMENTS = {
    "copied over model": {"axis": "data"},
    "over both": {"axis": ("data", "model")},
    "swapped": {"axis": ("model", "data")},
    "replicated": {"replicated": True},
    "replicated over data": {"axis": "data", "replicated": True},
}


# How keys are sharded means the same to the table in all kinds of programs, so not all three have to meet each other.
QUICK = {"over both-explicit-both"}
MEETINGS = [
    pytest.param(
        placement, program, keys, id=(id_ := f"{placement}-{program}-{name}"), marks=() if id_ in QUICK else slow
    )
    for placement in PLACEMENTS
    for program in ("jit", "explicit", "shard_map")
    for name, keys in {"data": "data", "both": ("data", "model"), "none": None}.items()
    if program == "jit" or placement == "over both" or name == "both"
]


@pytest.mark.parametrize(("placement", "program", "keys"), MEETINGS)
def test_meshes_of_two_axes(make, mesh, check, placement, program, keys):
    """Whatever the keys are split over: each is looked up once, trained once and counted once."""
    mesh = mesh(data=2, model=2, explicit=program == "explicit")
    table = make(**OPTIONS, **PLACEMENTS[placement], mesh=mesh)
    run = step
    if program == "shard_map":
        run = step if keys is None else summed(keys)
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P(), P(keys), P(keys)), out_specs=P())
    with on(mesh, program == "explicit"):
        check(train(jax.jit(run), table, split(mesh, keys), whole(mesh)))


@slow
def test_without_check_vma_each_device_has_its_own_batch(make, mesh):
    """JAX does not know then what is the same on several devices; copies of a table must get the same."""
    mesh = mesh(data=2, model=2)
    grads = kvjax.SparseRows(np.arange(8), jnp.ones((8, 4)))

    def freqs(axis, *keys):
        table = make(dim=4, mesh=mesh, axis=axis)
        specs = (P(), grads.replace(keys=P(*keys), rows=P(*keys), counts=P(*keys), canary=P()))
        apply = jax.shard_map(
            lambda table, grads: table.apply(optax.sgd(1.0), grads)[0],
            mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False,
        )  # fmt: skip
        return set(jax.jit(apply)(table, grads).export().freqs.tolist())

    assert freqs("data", "data") == {1}
    assert freqs(("data", "model"), ("data", "model")) == {1}
    assert freqs(("data", "model"), "data") == {2}
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="the same call with the same keys"):
        freqs("data", ("data", "model"))


@pytest.mark.parametrize("program", few(["jit", "explicit", "vma", "no vma", "vma, whole", "pmap"], "explicit"))
def test_writes(make, mesh, program):
    rng = np.random.default_rng(1)
    keys, rows = rng.integers(0, 40, 24), rng.normal(size=(24, 4)).astype(np.float32)
    exists = rng.random(24) < 0.5

    def writes(table, keys, rows, exists):
        read, table = table.lookup_or_insert(keys)
        table = table.upsert(keys, rows).add(keys, rows).assign(keys, read)
        table = table.accum(keys, read, rows, exists).pin(keys).unpin(keys)
        table = table.evict(kvjax.evict.MinNorm(0.5), step=3).remove(Keys(keys.words ^ jnp.uint32(1)))
        return table.clear_slots(), table.contains(keys)

    Keys = kvjax.Keys
    mesh = mesh(4, explicit=program == "explicit")
    one, sharded = make(**OPTIONS), make(**OPTIONS, mesh=mesh)
    args = (kvjax.keys(keys), rows, exists)
    want, contained = jax.jit(writes)(one, *args)
    if program == "pmap":
        run = jax.pmap(writes, "x", in_axes=(None, 0, 0, 0), out_axes=(None, 0), devices=list(mesh.devices))
        args = jax.tree.map(lambda x: x.reshape(4, 6, *x.shape[1:]), args)
    else:
        axis = P() if program == "vma, whole" else P("x")
        run, maps = writes, program in ("vma", "no vma", "vma, whole")
        if maps:
            specs = {"in_specs": (P(), axis, axis, axis), "out_specs": (P(), axis)}
            run = jax.shard_map(writes, mesh=mesh, check_vma=program != "no vma", **specs)
        args = jax.device_put(args, NamedSharding(mesh, axis))
    with on(mesh, program == "explicit"):
        got, found = jax.jit(run)(sharded, *args)
    same_rows(want.export(), got.export())
    np.testing.assert_array_equal(np.ravel(found), contained)


def test_types_of_results(make, mesh):
    mesh = mesh(data=2, model=2, explicit=True)
    table = make(**OPTIONS, mesh=mesh, axis="data")
    keys = jax.device_put(kvjax.keys(np.arange(16).reshape(4, 4)), NamedSharding(mesh, P("data", "model")))

    @jax.jit
    def f(table, keys):
        rows, found = table.lookup(keys, return_found=True)
        grads = kvjax.grad(lambda t: jnp.sum(t.lookup(keys)))(table)
        table, _ = table.apply(TX, grads)
        assert jax.typeof(rows).sharding.spec == P("data", "model", None)
        assert jax.typeof(found).sharding.spec == P("data", "model")
        assert jax.typeof(table.frequency(keys)).sharding.spec == P("data", "model")
        assert jax.typeof(grads.rows).sharding.spec == P("data", "model", None)
        assert jax.typeof(grads.keys.words).sharding.spec == P("data", "model", None)
        assert jax.typeof(table.version).sharding.spec == P()
        return rows, table

    with jax.set_mesh(mesh):
        rows, table = f(table, keys)
    assert rows.sharding.spec == P("data", "model", None) and len(table) == 16


@pytest.mark.parametrize("op", few(["lookup", "upsert", "apply"]))
def test_wrong_contexts(op, make, mesh):
    table = make(**OPTIONS, mesh=mesh(4))
    keys, grads = kvjax.keys(np.arange(8)), kvjax.SparseRows(np.arange(8), jnp.ones((8, 4)))
    two = mesh(x=4, y=2)
    permuted = jax.sharding.Mesh(np.array(jax.devices()[:4])[::-1], ("x",))
    elsewhere = jax.sharding.Mesh(np.array(jax.devices()[4:]), ("x",))
    op = {
        "lookup": lambda t: t.lookup(keys),
        "upsert": lambda t: t.upsert(keys, jnp.ones((8, 4))).version,
        "apply": lambda t: t.apply(TX, grads)[0].version,
    }[op]

    def mapped(op, mesh, **options):
        return jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False, **options))

    def under(op, mesh):
        def call(table):
            with jax.set_mesh(mesh):
                return op(table)

        return call

    for call, message in (
        (mapped(op, mesh(2)), "want a program on the table's mesh, {'x': 4}, got one on a mesh {'x': 2}"),
        (mapped(op, two), "got one on a mesh {'x': 4, 'y': 2}"),
        (mapped(op, mesh(y=4)), "got one on a mesh {'y': 4}"),
        (under(op, mesh(y=4)), "got one on a mesh {'y': 4}"),
        (under(op, mesh(2, explicit=True)), "got one on a mesh {'x': 2}"),
        (mapped(op, permuted), "want a program on the mesh that the table was made with .this device has shard"),
        (mapped(op, elsewhere), "want a call on a device of the table's mesh, got one on device"),
        (under(op, permuted), "want a program on the mesh that the table was made with"),
    ):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            jax.block_until_ready(call(table))
    both = make(**OPTIONS, mesh=two, axis="x")
    partly = mapped(lambda t: t.lookup(keys), two, axis_names={"x"})
    with pytest.raises(ValueError, match=r"over all axes of the mesh, \('x', 'y'\), got one over \('x',\) alone"):
        partly(both)
    assert table.refresh().version == table.version
