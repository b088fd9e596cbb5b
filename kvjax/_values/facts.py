"""Facts about a row: what a table knows of it in a step, for transforms whose update asks by ``row_facts=``."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROW_FACTS = "row_facts"
"""The name of the extra argument."""


class Words(NamedTuple):
    """A 64-bit number as two words, whatever ``jax_enable_x64`` is.

    Attributes:
      low, high: ``(...)`` uint32, its halves; for a negative number those of its two's complement.

    Example:
      >>> import kvjax, numpy as np
      >>> minus_one = kvjax.optax.Words(np.uint32(2**32 - 1), np.uint32(2**32 - 1))
      >>> np.int64(np.uint64(minus_one.high) << np.uint64(32) | np.uint64(minus_one.low))
      np.int64(-1)
    """

    low: jax.Array | np.ndarray
    high: jax.Array | np.ndarray


class RowFacts(NamedTuple):
    """What a table knows of the rows of a step, as the extra argument ``row_facts=`` of a transform's update.

    In tables, a transform gets it if its update takes it, as in ``update(updates, state, params=None, *,
    row_facts=None, **extra_args)`` of an ``optax.GradientTransformationExtraArgs``, also inside ``optax.chain`` and
    similar wrappers. There a row is ``(1, dim)`` and each fact ``(1,)``: the shape of the parameters without the last
    axis. For dense parameters it is None, unless you give ``update`` a `RowFacts` with arrays of such shapes (a tree of
    them for a tree of parameters); tables ignore that. A number that does not fit its dtype becomes the greatest that
    does.

    Attributes:
      occurrences: ``(...)`` int32, how often the key is in the gradients of this step: the sum of its counts, over all
        devices, and with `accumulate` over all of its steps. For the row that unadmitted keys share, the sum over these
        keys.
      frequency: ``(...)`` int32, `Table.frequency` after this step. So it is 1 or more.
      missed: ``(...)`` int32, the steps between this one and the one that last wrote the row: step - last_step - 1. 0
        if the row is trained for the first time, even if it was inserted or assigned before.
      last_step: `Words`, the step that last wrote the row (in exports ``versions``, before this step), or -1 if it is
        trained for the first time.
      step: `Words`, this step, which becomes the row version.
      key: `Words`, the key of the row.

    Example:
      >>> import jax, jax.numpy as jnp, kvjax, numpy as np, optax
      >>> def update(updates, state, params=None, *, row_facts=None, **extra_args):
      ...     return jax.tree.map(lambda g: -g / row_facts.occurrences[..., None], updates), state
      >>> tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
      >>> table = kvjax.get_table("doc_facts", dim=1)
      >>> table, _ = table.apply(tx, kvjax.SparseRows(np.array([7, 9, 7]), jnp.array([[1.0], [1.0], [2.0]])))
      >>> table.lookup(np.array([7, 9]))[:, 0].tolist()
      [-1.5, -1.0]
      >>> kvjax.drop_table("doc_facts")
    """

    occurrences: jax.Array | np.ndarray
    frequency: jax.Array | np.ndarray
    missed: jax.Array | np.ndarray
    last_step: Words
    step: Words
    key: Words


_LEAF = np.zeros(())
_WORDS = Words(_LEAF, _LEAF)
_FORM = RowFacts(_LEAF, _LEAF, _LEAF, _WORDS, _WORDS, _WORDS)
NUM_FACTS = len(jax.tree.leaves(_FORM))
FACT_DTYPES = ("int32",) * 3 + ("uint32",) * (NUM_FACTS - 3)
"""Of the leaves, in the order in which ``core/facts.h`` has them."""


def facts_from(leaves: Any) -> RowFacts:
    return jax.tree.unflatten(jax.tree.structure(_FORM), list(leaves))


def fact_types() -> RowFacts:
    """Of one row."""
    return facts_from(jax.ShapeDtypeStruct((), jnp.dtype(dtype)) for dtype in FACT_DTYPES)


def facts_of(words: jax.Array) -> RowFacts:
    """The facts ``(n,)`` about rows whose words are ``(n, NUM_FACTS)`` uint32."""
    return facts_from(
        jax.lax.bitcast_convert_type(words[:, i], jnp.dtype(dtype)) for i, dtype in enumerate(FACT_DTYPES)
    )
