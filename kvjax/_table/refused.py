"""Refused steps that nobody asked about before the next one: each is reported once, by a call that passes a handle.

A program with such a step raises nothing, and a loop of compiled steps runs nothing of kvjax's between them but the
flattening of its handles. So that is where it is seen.
"""

from __future__ import annotations

from kvjax import ffi
from kvjax._process import PROCESS
from kvjax._values.errors import warn


def watch() -> None:
    """Says that steps of this process keep to themselves what they are refused for."""
    PROCESS.keeps_refused = True


def warn_of_refused() -> None:
    """Warns of steps that have been refused, and others after them."""
    if not PROCESS.keeps_refused:
        return
    for number, text, others in ffi.left_failures():
        if others and number not in PROCESS.said:
            PROCESS.said.add(number)
            warn(
                f"{text} (a step was refused, and so are all after it, which change nothing until "
                "kvjax.commit(state) has raised this)"
            )
