"""The backend that tests run on, strict JAX for every test, eight devices, and no table and no cursor left behind."""

import gc
import importlib.metadata
import itertools
import math
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

import hypothesis
import pytest

# Before JAX starts. With fewer threads than twice the devices, XLA's collectives on the CPU may wait for each other for
# ever once several programs are under way (seen with jax 0.10).
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "32")

# What JAX and kvjax are told, by --backend. They hear it when they are imported, which pytest_configure does.
BACKENDS = {
    "cpu": {"JAX_PLATFORMS": "cpu", "KVJAX_EMULATED": "0"},
    # Several processes share the GPU, and tables take memory beside JAX's.
    "cuda": {"JAX_PLATFORMS": "cuda,cpu", "KVJAX_EMULATED": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    "emulated": {"JAX_PLATFORMS": "cpu", "KVJAX_EMULATED": "1"},
}

ROOT = Path(__file__).parents[1]

MOST_MEMORY = 3 << 30
"""Bytes of a process with which it forgets its programs."""


class Contexts(threading.local):
    """MLIR's, in which a thread lowers the programs of a file of tests. JAX 0.10 makes one for each program, which
    takes six times as long as to lower a small one, and 0.12 one for ten."""

    kept = None

    def get(self, make):
        if ir.Context.current is not None:  # within a lowering, whose program another would become a part of
            return make()
        self.kept = self.kept or make()
        return self.kept


CONTEXTS = Contexts()

# The same examples in every run, so that only a change makes a test fail, and no minutes of shrinking when one does.
# `--hypothesis-profile=search` tries others, and shrinks.
_phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None, phases=_phases)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("fixed")

pytest.register_assert_rewrite("tests.support")

from tests.support import gaps, marks  # noqa: E402


def part(text):
    """Two numbers, of ``"2/4"``."""
    k, n = map(int, text.split("/"))
    if not 1 <= k <= n:
        raise ValueError(text)
    return k, n


def pytest_addoption(parser):
    parser.addoption(
        "--backend", choices=list(BACKENDS), help="whose tables are tested; by default those that a program would get"
    )
    parser.addoption(
        "--haste", action="store_true", help="compile in haste, as is the default for the quick tests alone"
    )
    parser.addoption(
        "--part", type=part, default=(1, 1), metavar="K/N", help="every N-th of the tests, from the K-th on, as in 2/4"
    )


def pytest_configure(config):
    gc.set_threshold(50_000)  # what is collected leaves little garbage, and a tenth of the time went to looking for it
    config.addinivalue_line("markers", "cpu_table: about the CPU table alone; skipped where tables are on a device")
    config.addinivalue_line("markers", "slow: takes seconds, and adds to what a quick test checks; .ci/run has some")
    marks.full = config.option.markexpr != "not slow"
    if config.option.haste or not marks.full:
        # Compiling takes most of the time, and a fifth of it where programs may be slow. Where slow tests run, too, all
        # of them run as users' programs do, unless --haste says otherwise.
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        marks.hasty = True
        if importlib.metadata.version("jaxlib").startswith("0.10."):  # one that is not known ends the process
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # What this process compiles, its workers and the programs that they start need not compile again.
        folder = tempfile.mkdtemp(prefix="kvjax-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    backend = config.getoption("--backend")
    # Programs that tests start take kvjax from where they do.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.update(BACKENDS.get(backend, {}))
    if "kvjax" in sys.modules:  # by a conftest in a folder, which would get another backend than it was asked for
        raise pytest.UsageError("kvjax was imported before it was told the backend: import it where a fixture runs")
    global jax, ir, kvjax, tables, Elsewhere, mesh_trouble, PROCESS
    import jax
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    import kvjax
    from kvjax._process import PROCESS
    from kvjax._spec.unsupported import mesh_trouble
    from tests.support import tables
    from tests.support.elsewhere import Elsewhere

    make_context = mlir.make_ir_context
    mlir.make_ir_context = lambda: CONTEXTS.get(make_context)
    if backend == "cuda" and (state := kvjax.backends()["cuda"]) != "loaded":
        raise pytest.UsageError(f"--backend=cuda wants a GPU, got {state!r}: see docs/cuda.md")


def on_device():
    """Whether tables are those of a device, on a GPU or emulated."""
    return kvjax.ffi.on_device()


def backend_of_tables():
    """One of BACKENDS: that of the tables that are tested, whether it was named or not."""
    if not on_device():
        return "cpu"
    return "emulated" if kvjax.backends()["cuda"] == "emulated" else "cuda"


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    k, n = config.option.part
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % n != k - 1])
    items[:] = items[k - 1 :: n]
    for item in items:
        if item.get_closest_marker("cpu_table") and on_device():
            item.add_marker(pytest.mark.skip(reason="about the CPU table alone"))


