"""Serving: frozen tables, read by NumPy alone or inside ``jit``. Importing this loads no JAX."""

from kvjax.serving._format import FrozenError as FrozenError
from kvjax.serving._frozen import FrozenTable as FrozenTable

__all__ = ["FrozenError", "FrozenTable"]


def __dir__() -> list[str]:
    return sorted(__all__)
