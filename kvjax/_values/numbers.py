"""Numbers: what counts as one in an argument."""

from typing import Any

import numpy as np


def is_integer(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_real(x: Any) -> bool:
    """A finite number."""
    return (
        isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool) and bool(abs(x) < float("inf"))
    )