def pytest_collection_finish():
    """Modules and tests stay to the end: a twentieth of the time went to looking through them for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that falls into a gap of the backend has to fail as the gap says. Where this JAX runs no tables with
    mesh=, tests of these are skipped."""
    gap = gaps.of(item.nodeid, backend_of_tables())
    try:
        result = yield
    except Exception as error:
        if gap is not None and gap.explains(error):
            pytest.xfail(gap.message)
        trouble = mesh_trouble(jax.__version__)
        if trouble and "want a jax that runs tables with mesh=" in gaps.text_of(error):
            pytest.skip(trouble)
        raise
    if gap is None:
        return result
    pytest.fail(f"it works now: take it off the list of what fails with {gap.message!r} in tests/support/gaps.py")


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True)
def _drop_tables():
    yield
    names, refused = list(PROCESS.all_specs()), []  # also of those of which a step has stopped half-way
    for _ in range(len(names) + 1):  # each is raised once, by the first call that meets it
        try:
            kvjax.stats()
            break
        except Exception as error:
            refused.append(error)
    for name in names:
        kvjax.drop_table(name)
    PROCESS.cursors.clear(), PROCESS.moving.clear()
    if refused:  # of which the test knows nothing
        raise refused[0]


@pytest.fixture(autouse=True, scope="module")
def _drop_programs():
    """Compiled programs are shared by modules, until they take much memory; where the system says it."""
    yield
    CONTEXTS.kept = None  # with the constants of all programs
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else math.inf
    if pages * os.sysconf("SC_PAGE_SIZE") > MOST_MEMORY:
        jax.clear_caches()


@pytest.fixture
def make():
    """Makes a table with a name of its own in this test. The next test has the same names, and so the same programs."""
    numbers = itertools.count()

    def make(dim=4, **options):
        return kvjax.get_table(f"table{next(numbers)}", dim=dim, **options)

    return make


@pytest.fixture
def mesh():
    """Makes a mesh of some of the devices: ``mesh(4)``, ``mesh(data=2, model=2)``, ``mesh(4, explicit=True)``."""

    def make(n=None, explicit=False, **axes):
        if trouble := mesh_trouble(jax.__version__):
            pytest.skip(trouble)
        axes = axes or {"x": n}
        kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
        devices = jax.devices()[: math.prod(axes.values())]
        if len(devices) < math.prod(axes.values()):
            pytest.skip(f"wants {math.prod(axes.values())} devices, and there are {len(devices)}")
        return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes), devices=devices)

    return make


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    """Runs the test with 64-bit JAX integers off and on."""
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture
def promotion(_strict):
    """JAX's own promotion rules: Optax's adam does not run under strict ones, with dense parameters neither."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def places(mesh):
    """Arguments of get_table and reshard, by what they put a table into."""
    return {
        "one place": {"mesh": None},
        "1": {"mesh": mesh(1)},
        "4": {"mesh": mesh(4)},
        "8": {"mesh": mesh(8)},
        "axis": {"mesh": mesh(data=2, model=4), "axis": "model"},
        "partitioner": {"mesh": mesh(4), "partitioner": tables.by_low_bits},
        "another": {"mesh": mesh(2), "partitioner": tables.by_high_bits},
        "replicated": {"mesh": mesh(4), "replicated": True},
    }


@pytest.fixture
def elsewhere(monkeypatch):
    """Makes tables of the device backend ones of the host's, under other names."""
    ffi = kvjax.ffi
    module = Elsewhere()
    monkeypatch.setitem(ffi._modules, ffi.DEVICE, module)
    monkeypatch.setitem(ffi._states, ffi.DEVICE, "loaded")
    yield module
    for name in kvjax.tables():
        kvjax.drop_table(name)
