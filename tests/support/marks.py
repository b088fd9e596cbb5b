"""Which tests are slow: cases that only add to what a quick one checks, and how many examples Hypothesis tries."""

import pytest

slow = pytest.mark.slow

wide_is_slow = pytest.mark.parametrize(
    "x64", [pytest.param(False, id="x32"), pytest.param(True, id="x64", marks=slow)], indirect=True
)
"""For a test that uses the fixture x64: only with 32-bit JAX integers is it quick."""

full = False
"""Whether slow tests run, too; tests/conftest.py sets it before it imports any of them."""


def few(cases, *quick):
    """Values of one parameter of which those that are named, or numbered, are quick."""
    return _few(cases, quick, lambda case: (case,))


def few_rows(cases, *quick):
    """The same for several parameters, by numbers of cases."""
    return _few(cases, quick, tuple)


def _few(cases, quick, values):
    cases = list(cases)
    chosen = {cases[q] if isinstance(cases[0], str) and not isinstance(q, str) else q for q in quick}
    names = set(cases) if isinstance(cases[0], str) else set(range(len(cases)))
    assert chosen <= names, chosen - names
    keys = cases if isinstance(cases[0], str) else range(len(cases))
    return [pytest.param(*values(c), marks=() if k in chosen else slow) for k, c in zip(keys, cases, strict=True)]


def examples(quick, all):
    """A number of examples."""
    return all if full else quick
