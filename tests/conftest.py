"""Strict JAX for every test, and no table left behind."""

import itertools

import jax
import pytest

import kvjax

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def _drop_tables():
    yield
    for name in kvjax.tables():
        kvjax.drop_table(name)


@pytest.fixture
def make():
    """Makes a table with a name of its own."""

    def make(dim=4, **options):
        return kvjax.get_table(f"table{next(_numbers)}", dim=dim, **options)

    return make


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    """Runs the test with 64-bit JAX integers off and on."""
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture
def promotion(_strict):
    """JAX's own promotion rules: Optax's adam does not run under strict ones, with dense parameters neither."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
