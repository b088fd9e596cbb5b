"""The public door of kvjax._rowwise."""

from __future__ import annotations

import optax

from kvjax._rowwise import Rowwise as Rowwise


def rowwise(tx: optax.GradientTransformation, count: str = "auto") -> Rowwise:
    """Runs an optax transform for each touched row by itself.

    `kvjax.optax.partition` and `Table.apply` do this with any transform that they are given; call it to choose how
    scalars are counted, or to make the state for `Table.apply`.

    Args:
      tx: any transform whose update of a row depends on that row alone. Rows that are not in a batch are not touched
        (lazy updates), and norms are norms of a row.
      count: scalars of the state that are kept per row. "auto": those that correct the bias of a row's moments
        (``count`` of adam), so that a row touched late starts like a row touched early; schedules stay global.
        "global": none that the update allows to share, as in dense training. "row": all.

    Returns:
      `Rowwise`, with ``.init(dim)`` for the state.

    Raises:
      TypeError: `tx` is not an optax transform.
      ValueError: `count` is none of these.

    Example:
      >>> import kvjax, optax
      >>> kvjax.optax.rowwise(optax.adam(1e-3)).init(8)
      ()
      >>> kvjax.optax.rowwise(optax.adam(1e-3), count="global").init(8)
      (Array(0, dtype=int32),)
    """
    return Rowwise(tx, count)
