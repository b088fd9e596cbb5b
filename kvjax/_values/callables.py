"""Callables of the user's: whether they take the arguments that they will be called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from kvjax._values.errors import fail


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
