"""What decides about a whole step decides inside shard_map and pmap as it does under jit, and on all devices alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from tests.support.marks import few_rows, slow

DEVICES, STEPS = 4, 3
_rng = np.random.default_rng(0)
# Keys that several devices have, keys that one device alone has, and a target that is not finite on one device.
IDS = [_rng.integers(0, 12, 16) * 7919**3 for _ in range(STEPS)]
Y = [_rng.normal(size=16).astype(np.float32) * 4 for _ in range(STEPS)]
BAD = [y if i != 1 else np.where(np.arange(16) == 0, np.nan, y).astype(np.float32) for i, y in enumerate(Y)]


def inner():
    return kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.adagrad(0.1))


WRAPPERS = {
    "clip": (lambda: optax.chain(kvjax.optax.joint(optax.clip_by_global_norm(0.5)), inner()), Y),
    "clip and finite": (
        lambda: kvjax.optax.apply_if_finite(optax.chain(kvjax.optax.joint(optax.clip_by_global_norm(0.5)), inner()), 5),
        BAD,
    ),
    "scale": (lambda: kvjax.optax.scale_loss(inner(), 4.0, 2), BAD),
    "small alone": (lambda: kvjax.optax.apply_if(inner(), lambda grads: optax.tree.norm(grads) < 5.9), Y),
    "accumulate": (lambda: kvjax.optax.accumulate(kvjax.optax.apply_if_finite(inner(), 5), 3), Y),
}
# Of the gradients that are kept each device has its own.
OWN = {"accumulate": lambda same, own: kvjax.optax.AccumulateState(same, own, same)}
CASES = [(w, p) for w in WRAPPERS for p in ("vma", "no vma", "pmap")]


def step_of(tx, over, pieces=DEVICES):
    """over: the axis over which the step's loss is a mean, or None where it is of the whole batch."""

    def step(params, state, keys, y):
        scale = optax.tree_utils.tree_get(state, "loss_scale", 1.0)

        def loss(params):
            value = jnp.mean((params["t"].lookup(keys) @ params["w"] - y) ** 2) * scale
            return jax.lax.pmean(value, over) if over and jax.typeof(value).manual_axis_type.varying else value

        grads = kvjax.grad(loss)(params)
        if over and not _tracked(keys):  # else JAX has summed them itself
            grads = {"t": kvjax.merge(grads["t"], scale=1 / pieces), "w": jax.lax.pmean(grads["w"], over)}
        norm = kvjax.optax.global_norm(grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, norm

    return step


def _tracked(keys):
    return bool(jax.typeof(keys.words).manual_axis_type.varying)


def run(step, table, tx, ys, put=lambda x: x):
    params = {"t": table, "w": jnp.array([1.0, -2.0, 0.5])}
    state, norms = tx.init(params), []
    for ids, y in zip(IDS, ys, strict=True):
        params, state, norm = step(params, state, *put((kvjax.keys(ids), y)))
        norms.append(np.ravel(norm)[0])
        state = jax.tree.map(np.asarray, state)  # as it would be saved
    return params, norms


@pytest.mark.parametrize(("wrapper", "program"), few_rows(CASES, 4))
def test_as_under_jit(wrapper, program, make, mesh):
    make_tx, ys = WRAPPERS[wrapper]
    tx, options = make_tx(), {"dim": 3, "initializer": kvjax.initializers.normal(0.5), "seed": 3}
    want, want_norms = run(jax.jit(step_of(tx, None)), make(**options), tx, ys)
    mesh = mesh(DEVICES)
    table, step = make(**options, mesh=mesh), step_of(tx, "x")
    of_state = OWN.get(wrapper, lambda same, own: same)
    if program == "pmap":
        axes = None, of_state(None, 0)
        pmapped = jax.pmap(step, "x", in_axes=(*axes, 0, 0), out_axes=(*axes, 0), devices=list(mesh.devices))
        got, norms = run(
            pmapped, table, tx, ys, lambda batch: jax.tree.map(lambda x: x.reshape(DEVICES, -1, *x.shape[1:]), batch)
        )
    else:
        state = of_state(P(), P("x"))
        specs = {"in_specs": (P(), state, P("x"), P("x")), "out_specs": (P(), state, P())}
        mapped = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=program == "vma", **specs))
        sharding = NamedSharding(mesh, P("x"))
        got, norms = run(mapped, table, tx, ys, lambda batch: jax.device_put(batch, sharding))
    np.testing.assert_allclose(norms, want_norms, rtol=1e-5)
    for shard in got["w"].addressable_shards:
        np.testing.assert_allclose(np.asarray(shard.data), want["w"], rtol=1e-5)
    one, other = want["t"].export(), got["t"].export()
    assert one.keys.tolist() == other.keys.tolist() and one.freqs.tolist() == other.freqs.tolist()
    np.testing.assert_allclose(other.values, one.values, rtol=1e-4, atol=1e-6)


@slow
@pytest.mark.parametrize("check_vma", [False, True], ids=["no vma", "vma"])
@pytest.mark.parametrize(
    ("options", "axis"),
    [({"axis": "x"}, "x"), ({"axis": ("x", "y")}, ("x", "y")), ({"replicated": True}, ("x", "y"))],
    ids=["copied over y", "over both", "replicated"],
)
def test_meshes_of_two_axes(options, axis, check_vma, make, mesh):
    """Copies of a table all get the same gradient, which counts once."""
    make_tx, _ = WRAPPERS["clip and finite"]
    tx, made = make_tx(), {"dim": 3, "initializer": kvjax.initializers.normal(0.5), "seed": 3}
    want, want_norms = run(jax.jit(step_of(tx, None)), make(**made), tx, Y)
    mesh = mesh(x=2, y=2)
    spec = P(axis)
    specs = {"in_specs": (P(), P(), spec, spec), "out_specs": (P(), P(), P())}
    step = step_of(tx, axis, 2 if axis == "x" else 4)
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))
    put = lambda batch: jax.device_put(batch, NamedSharding(mesh, spec))  # noqa: E731
    got, norms = run(mapped, make(**made, **options, mesh=mesh), tx, Y, put)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-5)
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5)
    np.testing.assert_allclose(got["t"].export().values, want["t"].export().values, rtol=1e-4, atol=1e-6)


@slow
@pytest.mark.parametrize("check_vma", [False, True], ids=["no vma", "vma"])
def test_empty_batches(check_vma, make, mesh):
    mesh, tx = mesh(DEVICES), WRAPPERS["clip and finite"][0]()
    params = {"t": make(3, mesh=mesh), "w": jnp.ones(3)}

    def step(params, state, keys):
        grads = kvjax.grad(lambda params: jnp.sum(params["t"].lookup(keys) @ params["w"]))(params)
        updates, state = tx.update({"t": grads["t"], "w": jnp.zeros(3)}, state, params)
        return optax.apply_updates(params, updates), state, kvjax.optax.global_norm({"t": grads["t"]})

    specs = {"in_specs": (P(), P(), P("x")), "out_specs": (P(), P(), P())}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=check_vma, **specs))
    got, _, norm = mapped(params, tx.init(params), kvjax.keys(np.zeros(0, np.int64)))
    assert len(got["t"]) == 0 and float(norm) == 0
