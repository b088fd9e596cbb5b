"""Dtypes that rows and keys may have."""

from typing import Any

import jax.numpy as jnp

KEY_DTYPES = ("int64", "uint64", "int32", "uint32")
ROW_DTYPES = ("float32", "bfloat16", "float16")


def dtype_name(dtype: Any) -> Any:
    """The name of a dtype, or what was given if it is none."""
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return dtype
