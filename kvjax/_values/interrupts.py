"""Signals, whose handlers wait where something must not be left half-way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    """Has handlers of signals run after the body, of which an exception would be raised between any two of its lines.
    Only the main thread runs them."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        every = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {number: handler for number, handler in every.items() if callable(handler)}
    came: list[tuple[int, Any]] = []
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number, frame in came:
            handlers[number](number, frame)
