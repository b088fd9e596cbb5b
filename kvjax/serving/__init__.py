"""Serving: frozen tables, read by NumPy alone or inside ``jit``. Importing this loads no JAX."""

from typing import TYPE_CHECKING, Any

from kvjax.serving._format import FrozenError as FrozenError
from kvjax.serving._frozen import FrozenTable as FrozenTable
from kvjax.serving._info import ReleaseInfo as ReleaseInfo
from kvjax.serving._release import Changes as Changes
from kvjax.serving._release import PausedError as PausedError
from kvjax.serving._release import Release as Release
from kvjax.serving._releases import Releases as Releases

if TYPE_CHECKING:
    from kvjax.serving._jax import FrozenArrays as FrozenArrays
else:

    def __getattr__(name: str) -> Any:
        if name == "FrozenArrays":  # the one that needs JAX
            from kvjax.serving._jax import FrozenArrays

            return FrozenArrays
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Changes", "FrozenError", "FrozenTable", "PausedError", "Release", "ReleaseInfo", "Releases"]


def __dir__() -> list[str]:
    return sorted([*__all__, "FrozenArrays"])  # which `import *` leaves out, so that it needs no JAX
