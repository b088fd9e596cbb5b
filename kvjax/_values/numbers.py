"""Numbers: what counts as one in an argument."""

from collections.abc import Callable
from typing import Any

import numpy as np


def is_integer(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def integer_in(least: int, most: int) -> Callable[[Any], bool]:
    """Whether something is an integer in least..most, of what is not known to be one."""
    return lambda x: is_integer(x) and least <= x <= most


def is_real(x: Any) -> bool:
    """A finite number."""
    return (
        isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool) and bool(abs(x) < float("inf"))
    )
