"""Extra arguments of transforms that are no row programs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few


@pytest.mark.parametrize("jit", few([True, False], 0), ids=["compiled", "disable_jit"])
def test_chunks_outside_of_jit_with_an_extra_argument(jit, make):
    """Its calls are programs by themselves then."""
    update = lambda updates, state, params=None, *, rate, **_: (-rate * jnp.sort(updates, -1), state)  # noqa: E731
    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    table = make(dim=3)
    with contextlib.nullcontext() if jit else jax.disable_jit():
        for _ in range(2):
            grads = kvjax.SparseRows(np.array([1, 2, 2]), jnp.array([[3.0, 1, 2], [4, 5, 6], [1, 1, 1]]))
            table, _ = table.apply(tx, grads, rate=2.0)
    assert table.lookup([1, 2]).tolist() == [[-4.0, -8.0, -12.0], [-20.0, -24.0, -28.0]]


def test_a_number_for_all_rows_that_is_made_of_one_is_refused(make):
    """Of a transform whose extra argument only `apply` has: what its state depends on is not known before."""

    def update(updates, total, params=None, *, rate, **_):
        return -rate * updates, total + jnp.sum(jnp.abs(updates))

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
    table, grads = make(dim=4), kvjax.SparseRows(np.array([1, 2]), jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"rowwise: want .* depend on no row, .*count='row'"):
        table.apply(tx, grads, kvjax.optax.rowwise(tx).init(4), rate=2.0)
    with pytest.raises(ValueError, match="depend on no row"):
        kvjax.optax.check_compatibility(tx, 4, rate=2.0)
    table, _ = table.apply(kvjax.optax.rowwise(tx, count="row"), grads, rate=2.0)
    assert table.lookup([1, 2]).tolist() == [[-2.0] * 4] * 2 and table.export(slots=True).slots
