"""Runs one JAX program as several processes on this machine: gloo between them, host devices in each.

outputs = processes.run(worker, "argument", n=2, devices=2)     # worker: a function of a test module
outputs = processes.run(Path("examples/two_tower.py"), "--smoke")  # it gets --coordinator, --processes, --process

with processes.start(worker) as group:                          # to kill one of them
    group.wait_for("step 3")
    group.kill(1)
    codes = group.wait(timeout=60)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A process that dies is noticed after so many seconds, and one that fails waits so long for the others.
PATIENCE = 10

Target = Callable[..., Any] | Path


def run(target: Target, *args: Any, n: int = 2, devices: int = 1, timeout: float = 120) -> list[str]:
    """Runs the target as `n` processes of `devices` devices each, and gives what each of them printed.

    Raises:
      AssertionError: one ended with an exit code other than 0; the message has all outputs.
      TimeoutError: they took longer than `timeout` seconds; the message has all outputs.
    """
    with start(target, *args, n=n, devices=devices) as group:
        codes = group.wait(timeout, until_failure=True)
        assert not any(codes), group.report()
        return [group.output(process) for process in range(n)]


def start(target: Target, *args: Any, n: int = 2, devices: int = 1) -> Group:
    """Starts the processes; leaving the ``with`` block kills those that still run."""
    return Group(_command(target, args), n, devices)


class Group:
    def __init__(self, command: list[str], n: int, devices: int):
        self._folder = tempfile.TemporaryDirectory()
        # The port stays ours until the end; the coordinator can listen on it since gRPC shares ports.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._port.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{self._port.getsockname()[1]}"
        self._files = [Path(self._folder.name) / str(process) for process in range(n)]
        self._children = []
        for process, file in enumerate(self._files):
            flags = [f"--coordinator={coordinator}", f"--processes={n}", f"--process={process}"]
            with file.open("wb") as out:
                child = subprocess.Popen([*command, *flags], env=_environment(devices), stdout=out, stderr=out)
            self._children.append(child)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: Any) -> None:
        for process, child in enumerate(self._children):
            self.kill(process)
            child.wait()
        self._port.close()
        self._folder.cleanup()

    def output(self, process: int) -> str:
        """What a process has printed until now, errors included."""
        return self._files[process].read_text(errors="replace")

    def report(self) -> str:
        """Exit codes (None while it runs) and outputs; who failed first stands first."""
        codes = [child.poll() for child in self._children]
        order = sorted(range(len(codes)), key=lambda p: not codes[p])
        return "\n".join(f"--- process {p}, exit code {codes[p]}\n{self.output(p)}" for p in order)

    def kill(self, process: int, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends a process as a failing machine would, or as `how` does; JAX catches SIGTERM, which would not end it."""
        self._children[process].send_signal(how)

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Waits until every process has printed `text`. One that has ended without it fails at once."""

        def over() -> bool:
            ended = [child.poll() is not None for child in self._children]  # first, so that their outputs are whole
            missing = [text not in self.output(p) for p in range(len(ended))]
            assert not any(e and m for e, m in zip(ended, missing, strict=True)), self.report()
            return not any(missing)

        self._until(over, timeout, repr(text))

    def wait(self, timeout: float, until_failure: bool = False) -> list[int | None]:
        """Waits until all have ended, or with `until_failure` the first has failed, and gives the exit codes."""

        def over() -> bool:
            codes = [child.poll() for child in self._children]
            return None not in codes or (until_failure and any(codes))

        self._until(over, timeout, "the end")
        return [child.poll() for child in self._children]

    def _until(self, happened: Callable[[], bool], timeout: float, what: str) -> None:
        end = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > end:
                raise TimeoutError(f"waited {timeout} s for {what}\n{self.report()}")
            time.sleep(0.02)


def _command(target: Target, args: tuple[Any, ...]) -> list[str]:
    if isinstance(target, Path):
        return [sys.executable, "-u", str(target), *map(str, args)]
    return [sys.executable, "-u", "-m", __name__, target.__module__, target.__name__, json.dumps(args)]


def _environment(devices: int) -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        # Threads of XLA's pool. With fewer than two per device (jax 0.10.2), steps that are dispatched before the last
        # one has ended take the threads its collectives wait for, and the program hangs.
        "NPROC": str(max(4 * devices, os.cpu_count() or 1)),
    }


def _main() -> None:
    """Calls a function of a module in one of the processes, once JAX knows the others."""
    parser = argparse.ArgumentParser()
    for name in ("module", "function", "args"):
        parser.add_argument(name)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    options = parser.parse_args()

    import jax

    jax.distributed.initialize(
        options.coordinator,
        options.processes,
        options.process,
        coordinator_bind_address=options.coordinator,  # not on every interface
        heartbeat_timeout_seconds=PATIENCE,
        shutdown_timeout_seconds=PATIENCE,
    )
    try:
        getattr(importlib.import_module(options.module), options.function)(*json.loads(options.args))
    except BaseException:
        # An ordinary exit would wait for the others, which wait for this process.
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    _main()
