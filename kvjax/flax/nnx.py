"""NNX layers: modules with a table in an ``nnx.Param``, and ``value_and_grad`` for NNX models."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.filterlib import Filter
from jax.typing import DTypeLike

from kvjax._keys.keys import KeysLike
from kvjax._lookup import gradients
from kvjax._lookup.feature import Feature, read
from kvjax._lookup.readable import Readable
from kvjax._spec.signature import initialized_by
from kvjax._table.modules import Maker
from kvjax._table.prefetched import Prefetched
from kvjax._table.reads import Missing
from kvjax._table.table import Table
from kvjax._values.arrays import ArrayLike, PyTree
from kvjax._values.bags import Combiner
from kvjax._values.errors import fail
from kvjax.flax._common import LayerOptions, feature_of, learns_default, resolve_table

__all__ = ["Embed", "EmbedBag", "grad", "value_and_grad"]


def __dir__() -> list[str]:
    return sorted(__all__)


P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(repr=False)
class _EmbedOptions(LayerOptions):
    _: dataclasses.KW_ONLY
    # That of Linen may stand by its place, as all fields of its modules may.
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike | None = None
    rngs: nnx.Rngs | None = None


@dataclasses.dataclass(repr=False)
class _BagOptions(_EmbedOptions):
    _: dataclasses.KW_ONLY
    combiner: Combiner = "mean"
    empty: Literal["zeros", "learned"] = "zeros"


class _TableModule(nnx.Module):
    """A module with a table in an ``nnx.Param``."""

    if TYPE_CHECKING:  # what is read is the Param, and what is set may be a handle (see __setattr__)

        @property
        def table(self) -> nnx.Param[Table]: ...
        @table.setter
        def table(self, value: nnx.Param[Table] | Readable) -> None: ...
    else:
        table: nnx.Param[Table]
    dtype: DTypeLike | None
    pad_id: int | None
    max_norm: float | None

    def _begin(self, layer: _EmbedOptions) -> None:
        # What the table is called decides its seed, and not how often the stream has been asked.
        rng = None if layer.rngs is None else layer.rngs["params"].key.get_value()
        self.table = nnx.Param(resolve_table(layer, type(self).__name__, rng, Maker(None, self, False)))
        self.dtype, self.pad_id, self.max_norm = layer.dtype, layer.pad_id, layer.max_norm

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "table" and isinstance(value, Readable):
            param: nnx.Param[Any] = self.table
            dim = getattr(param.get_value(), "dim", value.dim)
            if value.dim != dim:
                mend = "for rows of another width make another layer"
                op = f"{type(self).__name__}.table"
                raise fail(ValueError, value.name, op, f"a table of dim={dim}, as the layer has", f"{value.dim}", mend)
            param.set_value(value)  # without its Param, no state would have the table
        elif name == "table" and isinstance(value, (jax.Array, np.ndarray, np.generic, str, bytes, int, float)):
            mend = "give what kvjax.get_table, a restore or FrozenTable.as_jax returns"
            op = f"{type(self).__name__}.table"
            raise fail(TypeError, None, op, "a kvjax.Table or frozen arrays", type(value).__name__, mend)
        else:
            super().__setattr__(name, value)

    # Private, and what a call goes through: nnx.tabulate compiles all public methods that are called, and a Feature is
    # no result of a compiled function.
    def _feature(self, keys: KeysLike | Prefetched, **others: Any) -> Feature:
        return feature_of(self, self.table.get_value(), keys, **others)


class Embed(_TableModule):
    """``flax.nnx.Embed`` without a vocabulary: looks up rows of a table by any 64-bit key.

    The table is in an ``nnx.Param``. Differentiate with `kvjax.flax.nnx.value_and_grad`; a stock ``nnx.Optimizer(model,
    kvjax.optax.partition(...), wrt=nnx.Param)`` updates it. Several features on one table share one module.

    There is no ``attend``, because a table has no last key: choose candidates, and score them by ``queries @
    table.lookup(candidates).T``.

    Args:
      table: name of the table that the layer makes with the options below, or a `Table`. If an earlier layer made a
        table of this name and it has been written since, a new layer replaces it by a new table. Layers of one model
        share a table by its name.
      features: width of a row. Without it, the layer uses the existing table of this name.
      dtype: compute dtype of the output; by default the table's.
      param_dtype: dtype of the rows, by default float32.
      pad_id: the id that marks padding, which reads as zeros and is neither trained nor counted.
      max_norm: positive number; longer rows are scaled down to this Euclidean norm when they are read.
      rngs: its "params" (or default) key, together with the table's name, seeds the initial rows; nothing is drawn from
        it. Without `rngs`, only the name seeds them.
      **options: initializer (by default normal with variance 1 / features), key_dtype and the other options of
        `kvjax.get_table`, and ``reuse=True`` to keep the rows of a live table of this name.

    Raises:
      TypeError: `table` is neither a name nor a table, or there is no such option; from a call: the keys are not
        integers.
      ValueError: an option is out of range; options of a new table are given for one that exists; `features` is not the
        table's dim; or a live table that is kept has other options.
      KeyError: there is no table of this name, and `features` is not given.
      RuntimeError: from a call: the handle is stale (in a compiled function it may be a ValueError, see
        docs/troubleshooting.md).

    Example:
      >>> import kvjax, numpy as np
      >>> embed = kvjax.flax.nnx.Embed("doc_nnx", 4)
      >>> embed(np.array([[2**40, -1]])).shape
      (1, 2, 4)
      >>> kvjax.drop_table("doc_nnx")
    """

    @initialized_by(_EmbedOptions)
    def __init__(self, layer: _EmbedOptions) -> None:
        self._begin(layer)

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

        Example:
          >>> import kvjax, numpy as np
          >>> layer = kvjax.flax.nnx.Embed("doc_nnx_feature", 4)
          >>> feature = layer.feature(np.array([[7, 8]]))
          >>> kvjax.lookup_many({"item": feature})["item"].shape
          (1, 2, 4)
          >>> kvjax.drop_table("doc_nnx_feature")
        """
        return self._feature(
            keys, mask=mask, salt=salt, missing=missing, combiner=combiner, lengths=lengths, segment_ids=segment_ids,
            num_segments=num_segments, weights=weights, empty=empty,
        )  # fmt: skip


