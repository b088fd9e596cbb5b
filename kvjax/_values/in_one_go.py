"""`in_one_go`: calls between which no handler of a signal runs."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable


def in_one_go(*calls: Callable[[], object]) -> None:
    """Calls one after the other, up to the first that fails. Python runs handlers of signals only in its own code, so
    none, of which an exception may be raised, runs between calls of C: functions of our C++ side, methods of dicts."""
    collections.deque(map(operator.call, calls), maxlen=0)  # a loop in C
