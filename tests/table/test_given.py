"""Numbers that a caller gives as rows: what JAX would cut to 32 bits keeps its value."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax

LARGE = 1_700_000_000_000  # a time in milliseconds


@pytest.mark.parametrize(
    "given",
    [np.array([[LARGE, -LARGE]]), [[LARGE, -LARGE]], np.array([[2**63, 1]], np.uint64)],
    ids=["int", "list", "u"],
)
def test_large_integers_are_not_cut(given, make, x64):
    want = np.asarray(given, np.float32)
    table = make(2)
    for write in (
        lambda: table.upsert([7], given),
        lambda: table.refresh().assign([7], given),
        lambda: table.refresh().upsert([7], np.zeros((1, 2))).add([7], given),
        lambda: (
            table.refresh()
            .upsert([7], np.zeros((1, 2)))
            .apply(optax.sgd(-1.0), kvjax.SparseRows(np.array([7]), given))[0]
        ),
    ):
        np.testing.assert_array_equal(write().lookup([7]), want)
    table = table.refresh()
    np.testing.assert_array_equal(table.lookup([99], missing=np.asarray(given)[0]), want)
    ones = table.upsert([7], np.ones((1, 2)))
    bag = kvjax.lookup_bag(ones, [[7]], weights=np.asarray(given)[:, :1], combiner="sum")
    np.testing.assert_array_equal(bag, want[:, :1].repeat(2, 1))


def test_small_integers_stay_integers():
    rows = kvjax.SparseRows(np.array([8]), np.array([[1, 2]])).rows
    assert jnp.issubdtype(rows.dtype, jnp.integer)
