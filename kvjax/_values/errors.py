"""Errors, in the one form that those of Python and of the C++ side have; and warnings, at the user's line."""

import difflib
import inspect
import warnings
from collections.abc import Iterable
from typing import Any

_BETWEEN = ("kvjax", "jax", "flax", "optax", "contextlib", "functools")
"""Packages whose frames stand between the user's line and a warning."""


def fail(kind: type[Exception], table: str | None, op: str, want: str, got: str, mend: str) -> Exception:
    """An error that names the table, the operation, what was wanted and got, and the mend; None is for no one table."""
    return kind(f"kvjax: {where_of(table, op)}: want {want}, got {got}; {mend}")


def where_of(table: str | None, op: str) -> str:
    """The table and the operation, as errors name them."""
    return op if table is None else f"table {table!r}, {op}"


def check_choice(choice: object, ok: bool, want: str, got: Any) -> None:
    """Whether an argument of what a public class makes, such as a `kvjax.evict.MaxAge`, is as it must be.

    Raises:
      ValueError: it is not.
    """
    if not ok:
        own = next(each for each in type(choice).__mro__ if each.__module__.startswith("kvjax."))  # of a user's class
        module, name = own.__module__.removeprefix("kvjax."), own.__name__
        raise fail(ValueError, None, f"{module}.{name}", want, repr(got), f"see kvjax.{module}")


def meant(name: object, names: Iterable[str]) -> str:
    """ "did you mean 'user'? ", before the mend of an error, if a name is like one of those that there are.

    Example:
      >>> meant("usr", ["item", "user"]), meant("price", ["item", "user"])
      ("did you mean 'user'? ", '')
    """
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def warn(text: str, each_time: bool = False) -> None:
    """Warns at the user's line: the first that is not of kvjax, nor of what calls it for the user.

    Args:
      text: of the warning.
      each_time: also where the line has been warned so before, which Python says once.
    """
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level, frame = level + 1, frame.f_back
    if each_time and frame is not None:
        warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno)
    else:
        warnings.warn(text, stacklevel=level)
