"""The state of this process: which tables live in it, and what they call back."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from kvjax._values.errors import fail, warn

MANY_SCORES = 128
"""So many score functions of one name are none that a program defines: they are made anew for each call."""

MANY_ERRORS = 256
"""So many errors that a program has met are remembered."""

Score = Callable[[Any], Any]


class OfModule(NamedTuple):
    """How a module's ``init`` made a table.

    Attributes:
      drawn: whether the table's seed was drawn, as nobody had said one.
      model: a weak reference to what all layers of the model have in common in that ``init``, or what gives None.
      layer: the same of the layer, if it holds its table itself.
      traced: whether it was a part of a larger model and traced by itself, as under ``nn.jit``: its key had no number.
    """

    drawn: bool
    model: Callable[[], Any] = lambda: None
    layer: Callable[[], Any] = lambda: None
    traced: bool = False


class Process:
    """All that the Python side keeps between calls.

    Attributes:
      lock: for the dicts alone, and what must change together with them: a sink may ask for tables while another call
        waits for its table.
      restoring: for a restore, from its last look at all of its tables until they are replaced, or what it has made
        for them is gone.
      specs: what each live table is, by name.
      first_versions: the version of a table that is yet to be made, by name: behind those of one that was dropped, in
        whatever backend, so that its handles stay stale.
      births: the version that each live table was made at: one that still has it has never been written.
      caught_up: how far each table had been trained when no row of it was behind, see `kvjax._table.behind`.
      of_modules: the live tables that a module's ``init`` made, and may make anew, by name.
      forked: whether this is a child of the process whose tables these are, in which neither they nor JAX can run.
      placements: a number of each placement that a table has had, from 1.
      traced: names of the tables that JAX may keep programs for.
      outlived: hashes of what is gone, or may be, while JAX keeps programs for it: specs of such tables that were
        dropped and not made again, and score functions.
      sinks: what shards call with evicted rows, by table; it goes with a table that moves.
      cursors: where the cursors of deltas are, by name and tables.
      moving: the cursors that saves move which are not finished yet, by the folder of the save.
      started: the newest version that a program has given or will give, by thread and table. What comes behind a failed
        write in a program fails with it, so that is known of the newest.
      met: what kvjax says in the last errors that the program has seen.
      keeps_refused: whether some steps keep to themselves what they are refused for.
      said: numbers of the refused steps that a warning has told of.
      raised: what a function of the user's has raised last, until the write that called it has failed for that.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self.restoring = threading.RLock()
        self.specs: dict[str, Any] = {}
        self.first_versions: dict[str, int] = {}
        self.births: dict[str, int] = {}
        self.caught_up: dict[str, Any] = {}
        self.of_modules: dict[str, OfModule] = {}
        self.sinks: dict[str, Any] = {}
        self.cursors: dict[Any, Any] = {}
        self.moving: dict[Any, Any] = {}
        self.placements: dict[Any, int] = {}
        self.traced: set[str] = set()
        self.outlived: set[int] = set()
        self.started: dict[tuple[int, str], Any] = {}
        self.met: dict[str, None] = {}
        self.keeps_refused = False
        self.said: set[int] = set()
        self.raised: BaseException | None = None
        self.forked = False
        self._scores: dict[str, Score] = {}

    def after_fork(self) -> None:
        """In a child: tables are of the process that made them. One that made none may have forked in time."""
        self.lock, self.restoring = threading.RLock(), threading.RLock()  # a thread that is not here may have held them
        self.forked = self.forked or bool(self.specs)
        # Of programs that never end here, as JAX's threads are not there: the exit would wait for them for ever.
        self.started, self.met, self.said, self.keeps_refused = {}, {}, set(), False

    def spec_of(self, name: str) -> Any:
        """The spec of the table of this name, or None."""
        with self.lock:
            return self.specs.get(name)

    def all_specs(self) -> dict[str, Any]:
        with self.lock:
            return dict(self.specs)

    def number_of(self, placement: Any) -> int:
        with self.lock:
            return self.placements.setdefault(placement, len(self.placements) + 1)

    def sink_of(self, name: str) -> Any:
        with self.lock:
            return self.sinks.get(name)

    def set_sink(self, name: str, sink: Any) -> None:
        with self.lock:
            self.sinks[name] = sink

    @contextlib.contextmanager
    def calling_out(self) -> Generator[None]:
        """Runs the user's code; what it raises is kept for `blaming`, as XLA hands on no more than a text."""
        try:
            yield
        except BaseException as error:
            self.raised = error
            raise

    @contextlib.contextmanager
    def blaming(self) -> Generator[None]:
        """The error of a write that the user's code has stopped has the exception of that as its cause."""
        try:
            yield
        except (ValueError, RuntimeError) as error:
            cause = self.raised
            if cause is None or f"that works, got {type(cause).__name__}" not in str(error):
                raise
            self.raised = None
            raise error from cause

    def name_score(self, name: str, score: Score) -> str:
        """The name by which compiled programs find a score function, as they do tables."""
        with self.lock:
            number, before = 0, len(self._scores)
            while self._scores.setdefault(key := f"{name}#{number}" if number else name, score) is not score:
                number += 1
            if is_new := len(self._scores) > before:
                self.outlived.add(hash(key))
        if is_new and number == MANY_SCORES:
            warn(
                f"kvjax: evict: want a score function that is defined once, got {number + 1} of the name "
                f"{unquote(name)}; each compiles programs of its own, and is kept to the end of the process with all "
                "that it closes over: define it at the top of a module"
            )
        return key

    def call_score(self, exported: Callable[[dict[str, Any]], Any], name: str, raw: dict[str, Any]) -> np.ndarray:
        """Scores rows for the C++ side.

        Args:
          exported: gives the rows that a score function takes.
          name: of the function.
          raw: the rows as the C++ side has copied them out.

        Returns:
          ``(n,)`` float64.

        Raises:
          ValueError: the function gives something else.
        """
        with self.calling_out():
            rows = exported(raw)
            scores = np.asarray(self._scores[name](rows))
            real = scores.dtype.kind in "iuf" or scores.dtype.name in ("bfloat16", "float16")
            if scores.shape != (len(rows),) or not real or not np.isfinite(scores.astype(np.float64)).all():
                raise ValueError(f"want a score function that gives ({len(rows)},) finite real numbers, got {scores!r}")
            return np.ascontiguousarray(scores, np.float64)


PROCESS = Process()
os.register_at_fork(after_in_child=PROCESS.after_fork)


def check_process(name: str, op: str) -> None:
    """Whether this is the process of the tables. Asked before JAX is, which would wait for ever in a forked one."""
    if PROCESS.forked:
        raise fail(
            RuntimeError, name, op, "the process that made it", "a forked one",
            "tables and JAX stay behind in the parent: make kvjax.keys in the workers of a loader and look them up "
            "outside, or start workers by multiprocessing's 'spawn'",
        )  # fmt: skip
