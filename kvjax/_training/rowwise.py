"""Row-wise transforms: any optax transform, applied to each touched row by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.slots import COUNTS, SlotCount, SlotLayout, layout_of, warn_once
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail


class HasUpdate(Protocol):
    """What works as an optax transform, such as ``optax.GradientTransformation``."""

    @property
    def init(self) -> Callable[..., Any]: ...

    @property
    def update(self) -> Callable[..., Any]: ...


_OF_ROWS = (
    "what kvjax.optax.rowwise or catch_up made, which a table takes as a whole (partition(tables=), Table.apply); "
    "chain or wrap the transform inside of it"
)


def check_transform(tx: Any, op: str) -> None:
    """Whether this works as an optax transform; `op` is for the error."""
    if isinstance(tx, Rowwise):
        raise TypeError(f"kvjax: {op}: want an optax transform, got {_OF_ROWS}")
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"kvjax: {op}: want an optax transform, got {tx!r}; make one, for instance optax.adam(1e-3)")


def check_params(params: Any, op: str) -> None:
    """Whether the update of a transform got the parameters; `op` is for the error."""
    if params is None:
        raise fail(
            ValueError, None, op, "update(grads, state, params)", "no params", "give the parameters, which it reads"
        )


def stepping(
    init: Callable[..., Any], step: Callable[..., tuple[Any, Any]], name: str
) -> optax.GradientTransformationExtraArgs:
    """The transform whose step gives the next parameters; its update is what they are more than those before."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        check_params(params, name)
        after, state = step(updates, state, params, **extra)
        return after - params, state

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class Rowwise:
    """An optax transform that runs per row; made by `kvjax.optax.rowwise`.

    Attributes:
      tx: the transform.
      count: which scalars of its state are kept per row: "auto", "row" or "global".

    Raises:
      TypeError: `tx` is not an optax transform, or has no hash.
      ValueError: `count` is none of these.

    Example:
      >>> import kvjax, optax
      >>> rowwise = kvjax.optax.rowwise(optax.adam(0.1))
      >>> rowwise.count, rowwise.init(2)[0]  # None for what is kept per row
      ('auto', ScaleByAdamState(count=None, mu=None, nu=None))
    """

    tx: HasUpdate
    count: SlotCount = "auto"

    def __post_init__(self) -> None:
        check_transform(self.tx, "rowwise")
        try:
            hash(self.tx)
        except TypeError as error:
            want, mend = "a transform with a hash, by which steps know it", "a dataclass has one with frozen=True"
            raise fail(TypeError, None, "rowwise", want, f"{self.tx!r}: {error}", mend) from None
        if self.count not in COUNTS:
            raise ValueError(f"kvjax: rowwise: want count 'auto', 'row' or 'global', got {self.count!r}; choose one")

    def init(self, dim: int) -> optax.OptState:
        """The state of the transform for all rows of a new table together.

        Args:
          dim: width of the rows.

        Returns:
          The transform's state with None for what is kept per row; the first ``state`` for `Table.apply`.

        Raises:
          TypeError: `dim` is not an integer.
          ValueError: `dim` is below 1.
        """
        if not is_integer(dim):
            name = getattr(self, "name", "rowwise")
            raise TypeError(
                f"kvjax: {name}: want the width of rows, got {type(dim).__name__}; this is a transform of a "
                f"table's rows and not of parameters: kvjax.optax.{name} goes around optax.chain, and not into it"
            )
        if dim < 1:
            raise ValueError(f"kvjax: rowwise: want a width of rows of 1 or more, got {dim}; give the table's dim")
        self.warn(dim)
        return self.first_globals(dim)

    def first_globals(self, dim: int) -> optax.OptState:
        """As `init`, without a word."""
        layout, state = self.layout(dim), self.tx.init(jnp.zeros((1, dim), jnp.float32))
        return layout.state_of(map(jnp.asarray, layout.globals_of(state)))

    def layout(self, dim: int) -> SlotLayout:
        """How the leaves of the state are split into slots and globals.

        Args:
          dim: width of the rows.
        """
        return layout_of(self.tx, self.count, dim)

    def warn(self, dim: int) -> None:
        """Says once if the transform is something else row by row."""
        if coupled := self.layout(dim).coupled:
            warn_once(self.tx, coupled)


