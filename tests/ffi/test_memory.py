"""Calls of Python's without memory: an error in our words, and the process goes on."""

import subprocess
import sys

import pytest

from kvjax.ffi import host
from tests.support import failing
from tests.support.marks import slow

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


IN_TURN = """
import tempfile
import jax, numpy as np, optax
import kvjax
from kvjax._values.snapshot import head_to_native
from tests.support.failing import each_in_turn
name, rows, tx = "a name that does not fit into a std::string", np.ones((40, 2), np.float32), optax.adam(0.1)
options = dict(dim=2, max_capacity=50, on_full="evict", admit=kvjax.admit.MinCount(2))
if "PLACE" == "sharded": options["mesh"] = jax.make_mesh((2,), ("x",))

def make():
    if name in kvjax.tables(): kvjax.drop_table(name)
    table = kvjax.get_table(name, **options).upsert(np.arange(20), rows[:20])
    return jax.block_until_ready(table.apply(tx, kvjax.SparseRows(np.arange(15, 30), rows[:15]))[0])

def contents(table):
    return {column: np.asarray(of).tolist() for column, of in vars(table.export()).items()}

same, snapshot = contents(make()), make().snapshot()
# Where nanobind's map of its objects cannot grow, it ends the process: here it has grown before.
table, head = make(), head_to_native(0, 0, {}, {})
many = [table.spec.host.begin_load(name, 0, int(table.version), head) for _ in range(64)]
del many
calls = {
    "upsert": lambda table: table.upsert(np.arange(10, 50), rows),
    "pin": lambda table: table.pin(np.arange(25)),
    "remove": lambda table: table.remove(np.arange(9)),
    "restrict": lambda table: table.restrict(5),
    "apply": lambda table: table.apply(tx, kvjax.SparseRows(np.arange(10, 50), rows))[0],
} if "mesh" in options else {
    "to": lambda table: table.to(kvjax.storage.Mmap(tempfile.gettempdir())),
    "load": lambda table: table.load(snapshot),
    "reserve": lambda table: table.reserve(1000),
}
for op, call in calls.items():
    call(make()), make()
    failed = 0
    for table, for_good, error in each_in_turn(make, lambda table: jax.block_until_ready(call(table))):
        failed += error is not None
        if error is None: continue
        live = kvjax.get_table(name)  # an error if shards have two versions
        assert int(live.version) == int(table.version) and contents(live) == same, (op, error)
        named = for_good or op == "load"  # whose keys are compared by a function that knows of no table
        assert for_good or "kvjax: " in str(error) and "want memory" in str(error), (op, error)
        assert named or f"table '{name}'" in str(error), (op, error)
        assert for_good or "mesh" in options or isinstance(error, MemoryError), (op, error)
    print(op, failed)
"""


@slow
@pytest.mark.cpu_table
@pytest.mark.parametrize("place", ["sharded", "host"])
def test_each_allocation_fails_in_turn(place, tmp_path):
    """Also with all behind it: nothing has changed, shards have one version, and the process goes on."""
    out = failing.run(IN_TURN.replace("PLACE", place), tmp_path)
    assert out.returncode == 0, out.stderr
    failed = {op: int(times) for op, times in map(str.split, out.stdout.splitlines())}
    assert len(failed) >= 3 and sum(failed.values()) > 15 and min(failed.values()) > 0, failed
