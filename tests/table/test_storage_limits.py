"""What storage takes and gives back: memory, huge pages, disk, and what happens at their ends."""

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few, slow

pytestmark = pytest.mark.cpu_table

Host, Mmap = kvjax.storage.Host, kvjax.storage.Mmap

SLAB = 2 << 20
MADV_PAGEOUT = 21


def disk_bytes(folder):
    """Bytes on disk of the nameless files that this process has open in the folder."""
    total = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith(str(folder)):
                total += os.stat(fd).st_blocks * 512
        except FileNotFoundError:  # the descriptor by which the folder was listed
            pass
    return total


def test_disk_is_given_back(make, tmp_path, promotion):
    table = make(1024, storage=Mmap(tmp_path))
    keys = kvjax.keys(np.arange(8192))  # 32 MiB of values, 64 MiB of slots
    table, _ = table.apply(optax.adam(0.1), kvjax.SparseRows(keys, jax.numpy.ones((8192, 1024))))
    jax.block_until_ready(table)
    full = disk_bytes(tmp_path)
    assert 96 << 20 <= full <= 104 << 20
    table = jax.block_until_ready(table.clear_slots())
    assert disk_bytes(tmp_path) <= full - (64 << 20)
    table = jax.block_until_ready(table.clear())
    assert disk_bytes(tmp_path) <= 1 << 16
    table = table.upsert(np.array([5]), np.ones((1, 1024)))
    np.testing.assert_array_equal(table.lookup(np.array([5, 6])), np.repeat([[1.0], [0.0]], 1024, 1))
    assert disk_bytes(tmp_path) >= SLAB
    kvjax.drop_table(table.name)
    assert disk_bytes(tmp_path) == 0


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("storage", few([Host(huge_pages=True), Host(huge_pages=False), Host()], 2), ids=repr)
def test_memory_is_given_back(make, storage):
    table = make(1024, storage=storage)
    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[1])
    keys = kvjax.keys(np.arange(65_536))
    table = jax.block_until_ready(insert(table, keys)).clear()
    empty = resident()
    table = jax.block_until_ready(insert(table, keys))
    full = resident()
    assert full - empty > 240 << 20  # of 256
    table = jax.block_until_ready(table.clear())
    assert resident() - empty < 32 << 20


def huge_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


@slow
def test_huge_pages_come_where_they_help(make):
    switch = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not switch.exists() or "[never]" in switch.read_text() or "[always]" in switch.read_text():
        pytest.skip("the system gives huge pages to nobody or to everybody")
    insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[1])

    def gained(storage, rows):
        before = huge_bytes()
        jax.block_until_ready(insert(make(1024, storage=storage), kvjax.keys(np.arange(rows))))
        return (huge_bytes() - before) >> 20

    def once(storage, rows, ok):  # of several times: the process has other memory that comes and goes
        found = [got := gained(storage, rows)]
        while not ok(got) and len(found) < 4:
            found.append(got := gained(storage, rows))
        assert ok(got), found

    once(Host(huge_pages=False), 32_768, lambda mib: mib <= 0)  # 128 MiB
    once(Host(), 500, lambda mib: mib <= 0)  # not one slab
    once(Host(), 4096, lambda mib: mib >= 8)  # 16 MiB at once
    once(Host(), 32_768, lambda mib: mib >= 64)  # about 96; the system may be short of them
    once(Host(huge_pages=True), 4096, lambda mib: mib >= 8)


def put_out(folder):
    """Writes the pages of this process's files in the folder to the disk, and has none of them in memory."""
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(fd).startswith(str(folder)):
                os.fsync(int(fd.name))
        except FileNotFoundError:
            pass
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            assert ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_PAGEOUT) == 0


