"""Callables of the user's: whether they take the arguments that they will be called with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


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
