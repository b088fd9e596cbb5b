"""Threads that read and write files: some copy and digest while others wait for the disk."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

NUM_THREADS = max(4, min(os.cpu_count() or 1, 16))


class FileThreads:
    """Calls that the threads of the process make one after the other.

    Where no thread can be had, `submit` makes the call itself: at the end of the process, when Python starts none and
    its own executors refuse work, and where the system has none left. A child that was forked starts threads of its
    own. They are daemons, so that they are there until the very end; whoever waits for a call keeps the process alive.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins without threads: in a child they are not there, nor is what they were to do."""
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # Chunks that are written at once, in all; so memory stays bounded where rows come faster than the disk takes
        # them.
        self.under_way = threading.BoundedSemaphore(NUM_THREADS + 1)

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Has a thread call ``call(*args)``."""
        future: Future[T] = Future()
        if self._have_some():
            self._calls.put((future, lambda: call(*args)))
        else:
            _run(future, lambda: call(*args))
        return future

    def _have_some(self) -> bool:
        # Without a lock, for which a signal's handler that saves would wait while this thread has it. So a few threads
        # more may start where several callers come at once.
        if len(self._threads) < NUM_THREADS:
            thread = threading.Thread(target=self._work, args=(self._calls,), name="kvjax_files", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # see above
                return bool(self._threads)
            self._threads.append(thread)
        return True

    @staticmethod
    def _work(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
        while True:
            _run(*calls.get())


THREADS = FileThreads()
os.register_at_fork(after_in_child=THREADS.forget)


def side_by_side(calls: Iterable[Callable[[], object]]) -> None:
    """Makes calls that wait for `THREADS`, on this thread and on others while there are some. Returns when all have
    ended; after an error or an interrupt, which it raises, none begins."""
    todo, errors = collections.deque(calls), list[BaseException]()

    def failed(error: BaseException) -> None:
        errors.append(error)
        todo.clear()

    def work() -> None:
        while True:
            try:
                call = todo.popleft()
            except IndexError:
                return
            try:
                call()
            except BaseException as error:
                failed(error)

    def help_until(ended: threading.Event) -> None:
        try:
            work()
        finally:
            ended.set()

    ends = [threading.Event() for _ in range(min(len(todo), 2 * NUM_THREADS) - 1)]
    helpers = [threading.Thread(target=help_until, args=(ended,), daemon=True) for ended in ends]
    try:
        with contextlib.suppress(RuntimeError):  # see FileThreads
            for helper in helpers:
                helper.start()
        work()
    except BaseException as error:
        failed(error)
    for helper, ended in zip(helpers, ends, strict=True):
        while helper.ident is not None and not ended.is_set():  # join, once interrupted, takes a thread for ended
            try:
                ended.wait()
            except BaseException as error:  # nobody works any more when the caller hears of an interrupt
                failed(error)
    if errors:
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])


def _run(future: Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
