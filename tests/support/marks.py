"""Marks: which tests are slow, because they only add to what a quick one checks, and how often Hypothesis tries."""

import pytest

slow = pytest.mark.slow

wide_is_slow = pytest.mark.parametrize(
    "x64", [pytest.param(False, id="x32"), pytest.param(True, id="x64", marks=slow)], indirect=True
)
"""For a test that uses the fixture x64: only with 32-bit JAX integers is it quick."""

full = False
"""Whether slow tests run, too; tests/conftest.py sets it, like `hasty`, before it imports any of them."""

hasty = False
"""Whether programs are compiled in haste, and so may round in other places than one another."""


def few(cases, *quick):
    """Values of one parameter of which those that are named, or numbered, are quick."""
    return _few(cases, quick, lambda case: (case,))


def few_rows(cases, *quick):
    """The same for several parameters, by numbers of cases."""
    return _few(cases, quick, tuple)


def _few(cases, quick, values):
    cases = list(cases)
    numbers = {cases.index(case) if isinstance(case, str) else case for case in quick}
    assert numbers <= set(range(len(cases))), numbers
    return [pytest.param(*values(case), marks=() if i in numbers else slow) for i, case in enumerate(cases)]


def examples(quick, all):
    """A number of examples."""
    return all if full else quick
