"""The canonical form of a jaxpr is equal where the same is computed, and nowhere else."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax._training.canonical import canonical

LONG = np.arange(3000, dtype=np.float32)
X = jnp.arange(4.0)


def shifted(by):
    return lambda x: x + by


MADE = {
    "sum": lambda: lambda x: jnp.sort(x) + 1.0,
    "other number": lambda: lambda x: jnp.sort(x) + 2.0,
    "integer": lambda: lambda x: jnp.sort(x.astype(jnp.int32)) + 1,
    "other operand": lambda: lambda x: jnp.sort(x) + x,
    "other order": lambda: lambda x: x - jnp.sort(x),
    "its reverse": lambda: lambda x: jnp.sort(x) - x,
    "axis": lambda: lambda x: jax.lax.cumsum(x, reverse=True),
    "other axis": lambda: lambda x: jax.lax.cumsum(x),
    "array": lambda: shifted(np.resize(LONG, 4)),
    "long array": lambda: lambda x: x + jnp.sum(LONG),
    "another in the middle": lambda: lambda x: x + jnp.sum(np.where(LONG == 1500, 7, LONG)),
    "custom": lambda: lambda x: jax.nn.relu(x),
    "branches": lambda: lambda x: jax.lax.cond(x[0] > 0, lambda: x, lambda: -x),
    "others": lambda: lambda x: jax.lax.cond(x[0] > 0, lambda: -x, lambda: x),
    "loop": lambda: lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, x),
    "longer": lambda: lambda x: jax.lax.fori_loop(0, 4, lambda i, y: y * 2, x),
    "two results": lambda: lambda x: (x, x + 1),
    "two others": lambda: lambda x: (x + 1, x),
    "a literal": lambda: lambda x: 1.0 * x[0],
    "filled": lambda: lambda x: x.at[jnp.arange(4) + 1].get(mode="fill", fill_value=0.0),
    "filled otherwise": lambda: lambda x: x.at[jnp.arange(4) + 1].get(mode="fill", fill_value=-0.0),
    "filled by none": lambda: lambda x: x.at[jnp.arange(4) + 1].get(mode="fill", fill_value=float("nan")),
    "not a number": lambda: lambda x: x * jnp.nan,
}


def of(function):
    return canonical(jax.make_jaxpr(function)(X))


@pytest.mark.parametrize("name", MADE)
def test_the_same_made_anew_is_equal(name):
    one, other = of(MADE[name]()), of(MADE[name]())
    assert one == other and hash(one) == hash(other)


def test_others_differ():
    found = {name: of(make()) for name, make in MADE.items()}
    alike = [pair for pair in itertools.combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert alike == []


def test_a_callback_is_equal_to_itself_alone():
    def watched():
        return lambda x: (jax.debug.callback(lambda y: None, x), x)[1]

    assert of(watched()) != of(watched())
