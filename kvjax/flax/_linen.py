"""Linen layers: modules whose parameters hold a table."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import yaml
from flax.core.scope import LazyRng

from kvjax._keys.keys import Keys, KeysLike
from kvjax._lookup.feature import Feature, read
from kvjax._lookup.readable import Readable
from kvjax._table.modules import Maker
from kvjax._table.prefetched import Prefetched
from kvjax._table.reads import Missing
from kvjax._table.table import Table
from kvjax._values.arrays import ArrayLike
from kvjax._values.bags import Combiner
from kvjax._values.errors import fail
from kvjax.flax._common import LayerOptions, checked, feature_of, learns_default, resolve_table
from kvjax.initializers import from_pool

# So that ``nn.Module.tabulate``, which prints parameters and inputs as YAML, can show them.
for _shown in (Table, Keys):
    yaml.SafeDumper.add_representer(_shown, lambda dumper, value: dumper.represent_str(repr(value)))


class _TableModule(LayerOptions, nn.Module):
    """A module with a table in ``params``."""

    def __post_init__(self) -> None:
        given = self.initializer
        if isinstance(given, (np.ndarray, jax.Array)) and given.dtype != bool:  # which has no hash, as modules must
            self.initializer = from_pool(given) if given.ndim else float(given)
        super().__post_init__()

    def _table(self) -> Readable:
        op, scope = type(self).__name__, self.scope
        assert scope is not None
        if not self.has_variable("params", "table"):
            # The model's key and not this module's, which differs between two modules that name one table.
            if "params" not in scope.root.rngs:
                raise fail(
                    ValueError, str(getattr(self.table, "name", self.table)), op,
                    'variables with its table, under "params"', "none",
                    'give init a key, or rngs with "params"; and apply what init has returned, or updates made of it',
                )  # fmt: skip
            rng = LazyRng.create(scope.root.rngs["params"]).rng
            maker = Maker(scope.root, None, part=bool(scope.root.path))
            return self.param("table", lambda _: resolve_table(self, op, rng, maker))
        table = checked(self, op, self.get_variable("params", "table"))
        return self.param("table", lambda _: table)

    # What a call goes through: nn.tabulate shows the results of all methods that are called, and a Feature is no array.
    @nn.nowrap
    def _feature(self, keys: KeysLike | Prefetched, **others: Any) -> Feature:
        return feature_of(self, self._table(), keys, **others)


class Embed(_TableModule):
    """``flax.linen.Embed`` without a vocabulary: looks up rows of a table by any 64-bit key.

    The table is in ``params`` under "table". Differentiate with `kvjax.value_and_grad`, and update with
    `kvjax.optax.partition`. Several features on one table share one module.

    There is no ``attend``, because a table has no last key: choose candidates, and score them by ``queries @
    table.lookup(candidates).T``.

    Attributes:
      table: name of the table that ``init`` makes with the options below, or a `Table`. If an earlier ``init`` made a
        table of this name and it has been written since, ``init`` replaces it by a new one. Modules of one model share
        a table by its name.
      features: width of a row. Without it, the layer uses the existing table of this name.
      dtype: compute dtype of the output; by default the table's.
      param_dtype: dtype of the rows, by default float32.
      reuse: whether ``init`` keeps the rows of a live table of this name.
      initializer: see `kvjax.get_table`; by default normal with variance 1 / features.
      key_dtype: see `kvjax.get_table`.
      seed: see `kvjax.get_table`; by default ``init`` makes it from its key and the table's name. (Under ``jit``
        and ``nn.remat`` the key has no value yet, so only the name decides.)
      trainable: see `kvjax.get_table`.
      checkpoint: see `kvjax.get_table`, also for the options that follow.
      capacity: rows to reserve memory for at the start.
      max_capacity: the most rows that the table should have.
      on_full: what a full table does.
      admit: which new keys get a row.
      evict: which rows are evicted.
      count: what a frequency counts.
      storage: where rows live.
      rounding: how training rounds 16-bit rows.
      constraint: function of a row, applied after each update.
      mesh: devices over which rows are sharded.
      devices: a list of devices instead of a mesh.
      axis: the axes of the mesh over which rows are sharded.
      partitioner: which shard owns which key.
      replicated: whether each device has all rows.
      wire: the dtype in which rows travel between devices.
      pad_id: the id that marks padding, which reads as zeros and is neither trained nor counted.
      max_norm: positive number; longer rows are scaled down to this Euclidean norm when they are read.

    Raises:
      TypeError: from ``init`` or ``apply``, as all that follow: `table` is neither a name nor a table; the keys are
        not integers; or ``params`` has something else in the place of the table.
      ValueError: an option is out of range; options of a new table are given for one that exists; `features` is not
        the table's dim; a live table that is kept has other options; ``init`` got no key for "params"; or ``apply`` no
        table.
      KeyError: there is no table of this name, and `features` is not given.
      RuntimeError: the handle in ``params`` is stale (in a compiled function it may be a ValueError, see
        docs/troubleshooting.md).

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

    @nn.compact
    def __call__(
        self,
        keys: KeysLike | Prefetched,
        mask: ArrayLike | None = None,
        *,
        salt: int | None = None,
        missing: Missing | None = None,
    ) -> jax.Array:
        """Looks rows up.

        Args:
          keys: ``(...)``: `kvjax.Keys`, NumPy integers or JAX integers.
          mask: ``(...)`` bool, false for padding.
          salt: number of a feature, so that it shares the table with others but no rows; see `kvjax.Keys.salted`.
          missing: what keys without a row read as, for instance "zeros" in evaluation; see `kvjax.Table.lookup`.

        Returns:
          ``(..., features)``.
        """
        return read(self._feature(keys, mask=mask, salt=salt, missing=missing), type(self).__name__)

    @nn.compact
    def feature(
        self,
        keys: KeysLike | Prefetched,
        mask: ArrayLike | None = None,
        *,
        salt: int | None = None,
        missing: Missing | None = None,
        combiner: Combiner | None = None,
        lengths: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        num_segments: int | None = None,
        weights: ArrayLike | None = None,
        empty: ArrayLike | None = None,
    ) -> Feature:
        """What `kvjax.lookup_many` reads of this table, together with other features.

        Args:
          keys: as of a call; of bags ``(..., L)``, or ``(n,)`` with lengths or segment_ids.
          mask: bool in the shape of the keys, false for padding.
          salt: as of a call.
          missing: as of a call.
          combiner: "sum", "mean", "sqrtn" or "max" makes bags; by default the feature is a row for each key.
          lengths: of bags, for this and the arguments that follow see `kvjax.Feature`.
          segment_ids: ``(n,)`` integers.
          num_segments: a Python integer.
          weights: real numbers in the shape of the keys.
          empty: row ``(features,)`` of a bag without keys, for instance a parameter.

        Returns:
          `kvjax.Feature`.

        Raises:
          TypeError, ValueError, KeyError, RuntimeError: as a call, except for what `kvjax.lookup_many` checks when it
            reads the feature.

        Example:
          >>> import jax, kvjax, numpy as np
          >>> embed = kvjax.flax.Embed("doc_linen_feature", features=4)
          >>> keys = np.array([[7, 8]])
          >>> variables = embed.init(jax.random.key(0), keys)
          >>> feature = embed.apply(variables, keys, method="feature")
          >>> kvjax.lookup_many({"item": feature})["item"].shape
          (1, 2, 4)
          >>> kvjax.drop_table("doc_linen_feature")
        """
        return self._feature(
            keys, mask=mask, salt=salt, missing=missing, combiner=combiner, lengths=lengths, segment_ids=segment_ids,
            num_segments=num_segments, weights=weights, empty=empty,
        )  # fmt: skip


