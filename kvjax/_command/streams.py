"""Standard output and error of a command: they take everything, whoever reads them and in whatever letters."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Generator
from typing import Any, TextIO, cast


@contextlib.contextmanager
def prepared() -> Generator[None]:
    """Has a stream that was closed take everything, one in another encoding escape what that lacks, and the output
    take what nobody reads any more: what a command finds, and so its exit status, does not depend on that."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # of `kvjax inspect saved >&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with contextlib.redirect_stdout(cast("TextIO", _Unread(sys.stdout))):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # which has been said
                sys.stdout.flush()


class _Unread:
    """A stream of which the reader may go: `kvjax top ... | head`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._unless_closed(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_closed(self._stream.flush)

    def _unless_closed(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
