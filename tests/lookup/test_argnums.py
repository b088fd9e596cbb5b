"""The arguments of kvjax.grad and value_and_grad: all forms that JAX allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

IDS = np.array([3, 17, 3, 0, 9, 17])


def to_dense(grad):
    merged = kvjax.merge(grad)
    active = np.asarray(merged.counts) > 0
    out = np.zeros((20, 4), np.float32)
    out[np.asarray(merged.keys)[active]] = np.asarray(merged.rows)[active]
    return out


def test_the_forms_that_jax_takes(make):
    """Auxiliary values that are no arrays, argnums of any integers, and integers among what is differentiated."""

    def loss(params, w, n):
        return jnp.sum(params["t"].lookup(IDS) * w) * n, {"loss": "a text", "function": print, "none": None}

    def want(rows, w, n):
        return jnp.sum(rows[IDS] * w) * n, None

    dense = jax.random.normal(jax.random.key(1), (20, 4))
    table = make(4).upsert(np.arange(20), dense)
    params, w, n = {"t": table}, jnp.float32(2), 3
    reference, _ = jax.grad(want, argnums=(0, 1, 2), has_aux=True, allow_int=True)(dense, w, n)
    for form in (np.int64(1), 1, -2):
        grads, aux = kvjax.grad(loss, argnums=form, has_aux=True)(params, w, n)
        assert float(grads) == float(reference[1]) and aux == {"loss": "a text", "function": print, "none": None}
    for form in ([1, 0], (-2, np.int8(0))):
        _, (by_w, by_t) = kvjax.value_and_grad(loss, argnums=form, has_aux=True)(params, w, n)
        assert float(by_w) == float(reference[1])
        np.testing.assert_array_equal(to_dense(by_t["t"]), reference[0])
    (_, aux), grads = kvjax.value_and_grad(loss, (0, 2), has_aux=True, allow_int=True)(params, w, n)
    assert grads[1].dtype == jax.dtypes.float0 and aux["loss"] == "a text"
    np.testing.assert_array_equal(to_dense(grads[0]["t"]), reference[0])


@pytest.mark.parametrize(
    "argnums, error",
    [((), ValueError), ((0, 0), ValueError), ((0, -2), ValueError), ("w", TypeError), (0.5, TypeError)],
)
def test_argnums_that_name_no_arguments(argnums, error):
    with pytest.raises(error, match=r"^kvjax: value_and_grad: want argnums"):
        kvjax.grad(lambda p, w: w, argnums=argnums)({}, 1.0)