@dataclasses.dataclass(frozen=True)
class CatchUp(Rowwise):
    """A transform whose rows are behind until they catch up; made by `kvjax.optax.catch_up`.

    Attributes:
      catch_up: from state and parameters ``(..., dim)`` to the up-to-date ones. Code that reads rows through the
        transform calls it.
      step: gradients, state and parameters to the next parameters and state; its ``update`` gives their difference.
      name: of the function that made it, for errors.
      signature: a number that tells it from other transforms.
      layout_of: width of the rows to the layout, where it is not found by looking at the state.

    Example:
      >>> import kvjax, optax
      >>> tx = kvjax.optax.catch_up(optax.sgd(0.1))
      >>> isinstance(tx, kvjax.optax.CatchUp), tx.name, int(tx.init(2).steps)
      (True, 'catch_up', 0)
    """

    catch_up: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]] = dataclasses.field(kw_only=True)
    step: Callable[..., tuple[PyTree, PyTree]] = dataclasses.field(kw_only=True)
    name: str = dataclasses.field(kw_only=True)
    signature: np.float32 = dataclasses.field(kw_only=True)
    layout_of: Callable[[int], SlotLayout] | None = dataclasses.field(default=None, kw_only=True)

    def layout(self, dim: int) -> SlotLayout:
        return super().layout(dim) if self.layout_of is None else self.layout_of(dim)


Transform: TypeAlias = HasUpdate | Rowwise
"""What is taken as the transform of a table's rows."""


def as_rowwise(tx: Any, where: str = "rowwise") -> Rowwise:
    """What a table takes as a transform; `where` is for the error if it is none."""
    if not isinstance(tx, Rowwise):
        check_transform(tx, where)
    return tx if isinstance(tx, Rowwise) else Rowwise(tx)


def rowwise(tx: HasUpdate, count: SlotCount = "auto") -> Rowwise:
    """Runs an optax transform for each touched row by itself.

    `kvjax.optax.partition` and `Table.apply` do this with any transform. Call `rowwise` to choose which scalars are
    kept per row, or to make the state for `Table.apply`. The transform sees a row as a matrix ``(1, dim)``, so code
    that checks the number of axes works as for a dense table. A transform in which the rows of a dense table depend on
    each other (by a norm over all of them) runs on each row by itself, with a warning when it is first used;
    `check_compatibility` says what a transform does to rows. A transform whose update takes ``row_facts=`` gets
    `RowFacts`.

    Args:
      tx: any transform whose update of a row depends only on that row. Rows that are not in a batch are not touched
        (lazy updates), and norms are norms of a row.
      count: scalars of the state that are kept per row. "auto": those that correct the bias of a row's moments
        (``count`` of adam), so that a row touched late starts like a row touched early; schedules stay global.
        "global": as few as possible: rows share all scalars that can be shared, as in dense training. "row": all
        scalars.

    Returns:
      `Rowwise`, with ``.init(dim)`` for the state.

    Raises:
      TypeError: `tx` is not an optax transform.
      ValueError: `count` is none of these. When it is first used: the transform would be wrong row by row, because it
        holds updates back (``optax.MultiSteps``), estimates a rate from all parameters (``optax.contrib.prodigy``),
        works on matrices (``optax.contrib.muon``), needs the loss, or draws random numbers.

    Example:
      >>> import kvjax, optax
      >>> kvjax.optax.rowwise(optax.adam(1e-3)).init(8)[0]
      ScaleByAdamState(count=None, mu=None, nu=None)
      >>> kvjax.optax.rowwise(optax.adam(1e-3), count="global").init(8)[0]
      ScaleByAdamState(count=Array(0, dtype=int32), mu=None, nu=None)
    """
    return Rowwise(tx, count)