class EmbedBag(_TableModule):
    """Bags: rows of any number of keys combined into one, see `kvjax.lookup_bag`.

    The table is in ``params`` under "table", and a learned row for empty bags under "default".

    Attributes:
      table: as in `Embed`, like all attributes that are not listed here.
      combiner: "sum", "mean", "sqrtn" or "max".
      empty: the result for a bag without keys: "zeros", or "learned", a row that is trained and begins with zeros.

    Raises:
      ValueError: from ``init`` and ``apply``: `combiner` or `empty` is none of these.
      TypeError, ValueError, KeyError, RuntimeError: as `Embed`.

    Example:
      >>> import jax, kvjax, numpy as np
      >>> bag = kvjax.flax.EmbedBag("doc_linen_bag", features=4, combiner="sum", pad_id=-1, empty="learned")
      >>> keys = kvjax.keys(np.array([[2**40, 7, -1], [-1, -1, -1]]))
      >>> variables = bag.init(jax.random.key(0), keys)
      >>> sorted(variables["params"]), bag.apply(variables, keys).shape
      (['default', 'table'], (2, 4))
      >>> kvjax.drop_table("doc_linen_bag")
    """

    combiner: Combiner = dataclasses.field(default="mean", kw_only=True)
    empty: Literal["zeros", "learned"] = dataclasses.field(default="zeros", kw_only=True)

    @nn.compact
    def __call__(
        self,
        keys: KeysLike | Prefetched,
        *,
        lengths: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        num_segments: int | None = None,
        mask: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        salt: int | None = None,
        missing: Missing | None = None,
    ) -> jax.Array:
        """Looks rows up and combines them.

        Args:
          keys: ``(..., L)``, or ``(n,)`` with lengths or segment_ids.
          lengths: for this and the arguments that follow, see `kvjax.lookup_bag`.
          segment_ids: ``(n,)`` integers.
          num_segments: a Python integer.
          mask: bool in the shape of the keys, false for padding.
          weights: real numbers in the shape of the keys.
          salt: see `Embed`.
          missing: see `Embed`.

        Returns:
          ``(..., features)``, one row a bag.
        """
        feature = self._feature(
            keys, lengths=lengths, segment_ids=segment_ids, num_segments=num_segments, mask=mask, weights=weights,
            salt=salt, missing=missing,
        )  # fmt: skip
        return read(feature, type(self).__name__)

    @nn.compact
    def feature(
        self,
        keys: KeysLike | Prefetched,
        *,
        lengths: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        num_segments: int | None = None,
        mask: ArrayLike | None = None,
        weights: ArrayLike | None = None,
        salt: int | None = None,
        missing: Missing | None = None,
        combiner: Combiner | None = None,
    ) -> Feature:
        """What a call with these arguments would read, for `kvjax.lookup_many` to read together with other features.

        Args:
          keys: this and the arguments that follow as of a call.
          lengths: ``(b,)`` integers.
          segment_ids: ``(n,)`` integers.
          num_segments: a Python integer.
          mask: bool in the shape of the keys.
          weights: real numbers in the shape of the keys.
          salt: number of a feature.
          missing: what keys without a row read as.
          combiner: of these bags, by default the layer's.

        Returns:
          `kvjax.Feature`.

        Raises:
          TypeError, ValueError, KeyError, RuntimeError: as a call, except for what `kvjax.lookup_many` checks when it
            reads the feature.

        Example:
          >>> import jax, kvjax, numpy as np
          >>> bag = kvjax.flax.EmbedBag("doc_linen_bag_feature", features=4)
          >>> keys = np.array([[7, 8]])
          >>> variables = bag.init(jax.random.key(0), keys)
          >>> feature = bag.apply(variables, keys, method="feature")
          >>> kvjax.lookup_many({"item": feature})["item"].shape
          (1, 4)
          >>> kvjax.drop_table("doc_linen_bag_feature")
        """
        return self._feature(
            keys, lengths=lengths, segment_ids=segment_ids, num_segments=num_segments, mask=mask, weights=weights,
            salt=salt, missing=missing, combiner=combiner,
        )  # fmt: skip

    @nn.nowrap
    def _feature(self, keys: KeysLike | Prefetched, *, combiner: Combiner | None = None, **others: Any) -> Feature:
        table, default = self._table(), None
        if learns_default(self.empty, self.combiner, table):
            default = self.param("default", nn.initializers.zeros, (table.dim,), jnp.float32)
        return feature_of(self, table, keys, combiner=combiner or self.combiner, empty=default, **others)
