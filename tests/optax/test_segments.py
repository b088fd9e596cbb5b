"""Transforms for parts of a row: each does to its columns what it does to an array of them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.optax import check_compatibility, rowwise, scale_by_frequency, segments
from tests.support.marks import slow
from tests.support.transforms import row_by_row

pytestmark = pytest.mark.usefixtures("promotion")
DIM = 8
PARTS = {
    "bias": (0, optax.sgd(0.5, momentum=0.9)),
    "slice": (slice(-2, None), optax.adam(0.1)),
    "apart": ([-3, 1], optax.lamb(0.1)),
    "mask": (np.arange(DIM) == 3, optax.adagrad(0.1)),
}
COLUMNS = {"bias": [0], "slice": [6, 7], "apart": [1, 5], "mask": [3], "rest": [2, 4]}
REST = optax.adam(0.2)


def train(make, tx, columns):
    """Rows of some columns of what has been trained; a row is in each batch, as in dense training."""
    rng, keys = np.random.default_rng(0), np.arange(4)
    start = rng.normal(size=(4, DIM)).astype(np.float32)[:, columns]
    table, state = make(dim=len(columns)).upsert(keys, start), rowwise(tx).init(len(columns))
    step = jax.jit(lambda table, grads, state: table.apply(tx, grads, state))
    for _ in range(3):
        grads = jnp.asarray(rng.normal(size=(4, DIM)).astype(np.float32)[:, columns])
        table, state = step(table, kvjax.SparseRows(keys, grads), state)
    return table


@row_by_row
@slow
def test_parts_are_trained_like_rows_of_their_own(make):
    rows = np.asarray(train(make, segments(PARTS, rest=REST), list(range(DIM))).lookup(np.arange(4)))
    for name, columns in COLUMNS.items():
        alone = train(make, PARTS[name][1] if name in PARTS else REST, columns).lookup(np.arange(4))
        np.testing.assert_allclose(rows[:, columns], alone, rtol=1e-6, atol=1e-6, err_msg=name)


def test_slots_are_as_wide_as_their_part():
    """And named after it, where there are two of a name; a count beside moments of a part belongs to the row."""
    tx = segments({"bias": (0, optax.adam(0.1))}, rest=optax.adam(0.2))
    assert rowwise(tx).layout(4).type_texts == {
        "bias.0.count": "int32[]", "bias.0.mu": "float32[1]", "bias.0.nu": "float32[1]",
        "rest.0.count": "int32[]", "rest.0.mu": "float32[3]", "rest.0.nu": "float32[3]",
    }  # fmt: skip
    alone = segments({"bias": (0, optax.sgd(0.1))}, rest=optax.adagrad(0.2))
    assert rowwise(alone).layout(4).type_texts == {"sum_of_squares": "float32[3]"}


@slow
def test_verdicts():
    """That of the part which differs most; rows stay apart, whatever the columns."""
    for parts, rest, verdict in (
        ({"bias": ([0, 2], optax.sgd(0.1))}, optax.adagrad(0.1), "equal"),
        ({"bias": (0, optax.sgd(0.1))}, optax.adam(0.1), "lazy"),
        ({"bias": (0, optax.clip_by_global_norm(1.0))}, optax.sgd(0.1), "per row"),
        ({"bias": (0, optax.contrib.muon(0.1))}, optax.sgd(0.1), "refused"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert check_compatibility(segments(parts, rest=rest), 4).verdict == verdict


@slow
def test_facts_masks_and_dense_trees(make):
    tx = segments({"bias": (0, optax.chain(scale_by_frequency(-1.0), optax.sgd(1.0)))}, rest=optax.set_to_zero())
    table, _ = make(dim=2).apply(tx, kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 2))))
    assert table.lookup(7).tolist() == [-1.0, 0.0]
    params = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(2)}
    tx = segments({"first": (0, optax.sgd(1.0))}, rest=optax.sgd(2.0))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    assert updates["a"].tolist() == [[-1, -2, -2]] * 2 and updates["b"].tolist() == [-1, -2]


def test_what_are_no_parts_is_refused(make):
    sgd = optax.sgd(0.1)
    for parts, error, words in (
        ([(0, sgd)], TypeError, "a mapping from names"), ({"a": sgd}, TypeError, "a mapping from names"),
        ({"rest": (0, sgd)}, ValueError, "'rest'"), ({"a": ("0", sgd)}, TypeError, "columns of 'a'"),
        ({"a": ([], sgd)}, TypeError, "columns of 'a'"), ({"a": (0, 0.1)}, TypeError, "optax transform"),
        ({"a": ([True, 1], sgd)}, TypeError, "columns of 'a'"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            segments(parts, rest=sgd)
    for parts, words in (
        ({"a": (0, sgd), "b": (slice(0, 2), sgd)}, "column 0 in 'a' and 'b'; take it"),
        ({"a": (2, sgd)}, "row of 2, .*column 2;"),
        ({"a": (-3, sgd)}, "row of 2, .*column -1;"), ({"a": (slice(None), sgd)}, "none of 2 for 'rest'"),
        ({"a": ([False], sgd)}, "none of 2 for 'a'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            segments(parts, rest=sgd).init(jnp.zeros((1, 2)))
        with pytest.raises(ValueError, match=f"^kvjax: segments: want .*{words}"):  # and no other error around it
            rowwise(segments(parts, rest=sgd)).init(2)
    table, tx = make(dim=2), segments({"a": (2, sgd)}, rest=sgd)
    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    for op, call in (
        ("apply", lambda: table.apply(tx, grads)), ("switch_optimizer", lambda: table.switch_optimizer(tx)),
        ("partition", lambda: kvjax.optax.partition(dense=sgd, tables=tx).init({"t": table})),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^kvjax: table '{table.name}', {op}, segments: want columns .*column 2;"):
            call()
