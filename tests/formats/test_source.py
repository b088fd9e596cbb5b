"""Sources: what makes items ahead."""

import gc
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


FORKED_WITHIN = """
import os, sys, threading
from kvjax._formats.source import ahead

parent, goes_on = os.getpid(), threading.Event()

def items():
    yield 0
    if sys.argv[1] == "reading":
        goes_on.wait()  # which is never in the child
    yield 1

for number, item in enumerate(found := ahead(items())):
    if number == (sys.argv[1] != "reading"):
        child = os.fork()
        if not child:
            break
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        goes_on.set()
if os.getpid() != parent:
    found.close()
    sys.exit(len(list(ahead(iter("abc")))))
"""


@pytest.mark.parametrize("program", [[FORKED], [FORKED_WITHIN, "reading"], [FORKED_WITHIN, "idle"]])
def test_a_forked_child_makes_items_ahead_by_threads_of_its_own(program):
    """Also one that was forked, and has left the loop, while its parent's thread was at work, or behind it."""
    command = [sys.executable, "-W", "ignore", "-c", *program]
    program = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert program.stdout == "3\n", program


def test_what_garbage_collection_closes_in_the_thread_itself_does_not_wait_for_it():
    """Else the process would never end."""
    lost, ends = threading.Event(), threading.Event()

    def items():
        yield 0
        lost.wait()
        gc.collect()
        ends.set()
        yield 1

    def lose():
        cycle = [ahead(items())]
        next(cycle[0])
        cycle.append(cycle)

    gc.disable()
    try:
        lose()
        lost.set()
        assert ends.wait(10)
    finally:
        gc.enable()
