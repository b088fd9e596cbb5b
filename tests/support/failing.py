"""Allocations of the C++ module that fail one after the other, in a process of their own (failing.cc)."""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvjax.ffi import host

ROOT = Path(__file__).parents[2]


def run(script, folder):
    """What a script prints, in a process in which `each_in_turn` works.

    Args:
      script: Python, with two devices.
      folder: for files.
    """
    compiler = shutil.which("c++") or pytest.skip("there is no C++ compiler")
    library = str(folder / "failing.so")
    source = str(Path(__file__).with_name("failing.cc"))
    subprocess.run([compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-o", library, source], check=True)
    env = os.environ | {"LD_PRELOAD": library, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, env=env, timeout=120
    )


def _library():
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.failing_disarm.restype = ctypes.c_long
    maps = Path("/proc/self/maps").read_text().splitlines()
    for i, name in enumerate((os.environ["LD_PRELOAD"], os.path.realpath(host.__file__), "libstdc++.so")):
        parts = [line.split("-", 1) for line in maps if name in line]
        begin, end = parts[0][0], parts[-1][1].split()[0]
        library.failing_of(i, ctypes.c_size_t(int(begin, 16)), ctypes.c_size_t(int(end, 16)))
    return library


def each_in_turn(make, call):
    """Calls while its first, second, ... allocation fails, and then while that and all behind it do.

    Args:
      make: gives what to call on, anew each time.
      call: takes it.

    Yields:
      What make() gave, whether all behind failed too, and what was raised, or None.
    """
    library = _library()
    for for_good in (False, True):
        for at in itertools.count(1):
            given, raised = make(), None
            library.failing_arm(ctypes.c_long(at), for_good)
            try:
                call(given)
            except Exception as error:
                raised = error
            finally:
                count = library.failing_disarm()
            if count < at:
                break
            yield given, for_good, raised
