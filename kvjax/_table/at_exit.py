"""The check at exit: a write that failed, and whose error no call of kvjax has met, is reported once.

What a program has met by JAX alone (`jax.block_until_ready` of what a compiled step gives) nobody can tell from what
it has not, so it is among these. JAX keeps the failure of a device's last program and prints it with two tracebacks
when Python exits, also if the program has met the error long before.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from typing import Any

import jax
from jax.extend.backend import backends

from kvjax import ffi
from kvjax._process import MANY_ERRORS, PROCESS


def started(name: str, version: Any) -> None:
    """Says that a program gives this version of a table, an array."""
    PROCESS.started[threading.get_ident(), name] = version


def forget(name: str) -> None:
    """Says that the table is gone."""
    for key in list(PROCESS.started):
        if key[1] == name:
            PROCESS.started.pop(key, None)


def met(error: BaseException) -> None:
    """Says that the program has seen an error."""
    said = _ours(error)
    with PROCESS.lock:
        PROCESS.met.pop(said, None)  # the last is that of now
        PROCESS.met[said] = None
        while len(PROCESS.met) > MANY_ERRORS:
            del PROCESS.met[next(iter(PROCESS.met))]


def _ours(error: BaseException) -> str:
    """What kvjax says in an error, which is the same wherever JAX meets it; nothing in an error of others."""
    return "".join(str(error).partition("kvjax:")[1:])


def wait_for_programs(of_all_threads: bool = False) -> list[Exception]:
    """Waits for all programs of this thread that are writing. What the last of them have failed with."""
    failed: list[Exception] = []
    try:
        jax.effects_barrier()  # for programs with an effect of the user's, such as jax.debug.print
    except ExceptionGroup as group:  # as of jax 0.12
        failed += group.exceptions
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        failed.append(error)
    for thread, name in list(PROCESS.started):
        version = PROCESS.started.get((thread, name))
        if version is None or (not of_all_threads and thread != threading.get_ident()):
            continue
        try:
            if not version.is_deleted():  # or a program that comes after has it
                version.block_until_ready()
        except (ValueError, RuntimeError) as error:
            failed.append(error)
    return failed


def wait_for_results() -> None:
    """Waits for all programs whose results somebody has: JAX does not say which of them read a table. What they fail
    with, who has the results meets."""
    for platform in backends():
        for result in jax.live_arrays(platform):
            with contextlib.suppress(ValueError, RuntimeError):  # also of one that another thread deletes
                result.block_until_ready()


def acknowledge() -> bool:
    """Takes the failures of programs that have been started as known. Whether there is one."""
    failed = wait_for_programs()
    for error in failed:
        met(error)
    return bool(failed)


def _refused_late() -> list[Exception]:
    """What calls on tables of a device were refused for, and no later call has raised: no program fails for it."""
    refused: list[Exception] = []
    for spec in PROCESS.all_specs().values():
        for shard in spec.shards if ffi.is_device(spec.storage.backend) else ():
            try:
                spec.host.version(spec.name, shard)  # waits for the device, so that the next call knows
                spec.host.stats(spec.name, shard)
            except KeyError:  # another thread has dropped the table or moved it
                continue
            except (ValueError, RuntimeError, MemoryError) as error:
                if f"table '{spec.name}', stats:" not in str(error):  # of this call itself, as beside a slow sink
                    refused.append(error)
    return refused


def _say_what_failed() -> None:
    if PROCESS.forked:  # the tables, and what has failed of them, are of the process that made them
        return
    failed = list(filter(None, map(_ours, wait_for_programs(of_all_threads=True))))  # JAX says the others
    for _, text, _ in ffi.left_failures():
        print(f"kvjax: a step was refused, and kvjax.commit has not been called: {text}", file=sys.stderr)
    for text in (*failed, *map(_ours, _refused_late())):
        if text not in PROCESS.met and text not in str(getattr(sys, "last_value", None)):
            said = "a write has failed that no call of kvjax has met (one of JAX may have)"
            print(f"kvjax: {said}: {text}", file=sys.stderr)
    if failed:
        for device in jax.local_devices():
            with jax.default_device(device):
                jax.jit(_nothing)()  # whose success takes the place of the failure that JAX keeps for the device


def _nothing() -> None:
    jax.debug.callback(lambda: None)


atexit.register(_say_what_failed)  # after JAX's, so it is called before them
