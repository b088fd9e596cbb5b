"""Sources: what makes items ahead."""

import subprocess
import sys
import threading

import pytest

from kvjax._formats.source import ahead


def makers(n=3):
    return (threading.get_ident() for _ in range(n))


def test_threads_that_make_items_ahead_are_kept():
    """Each new one would take memory of malloc's that it keeps: 350 MB for 20 restores of a table of 22."""
    first, *rest = ahead(makers())
    assert set(rest) == {first} != {threading.get_ident()}
    assert set(ahead(makers())) == {first}
    one, other = ahead(makers()), ahead(makers())
    beside = next(one), next(other)
    assert beside[0] == first != beside[1]
    one.close()
    other.close()
    with pytest.raises(ZeroDivisionError):
        list(ahead(1 // n for n in (1, 0)))
    assert {next(ahead(makers())) for _ in range(4)} <= set(beside)


FORKED = """
import os
from kvjax._formats.source import ahead

assert list(ahead(iter("abc"))) == ["a", "b", "c"]
if child := os.fork():
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    os._exit(len(list(ahead(iter("abc")))))
"""


def test_a_forked_child_makes_items_ahead_by_threads_of_its_own():
    program = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60)
    assert program.stdout == "3\n", program
