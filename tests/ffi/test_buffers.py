"""Results that are large keep their memory from call to call, unless the environment says otherwise."""

import os
import platform
import subprocess
import sys

import pytest

from tests.support.marks import few

PROGRAM = """
import resource, jax, numpy as np, kvjax
table = kvjax.get_table("large", dim=1024)
keys = kvjax.keys(np.arange(9000))  # 36 MB, which glibc maps anew for each call
lookup = jax.jit(lambda table, keys: table.lookup(keys))
for _ in range(3):
    lookup(table, keys).block_until_ready()
least = 1 << 30  # of some rounds: other threads of the process have faults of their own
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        lookup(table, keys).block_until_ready()
    least = min(least, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(least)
"""


def faults(**environment):
    # Without the many threads that tests have: each may get memory from an arena of its own.
    other = ("MALLOC_", "GLIBC_", "NPROC", "JAX_NUM_CPU_DEVICES")
    env = {name: value for name, value in os.environ.items() if not name.startswith(other)}
    env |= {"JAX_PLATFORMS": "cpu", "KVJAX_EMULATED": "0"} | environment
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc has other habits")
@pytest.mark.parametrize("environment", few([{"KVJAX_KEEP_BUFFERS": "0"}, {"MALLOC_TRIM_THRESHOLD_": "131072"}]))
def test_pages_are_kept_unless_the_user_says_otherwise(environment):
    assert any(faults() < 300 for _ in range(4))  # which arena a thread gets is a matter of chance
    assert faults(**environment) > 300  # even in huge pages it is more, and nine thousand a call without
