"""The CUDA module: when it is built, that it loads without a driver, and that it holds the code asked for."""

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
built = pytest.mark.skipif(_spec is None, reason=f"the CUDA backend is {kvjax.backends()['cuda']}")
BINARY = Path(_spec.origin or "") if _spec else Path()


def output(*command, **environment):
    env = os.environ | environment
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.strip()


def python(code, **environment):
    """What the code prints in a process of its own."""
    return output(sys.executable, "-c", code, **environment)


# Enough of an nvcc for find_cuda.cmake: it has a version, and compiles whatever it is given.
NVCC = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 13.0, V13.0.88";; esac
"""


@pytest.fixture
def decide(tmp_path):
    """What cmake/find_cuda.cmake decides, and says, on a machine with or without an nvcc and a GPU's driver."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake here")
    script, nvcc, driver = tmp_path / "decide.cmake", tmp_path / "nvcc", tmp_path / "driver"
    find_cuda = Path(__file__).parents[2] / "cmake/find_cuda.cmake"
    script.write_text(f'include("{find_cuda}")\nmessage(STATUS "decided: ${{KVJAX_HAS_CUDA}}")\n')

    def decide(wanted, *, has_nvcc, has_driver):
        for path, is_there in ((nvcc, has_nvcc), (driver, has_driver)):
            path.unlink(missing_ok=True)
            if is_there:
                path.write_text(NVCC)
                path.chmod(0o755)
        settings = {"KVJAX_CUDA": wanted, "KVJAX_DRIVER_SIGNS": f"{tmp_path}/none;{driver}", "KVJAX_NVCCS": nvcc}
        command = [cmake, *(f"-D{k}={v}" for k, v in settings.items()), "-P", str(script)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        text = " ".join((done.stdout + done.stderr).split())
        return ("error" if done.returncode else text.split("decided: ")[1]), text

    return decide


@pytest.mark.parametrize(
    ("wanted", "has_nvcc", "has_driver", "decision"),
    [
        ("AUTO", True, True, "ON"),
        ("AUTO", True, False, "OFF"),
        ("AUTO", False, True, "OFF"),
        ("AUTO", False, False, "OFF"),
        ("ON", True, False, "ON"),
        ("ON", False, True, "error"),
        ("OFF", True, True, "OFF"),
        ("perhaps", True, True, "error"),
    ],
)
def test_when_it_is_built(decide, wanted, has_nvcc, has_driver, decision):
    assert decide(wanted, has_nvcc=has_nvcc, has_driver=has_driver)[0] == decision


def test_why_it_is_not_built_is_said(decide):
    text = decide("AUTO", has_nvcc=True, has_driver=False)[1]
    assert "this machine has no driver of an NVIDIA GPU; KVJAX_CUDA=ON builds it for others" in text
    text = decide("ON", has_nvcc=False, has_driver=False)[1]
    assert "KVJAX_CUDA is ON, but there is no CUDA compiler: " in text
    assert "set CUDACXX to its nvcc, or pip install nvidia-cuda-nvcc" in text


@built
def test_it_loads_and_has_handlers():
    code = "import importlib.util as u; print(u.find_spec('kvjax.ffi._cuda').origin)"
    assert Path(python(code)).samefile(BINARY)
    assert python("import kvjax.ffi._cuda as m; print('kvjax_after' in m.handlers())") == "True"


@built
def test_without_a_gpu_it_says_why():
    code = "import kvjax, kvjax.ffi._cuda as m; print(m.devices(), kvjax.backends()['cuda'], sep='|')"
    count, state = python(code, CUDA_VISIBLE_DEVICES="").split("|")
    assert count == "0"
    assert re.fullmatch(r"built; no GPU: (there is no CUDA driver|cudaError\w+: .+)", state)


@built
def test_the_state_is_that_of_the_machine():
    from kvjax.ffi import _cuda

    state = kvjax.backends()["cuda"]
    assert state == "loaded" if _cuda.devices() else state.startswith("built; no GPU: ")


@built
def test_importing_kvjax_does_not_start_cuda():
    if kvjax.backends()["cuda"] != "loaded":
        pytest.skip("needs a GPU")
    code = "import os, kvjax; os.environ['CUDA_VISIBLE_DEVICES'] = ''; print(kvjax.backends()['cuda'])"
    assert python(code).startswith("built; no GPU: ")


@built
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the system's loader")
def test_it_links_neither_the_driver_nor_the_runtime():
    libraries = output("ldd", str(BINARY))
    assert "libc.so" in libraries
    assert not re.search(r"libcuda|libcudart|libnvrtc", libraries)


@built
def test_it_holds_the_code_asked_for():
    from kvjax.ffi import _cuda

    near = Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc").resolve().parent / "cuobjdump"
    cuobjdump = shutil.which("cuobjdump") or (str(near) if near.exists() else None)
    if cuobjdump is None:
        pytest.skip("there is no cuobjdump here")
    code = output(cuobjdump, "--list-elf", "--list-ptx", str(BINARY))
    assert {int(n) for n in re.findall(r"sm_(\d+)", code)} == set(_cuda.architectures())


@built
def test_programs_are_lowered_for_cuda_on_any_machine(make):
    table = make(dim=3)

    def step(table, x):
        return table.after(x)

    text = jax.jit(step).trace(table, jnp.zeros(2)).lower(lowering_platforms=("cuda",)).as_text()
    assert "@kvjax_after" in text
