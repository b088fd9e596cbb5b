"""Steps of training in the form that the C++ side takes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._keys.keys import as_keys
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import array_of, check_no_mask
from kvjax._values.errors import fail, where_of

MOST_COUNTED = 2**31 - 1
"""Where the count of steps in the state of `kvjax.optax.partition` stops."""


def step_words(step: Any, table: str, op: str) -> jax.Array:
    """The step as the words ``(2,)`` of an int64; -1 stands for the step that the table takes by itself."""
    if step is None:
        return jnp.asarray(np.array([-1], np.int64).view(np.uint32))
    check_no_mask(step, where_of(table, f"{op}, step"))
    if not isinstance(step, jax.Array):
        if hasattr(step, "__jax_array__"):
            step = step.__jax_array__()  # of a variable that has one of NumPy, NumPy's, which JAX would cut
        if hasattr(step, "__array__") and not isinstance(step, jax.Array):
            step = np.asarray(step)
            step = step[()] if step.shape == () else step
    if is_integer(step):
        if not 0 <= step < 2**63:
            raise fail(ValueError, table, op, "a step of 0 or more, below 2**63", repr(step), "count steps from 0 or 1")
        return jnp.asarray(np.array([step], np.int64).view(np.uint32))
    step = array_of(step, table, op, "an integer step ()")
    if not jnp.issubdtype(step.dtype, jnp.integer) or step.shape != ():
        raise fail(TypeError, table, op, "an integer step ()", f"{step.shape} {step.dtype}", "give int(step)")
    return as_keys(step).words
