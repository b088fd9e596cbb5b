"""Checks of hyperparameters: a transform refuses numbers by which rows would be wrong, whatever type they are of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from kvjax._values.arguments import is_integer
from kvjax._values.dtypes import is_float
from kvjax._values.errors import fail


class Want(NamedTuple):
    """What numbers are wanted, in words and as a test of a number of Python."""

    text: str
    holds: Callable[[Any], bool]


FINITE = Want("a finite number", math.isfinite)
AT_LEAST_0 = Want("a finite number of 0 or more", lambda x: 0 <= x < math.inf)
ABOVE_0 = Want("a finite number above 0", lambda x: 0 < x < math.inf)
ABOVE_1 = Want("a finite number above 1", lambda x: 1 < x < math.inf)
FRACTION = Want("a number in 0..1", lambda x: 0 <= x <= 1)
DECAY = Want("a number from 0 to below 1", lambda x: 0 <= x < 1)
COUNT = Want("an integer of 0 or more", lambda x: is_integer(x) and x >= 0)
COUNT_FROM_1 = Want("an integer of 1 or more", lambda x: is_integer(x) and x >= 1)


def check(op: str, want: Want, **given: Any) -> None:
    """Whether hyperparameters are as they must be, by name. Arrays of JAX, which optax injects, are known only as a
    program runs, and are not looked at.

    Raises:
      TypeError: one is a schedule: a formula that has it in the state cannot follow that.
      ValueError: one is another number, or none.
    """
    for name, value in given.items():
        if callable(value):
            mend = f"optax.inject_hyperparams(kvjax.optax.{op}) takes it"
            raise fail(TypeError, None, op, f"a number as {name}", "a schedule", mend)
    check_known(op, want, **{name: value for name, value in given.items() if is_known(value)})


def check_known(op: str, want: Want, **given: Any) -> None:
    """As `check`, of what must be known while a program is traced."""
    for name, value in given.items():
        number = None if isinstance(value, Tracer) else np.asarray(value)
        real = number is not None and number.ndim == 0 and (is_float(number.dtype) or number.dtype.kind in "iu")
        if number is None or not real or not want.holds(number.item()):
            raise fail(ValueError, None, op, f"{want.text} as {name}", repr(value), f"see kvjax.optax.{op}")


def is_known(value: Any) -> bool:
    """Whether a hyperparameter is a number now, and not one that optax injects."""
    return not isinstance(value, jax.Array)
