"""Releases in processes that are forked."""

import subprocess
import sys

from kvjax.serving import Releases

_FORKS = """
import os, signal, sys, threading
from kvjax.serving import Releases, _releases
releases, identity_at = Releases(sys.argv[1]), _releases.identity_at
looking, go = threading.Event(), threading.Event()

def waiting(path):
    looking.set(), go.wait()
    return identity_at(path)

_releases.identity_at = waiting
threading.Thread(target=releases.refresh).start()
looking.wait()
_releases.identity_at = identity_at
if (child := os.fork()) == 0:
    signal.alarm(20)
    os._exit(releases.refresh().number)
go.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_was_forked_while_a_thread_opens_a_release_opens_it_too(tmp_path):
    Releases(tmp_path).publish({}, {"a file": b""})
    command = [sys.executable, "-W", "ignore", "-c", _FORKS, str(tmp_path)]  # Python warns of forks beside threads
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "1\n"
