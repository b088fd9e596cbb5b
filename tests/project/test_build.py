"""The build: which systems it refuses."""

import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_other_systems_than_linux_are_refused(system, tmp_path):
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake here")
    command = [cmake, "-S", Path(__file__).parents[2], "-B", tmp_path, f"-DCMAKE_SYSTEM_NAME={system}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode
    assert f"and this is for {system}; install it in a container" in " ".join(done.stderr.split())
