"""Constraints: projections that a table applies to each row after its update.

A constraint is any function of a row ``(dim,)`` float32 that returns a row ``(dim,)`` float32; `get_table` takes it as
``constraint``. It sees the updated row before it is rounded to the table's dtype.

Source: the ``constraint`` of TensorFlow's variables, which TFRA and SOK honour.

Example:
  >>> import kvjax, optax, jax.numpy as jnp, numpy as np
  >>> table = kvjax.get_table("doc_constraint", dim=2, constraint=kvjax.constraints.max_norm(1.0))
  >>> grads = kvjax.SparseRows(np.array([7]), jnp.array([[-3.0, -4.0]]))
  >>> table, _ = table.apply(optax.sgd(1.0), grads)
  >>> [round(x, 6) for x in table.lookup(7).tolist()]
  [0.6, 0.8]
  >>> kvjax.drop_table("doc_constraint")
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvjax._values.arguments import is_real
from kvjax._values.errors import check_choice

if TYPE_CHECKING:
    import jax  # which is loaded where rows are: a checkpoint has names and numbers

__all__ = ["max_norm", "non_negative"]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclasses.dataclass(frozen=True)
class max_norm:  # named as a function, for that is its use; a class, so that equal ones are equal
    """Scales rows down to a Euclidean norm of at most `limit`.

    It is a function of a row ``(dim,)`` float32 that returns one. The norm is computed in float32, so a row whose norm
    is above about 1.8e19 becomes zeros: its square is infinite.

    Attributes:
      limit: above 0.

    Raises:
      ValueError: the limit is not a finite number above 0.

    Example:
      >>> import kvjax, jax.numpy as jnp
      >>> kvjax.constraints.max_norm(2.5)(jnp.array([3.0, 4.0])).tolist()
      [1.5, 2.0]
    """

    limit: float

    def __post_init__(self) -> None:
        fits = is_real(self.limit) and 0 < self.limit < float("inf")
        check_choice(self, fits, "a finite limit above 0", self.limit)

    def __call__(self, row: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        norm = jnp.linalg.norm(row)
        limit = jnp.float32(self.limit)
        return row * jnp.where(norm > limit, limit / norm, jnp.float32(1))


@dataclasses.dataclass(frozen=True)
class non_negative:
    """Replaces negative elements by 0. It is a function of a row ``(dim,)`` float32 that returns one.

    Example:
      >>> import kvjax, jax.numpy as jnp
      >>> kvjax.constraints.non_negative()(jnp.array([-3.0, 4.0])).tolist()
      [0.0, 4.0]
    """

    def __call__(self, row: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        return jnp.maximum(row, jnp.float32(0))


RULES: dict[str, type[max_norm | non_negative]] = {kind.__name__: kind for kind in (max_norm, non_negative)}
"""What checkpoints hold of constraints, by name."""
