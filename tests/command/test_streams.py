"""Where what commands print goes."""

import os
import subprocess
import sys

import kvjax
from tests.support.marks import slow


@slow
def test_a_stream_that_is_closed_or_has_no_such_letters(tmp_path):
    kvjax.checkpoint.save(tmp_path / "a", [kvjax.get_table("command_\u00fc", dim=1)])
    command, env = (
        [sys.executable, "-m", "kvjax", "inspect", str(tmp_path / "a")],
        {**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert b"command_\\xfc" in subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")
