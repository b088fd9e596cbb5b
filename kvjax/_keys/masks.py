"""Masks: which of the keys of a call are valid, and which are padding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from kvjax._keys.keys import Keys
from kvjax._keys.table_keys import keys_of
from kvjax._values.arrays import array_of
from kvjax._values.lookups import MASK_OF, check_mask, check_pad


def mask_of(keys: Keys, mask: Any, pad_id: Any, table: str, key_dtype: str, op: str) -> jax.Array | None:
    """True for keys that are valid, ``(...)`` bool; None if that is all of them.

    Args:
      keys: ``(...)``, as the table has them.
      mask: None or ``(...)`` bool, false for padding.
      pad_id: None or the one id that marks padding too.
      table: its name, for errors.
      key_dtype: of it.
      op: for errors.

    Raises:
      TypeError, ValueError: the mask or the id does not fit the keys.
    """
    if mask is not None:
        mask = array_of(mask, table, op, "a mask of bool", MASK_OF)
        check_mask(mask, keys.shape, table, op)
    if pad_id is None:
        return mask
    pad = keys_of(pad_id, table, key_dtype, f"{op}, pad_id")
    check_pad(pad, pad.shape, keys, table, op)
    valid = jnp.any(keys.words != jnp.broadcast_to(pad.words, keys.words.shape), -1)
    return valid if mask is None else mask & valid
