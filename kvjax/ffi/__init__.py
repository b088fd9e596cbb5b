"""Loads the backends that were built and registers their handlers with XLA: the one place that knows platforms.

The same target name is registered for every platform, and XLA chooses; nothing above this module does.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import jax

# Python started in a checkout finds this folder before the installed one, but the compiled modules lie
# only in the latter.
__path__ += [
    folder
    for entry in sys.path
    if os.path.isdir(folder := os.path.join(entry, "kvjax", "ffi")) and folder not in __path__
]

_PLATFORMS = {"cpu": ("_cpu", "cpu"), "cuda": ("_cuda", "CUDA")}


def _load() -> tuple[dict[str, ModuleType], dict[str, str]]:
    modules, states = {}, {}
    for backend, (module, platform) in _PLATFORMS.items():
        try:
            modules[backend] = importlib.import_module(f"kvjax.ffi.{module}")
        except ModuleNotFoundError:
            states[backend] = f"not built: there is no module kvjax.ffi.{module}"
            continue
        except ImportError as error:
            states[backend] = f"built, but it does not load: {error}"
            continue
        for target, handler in modules[backend].handlers().items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)
        states[backend] = "loaded"
    return modules, states


_modules, _states = _load()
if "cpu" not in _modules:
    raise ImportError(
        f"kvjax's compiled module is missing ({_states['cpu']}); install the project with `pip install .` "
        "(or `pip install -e .`) in its top folder"
    )

host = _modules["cpu"]
"""The whole-table calls that are made from Python and not from a compiled program."""


def ordinal(device: Any) -> int:
    """What an FFI call that runs on a device of this process is told as its DeviceOrdinal."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def backends() -> dict[str, str]:
    """Says which backends this process can use.

    Returns:
      "loaded", or the reason why not, by backend name.

    Example:
      >>> import kvjax
      >>> kvjax.backends()["cpu"]
      'loaded'
    """
    return dict(_states)
