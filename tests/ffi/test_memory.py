"""Calls of Python's without memory: an error in our words, and the process goes on."""

import subprocess
import sys

from kvjax.ffi import host

SCRIPT = """
import importlib.util, numpy, resource, sys
spec = importlib.util.spec_from_file_location("_cpu", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
items, numbers, name = [b"7"] * 6_000_000, [0] * 12_000_000, "n" * 50_000_000
calls = [
    lambda: native.hash_strings(items, 0),
    lambda: native.create("t", {}, numbers, [0], [True], 0),
    lambda: native.create(name, {"dim": 2, "dtype": "float32"}, [native.HOME], [0], [True], 0),
    lambda: native.set_sink(name, 0, print),
    lambda: native.drop(name),
]
with open("/proc/self/statm") as sizes:
    used = int(sizes.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, -1))
for call in calls:
    try:
        call()
    except MemoryError as error:
        print(str(error)[:17], str(error)[-70:])
print(native.hash_strings(items[:1], 0).tolist() == native.hash_strings([b"7"], 0).tolist())
"""


def test_a_call_without_memory_is_an_error():
    # Without JAX, so that it takes no time.
    out = subprocess.run([sys.executable, "-c", SCRIPT, host.__file__], capture_output=True, text=True)
    assert out.returncode == 0, out
    *errors, works = out.stdout.splitlines()
    assert works == "True", out
    assert len(errors) == 5 and all("kvjax:" in line and "memory" in line for line in errors), out
