"""Names: what may be the name of a table, in the process and in a checkpoint."""

from typing import Any


def is_name(x: Any) -> bool:
    """Whether it is a text that UTF-8 can hold, and not empty.

    Example:
      >>> is_name("user"), is_name(""), is_name(7), is_name("\\ud800")
      (True, False, False, False)
    """
    return isinstance(x, str) and x != "" and x.encode("utf-8", "ignore").decode() == x
