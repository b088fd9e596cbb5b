"""Signals, whose handlers wait where something must not be left half-way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Generator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Those whose handlers raise: KeyboardInterrupt, and in many programs SystemExit."""


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    """Has handlers of signals run after the body, of which an exception would be raised between any two of its lines.
    Only the main thread runs them."""
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: handler for number in _SIGNALS if callable(handler := signal.getsignal(number))}
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
