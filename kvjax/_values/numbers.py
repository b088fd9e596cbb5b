"""Numbers: what counts as one in an argument."""

from collections.abc import Callable
from typing import Any

import numpy as np


def is_integer(x: Any) -> bool:
    """Whether something is an integer. A bool is none, nor is a span of time, which NumPy derives from its integers."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, (bool, np.timedelta64))


def integer_in(least: int, most: int) -> Callable[[Any], bool]:
    """Whether something is an integer in least..most, of what is not known to be one."""
    return lambda x: is_integer(x) and least <= x <= most


def is_real(x: Any) -> bool:
    """A finite number."""
    return is_integer(x) or (isinstance(x, (float, np.floating)) and bool(abs(x) < float("inf")))
