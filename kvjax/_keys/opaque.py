"""Opaque words, which no arithmetic accepts: the versions of handles, and the canaries of gradients.

What treats all leaves of a tree as numbers (a norm, a sum, a cast) would count them in. So they have a dtype of their
own, which goes wherever arrays go, and whose name is in JAX's errors. JAX has such dtypes for the keys of random
numbers alone; nothing is drawn from these.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.random import define_prng_impl


def _draws_nothing(*_: Any) -> NoReturn:
    raise TypeError("kvjax: want a key of random numbers, got a word of a table or of its gradient")


class _Unsaved:
    """Draws nothing, and is in no pickle: JAX pickles it with each array of its dtype, and so none of versions."""

    def __call__(self, *_: Any) -> NoReturn:
        _draws_nothing()

    def __deepcopy__(self, memo: Any) -> _Unsaved:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "kvjax: pickle: want the rows of tables, got the version of a handle; rows are not part of a handle: save "
            "them with kvjax.orbax.split and TableSave, or kvjax.checkpoint.save"
        )


class _Unnamed(str):
    """A name that is looked up in vain, and loudly: `jax.random.key_impl` looks for it among those of JAX, which only
    what saves an array asks for. A dict compares names of one hash, so it has that of one of theirs.
    """

    def __hash__(self) -> int:
        return hash("threefry2x32")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Unnamed):
            return str.__eq__(self, other)
        raise TypeError(
            f"kvjax: save: want arrays, got a word of a {self}; save handles of tables with kvjax.orbax.split and "
            "TableSave, or with kvjax.checkpoint.save, and of a gradient its keys, rows and counts"
        )

    def __deepcopy__(self, memo: Any) -> _Unnamed:
        return self


def _impl(name: str, tag: str, draws: Callable[..., NoReturn]) -> Hashable:
    return define_prng_impl(
        key_shape=(1,), seed=draws, split=draws, random_bits=draws, fold_in=draws, name=_Unnamed(name), tag=tag
    )


# JAX's errors show the tags, so they have the mends.
_VERSION_TAG = "kvjax table, not a number; kvjax.grad, kvjax.orbax.split and kvjax.optax.averaged know tables"
_CANARY_TAG = "kvjax gradient, not a number; kvjax.optax.partition, joint, global_norm and kvjax.merge take those"
_VERSION = _impl("handle", _VERSION_TAG, _Unsaved())
_CANARY = _impl("gradient", _CANARY_TAG, _draws_nothing)


def opaque(words: Any) -> jax.Array:
    """Versions ``(...)`` uint32 as opaque words ``(...)``."""
    return _wrapped(words, _VERSION)


def opaque_canary(words: Any) -> jax.Array:
    """Canaries ``(...)`` uint32 as opaque words ``(...)``."""
    return _wrapped(words, _CANARY)


def _wrapped(words: Any, impl: Hashable) -> jax.Array:
    if isinstance(words, Tracer):
        return jax.random.wrap_key_data(words[..., None], impl=impl)
    with jax.ensure_compile_time_eval():  # of a handle that a program closes over, too
        return jax.random.wrap_key_data(jnp.asarray(words[..., None]), impl=impl)


def words_in(x: Any) -> Any:
    """The words ``(...)`` uint32 of opaque ones ``(...)``; anything else as it is."""
    if not is_opaque(x) or not isinstance(x, jax.Array):
        return x
    if isinstance(x, Tracer):
        return jax.random.key_data(x)[..., 0]
    with jax.ensure_compile_time_eval():
        return jax.lax.index_in_dim(jax.random.key_data(x), 0, -1, False)  # by no array of another mesh


_OPAQUE = jax.dtypes.prng_key


def is_array(x: Any) -> bool:
    """Whether this is an array of JAX's whose elements there are, or will be."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def is_fresh(words: Any) -> bool:
    """Whether this comes from a program, and nobody has had it in hand (`uncast`)."""
    return is_array(words) and is_opaque(words) and "astype" not in vars(words)


def is_opaque(x: Any) -> bool:
    # As `jnp.issubdtype` has it, which takes ten times as long: handles are flattened by every call.
    return getattr(getattr(x, "dtype", None), "type", None) is _OPAQUE


def are_words(x: Any) -> bool:
    """Whether this is an array of words, and nothing that stands for one (a shape, a sharding)."""
    return isinstance(x, (np.ndarray, np.generic, jax.Array)) and x.dtype == np.uint32


# Outside of ``jit`` JAX's own method ``astype`` is missing.


def uncast(words: Any) -> Any:
    """Opaque versions whose casts are refused with the mend."""
    return _with_astype(words, _refuse_version)


def uncast_canary(words: Any) -> Any:
    """Opaque canaries whose casts are refused with the mend."""
    return _with_astype(words, _refuse_canary)


def replaced(words: Any) -> Any:
    """Opaque versions that ``optax.apply_updates`` takes for the sum of a parameter and its update, which it casts."""
    made = opaque(words)
    return _with_astype(opaque(words), lambda dtype, *_, **__: made if dtype == made.dtype else _refuse_version(dtype))


def _with_astype(words: Any, astype: Callable[..., Any]) -> Any:
    if is_array(words):
        words.astype = astype
    return words


def _refuse_version(dtype: Any, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(f"kvjax: astype: want no cast of a {_VERSION_TAG}; got one to {dtype}")


def _refuse_canary(dtype: Any, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(f"kvjax: astype: want no cast of a {_CANARY_TAG}; got one to {dtype}")
