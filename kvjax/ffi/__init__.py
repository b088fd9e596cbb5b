"""The backends that were built, loaded, and registered with XLA: the one place that knows platforms.

The same target name is registered for every platform, and XLA chooses; nothing above this module does. JAX is loaded by
who calls the targets: hashes, digests and constants do not need it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from kvjax.ffi._native import Native  # pyright: ignore[reportMissingModuleSource]  # a stub alone

# Python started in a checkout finds this folder before the installed one, but the compiled modules lie
# only in the latter.
__path__ += [
    folder
    for entry in sys.path
    if os.path.isdir(folder := os.path.join(entry, "kvjax", "ffi")) and folder not in __path__
]

_PLATFORMS = {"cpu": ("_cpu", "cpu"), "cuda": ("_cuda", "CUDA")}

HOST, DEVICE = _PLATFORMS
"""The backends that hold tables in the memory of the host and of the GPU."""

# So that the table of the GPU can be tested without one: every table is then such a one, in the memory of the host.
_EMULATED = os.environ.get("KVJAX_EMULATED") == "1"


def _import(module: str) -> Native | str:
    """A compiled module, or why there is none."""
    try:
        return cast("Native", importlib.import_module(f"kvjax.ffi.{module}"))
    except ModuleNotFoundError:
        return f"not built: there is no module kvjax.ffi.{module}"
    except ImportError as error:
        return f"built, but it does not load: {error}"


def _load() -> tuple[dict[str, Native], dict[str, str]]:
    modules, states = {}, {}
    for backend, (name, _) in _PLATFORMS.items():
        module = _import(name)
        states[backend] = module if isinstance(module, str) else "loaded"
        if not isinstance(module, str):
            modules[backend] = module
    return modules, states


def _import_emulated() -> Native:
    module = _import("_emulated")
    if isinstance(module, str):
        raise ImportError(
            f"kvjax: KVJAX_EMULATED=1 wants the emulated device table ({module}); build it with "
            "`pip install . -C cmake.define.KVJAX_EMULATED=ON`, or unset the variable"
        )
    return module


_modules, _states = _load()
if HOST not in _modules:
    raise ImportError(
        f"kvjax's compiled module is missing ({_states[HOST]}); install the project with `pip install .` "
        "(or `pip install -e .`) in its top folder"
    )

host: Native = _modules[HOST]
"""What the compiled code says from Python that is about no table: hashes, owners, constants."""

_built = dict(_modules)

if _EMULATED:
    _modules |= dict.fromkeys(_PLATFORMS, _import_emulated())
    _states[DEVICE] = "emulated"


def register() -> None:
    """Tells XLA what the targets are of the backends that were built."""
    import jax

    for backend, built in _built.items():
        handlers = built.handlers()
        if _EMULATED and backend == HOST:
            handlers |= _modules[HOST].handlers()  # what it cannot do yet stays
        for target, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=_PLATFORMS[backend][1])


def module(backend: str) -> Native:
    """The whole-table calls that are made from Python and not from a compiled program, on the tables of a backend.

    Raises:
      RuntimeError: it is not there.
    """
    if backend not in _modules:
        raise RuntimeError(f"kvjax: want the backend {backend!r}, got one that is {_states[backend]}")
    return _modules[backend]


def loaded(backend: str) -> bool:
    return backend in _modules


def is_device(backend: str) -> bool:
    """Whether its tables are those of a device: all are, when they are emulated."""
    return backend == DEVICE or _EMULATED


def trouble(backend: str) -> str | None:
    """Why there can be no tables of a backend, if so."""
    state = backends()[backend]
    return None if state in ("loaded", "emulated") else state


def on_device() -> bool:
    """Whether tables of this process belong in the memory of the GPU: its backend is there, and programs run on it."""
    if _EMULATED or DEVICE not in _modules:
        return _EMULATED
    import jax

    return jax.default_backend() == "gpu"


def set_process(number: int) -> None:
    """Says which of several processes this is, so that failures of different ones have different numbers."""
    for each in {host, *_modules.values()}:
        each.set_process(number)


def left_failures(table: str | None = None) -> list[tuple[int, str, bool]]:
    """What steps (of a table, if one is named) have been refused for that nobody has asked for: numbers, texts, and
    whether other steps were refused for them, too; of each module as they came."""
    found = [left for each in {host, *_modules.values()} for left in each.left_failures()]
    return [(number, text, others) for number, text, tables, others in found if table is None or table in tables]


def forget_failures(table: str) -> None:
    """Says that a table is gone: what was refused to it no longer keeps anybody from one of its name."""
    for each in {host, *_modules.values()}:
        each.forget_failures(table)


def ask_failure(number: int) -> None:
    """Raises the failure of a number that a step has given as its status, unless it has been asked for before.

    Raises:
      ValueError, RuntimeError, MemoryError, KeyError: as it is.
    """
    errors: list[Exception] = []
    for each in {host, *_modules.values()}:
        try:
            each.ask_failure(number)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def ordinal(device: Any) -> int:
    """What an FFI call that runs on a device of this process is told as its DeviceOrdinal."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def backends() -> dict[str, str]:
    """The backends that this process can use.

    Returns:
      "loaded", or the reason why not, by backend name. "built; no GPU: ..." means that programs for GPUs can be lowered
      here, but not run.

    Example:
      >>> import kvjax
      >>> kvjax.backends()["cpu"]
      'loaded'
    """
    # Asked for here and not at import, where it would start CUDA before JAX or a fork does.
    trouble = getattr(_modules.get("cuda"), "trouble", str)()
    return {**_states, "cuda": f"built; no GPU: {trouble}"} if trouble else dict(_states)
