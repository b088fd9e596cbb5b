"""What may be done before JAX has a backend: tables are made at import time, and processes meet later."""

import subprocess
import sys

import pytest

from kvjax import ffi

PROGRAM = """
import jax, kvjax, numpy as np, optax
tables = [
    kvjax.get_table("user", dim=4),
    kvjax.get_table("item", dim=4, initializer=kvjax.initializers.normal(0.1), admit=kvjax.admit.MinCount(2),
                    constraint=kvjax.constraints.max_norm(1.0)),
]
kvjax.keys(np.arange(3)).salted(1)
print(tables, len(tables[0]), kvjax.tables().keys(), tables[1].stats().size)
kvjax.drop_table("user")
jax.config.update("jax_num_cpu_devices", 3)  # an error once there is a backend, as jax.distributed.initialize is
print(jax.device_count(), kvjax.get_table("item").lookup(7).shape)
"""


@pytest.mark.slow
@pytest.mark.cpu_table
@pytest.mark.skipif(ffi.loaded(ffi.DEVICE), reason="whether tables belong on a GPU, only the backend knows")
def test_tables_and_keys_start_no_backend(monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    program = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert program.stdout.endswith("\n3 (4,)\n"), program.stderr
