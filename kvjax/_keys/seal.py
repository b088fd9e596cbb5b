"""Words that no arithmetic accepts: of gradients, and of the versions of tables inside a loss.

What treats all leaves of a tree as numbers (a norm, a sum, a cast) would count them in. So they have a dtype of their
own, which goes wherever arrays go, and whose name is in JAX's errors. JAX has such dtypes for the keys of random
numbers alone; nothing is drawn from these.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl


def _draws_nothing(*_: Any) -> NoReturn:
    raise TypeError("kvjax: want a key of random numbers, got a word of a table or of its gradient")


_IMPL = define_prng_impl(
    key_shape=(1,), seed=_draws_nothing, split=_draws_nothing, random_bits=_draws_nothing, fold_in=_draws_nothing,
    name="kvjax", tag="kvjax, not a number",
)  # fmt: skip


def sealed(words: Any) -> jax.Array:
    """Words ``(...)`` uint32, sealed ``(...)``."""
    return jax.random.wrap_key_data(jnp.asarray(words)[..., None], impl=_IMPL)


def words_in(seals: jax.Array) -> jax.Array:
    """The words ``(...)`` uint32 of seals ``(...)``."""
    return jax.random.key_data(seals)[..., 0]


def is_sealed(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", bool), jax.dtypes.prng_key)
