"""The list of what backends cannot do yet: its tests exist, and what it says of a test comes true."""

import ast
from pathlib import Path

from tests import conftest
from tests.support import gaps
from tests.support.marks import slow

ROOT = Path(__file__).parents[2]


def test_all_tests_on_the_list_exist():
    for gap in gaps.GAPS:
        for test in gap.tests:
            path, name = test.split("[")[0].split("::")
            names = {node.name for node in ast.parse((ROOT / path).read_text()).body if hasattr(node, "name")}
            assert name in names, test


def test_backends_are_those_that_tests_run_on():
    assert {backend for gap in gaps.GAPS for backend in gap.backends} <= set(conftest.BACKENDS)
    assert conftest.backend_of_tables() in conftest.BACKENDS


def test_a_gap_is_that_of_a_backend_and_of_parameters(monkeypatch):
    gap = gaps.Gap("not yet", ("emulated",), ("a.py::one", "a.py::two[x]"))
    monkeypatch.setattr(gaps, "GAPS", (gap,))
    for test, backend, found in (
        ("a.py::one", "emulated", True), ("a.py::one[y]", "emulated", True), ("a.py::one", "cpu", False),
        ("a.py::two[x]", "emulated", True), ("a.py::two[y]", "emulated", False), ("a.py::other", "emulated", False),
    ):  # fmt: skip
        assert (gaps.of(test, backend) is gap) == found, (test, backend)


OUTCOMES = """
import pytest
from tests.support import gaps

gaps.GAPS = (gaps.Gap("not yet", ("cpu", "emulated", "cuda"), ("test_it.py::test_closed", "test_it.py::test_open")),)

def test_open():
    raise ExceptionGroup("several", [ValueError("that is not yet there"), ValueError("other")])

def test_closed():
    pass

def test_undeclared():
    raise ValueError("not yet")
"""


@slow
def test_a_gap_that_is_closed_fails_and_one_that_is_not_declared_too(pytester, monkeypatch):
    monkeypatch.chdir(pytester.path)
    pytester.makepyfile(test_it=OUTCOMES)
    pytester.makeconftest("from tests.conftest import *")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rA")
    result.assert_outcomes(xfailed=1, failed=2)
    result.stdout.fnmatch_lines(["*it works now: take it off the list*"])
