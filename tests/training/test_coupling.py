"""Which rows of a dense array a transform's update depends on: what the jaxpr says is what numbers do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._programs import lower
from kvjax._training import dependence
from kvjax._training.coupling import coupling_of
from kvjax._training.transform_errors import check_state
from tests.support.marks import few
from tests.support.transforms import EXTRA, transforms

pytestmark = pytest.mark.usefixtures("promotion")

ROWS, DIM = 3, 4
APART = {
    "elementwise": lambda x: jnp.where(x > 0, jnp.sin(x), x * 2.0),
    "of each row": lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True),
    "transposed": lambda x: (x.T * jnp.arange(x.shape[0])).T[:, ::1],
    "product with a matrix": lambda x: x @ jnp.ones((DIM, DIM)),
    "joined and split": lambda x: jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1),
    "cut": lambda x: jnp.concatenate([x[:, 1:], x[:, :1]], 1),
    "flat": lambda x: (x.reshape(-1) + 1.0).reshape(x.shape),
    "cond": lambda x: jax.lax.cond(jnp.bool_(True), jnp.sin, jnp.cos, x),
    "checkpoint": jax.checkpoint(jnp.tanh),
    "each sorted": lambda x: jnp.sort(x, 1),
    "running sums of each": lambda x: jnp.cumsum(x, 1),
    "frequencies of each": lambda x: jnp.fft.irfft(jnp.fft.rfft(x, axis=1), DIM, axis=1),
    "each put in order": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    "by its own place": lambda x: jax.vmap(lambda row: row + row[jnp.argmax(row)])(x),
    "a part of each": lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.int32(3), 2, 1).repeat(2, 1),
    "a part of each set": lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:, :2] * 2, jnp.int32(1), 1),
    "loop in each": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x / jnp.sum(x, 1, keepdims=True), x),
    "loop with an end": lambda x: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1],
    "scan of columns": lambda x: jax.lax.scan(lambda sum, col: (sum + col, sum), x[:, 0], x.T)[1].T,
    "scan of nothing": lambda x: x + jnp.sum(jax.lax.scan(lambda c, i: (c, c[0]), x, jnp.zeros(0))[1]),
    "one row at a time": lambda x: jax.lax.map(lambda row: row / jnp.linalg.norm(row), x),
}
TOGETHER = {
    "norm": lambda x: x / jnp.linalg.norm(x),
    "of each column": lambda x: x - jnp.mean(x, 0),
    "product of rows": lambda x: (x @ x.T) @ x,
    "moved": lambda x: x[::-1] + x,
    "greatest": lambda x: jnp.where(x == jnp.max(x), 0.0, x),
    "chosen by all": lambda x: jax.lax.cond(jnp.all(jnp.isfinite(x)), jnp.sin, jnp.cos, x),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x / jnp.sum(x), x),
    "scan": lambda x: jax.lax.scan(lambda sum, row: (sum + row, sum), jnp.zeros(DIM), x)[1],
    "sorted": lambda x: jnp.sort(x, 0),
    "running sum": lambda x: jnp.cumsum(x, 0),
    "frequencies": lambda x: jnp.fft.irfft(jnp.fft.rfft(x, axis=0), x.shape[0], axis=0),
    "put in order": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0),
    "by the place of another": lambda x: x[:, jnp.argmax(x[0])][:, None] + x,
    "any row": lambda x: x + jax.lax.dynamic_slice_in_dim(x, jnp.argmax(x[:, 0]), 1, 0),
    "a row set": lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:1] * 2, jnp.argmax(x[:, 0]), 0),
    "to the end of all": lambda x: jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, x),
    "carried": lambda x: jax.lax.scan(lambda c, i: ((c[1], c[0] * 1.0), c[0]), (x[0], x[1]), jnp.arange(2))[1],
}


@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_functions(name):
    f = (APART | TOGETHER)[name]
    assert coupling_of(optax.stateless(lambda grads, params: f(grads)), DIM, ()).updates == (name in TOGETHER)
    assert coupling_of(optax.stateless(lambda grads, params: f(params)), DIM, ()).updates == (name in TOGETHER)


def test_what_reaches_rows_by_way_of_the_state():
    """The sum of a step, of which the next one makes another, moves rows in the third."""

    def update(grads, state, params=None):
        return grads * state["last"], {"sum": jnp.sum(grads), "last": state["sum"] + 1.0, "count": state["count"] + 1}

    state = {"sum": jnp.zeros(()), "last": jnp.zeros(()), "count": 0}
    found = coupling_of(optax.GradientTransformation(lambda params: state, update), DIM, (False,) * 3)
    assert found.updates and found.leaves == (False, True, True) and found.of_rows == (False, True, True)
    assert found.where == ("test_what_reaches_rows_by_way_of_the_state",) and not any(found.starts)


def test_what_a_state_starts_from_and_what_is_kept():
    tx = optax.contrib.schedule_free_sgd(0.1)
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(tx.init(jnp.ones((1, DIM))))[0]]
    found = coupling_of(tx, DIM, [name == ".step_count" for name in names])
    assert [name for name, starts in zip(names, found.starts, strict=True) if starts] == [".z"]
    assert not found.updates


def test_the_loss_of_all_rows():
    for tx, loss in (
        (optax.polyak_sgd(), True),
        (optax.chain(optax.lamb(0.1), optax.contrib.reduce_on_plateau()), False),
    ):
        kept = [False] * len(jax.tree.leaves(tx.init(jnp.ones((1, DIM)))))
        found = coupling_of(tx, DIM, kept)
        assert found.updates and found.loss == loss


def printing(updates, params):
    jax.debug.print("norm {}", jnp.sum(updates))
    return updates


@pytest.mark.parametrize(
    "tx", [optax.stateless(printing), optax.masked(optax.adam(0.1), lambda p: jax.tree.map(lambda _: False, p))],
    ids=["print", "masked"],
)  # fmt: skip
def test_equations_without_results(tx, make):
    assert not coupling_of(tx, DIM, [False] * len(jax.tree.leaves(tx.init(jnp.zeros((1, DIM)))))).updates
    grads, state = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2))), kvjax.optax.rowwise(tx).init(2)
    np.testing.assert_array_equal(make(2).apply(tx, grads, state)[0].lookup(7), [1, 1])


def spread(tx, extra, change):
    """Whether rows come out otherwise when the gradients of the first one are changed."""
    rng = np.random.default_rng(0)
    tx, results = optax.with_extra_args_support(tx), []
    start = jnp.asarray(rng.normal(size=(ROWS, DIM)), jnp.float32)
    grads = jnp.asarray(rng.normal(size=(4, ROWS, DIM)), jnp.float32)
    for changed in (grads, change(grads)):
        values, state = start, tx.init(start)
        for grad in changed:
            updates, state = tx.update(grad, state, values, **extra)
            values = optax.apply_updates(values, updates)
        results.append(np.asarray(values)[1:])
    return not np.array_equal(*results)


ALL = transforms()


@pytest.mark.parametrize("name", few(sorted(ALL), "sgd"))
def test_rows_that_the_jaxpr_keeps_apart_stay_apart(name):
    """By a row times 100, and by a NaN."""
    tx = ALL[name]
    try:
        check_state(tx.init(jnp.zeros((ROWS, DIM))))
        found = coupling_of(tx, DIM, [False] * len(jax.tree.leaves(tx.init(jnp.zeros((1, DIM))))))
    except (AttributeError, TypeError, ValueError):
        pytest.skip("refused")
    extra = EXTRA if name == "reduce_on_plateau" or "polyak" in name else {}
    seen = [spread(tx, extra, lambda g, x=x: g.at[1:, 0].multiply(x)) for x in (100.0, np.nan)]
    assert any(seen) == found.updates


def test_a_state_that_would_be_cut_is_refused(make):
    """Dense training goes on with the dtype that an update gives."""
    tx = optax.GradientTransformation(lambda p: jnp.int32(0), lambda u, s, p=None: (-u / (1 + s), s + jnp.float32(0.5)))
    with pytest.raises(ValueError, match="whose state always has the same leaves, got int32 and then float32"):
        make(1).apply(tx, kvjax.SparseRows(np.array([7]), jnp.ones((1, 1))))


def test_what_programs_know_by_element_is_known_here():
    """Or a transform that lowers would be said to mix rows."""
    names = {name for name in lower._ELEMENTWISE if hasattr(jax.lax, f"{name}_p")}
    assert len(names) > 40 and names <= dependence._ELEMENTWISE
    primitives = {name.removesuffix("_p") for name in vars(jax.lax) if name.endswith("_p")}
    assert {"atan", "asinh", "lgamma"} <= dependence._ELEMENTWISE & primitives
