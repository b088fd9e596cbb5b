"""Arrays that a caller gives: taken as they are at the call, and what JAX would cut to 32 bits keeps its value."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few

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


N, DIM = 1 << 15, 16  # arrays that JAX would not copy at once
KEYS = np.arange(N)


def _applied(table, rows, counts):
    return table.apply(optax.sgd(-1.0), kvjax.SparseRows(KEYS, rows, counts))[0].lookup(KEYS)


BY_VALUE = {
    "upsert": (lambda t, x: t.upsert(KEYS, x).lookup(KEYS), np.full((N, DIM), 3.0, np.float32)),
    "upsert, float64": (lambda t, x: t.upsert(KEYS, x).lookup(KEYS), np.full((N, DIM), 3.0)),
    "assign": (lambda t, x: t.assign(KEYS, x).lookup(KEYS), np.full((N, DIM), 3.0, np.float32)),
    "add": (lambda t, x: t.add(KEYS, x).lookup(KEYS), np.full((N, DIM), 3.0, np.float32)),
    "accum": (lambda t, x: t.accum(KEYS, x, 3 * x, x[:, 0] > 0).lookup(KEYS), np.full((N, DIM), 3.0, np.float32)),
    "keys": (lambda t, x: t.lookup(x), KEYS.copy()),
    "mask": (lambda t, x: t.lookup(KEYS, mask=x), np.ones(N, bool)),
    "gradient": (lambda t, x: _applied(t, x, None), np.full((N, DIM), 3.0, np.float32)),
    "counts": (lambda t, x: _applied(t, np.ones((N, DIM), np.float32), x), np.ones(N, np.int32)),
    "lengths": (lambda t, x: kvjax.lookup_bag(t, KEYS, lengths=x, combiner="sum"), np.ones(N, np.int32)),
    "weights": (
        lambda t, x: kvjax.lookup_bag(t, KEYS[:, None], weights=x, combiner="sum"),
        np.full((N, 1), 2.0, np.float32),
    ),
}


@pytest.mark.parametrize("name", few(BY_VALUE, "upsert", "keys", "mask", "gradient", "lengths"))
def test_arrays_are_taken_as_they_are_at_the_call(name, make):
    """A loader fills its arrays anew, while the device is still at what it was given before."""
    run, given = BY_VALUE[name]
    table = make(DIM).upsert(KEYS, np.ones((N, DIM), np.float32))
    want = np.asarray(run(table, given.copy()))
    table = table.refresh().upsert(KEYS, np.ones((N, DIM), np.float32))
    busy = jax.jit(lambda x: x @ x @ x)
    matrix, buffer = jnp.ones((1000, 1000)), np.empty(given.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64  # where JAX takes an array as it is
    loaded = buffer[start : start + given.nbytes].view(given.dtype).reshape(given.shape)
    loaded[...] = given
    for _ in range(3):
        busy(matrix)
    got = run(table, loaded)
    loaded[...] = 0
    np.testing.assert_array_equal(got, want)


def test_flags_of_numpy(make):
    table = make(1).upsert([1], [[1.0]])
    assert len(table.export(slots=np.True_)) == len(table.export(slots=np.False_)) == 1
