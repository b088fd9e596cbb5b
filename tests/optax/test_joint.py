"""Transforms of all gradients together: `joint` and `global_norm` are those of dense arrays, or refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import kvjax
from tests.support.marks import few, slow
from tests.support.training import OPTIMIZERS, batches, kv_step, loss_fn, rows_of, states, train_both, wide

pytestmark = pytest.mark.usefixtures("promotion")


def test_clip_by_global_norm_is_that_of_a_dense_table():
    dense, state = train_both(*states(OPTIMIZERS["sgd"], clip=optax.clip_by_global_norm(0.1)), "all")
    np.testing.assert_allclose(rows_of(state), dense.params["Embed_0"]["embedding"], rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("make_tx", few([optax.clip_by_block_rms, optax.add_noise], 0), ids=["block_rms", "noise"])
def test_joint_refuses_what_depends_on_rows_of_zeros(make_tx, make):
    """Duplicates leave such rows behind, and a dense table has one for each id that is not in the batch."""
    tx = make_tx(1.0, 0.5, jax.random.key(0)) if make_tx is optax.add_noise else make_tx(0.1)
    for init in (kvjax.optax.joint(tx).init, jax.jit(kvjax.optax.joint(tx).init)):
        with pytest.raises(ValueError, match=r"kvjax: joint: want .*rows of zeros"):
            init({"t": make(2), "w": jnp.ones(3)})


BY_PATH = {"t": True, "other": False, "w": False}
GROUPS = {"clipped": optax.clip_by_global_norm(0.5), "others": optax.identity()}


def by_path(tree):
    return jax.tree_util.tree_map_with_path(lambda path, x: BY_PATH[path[0].key], tree)


@pytest.mark.parametrize("mask", few([BY_PATH, by_path], 1), ids=["tree", "function"])
def test_joint_may_choose_places_of_the_tree(mask, make):
    """It is tried on the tree that it is for: a mask finds tables at their places."""
    params = {"t": make(2), "other": make(3), "w": jnp.ones(3)}
    labels = jax.tree.map(lambda chosen: "clipped" if chosen else "others", BY_PATH)
    grads = {
        "t": kvjax.SparseRows(np.array([1, 2, 2]), jnp.array([[1.0, 1.0], [0.5, 0.5], [0.5, 0.5]])),
        "other": kvjax.SparseRows(np.array([1]), jnp.ones((1, 3))),
        "w": jnp.ones(3),
    }
    for tx in (optax.masked(GROUPS["clipped"], mask), optax.multi_transform(GROUPS, labels)):
        joint = kvjax.optax.joint(tx)
        got, _ = joint.update(grads, joint.init(params), params)
        np.testing.assert_allclose(got["t"].rows[:2], np.full((2, 2), 0.25), rtol=1e-6)
        assert (got["other"].rows == 1).all() and (got["w"] == 1).all()
    decayed = kvjax.optax.joint(optax.masked(optax.add_decayed_weights(0.5), {**BY_PATH, "t": False, "w": True}))
    assert (decayed.update(grads, decayed.init(params), params)[0]["w"] == 1.5).all()
    for tx, wanted in (
        (optax.clip_by_block_rms(0.1), "rows of zeros"), (optax.add_decayed_weights(0.1), "gradients alone"),
        (optax.trace(0.9), "without state per element"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"joint: want .*{wanted}"):
            kvjax.optax.joint(optax.masked(tx, mask)).init(params)
    only_measures = optax.stateless(lambda updates, params: optax.tree.norm(updates))
    with pytest.raises(ValueError, match=r"joint: want updates \(3, 2\) of such rows, got \(\)"):
        kvjax.optax.joint(only_measures).init(params["t"])
    with pytest.raises(ValueError, match="joint: want updates of 3 arrays, got 1"):
        kvjax.optax.joint(only_measures).init(params)


def test_joint_takes_what_its_trial_cannot_show(make):
    """A transform that asks for what only a step has, sums that nearly cancel, and None among the parameters."""
    wide = np.random.default_rng(1).normal(size=(1024, 1024)).astype(np.float32)

    def of_a_shape(updates, params):
        assert updates["w"].shape == (3,)
        return updates

    params = {"t": make(1024), "w": jnp.ones(3), "none": None}
    for update in (of_a_shape, lambda updates, params: {**updates, "t": updates["t"] @ wide}):
        kvjax.optax.joint(optax.stateless(update)).init(params)


def test_joint_begins_as_it_goes_on(make, x64):
    tx = kvjax.optax.joint(
        optax.GradientTransformation(
            lambda params: jax.tree.map(lambda x: jnp.zeros((), x.dtype), params),
            lambda updates, state, params: (updates, jax.tree.map(lambda x: x.sum(), updates)),
        )
    )
    params = {"t": make(2), "w": jnp.ones(3, jnp.float32)}
    state = tx.init(params)
    grads = {"t": kvjax.SparseRows([1], jnp.ones((1, 2), jnp.float32)), "w": params["w"]}
    assert jax.tree.map(jnp.result_type, tx.update(grads, state)[1]) == jax.tree.map(jnp.result_type, state)


@pytest.mark.parametrize("tx", [optax.add_decayed_weights(0.1), optax.adaptive_grad_clip(0.1), optax.adam(1.0)])
def test_joint_refuses_what_reads_rows_or_keeps_them(tx, make):
    """Where all parameters are tables, too."""
    for params in ({"t": make(2)}, {"t": make(2), "w": jnp.ones(3)}):
        with pytest.raises(ValueError, match=r"joint.* wants? .*(of gradients alone|without state per element)"):
            kvjax.optax.joint(tx).init(params)


@pytest.mark.parametrize(
    "tx",
    few([optax.clip_by_global_norm(0.5), optax.clip(0.1), optax.normalize_by_update_norm(), optax.centralize()], 0, 1),
)
def test_joint_is_that_of_dense_gradients_wherever_duplicates_stand(tx, make):
    joint, params = kvjax.optax.joint(tx), {"t": make(2), "w": jnp.ones(3)}
    state, w, rows = (
        joint.init(params),
        jnp.array([3.0, -4.0, 0.5]),
        np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2),
    )
    dense = {"t": jnp.asarray(np.stack([rows[0], rows[1] + rows[2], rows[3]])), "w": w}
    want, _ = tx.update(dense, tx.init(dense))
    for order in ([0, 1, 2, 3], [1, 2, 0, 3], [3, 2, 1, 0]):
        grads = {"t": kvjax.SparseRows(np.array([5, 6, 6, 7])[order], jnp.asarray(rows[order])), "w": w}
        got, _ = joint.update(grads, state, params)
        np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5)
        found = dict(zip(np.asarray(got["t"].keys).tolist(), got["t"].rows, strict=True))
        np.testing.assert_allclose([found[5], found[6], found[7]], want["t"], rtol=1e-5)


def test_clipping_the_raw_gradient_tree_is_refused():
    _, state = states(OPTIMIZERS["sgd"])
    tx = optax.chain(optax.clip_by_global_norm(0.1), state.tx)
    state = TrainState.create(apply_fn=state.apply_fn, params=state.params, tx=tx)
    with pytest.raises((TypeError, ValueError, jax.errors.JaxRuntimeError)):
        jax.block_until_ready(jax.jit(kv_step)(state, wide([1]), jnp.ones(1)))


def test_global_norm_takes_no_tables(make):
    with pytest.raises(TypeError, match="global_norm: want gradients, got a tree with tables"):
        kvjax.optax.global_norm({"t": make(), "w": jnp.ones(2)})


@slow
def test_global_norm_is_that_of_a_dense_table():
    dense, state = states(OPTIMIZERS["sgd"])
    ids, y = next(batches("all", steps=1))
    want = jax.grad(lambda p: loss_fn(dense.apply_fn, p, jnp.asarray(ids), y))(dense.params)
    got = kvjax.grad(lambda p: loss_fn(state.apply_fn, p, wide(ids), y))(state.params)
    np.testing.assert_allclose(kvjax.optax.global_norm(got), optax.tree.norm(want), rtol=1e-5)
