"""Forms: calls that are the derivatives of one another, as primitives that JAX differentiates in both modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from kvjax._spmd.varying import varying_like

Operand: TypeAlias = Literal["weights", "rows", "bags"]
_INT32 = 2**31


class Form:
    """A number that is linear in each of its operands: weights ``(n,)``, rows ``(n, dim)``, bags ``(bags, dim)``.

    It is never computed. Its derivative by an operand has the shape of that one and is linear in each of the others, so
    what is to be differentiated there is again a derivative of the form, by another operand. Under vmap the bags of all
    examples are one call's.

    Args:
      name: for JAX.
      derivatives: of each operand, in the order above, the derivative by it: the target that it calls, "" for none, and
        a function of the number of bags, the ids, what else there is that says where rows belong, and the other
        operands.
    """

    def __init__(self, name: str, derivatives: Mapping[Operand, tuple[str, Callable[..., jax.Array]]]) -> None:
        self._derivatives = derivatives
        self._operands: tuple[Operand, ...] = tuple(derivatives)
        self._p = Primitive(name)
        self._p.def_impl(self._call)
        self._p.def_abstract_eval(self._abstract)
        ad.primitive_jvps[self._p] = self._jvp
        ad.primitive_transposes[self._p] = self._transpose
        batching.primitive_batchers[self._p] = self._batch
        mlir.register_lowering(self._p, mlir.lower_fun(self._call, multiple_results=False))

    def bags(self, bags: int, *operands: jax.Array) -> jax.Array:
        """The derivative by the bags, which is what they are.

        Args:
          bags: how many there are.
          operands: the ids of bags and what else says where rows belong, int32, then the other operands, float32.
        """
        return self._bind("bags", bags, *(varying_like(x, *operands) for x in operands))

    def _bind(self, by: Operand, bags: int, *operands: Any) -> jax.Array:
        return self._p.bind(*operands, by=by, bags=bags, target_name=self._derivatives[by][0])

    def _call(self, *operands: jax.Array, by: Operand, bags: int, target_name: str) -> jax.Array:
        return self._derivatives[by][1](bags, *operands)

    def _abstract(self, ids: Any, *others: Any, by: Operand, bags: int, target_name: str) -> Any:
        like = ids if by == "weights" else others[-1]  # an array of as many axes, rows or bags, on the same devices
        return like.update(shape=_shape(by, ids.shape[0], bags, like.shape[1:]), dtype=jnp.dtype(jnp.float32))

    def _jvp(self, primals: Sequence[Any], tangents: Sequence[Any], **which: Any) -> tuple[Any, Any]:
        value = self._p.bind(*primals, **which)
        tangent = ad.Zero(jax.typeof(value).to_tangent_aval())
        for i, moved in enumerate(tangents):
            if not isinstance(moved, ad.Zero) and moved.dtype != jax.dtypes.float0:
                tangent = ad.add_tangents(tangent, self._p.bind(*primals[:i], moved, *primals[i + 1 :], **which))
        return value, tangent

    def _transpose(self, cotangent: Any, *operands: Any, by: Operand, bags: int, **_: str) -> list[Any]:
        (place,) = (i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
        places = len(operands) - len(self._operands) + 1
        names: list[Operand] = [name for name in self._operands if name != by]
        wanted = names[place - places]
        given: dict[Operand, Any] = {by: cotangent, **dict(zip(names, operands[places:], strict=True))}
        others = [given[name] for name in self._operands if name != wanted]
        result: list[Any] = [None] * len(operands)
        if not isinstance(cotangent, ad.Zero):
            result[place] = self._bind(wanted, bags, *operands[:places], *others)
        return result

    def _batch(
        self, operands: Sequence[Any], axes: Sequence[Any], *, by: Operand, bags: int, **_: str
    ) -> tuple[jax.Array, int]:
        size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
        ids, *others = (batching.bdim_at_front(x, axis, size) for x, axis in zip(operands, axes, strict=True))
        n = ids.shape[1]
        if isinstance(size, int) and any(isinstance(x, int) and size * x >= _INT32 for x in (n, bags)):
            raise ValueError(
                f"kvjax: lookup_bag under vmap: want fewer than 2**31 keys and bags in all examples, got {size} "
                f"examples of {n} keys and {bags} bags; map over fewer examples at a time, for instance by jax.lax.map"
            )
        ids = jnp.where((ids >= 0) & (ids < bags), ids + _first(size, bags), -1)
        # Positions of rows, of each column of the bags.
        others = [jnp.where(x < 0, -1, x + _first(size, n)[..., None]) if x.dtype == jnp.int32 else x for x in others]
        flat = [x.reshape(size * x.shape[1], *x.shape[2:]) for x in (ids, *others)]
        made = self._bind(by, size * bags, *flat)
        return made.reshape(size, *_shape(by, n, bags, made.shape[1:])), 0


def _shape(by: Operand, n: int, bags: int, dim: tuple[int, ...]) -> tuple[int, ...]:
    return (bags, *dim) if by == "bags" else (n, *dim)


def _first(size: int, each: int) -> jax.Array:
    """What the numbers of each example begin at, ``(size, 1)``."""
    return (jnp.arange(size, dtype=jnp.int32) * jnp.int32(each))[:, None]