class EmbedBag(_TableModule):
    """Bags: rows of any number of keys combined into one, see `kvjax.lookup_bag`.

    The table is in an ``nnx.Param``, and so is the learned row for empty bags, if there is one.

    Args:
      table: for this and all arguments that are not listed here, see `Embed`.
      features: width of a row; may be left out if the table exists.
      combiner: "sum", "mean", "sqrtn" or "max".
      empty: the result for a bag without keys: "zeros", or "learned", a row that is trained and begins with zeros.

    Raises:
      ValueError: `combiner` or `empty` is none of these.
      TypeError, ValueError, KeyError, RuntimeError: as `Embed`.

    Example:
      >>> import kvjax, numpy as np
      >>> bag = kvjax.flax.nnx.EmbedBag("doc_nnx_bag", 4, combiner="sum", empty="learned")
      >>> bag(np.array([2**40, 7, -1]), lengths=[2, 0, 1]).shape
      (3, 4)
      >>> kvjax.drop_table("doc_nnx_bag")
    """

    combiner: Combiner
    default: nnx.Param[jax.Array] | None

    @initialized_by(_BagOptions)
    def __init__(self, layer: _BagOptions) -> None:
        self._begin(layer)
        self.combiner, table = layer.combiner, self.table.get_value()
        learned = learns_default(layer.empty, layer.combiner, table)
        self.default = nnx.Param(jnp.zeros((table.dim,), jnp.float32)) if learned else None

    def _feature(self, keys: KeysLike | Prefetched, **others: Any) -> Feature:
        default = None if self.default is None else self.default.get_value()
        if others.get("combiner") is None:
            others["combiner"] = self.combiner
        return super()._feature(keys, empty=default, **others)

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

        Example:
          >>> import kvjax, numpy as np
          >>> layer = kvjax.flax.nnx.EmbedBag("doc_nnx_bag_feature", 4)
          >>> feature = layer.feature(np.array([[7, 8]]))
          >>> kvjax.lookup_many({"item": feature})["item"].shape
          (1, 4)
          >>> kvjax.drop_table("doc_nnx_bag_feature")
        """
        return self._feature(
            keys, mask=mask, salt=salt, missing=missing, lengths=lengths, segment_ids=segment_ids,
            num_segments=num_segments, weights=weights, combiner=combiner,
        )  # fmt: skip


ArgNums: TypeAlias = int | nnx.DiffState | Sequence[int | nnx.DiffState]
"""What `value_and_grad` takes as ``argnums``."""


def value_and_grad(
    fun: Callable[P, R], *, argnums: ArgNums = 0, has_aux: bool = False, wrt: Filter = nnx.Param
) -> Callable[P, tuple[R, PyTree]]:
    """Like ``nnx.value_and_grad``, for models that hold tables; see `kvjax.value_and_grad`.

    Args:
      fun: function whose positional arguments may be models; by default the first is differentiated. It returns a
        ``()`` float, or with has_aux a pair (float, any pytree). Changes that it makes to other state of the models
        (batch statistics, random counts) are kept.
      argnums: which positional arguments to differentiate, models or trees of arrays and tables: an integer, an
        ``nnx.DiffState`` for another filter, or several of them.
      has_aux: see `fun`.
      wrt: filter of the variables to differentiate.

    Returns:
      A function with the arguments of `fun` that returns ``(value, gradients)``. The gradients of a model are an
      ``nnx.State`` for ``nnx.Optimizer.update``, those of several arguments a tuple.

    Raises:
      ValueError: `argnums` names an argument twice or none at all; or as `kvjax.value_and_grad`.
      TypeError: `argnums` has something other than integers and ``nnx.DiffState``, or positions at which the call has
        no argument.

    Example:
      >>> import kvjax, jax.numpy as jnp
      >>> user, item = (kvjax.flax.nnx.Embed(name, 2) for name in ("doc_nnx_user", "doc_nnx_item"))
      >>> def loss(user, item, keys):
      ...     return jnp.sum(user(keys) * item(keys))
      >>> value, (_, grads) = kvjax.flax.nnx.value_and_grad(loss, argnums=(0, 1))(user, item, kvjax.keys([7, 8]))
      >>> grads["table"].get_value()
      SparseRows(keys=(2,), rows=(2, 2), merged=False)
      >>> kvjax.drop_table("doc_nnx_user"), kvjax.drop_table("doc_nnx_item")
      (None, None)
    """
    run: Callable[..., Any] = fun
    single = not isinstance(argnums, Sequence)
    chosen = [
        (each.argnum, each.filter) if isinstance(each, nnx.DiffState) else (each, wrt)
        for each in ([argnums] if single else argnums)
    ]
    numbers = tuple(number for number, _ in chosen)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        gradients.check_positions(numbers, args, "flax.nnx.value_and_grad")
        filters = {number % len(args): each for number, each in chosen}
        splits = [_Split(arg, i in filters, filters.get(i)) for i, arg in enumerate(args)]

        def differentiated(*given: Any) -> tuple[Any, tuple[Any, list[Any]]]:
            *trees, _ = given
            merged = [split.merge(tree) for split, tree in zip(splits, trees, strict=True)]
            out = run(*merged, **kwargs)
            value, aux = out if has_aux else (out, None)
            return value, (aux, [split.rest_of(arg) for split, arg in zip(splits, merged, strict=True)])

        where = tuple(number % len(args) for number in numbers)
        # The last argument is what the loss has beside: a table there is one that is not to be trained.
        given = [*(split.params for split in splits), ([split.rest for split in splits], kwargs)]
        (value, (aux, rests)), grads = gradients.value_and_grad(differentiated, where, has_aux=True)(*given)
        for split, rest in zip(splits, rests, strict=True):
            split.update(rest)
        return ((value, aux) if has_aux else value), grads[0] if single else grads

    return wrapped


class _Split:
    """An argument: what is differentiated of it, and how it is put together again."""

    def __init__(self, arg: Any, differentiated: bool, wrt: Filter) -> None:
        self.arg, self.is_model = arg, nnx.graph.is_graph_node(arg)
        self.wrt = wrt if differentiated else nnx.Nothing()
        self.params, self.rest = arg, None
        if self.is_model:
            self.graph, self.params, self.rest = nnx.split(arg, self.wrt, ...)

    def merge(self, params: Any) -> Any:
        """The argument with other parameters; of a model a copy."""
        return nnx.merge(self.graph, params, self.rest, copy=True) if self.is_model else params

    def rest_of(self, arg: Any) -> Any:
        """The other state of a model."""
        return nnx.state(arg, nnx.Not(self.wrt)) if self.is_model else None

    def update(self, rest: Any) -> None:
        if self.is_model:
            nnx.update(self.arg, rest)


def grad(
    fun: Callable[P, object], *, argnums: ArgNums = 0, has_aux: bool = False, wrt: Filter = nnx.Param
) -> Callable[P, PyTree]:
    """Like ``nnx.grad``, for models that hold tables; see `value_and_grad`.

    Args:
      fun: see `value_and_grad`.
      argnums: see `value_and_grad`.
      has_aux: see `value_and_grad`.
      wrt: see `value_and_grad`.

    Returns:
      A function that returns the gradients, or with has_aux ``(gradients, aux)``.

    Raises:
      ValueError, TypeError: as `value_and_grad`.

    Example:
      >>> import kvjax, jax.numpy as jnp
      >>> model = kvjax.flax.nnx.Embed("doc_nnx_grad", 2)
      >>> grads = kvjax.flax.nnx.grad(lambda model: jnp.sum(model(kvjax.keys([7, 8]))))(model)
      >>> grads["table"].get_value().rows.tolist()
      [[1.0, 1.0], [1.0, 1.0]]
      >>> kvjax.drop_table("doc_nnx_grad")
    """
    return gradients.without_value(value_and_grad(fun, argnums=argnums, has_aux=has_aux, wrt=wrt), has_aux)
