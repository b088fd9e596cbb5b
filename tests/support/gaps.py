"""What tables of a device cannot do yet: the tests that fail for it on a backend, and how.

A test that is named here has to fail with the gap's message. Once it passes, the run fails until the test is taken off
the list; and a test that is not on the list fails like any other.
"""

from __future__ import annotations

import dataclasses

DEVICE = ("emulated", "cuda")


@dataclasses.dataclass(frozen=True)
class Gap:
    """Tests without [parameters] are meant with all of theirs."""

    message: str
    backends: tuple[str, ...]
    tests: tuple[str, ...]


GAPS: tuple[Gap, ...] = ()


def of(test: str, backend: str) -> Gap | None:
    """The gap that a test, by its id, falls into on a backend, if so."""
    names = {test, test.split("[")[0]}
    return next((gap for gap in GAPS if backend in gap.backends and names & set(gap.tests)), None)
