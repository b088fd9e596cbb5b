"""Threads that read and write files: some copy and digest while others wait for the disk."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
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
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._threads = 0
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
        with self._lock:
            if self._threads < NUM_THREADS:
                try:
                    threading.Thread(target=self._work, args=(self._calls,), name="kvjax_files", daemon=True).start()
                except RuntimeError:  # see above
                    return self._threads > 0
                self._threads += 1
            return True

    @staticmethod
    def _work(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]) -> None:
        while True:
            _run(*calls.get())


THREADS = FileThreads()
os.register_at_fork(after_in_child=THREADS.forget)


def side_by_side(calls: Sequence[Callable[[], object]]) -> None:
    """Makes calls that wait for `THREADS`, on this thread and on others while there are some. Returns when all have
    ended; after an error, which it raises, none begins.
    """
    todo, lock, errors = list(reversed(calls)), threading.Lock(), list[BaseException]()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                call = todo.pop()
            try:
                call()
            except BaseException as error:
                errors.append(error)
                todo.clear()

    helpers = [threading.Thread(target=work, daemon=True) for _ in range(min(len(todo), 2 * NUM_THREADS) - 1)]
    started: list[threading.Thread] = []
    for helper in helpers:
        try:
            helper.start()
        except RuntimeError:  # see FileThreads
            break
        started.append(helper)
    try:
        work()
    finally:  # nobody works any more when the caller hears of an interrupt
        todo.clear()
        for helper in started:
            helper.join()
    if errors:
        raise errors[0]


def _run(future: Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
