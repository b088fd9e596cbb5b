"""The NNX layer, and ``value_and_grad`` for NNX models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from kvjax import _gradients
from kvjax._table import Table
from kvjax.flax._common import read, resolve_table


class Embed(nnx.Module):
    """``flax.nnx.Embed`` without a vocabulary: looks rows of a table up by any 64-bit key.

    The table stands in an ``nnx.Param``. Differentiate with `kvjax.flax.nnx.value_and_grad`; a stock
    ``nnx.Optimizer(model, kvjax.optax.partition(...), wrt=nnx.Param)`` updates it.

    Args:
      table: name of the table (created with the options below if there is none), or a `Table`.
      features: width of a row; may be left out if the table exists.
      dtype: compute dtype of the output; by default the table's.
      param_dtype: dtype of the rows, by default float32.
      initializer: see `kvjax.get_table`; by default normal with variance 1 / features.
      rngs: taken for likeness to ``nnx.Embed`` and not used: initial rows depend on the table's seed alone.
      **options: key_dtype, seed, trainable, checkpoint and storage of `kvjax.get_table`.

    Example:
      >>> import kvjax, numpy as np
      >>> embed = kvjax.flax.nnx.Embed("doc_nnx", 4)
      >>> embed(np.array([[2**40, -1]])).shape
      (1, 2, 4)
      >>> kvjax.drop_table("doc_nnx")
    """

    def __init__(
        self,
        table: str | Table,
        features: int | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        initializer: Any = None,
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ):
        self.table = nnx.Param(resolve_table(table, features, dtype=param_dtype, initializer=initializer, **options))
        self.dtype = dtype

    def __call__(self, keys: Any) -> jax.Array:
        """Looks rows up.

        Args:
          keys: ``(...)``: `kvjax.Keys`, NumPy integers or JAX integers.

        Returns:
          ``(..., features)``.
        """
        return read(self.table.get_value(), keys, self.dtype)


def value_and_grad(fun: Callable[..., Any], has_aux: bool = False, wrt: Any = nnx.Param) -> Callable[..., Any]:
    """Like ``nnx.value_and_grad``, for models that hold tables; see `kvjax.value_and_grad`.

    Args:
      fun: its first argument is the model; returns a ``()`` float, or with has_aux a pair (float, any pytree).
        Changes that it makes to the model's other state (batch statistics, random counts) are kept.
      has_aux: see `fun`.
      wrt: filter of the variables to differentiate.

    Returns:
      A function with the arguments of `fun` that returns ``(value, gradients)``; the gradients are an ``nnx.State``
      for ``nnx.Optimizer.update``.
    """

    @functools.wraps(fun)
    def wrapped(model, *args, **kwargs):
        graph, params, rest = nnx.split(model, wrt, ...)

        def loss(params):
            copy = nnx.merge(graph, params, rest, copy=True)
            out = fun(copy, *args, **kwargs)
            value, aux = out if has_aux else (out, None)
            return value, (aux, nnx.state(copy, nnx.Not(wrt)))

        (value, (aux, rest)), grads = _gradients.value_and_grad(loss, has_aux=True)(params)
        nnx.update(model, rest)
        return ((value, aux) if has_aux else value), grads

    return wrapped


def grad(fun: Callable[..., Any], has_aux: bool = False, wrt: Any = nnx.Param) -> Callable[..., Any]:
    """Like ``nnx.grad``, for models that hold tables; see `value_and_grad`.

    Args:
      fun: see `value_and_grad`.
      has_aux: see `value_and_grad`.
      wrt: see `value_and_grad`.

    Returns:
      A function that returns the gradients, or with has_aux ``(gradients, aux)``.
    """
    function = value_and_grad(fun, has_aux, wrt)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        result, grads = function(*args, **kwargs)
        return (grads, result[1]) if has_aux else grads

    return wrapped
