"""Initial rows by any function ``(rng, shape, dtype)``, as a value: `kvjax._values.function_rows` calls it.

What a checkpoint says of one is read without JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class Generated:
    """An initializer that is a function. Two are equal if they give a few probe keys the same rows.

    Calling ``jax.nn.initializers.normal(0.1)`` twice gives two functions that Python cannot tell to be equal.

    Attributes:
      function: ``(rng, shape, dtype)`` to an array; None if it comes from a checkpoint, which contains no functions.
      probes: elements of the probe keys' rows, to 4 digits, so that other versions of JAX agree.

    Example:
      >>> import jax, kvjax
      >>> table = kvjax.get_table("doc_generated", dim=2, initializer=jax.nn.initializers.constant(0.5))
      >>> type(table.spec.initializer).__name__, table.lookup(7).tolist()
      ('Generated', [0.5, 0.5])
      >>> kvjax.drop_table("doc_generated")
    """

    function: Callable[..., jax.Array] | None = dataclasses.field(compare=False)
    probes: tuple[float, ...] = dataclasses.field(default=(), repr=False)

    @classmethod
    def of(cls, function: Any, dim: int, dtype: str) -> Generated:
        """The initializer for rows of width `dim` and a dtype.

        Raises:
          TypeError: the function takes or returns something else.
          ValueError: the function of an initializer from a checkpoint is not known, or rows of the dtype
            do not hold what it makes.
        """
        function = function.function if isinstance(function, Generated) else function
        if function is None:
            raise ValueError(
                "want the function that makes its initial rows, got a checkpoint, which holds no functions; make the "
                "table first, with the initializer it had, and restore into it"
            )
        from kvjax._values import function_rows

        return cls(function, function_rows.probes(function, dim, dtype))

    def rows(self, seed: int, words: jax.Array, dim: int) -> jax.Array:
        """Initial rows of keys.

        Args:
          seed: the table's, 64 bits.
          words: ``(n, 2)`` uint32, the words of the keys.
          dim: width of the rows.

        Returns:
          ``(n, dim)`` float32.

        Example:
          >>> import jax, kvjax
          >>> table = kvjax.get_table("doc_generated_rows", dim=2, initializer=jax.nn.initializers.constant(0.5))
          >>> table.spec.initializer.rows(0, kvjax.keys([7, 8]).words, 2).tolist()
          [[0.5, 0.5], [0.5, 0.5]]
          >>> kvjax.drop_table("doc_generated_rows")
        """
        from kvjax._values import function_rows

        return function_rows.rows(self.function, seed, words, dim)
