"""Serving: frozen tables, read by NumPy alone or inside ``jit``. Importing this loads no JAX."""

from kvjax.serving._format import FrozenError as FrozenError
from kvjax.serving._frozen import FrozenTable as FrozenTable
from kvjax.serving._versions import Changes as Changes
from kvjax.serving._versions import Version as Version
from kvjax.serving._versions import Versions as Versions

__all__ = ["Changes", "FrozenError", "FrozenTable", "Version", "Versions"]


def __dir__() -> list[str]:
    return sorted(__all__)
