"""Arguments: what counts as a number or a name in one, and whether a function can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvjax._values.errors import fail


def is_integer(x: Any) -> bool:
    """Whether something is an integer. A bool is none, nor is a span of time, which NumPy derives from its integers."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, (bool, np.timedelta64))


def integer_in(least: int, most: int) -> Callable[[Any], bool]:
    """Whether something is an integer in least..most, of what is not known to be one."""
    return lambda x: is_integer(x) and least <= x <= most


def is_real(x: Any) -> bool:
    """A finite number."""
    return is_integer(x) or (isinstance(x, (float, np.floating)) and bool(abs(x) < float("inf")))


def is_name(x: Any) -> bool:
    """Whether something may be the name of a table: a text that UTF-8 can hold, and not empty.

    Example:
      >>> is_name("user"), is_name(""), is_name(7), is_name("\\ud800")
      (True, False, False, False)
    """
    return isinstance(x, str) and x != "" and x.encode("utf-8", "ignore").decode() == x


def why_not_taken(function: Callable[..., Any], wanted: Sequence[str]) -> str:
    """The signature of a function that does not take so many arguments by position, and why; empty if it does, or has
    no signature.

    Args:
      function: to look at.
      wanted: the names of the arguments.

    Raises:
      TypeError: it is no function.
    """
    try:
        taken = inspect.signature(function, follow_wrapped=False)
    except ValueError:
        return ""
    try:
        taken.bind(*wanted)
    except TypeError as error:
        return f"{taken}: {error}"
    return ""


def check_progress(progress: object, op: str) -> None:
    """Whether this is what may be told of progress: None, or a function of a number.

    Raises:
      TypeError: it is not.
    """
    if progress is None:
        return
    wanted = "a function of a number, or None, as progress"
    if not callable(progress):
        raise fail(TypeError, None, op, wanted, f"{progress!r:.80}", "give a function, such as print")
    if why := why_not_taken(progress, ("number",)):
        raise fail(TypeError, None, op, wanted, f"one of {why}", "give one that takes a number")
