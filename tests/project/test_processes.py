"""Programs of several processes: all run the same, and those that are left end when one of them dies."""

import re
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support import processes

pytestmark = pytest.mark.slow


def _total(devices, n):
    """A sum over all devices of all processes, and where the values start."""
    mesh = jax.make_mesh((devices * n,), ("x",))
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    return total, NamedSharding(mesh, P("x"))


def add_up(devices, n):
    assert jax.process_count() == n and jax.local_device_count() == devices
    total, sharding = _total(devices, n)
    mine = np.arange(devices, dtype=np.float32) + devices * jax.process_index()
    x = jax.make_array_from_process_local_data(sharding, mine)
    print(jax.process_index(), int(total(x)[0]))


def add_up_for_ever(devices, n):
    total, sharding = _total(devices, n)
    x = jax.make_array_from_process_local_data(sharding, np.ones(devices, np.float32))
    for step in range(1_000_000):
        total(x).block_until_ready()
        print("step", step)


def fail_in(process):
    jax.devices()  # all have met
    if jax.process_index() == process:
        raise ValueError("planned")
    time.sleep(60)


@pytest.mark.parametrize(("n", "devices"), [(2, 1), (2, 2), (3, 1)])
def test_processes_add_up(n, devices):
    outputs = processes.run(add_up, devices, n, n=n, devices=devices)
    for process, output in enumerate(outputs):
        assert f"{process} {sum(range(n * devices))}\n" in output


def test_a_failure_is_told_with_its_output():
    with pytest.raises(AssertionError, match=r"process 1, exit code 1\n(.|\n)*ValueError: planned"):
        processes.run(fail_in, 1)


def test_what_a_process_that_has_ended_would_print_is_not_waited_for():
    with (
        processes.start(fail_in, 1) as group,
        pytest.raises(AssertionError, match=r"process 1, exit code 1\n(.|\n)*ValueError: planned"),
    ):
        group.wait_for("step 3\n", timeout=600)


def test_a_script_joins_by_its_flags(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, jax\n"
        "flags = dict(flag[2:].split('=') for flag in sys.argv[2:])\n"
        "jax.distributed.initialize(flags['coordinator'], int(flags['processes']), int(flags['process']))\n"
        "print(sys.argv[1], jax.process_index(), jax.device_count())\n"
    )
    outputs = processes.run(script, "hello", devices=2)
    assert ["hello 0 4\n" in outputs[0], "hello 1 4\n" in outputs[1]] == [True, True]


def test_a_hang_ends():
    with pytest.raises(TimeoutError, match="process 0, exit code None"):
        processes.run(fail_in, None, timeout=2)


@pytest.mark.parametrize("victim", [1, 0])
def test_a_death_ends_the_others(victim):
    """In bounded time, and with an error; process 0 is the coordinator."""
    with processes.start(add_up_for_ever, 2, 2, devices=2) as group:
        group.wait_for("step 3\n")
        group.kill(victim)
        codes = group.wait(timeout=3 * processes.PATIENCE)
        assert codes[victim] == -9 and codes[1 - victim] not in (0, None)
        # What it says depends on who notices first, the coordination service or gloo.
        assert re.search("another task died|Gloo .* failed", group.output(1 - victim))
