"""The Linen layer."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from kvjax._table import Table
from kvjax.flax._common import read, resolve_table


class Embed(nn.Module):
    """``flax.linen.Embed`` without a vocabulary: looks rows of a table up by any 64-bit key.

    The table stands in ``params`` under "table". Differentiate with `kvjax.value_and_grad`, and update with
    `kvjax.optax.partition`.

    Attributes:
      table: name of the table (created with the options below if there is none), or a `Table`.
      features: width of a row; may be left out if the table exists.
      dtype: compute dtype of the output; by default the table's.
      param_dtype: dtype of the rows, by default float32.
      initializer: see `kvjax.get_table`; by default normal with variance 1 / features.
      key_dtype: see `kvjax.get_table`.
      seed: see `kvjax.get_table`.
      trainable: see `kvjax.get_table`.
      checkpoint: see `kvjax.get_table`.
      storage: see `kvjax.get_table`.

    Example:
      >>> import jax, kvjax, numpy as np
      >>> embed = kvjax.flax.Embed("doc_linen", features=4)
      >>> keys = kvjax.keys(np.array([[2**40, -1]]))
      >>> variables = embed.init(jax.random.key(0), keys)
      >>> variables["params"]
      {'table': Table('doc_linen', dim=4, dtype=float32, rows=0, version=0)}
      >>> embed.apply(variables, keys).shape
      (1, 2, 4)
      >>> kvjax.drop_table("doc_linen")
    """

    table: str | Table
    features: int | None = None
    dtype: Any = None
    param_dtype: Any = None
    initializer: Any = None
    key_dtype: str | None = None
    seed: int | None = None
    trainable: bool | None = None
    checkpoint: bool | None = None
    storage: Any = None

    @nn.compact
    def __call__(self, keys: Any) -> jax.Array:
        """Looks rows up.

        Args:
          keys: ``(...)``: `kvjax.Keys`, NumPy integers or JAX integers.

        Returns:
          ``(..., features)``.
        """

        def init(_) -> Table:
            return resolve_table(
                self.table, self.features, dtype=self.param_dtype, initializer=self.initializer, seed=self.seed,
                key_dtype=self.key_dtype, trainable=self.trainable, checkpoint=self.checkpoint, storage=self.storage,
            )  # fmt: skip

        return read(self.param("table", init), keys, self.dtype)
