"""The keys of a call as its table has them: whole, and of the width that its ``key_dtype`` says."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import Keys, as_keys
from kvjax._values.errors import where_of
from kvjax._values.key_width import is_of_32_bits, narrow_error, own_words


def keys_of(ids: Any, table: str, key_dtype: str, op: str) -> Keys:
    """The keys of a table. Every way in goes through this: what is looked up, written and trained.

    Args:
      ids: ``(...)``, whatever `kvjax.keys` takes.
      table: its name, for errors.
      key_dtype: of it.
      op: for errors.

    Raises:
      TypeError: they are no keys; or JAX may have cut them, and nobody has said that it has not.
    """
    keys = own_keys(ids, table, key_dtype, op)
    if keys.narrow and not is_of_32_bits(key_dtype):
        raise narrow_error(where_of(table, op))
    return keys


def own_keys(ids: Any, table: str, key_dtype: str, op: str) -> Keys:
    """The same, also of ids that JAX may have cut, for what is only compared with keys."""
    keys = as_keys(ids, where_of(table, op))
    if not is_of_32_bits(key_dtype):
        return keys
    words: Any = keys.words
    return keys.with_words(own_words(np if isinstance(words, np.ndarray) else jnp, words, key_dtype))
