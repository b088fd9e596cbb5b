"""The CUDA module as it was built: it needs no driver to load, and holds the code it was asked for."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kvjax
import kvjax.ffi

_spec = importlib.util.find_spec("kvjax.ffi._cuda")
pytestmark = pytest.mark.skipif(_spec is None, reason=f"the CUDA backend is {kvjax.backends()['cuda']}")
BINARY = Path(_spec.origin or "") if _spec else Path()


def output(*command, **environment):
    env = os.environ | environment
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.strip()


def python(code, **environment):
    """What the code prints in a process of its own."""
    return output(sys.executable, "-c", code, **environment)


def test_it_loads_and_has_handlers():
    code = "import importlib.util as u; print(u.find_spec('kvjax.ffi._cuda').origin)"
    assert Path(python(code)).samefile(BINARY)
    assert python("import kvjax.ffi._cuda as m; print('kvjax_after' in m.handlers())") == "True"


def test_without_a_gpu_it_says_why():
    code = "import kvjax, kvjax.ffi._cuda as m; print(m.devices(), kvjax.backends()['cuda'], sep='|')"
    count, state = python(code, CUDA_VISIBLE_DEVICES="").split("|")
    assert count == "0"
    assert re.fullmatch(r"built; no GPU: (there is no CUDA driver|cudaError\w+: .+)", state)


def test_the_state_is_that_of_the_machine():
    from kvjax.ffi import _cuda

    state = kvjax.backends()["cuda"]
    assert state == "loaded" if _cuda.devices() else state.startswith("built; no GPU: ")


def test_importing_kvjax_does_not_start_cuda():
    if kvjax.backends()["cuda"] != "loaded":
        pytest.skip("needs a GPU")
    code = "import os, kvjax; os.environ['CUDA_VISIBLE_DEVICES'] = ''; print(kvjax.backends()['cuda'])"
    assert python(code).startswith("built; no GPU: ")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the system's loader")
def test_it_links_neither_the_driver_nor_the_runtime():
    libraries = output("ldd", str(BINARY))
    assert "libc.so" in libraries
    assert not re.search(r"libcuda|libcudart|libnvrtc", libraries)


def test_it_holds_the_code_asked_for():
    from kvjax.ffi import _cuda

    near = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parent / "cuobjdump"
    cuobjdump = shutil.which("cuobjdump") or (str(near) if near.exists() else None)
    if cuobjdump is None:
        pytest.skip("there is no cuobjdump here")
    code = output(cuobjdump, "--list-elf", "--list-ptx", str(BINARY))
    assert {int(n) for n in re.findall(r"sm_(\d+)", code)} == set(_cuda.architectures())


def test_programs_are_lowered_for_cuda_on_any_machine(make):
    table = make(dim=3)

    def step(table, x):
        return table.after(x)

    text = jax.jit(step).trace(table, jnp.zeros(2)).lower(lowering_platforms=("cuda",)).as_text()
    assert "@kvjax_after" in text
