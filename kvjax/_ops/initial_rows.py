"""Initial rows that C++ cannot compute, made by JAX before the call that needs them.

The cost is that of the rows that are missing. In training nearly all keys have a row, and the loop does not run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kvjax._keys.keys import Keys
from kvjax._ops import reads
from kvjax._ops.programs import program_outside
from kvjax._spec.spec import TableSpec
from kvjax._spmd.varying import varying_like
from kvjax._values.function_initializer import Generated


def initial_rows(
    spec: TableSpec, version: jax.Array, keys: Keys, mask: jax.Array | None, place: int | None = None
) -> jax.Array | None:
    """The operand `initial` of an op that may need rows for keys without one.

    Args:
      spec: of the table.
      version: ``()`` uint32.
      keys: ``(n,)``.
      mask: ``(n,)`` bool, false for keys that the op passes over, or None.
      place: see `kvjax._ops.reads`.

    Returns:
      ``(m, dim)`` of the row type, m >= n: initial rows of the distinct keys without a row, in order of first
      occurrence; what follows them has no meaning. None if C++ makes the rows itself.
    """
    if not spec.generated:
        return None
    words, count = reads.find_missing(spec, version, keys, mask, place)
    return generate(spec, words, count)


@program_outside(0)  # or each call outside jit would compile the loop
def generate(spec: TableSpec, words: jax.Array, count: jax.Array) -> jax.Array:
    """Initial rows of the first `count` keys, in chunks of one size, so that the same code makes every row.

    Args:
      spec: of a table with a `Generated` initializer.
      words: ``(n, 2)`` uint32.
      count: ``()`` int32.

    Returns:
      ``(m, dim)`` of the row type, m >= n.
    """
    initializer = spec.initializer
    assert isinstance(initializer, Generated)
    chunk = max(8, min(256, 16384 // spec.dim))
    words = jnp.pad(words, ((0, chunk), (0, 0)))  # by a chunk, also where the number is symbolic

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, rows = carry
        part = jax.lax.dynamic_slice_in_dim(words, start, chunk)
        made = initializer.rows(spec.seed, part, spec.dim).astype(spec.row_dtype)
        return start + jnp.int32(chunk), jax.lax.dynamic_update_slice_in_dim(rows, made, start, 0)

    first = varying_like((jnp.int32(0), jax.lax.empty((words.shape[0], spec.dim), spec.row_dtype)), words, count)
    return jax.lax.while_loop(lambda carry: carry[0] < count, body, first)[1]
