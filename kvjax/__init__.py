"""Embedding tables for JAX and Flax that need only a dimension: any 64-bit id, no vocabulary."""

import importlib
from typing import TYPE_CHECKING, Any

from kvjax import admit as admit
from kvjax import constraints as constraints
from kvjax import evict as evict
from kvjax import initializers as initializers
from kvjax import storage as storage
from kvjax._keys.hashing import hash_keys as hash_keys
from kvjax._keys.keys import Keys as Keys
from kvjax._keys.keys import KeysLike as KeysLike
from kvjax._keys.keys import keys as keys
from kvjax._keys.sparse_rows import SparseRows as SparseRows
from kvjax._lookup.bags import lookup_bag as lookup_bag
from kvjax._lookup.features import lookup_many as lookup_many
from kvjax._lookup.gradients import grad as grad
from kvjax._lookup.gradients import value_and_grad as value_and_grad
from kvjax._lookup.prefetch import prefetch as prefetch
from kvjax._table.prefetched import Prefetched as Prefetched
from kvjax._table.registry import drop_table as drop_table
from kvjax._table.registry import get_table as get_table
from kvjax._table.registry import stats as stats
from kvjax._table.registry import tables as tables
from kvjax._table.reshard import reshard as reshard
from kvjax._table.stats import Stats as Stats
from kvjax._table.table import Table as Table
from kvjax._training.merge import merge as merge
from kvjax._values.exported import Exported as Exported
from kvjax._values.prune import Prune as Prune
from kvjax.ffi import backends as backends

if TYPE_CHECKING:
    from kvjax import checkpoint as checkpoint
    from kvjax import convert as convert
    from kvjax import flax as flax
    from kvjax import optax as optax
    from kvjax import orbax as orbax
else:  # from which a type checker would take it that there is every name

    def __getattr__(name: str) -> Any:
        # These load when they are first used: whoever needs no checkpoints does not wait for Orbax.
        if name in ("checkpoint", "convert", "flax", "optax", "orbax"):
            return importlib.import_module(f"kvjax.{name}")
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)  # the adapters too, which are not loaded yet


__version__ = "0.1.0"

__all__ = [
    "Exported", "Keys", "KeysLike", "Prefetched", "Prune", "SparseRows", "Stats", "Table", "admit", "backends",
    "checkpoint", "constraints", "convert", "drop_table", "evict", "flax", "get_table", "grad", "hash_keys",
    "initializers", "keys", "lookup_bag", "lookup_many", "merge", "optax", "orbax", "prefetch", "reshard", "stats",
    "storage", "tables", "value_and_grad",
]  # fmt: skip
