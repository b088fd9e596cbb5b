"""Embedding tables for JAX and Flax that need only a dimension: any 64-bit id, no vocabulary."""

import importlib
from typing import TYPE_CHECKING, Any

from kvjax import _admit as admit
from kvjax import _constraints as constraints
from kvjax import _evict as evict
from kvjax import _initializers as initializers
from kvjax import _storage as storage
from kvjax._ahead import Ahead as Ahead
from kvjax._bags import lookup_bag as lookup_bag
from kvjax._export import Exported as Exported
from kvjax._export import Prune as Prune
from kvjax._features import lookup_many as lookup_many
from kvjax._gradients import grad as grad
from kvjax._gradients import value_and_grad as value_and_grad
from kvjax._keys import Keys as Keys
from kvjax._keys import hash_keys as hash_keys
from kvjax._keys import keys as keys
from kvjax._prefetch import prefetch as prefetch
from kvjax._registry import drop_table as drop_table
from kvjax._registry import get_table as get_table
from kvjax._registry import stats as stats
from kvjax._registry import tables as tables
from kvjax._reshard import reshard as reshard
from kvjax._sparse import SparseRows as SparseRows
from kvjax._sparse import merge as merge
from kvjax._stats import Stats as Stats
from kvjax._table import Table as Table
from kvjax.ffi import backends as backends

if TYPE_CHECKING:
    from kvjax import flax as flax
    from kvjax import optax as optax
    from kvjax import orbax as orbax

__version__ = "0.1.0"

__all__ = [
    "Ahead", "Exported", "Keys", "Prune", "SparseRows", "Stats", "Table", "admit", "backends", "constraints",
    "drop_table", "evict", "flax", "get_table", "grad", "hash_keys", "initializers", "keys", "lookup_bag",
    "lookup_many", "merge", "optax", "orbax", "prefetch", "reshard", "stats", "storage", "tables", "value_and_grad",
]  # fmt: skip

# Public under these names; the modules themselves are private like all others.
admit, constraints, evict, initializers, storage = admit, constraints, evict, initializers, storage


def __getattr__(name: str) -> Any:
    # The adapters load when they are first used: whoever needs no checkpoints does not wait for Orbax.
    if name in ("flax", "optax", "orbax"):
        return importlib.import_module(f"kvjax.{name}")
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