def waits(call):
    """How often a call has waited for a page of a file."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    jax.block_until_ready(call())
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before


@slow
@pytest.mark.parametrize("call", ["lookup", "train", "save", "evict"])
def test_pages_that_are_not_in_memory_are_asked_for_at_once(make, tmp_path, call):
    """The first call waits for one page after the other, and the next ones do not."""
    table = make(512, storage=Mmap(tmp_path))
    keys = kvjax.keys(np.arange(4096))
    grads = kvjax.SparseRows(keys, jax.numpy.ones((4096, 512)))
    step = jax.jit(lambda table: table.apply(optax.adagrad(0.1), grads)[0])
    calls = {
        "lookup": lambda: table.refresh().lookup(keys),
        "train": lambda: step(table.refresh()),
        "save": lambda: kvjax.checkpoint.save(tmp_path / "saved", [table.refresh()], overwrite=True),
        "evict": lambda: table.refresh().evict(kvjax.evict.MinNorm(0.0)).version,
    }
    jax.block_until_ready(step(table))
    jax.block_until_ready(calls[call]())  # compiled
    waited = []
    for _ in range(3):
        put_out(tmp_path)
        waited.append(waits(calls[call]))
    if waited[0] < 500:
        pytest.skip("the folder is in memory, or others read its pages")
    assert waited[1] < waited[0] / 4 and waited[2] < waited[0] / 4, waited


# A table four times as large as what the process may take. RLIMIT_DATA counts what is private to the process, as
# malloc's memory is; a mapped file is the system's, which writes it out when memory is short.
LIMITED = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np, optax
import kvjax

MIB, DIM, BLOCK, BLOCKS, BATCH, RATE = 2**20, 256, 32_768, 16, 1024, 0.5
storage = kvjax.storage.Mmap(sys.argv[1]) if len(sys.argv) > 1 else kvjax.storage.Host()
table = kvjax.get_table("large", dim=DIM, initializer=1.0, storage=storage)
column = jnp.linspace(0.0, 1.0, DIM)

def gradient(ids, epoch):
    return (ids % 1000).astype(np.float32)[:, None] * column + epoch

insert = jax.jit(lambda table, keys: table.lookup_or_insert(keys)[1])
train = jax.jit(lambda table, keys, grads: table.apply(optax.sgd(RATE), kvjax.SparseRows(keys, grads))[0])
read = jax.jit(lambda table, keys: table.lookup(keys))

def block(number):
    return np.arange(BLOCK * number, BLOCK * (number + 1), dtype=np.int32)

def keys_of(ids):
    return kvjax.keys(kvjax.hash_keys(ids))

def steps(table, number, epoch):
    for ids in block(number).reshape(-1, BATCH):
        table = jax.block_until_ready(train(table, keys_of(ids), gradient(ids, epoch)))
    return table

def check(table, number, epochs):
    for ids in block(number).reshape(-1, BATCH):
        want = 1.0 - RATE * sum(np.asarray(gradient(ids, epoch)) for epoch in range(epochs))
        np.testing.assert_allclose(np.asarray(read(table, keys_of(ids))), want, rtol=1e-6)

# Compile everything, and leave the first batch of rows there.
table = insert(table, keys_of(block(0))).clear()
table = train(table, keys_of(block(0)[:BATCH]), gradient(block(0)[:BATCH], 0))
before = np.asarray(read(table, keys_of(block(0)[:BATCH])))
data = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:")) * 1024
limit = data + 128 * MIB
assert 4 * (limit - data) <= BLOCK * BLOCKS * DIM * 4
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

try:
    table = insert(table, keys_of(block(1)))
    for number in range(2, BLOCKS):
        table = insert(table, keys_of(block(number)))
    table = jax.block_until_ready(table)
except Exception as error:
    print(type(error).__name__, error)
    table = kvjax.get_table("large")
    assert len(table) % BLOCK == BATCH, len(table)  # whole calls
    np.testing.assert_array_equal(np.asarray(read(table, keys_of(block(0)[:BATCH]))), before)
    table = table.clear()
    print("alive", len(insert(table, keys_of(block(0)[:BATCH]))))
    sys.exit(3)
table = table.remove(keys_of(block(0)[:BATCH]))
for epoch in range(2):
    for number in range(BLOCKS):
        table = steps(table, number, epoch)
for number in range(BLOCKS):
    check(table, number, 2)
assert len(table) == BLOCK * BLOCKS
assert (np.asarray(table.frequency(keys_of(block(3)))) == 2).all()
print("trained", len(table))
"""


def limited(*arguments):
    # Threads and devices as a user has them: each takes of what is limited.
    environment = dict(os.environ, JAX_PLATFORMS="cpu", JAX_ENABLE_X64="0", MALLOC_ARENA_MAX="2")
    environment |= {"JAX_NUM_CPU_DEVICES": "1", "NPROC": "2"}
    command = [sys.executable, "-c", LIMITED, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@slow
def test_a_table_in_a_file_may_be_larger_than_memory(tmp_path):
    done = limited(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "trained 524288\n"


@slow
def test_a_table_in_memory_that_is_larger_fails_cleanly():
    done = limited()
    assert done.returncode == 3, done.stdout + done.stderr
    assert "kvjax: table 'large', lookup_or_insert: want memory for the call, got none" in done.stdout
    assert "alive 1024" in done.stdout


FULL = """
import resource, sys
import numpy as np
import kvjax

table = kvjax.get_table("full", dim=1024, storage=kvjax.storage.Mmap(sys.argv[1]))
table = table.upsert(np.arange(100), np.ones((100, 1024)))
resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
try:
    table.lookup_or_insert(np.arange(8192))[1].version.block_until_ready()
except Exception as error:
    print(error)
table = kvjax.get_table("full")
assert len(table) == 100 and (np.asarray(table.lookup(np.arange(100))) == 1).all()
resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))
try:
    kvjax.get_table("full2", dim=1024, capacity=8192, storage=kvjax.storage.Mmap(sys.argv[1]))
except MemoryError as error:
    print(error)
print(len(table.lookup_or_insert(np.arange(1000))[1]))
"""


@slow
def test_a_full_disk_is_an_error_of_the_write(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"want 2097152 bytes more on disk, got '{tmp_path}': File too large"
    assert f"table 'full', lookup_or_insert: {said}" in done.stdout
    assert f"table 'full2', get_table: {said}" in done.stdout
    assert done.stdout.endswith("\n1000\n")
