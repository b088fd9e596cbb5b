"""Embedding tables for JAX and Flax that need only a dimension: any 64-bit id, no vocabulary."""

# ruff: noqa: F403, F405

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax import checkpoint as checkpoint
    from kvjax import convert as convert
    from kvjax import flax as flax
    from kvjax import optax as optax
    from kvjax import orbax as orbax
    from kvjax import serving as serving
    from kvjax._public import *
else:  # from which a type checker would take it that there is every name

    def __getattr__(name: str) -> Any:
        # Nothing is loaded before it is used: who serves `kvjax.serving.FrozenTable` has no JAX, and who needs no
        # checkpoints does not wait for Orbax.
        if name in _MODULES:
            return importlib.import_module(f"kvjax.{name}")
        if name in _WITHOUT_JAX:
            return getattr(importlib.import_module(f"kvjax.{_WITHOUT_JAX[name]}"), name)
        if not name.startswith("__"):
            public = importlib.import_module("kvjax._public")
            names = {each: getattr(public, each) for each in __all__ if hasattr(public, each)}
            globals().update(names)
            if name in globals():  # also a package that has come with them
                return globals()[name]
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)  # what is not loaded yet, too


__version__ = "0.1.0"

_MODULES = (
    "admit", "checkpoint", "constraints", "convert", "evict", "ffi", "flax", "initializers", "optax", "orbax",
    "serving", "storage",
)  # fmt: skip

# What a server makes its keys of, and what says which rows it gets.
_WITHOUT_JAX = {
    "Exported": "_values.exported", "Prune": "_values.prune", "PruneReport": "_values.prune",
    "PrunedRows": "_values.prune", "QuantisationReport": "_formats.quantise", "hash_keys": "_keys.hashing",
}  # fmt: skip

__all__ = [
    "Exported", "Feature", "Keys", "KeysLike", "Prefetched", "Program", "ProgramError", "Prune", "PruneReport",
    "PrunedRows", "QuantisationReport", "Simulated", "SparseRows", "Stats", "Table", "admit", "backends", "checkpoint",
    "commit", "constraints", "convert", "drop_table", "evict", "export", "flax", "get_table", "grad", "hash_keys",
    "initializers", "keys", "lookup_bag", "lookup_many", "merge", "optax", "orbax", "prefetch", "reshard", "serving",
    "simulate", "stats", "storage", "tables", "value_and_grad",
]  # fmt: skip
