"""Errors of transforms that would be something else row by row: what is wrong about each, and the mend."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax._values.segments import ColumnsError


@contextlib.contextmanager
def of_table(table: str, op: str) -> Generator[None]:
    """Errors that depend on how wide a table's rows are name the table."""
    try:
        yield
    except ColumnsError as error:
        raise ColumnsError(f"kvjax: table {table!r}, {op}, {str(error).removeprefix('kvjax: ')}") from None


class _Refusal(NamedTuple):
    want: str
    because: str
    mend: str


_HOLDS_BACK = _Refusal(
    "a transform that updates a row in each step that touches it",
    "which would count the steps of each row by itself, and never train a row that is rarely touched",
    "kvjax.optax.accumulate(kvjax.optax.partition(...), k) sums the gradients of k steps by key",
)
_ESTIMATES = _Refusal(
    "a transform with a learning rate",
    "which estimates one rate from all parameters, and would begin again with each new row",
    "choose a rate, for instance optax.adagrad(0.1)",
)
_MATRIX = _Refusal(
    "a transform of rows",
    "which works on whole matrices, and would see one of a single row",
    "give it to the dense parameters, and tables a transform like optax.adam(1e-3)",
)
_SEARCHES = _Refusal(
    "a transform that needs only gradients",
    "which asks for the loss of the whole model again",
    "give tables a transform like optax.adam(1e-3)",
)
_LOOKS_AHEAD = _Refusal(
    "a transform of parameters that are one array",
    "which trains pairs of parameters (optax.LookaheadParams), and a row is no pair",
    "give tables the optimizer that is inside of it",
)
_SKIPS = _Refusal(
    "a transform that updates a row in each step that touches it",
    "which would skip rows instead of steps, and count the steps of each row by itself",
    "kvjax.optax.apply_if_finite(kvjax.optax.partition(...), n) leaves out whole steps",
)
_NOISE = _Refusal(
    "a transform without random keys in its state",
    "by which every row would draw the same noise",
    "kvjax.optax.add_row_noise(eta, gamma, seed) draws it by the row's key and the step",
)
_DRAWS = _NOISE._replace(want="a transform that draws no random numbers")
_WHOLE = _Refusal(
    "the transform of a table's rows",
    "which is of a whole tree of parameters",
    "give what partition got as tables=, and put what wraps steps around partition",
)
# By the class of their state, as optax has them, and kvjax.
_STATES = {
    "kvjax.PartitionState": _WHOLE,
    "kvjax.CommitState": _WHOLE,
    "kvjax.AccumulateState": _WHOLE,
    "kvjax.ApplyIfState": _WHOLE,
    "kvjax.ApplyIfFiniteState": _WHOLE,
    "kvjax.LossScaleState": _WHOLE,
    "MultiStepsState": _HOLDS_BACK,
    "ApplyEvery": _HOLDS_BACK,
    "ApplyIfFiniteState": _SKIPS,
    "LookaheadState": _LOOKS_AHEAD,
    "SAMState": _SEARCHES,
    "ProdigyState": _ESTIMATES,
    "DAdaptAdamWState": _ESTIMATES,
    "DoGState": _ESTIMATES,
    "DoWGState": _ESTIMATES,
    "ScaleByDistanceOverGradientsState": _ESTIMATES,
    "MomoState": _ESTIMATES,
    "MomoAdamState": _ESTIMATES,
    "MechanicState": _ESTIMATES,
    "MuonState": _MATRIX,
    "GaLoreState": _MATRIX,
    "HutchinsonState": _SEARCHES,
    "SophiaState": _SEARCHES,
    "ScaleByLBFGSState": _SEARCHES,
    "ScaleByBacktrackingLinesearchState": _SEARCHES,
    "ScaleByZoomLinesearchState": _SEARCHES,
    "AddNoiseState": _NOISE,
    "DifferentiallyPrivateAggregateState": _NOISE,
}


def check_state(state: Any) -> None:
    """Whether a transform with this state means row by row what it means for an array.

    Raises:
      ValueError: it does not.
    """
    for part in jax.tree.leaves(state, is_leaf=_is_refused):
        if _is_refused(part):
            raise _error(_STATES[_name(part)], _name(part))
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise _error(_NOISE, jax.tree_util.keystr(path))


def loss_of_all_rows() -> ValueError:
    """Of a transform that takes the loss of all rows together with the norm of one."""
    return _error(_ESTIMATES, "value=, the loss of all rows")


def same_noise() -> ValueError:
    """Of a transform that draws random numbers for all rows at once."""
    return _error(_DRAWS, "jax.random by a key of its own")


def other_shape(want: tuple[int, ...], got: tuple[int, ...]) -> ValueError:
    """Of a transform whose updates are not of the shape of the parameters."""
    return ValueError(
        f"kvjax: rowwise: want a transform whose update of an array {want} has its shape, got {got}; it sees each row "
        "by itself, so its own arrays have no axis of rows: what belongs to a row is state of the transform"
    )


def check_update(made: Any) -> None:
    """Whether what a transform's update returned is an array, or a number for all elements, and a state.

    Raises:
      ValueError: it is not.
    """
    pair = isinstance(made, (tuple, list)) and len(made) == 2
    if not (pair and (hasattr(made[0], "shape") or isinstance(made[0], (int, float)))):
        got = f"({type(made[0]).__name__}, state)" if pair else type(made).__name__
        raise ValueError(
            "kvjax: rowwise: want a transform whose update of an array returns (array, state), got one that returns "
            f"{got}; return zeros for rows that stay as they are"
        )


def no_state(error: Exception) -> ValueError:
    """Of a transform whose state cannot be made."""
    return ValueError(
        "kvjax: rowwise: want a transform whose state is made from one array of parameters, got one that raises "
        f"{type(error).__name__}: {error}; give tables a transform like optax.adam(1e-3)"
    )


def other_state(one: Any, other: Any) -> ValueError:
    """Of a transform whose state has not always the same leaves."""
    return ValueError(
        f"kvjax: rowwise: want a transform whose state always has the same leaves, got {one} and then {other}; give "
        "tables a transform like optax.adam(1e-3)"
    )


@contextlib.contextmanager
def of_shared_numbers() -> Generator[None]:
    """Says of what a ``vmap`` over rows refuses, a number for all rows that is made of one, what can be done."""
    try:
        yield
    except ValueError as error:
        if "out_axes" not in str(error):
            raise
        raise ValueError(
            "kvjax: rowwise: want a transform whose numbers for all rows depend on no row, got one whose update makes "
            "such a number of a gradient, or a row, and takes extra arguments, so that this is not known beforehand; "
            "kvjax.optax.rowwise(tx, count='row') keeps it for each row"
        ) from error


def _name(part: Any) -> str:
    ours = type(part).__module__.startswith("kvjax.")
    return "kvjax." * ours + type(part).__name__


def _is_refused(part: Any) -> bool:
    return _name(part) in _STATES


def _error(refusal: _Refusal, got: str) -> ValueError:
    return ValueError(f"kvjax: rowwise: want {refusal.want}, got one with {got}, {refusal.because}; {refusal.mend}")
