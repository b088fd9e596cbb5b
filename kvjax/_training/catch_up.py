"""Catching up: a transform that makes up, when a row is touched, for the steps in which it was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.closed_form import ClosedForm
from kvjax._training.recognize import NoClosedForm, closed_form_of
from kvjax._training.replay import replaying
from kvjax._training.rowwise import CatchUp, Rowwise, check_transform, stepping
from kvjax._training.signature import signature
from kvjax._training.slots import join_leaves, split_leaves
from kvjax._training.update import takes_facts, update_of
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import PyTree
from kvjax._values.errors import fail
from kvjax._values.segments import ColumnsError
from kvjax._values.tracing import computed_now

_MOST = 4096  # steps that are replayed
_ENOUGH = 200  # of them, where beta1 is 0.9
_LAZY = "leave it out, and rows that a batch leaves out stay as they are"
_UNIT = np.float32(2.0**-16)  # of the whole part of a row's decay
_ROUND = np.int32(1 << 30)  # of such units: behind the last int32 they go on from here


class CatchUpRows(NamedTuple):
    """What `kvjax.optax.catch_up` keeps beside parameters ``(..., dim)``; each ``(...)``.

    Attributes:
      last_step: int32, the step up to which the parameters and the slots are those of dense training.
      clock: as it stood then.

    Example:
      >>> import jax.numpy as jnp, kvjax, optax
      >>> tx = kvjax.optax.catch_up(optax.sgd(0.1))
      >>> tx.tx.init(jnp.zeros((4, 2))).rows.last_step.tolist()
      [0, 0, 0, 0]
    """

    last_step: jax.Array
    clock: dict[str, jax.Array]


class CatchUpState(NamedTuple):
    """State of `kvjax.optax.catch_up`.

    Attributes:
      steps: ``()`` int32, steps so far.
      clock: by name ``()``: how far moments carry a row in the steps to come, and the logarithm of all decay so far in
        whole and small parts.
      rows: `CatchUpRows`.
      inner: state of the transform.
      made_by: ``()`` float32, the `signature` of the transform that made it.
    """

    steps: jax.Array
    clock: dict[str, jax.Array]
    rows: CatchUpRows
    inner: PyTree
    made_by: jax.Array


def caught_up_row(rowwise: CatchUp, dim: int) -> Callable[..., tuple[jax.Array, list[jax.Array]]]:
    """A function from a row ``(dim,)`` float32 and its slots, as the table has them, and the globals to the row and the
    slots of now."""
    layout, first = rowwise.layout(dim), update_of(rowwise, dim, {}).initial

    def now(value: jax.Array, slots: Any, globals_: Any) -> tuple[jax.Array, list[jax.Array]]:
        stored, fresh = (layout.join(x, globals_) for x in (slots, first(value)))
        written = jnp.reshape(stored.rows.last_step, ()) > 0  # the slots of a row without any read as zeros
        state, row = rowwise.catch_up(
            jax.tree.map(lambda x, y: jnp.where(written, x, y), stored, fresh), value.reshape(1, dim)
        )
        return row.reshape(dim), layout.slots_of(state)

    return now


def catching_up_of(tx: Any, name: str, replay: int, shrink: Callable[[Any, Any], Any] | None = None) -> CatchUp:
    """A transform whose rows make up for the steps that they have missed, by a formula or by `replay` of them.

    Raises:
      TypeError, ValueError: it is none, or they cannot.
    """
    check_transform(tx, name)
    if not is_integer(replay) or not 0 <= replay <= _MOST:
        raise ValueError(
            f"kvjax: {name}: want replay= in 0..{_MOST}, got {replay!r}; {_ENOUGH} will do where beta1 is 0.9"
        )
    if _is_of_parts(tx):
        raise fail(
            ValueError, None, name, "a transform of whole rows", "one that has kvjax.optax.segments in it",
            "keep the parts in tables of their own; or give them transforms that leave rows where they are without a "
            "gradient (optax.sgd, optax.adagrad), or kvjax.optax.gap_adam, and no catch_up",
        )  # fmt: skip
    if takes_facts(Rowwise(tx, "global"), 1, {}):
        want = "a transform of gradients, rows and slots"
        raise fail(ValueError, None, name, want, "one that takes row_facts", _LAZY)
    if replay:
        return replaying(tx, name, int(replay), shrink)
    try:
        return catching_up(tx, name, shrink)
    except NoClosedForm as error:
        raise ValueError(f"{error}{_replay_or_lazy(tx, name, shrink)}") from None


def _replay_or_lazy(tx: Any, name: str, shrink: Callable[[Any, Any], Any] | None) -> str:
    """The mend for a transform without a closed form, which is tried."""
    try:
        replaying(tx, name, _ENOUGH, shrink)
    except (TypeError, ValueError):
        return f"replay={_ENOUGH} is refused, too: {_LAZY}"
    return f"replay={_ENOUGH} takes missed steps one by one; or {_LAZY}"


def _is_of_parts(tx: Any) -> bool:
    try:
        state = jax.eval_shape(tx.init, jax.ShapeDtypeStruct((1, 3), jnp.float32))
    except ColumnsError:
        return True
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False  # what is wrong with it is said elsewhere

    def is_parts(x: Any) -> bool:
        return type(x).__name__ == "SegmentsState"

    return any(map(is_parts, jax.tree.leaves(state, is_leaf=is_parts)))


def catching_up(tx: Any, name: str, shrink: Callable[[Any, Any], Any] | None) -> CatchUp:
    """A transform whose rows make up for the steps that they have missed.

    Args:
      tx: the transform.
      name: of the function that is asked for it.
      shrink: parameters ``(..., dim)`` and steps ``(...)`` float32 to what a penalty makes of them in so many steps. It
        comes after each update.
    """
    form = closed_form_of(tx, name)
    if shrink is not None and (form.movers or form.decays):
        raise fail(
            ValueError, None, name, "a transform that leaves rows where they are while they have no gradient",
            "one that moves them or lets them decay",
            "optax.sgd, optax.adagrad and optax.rmsprop without momentum do; replay=200 takes others step by step",
        )  # fmt: skip
    with computed_now():
        first = jax.tree.map(np.asarray, _clock(form, 0, {}))
        made_by = signature([*form.signs(), *([] if shrink is None else [shrink(np.ones((1, 3)), np.ones(1))])])

    def init(params: Any) -> CatchUpState:
        clock = jax.tree.map(jnp.asarray, first)
        rows = CatchUpRows(jnp.zeros(params.shape[:-1], jnp.int32), _for_rows(clock, params))
        return CatchUpState(jnp.zeros((), jnp.int32), clock, rows, form.tx.init(params), jnp.float32(made_by))

    def catch_up(state: CatchUpState, params: Any) -> tuple[CatchUpState, Any]:
        steps = state.steps - state.rows.last_step
        slots, shared = split_leaves(state.inner, form.is_slot)
        decayed = _decayed(form, state.clock, state.rows.clock)
        value, slots = form.after(steps, decayed, state.rows.clock, state.clock, slots, params)
        inner = join_leaves(form.treedef, form.is_slot, slots, shared)
        if shrink is not None:
            value = shrink(value, jnp.maximum(steps.astype(jnp.float32), np.float32(0)))
        rows = CatchUpRows(jnp.broadcast_to(state.steps, params.shape[:-1]), _for_rows(state.clock, params))
        return state._replace(rows=rows, inner=inner), value

    def step(grads: Any, state: CatchUpState, params: Any, **extra: Any) -> tuple[Any, CatchUpState]:
        state, value = catch_up(state, params)
        updates, inner = form.tx.update(grads, state.inner, value, **extra)
        steps = state.steps + np.int32(1)
        clock = _clock(form, steps, state.clock)
        rows = CatchUpRows(jnp.broadcast_to(steps, params.shape[:-1]), _for_rows(clock, params))
        value = jnp.asarray(optax.apply_updates(value, updates))
        if shrink is not None:
            value = shrink(value, jnp.ones(params.shape[:-1], jnp.float32))
        return value, CatchUpState(steps, clock, rows, inner, jnp.float32(made_by))

    made = stepping(init, step, name)
    return CatchUp(made, "global", catch_up=catch_up, step=step, name=name, signature=made_by)


def _clock(form: ClosedForm, steps: Any, before: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """After so many steps; `before` is that of one step less, if there is one."""
    clock = form.reach(steps)
    if not form.decays:
        return clock
    if not before:
        return clock | {"decay_small": jnp.float32(0), "decay_whole": jnp.int32(0)}
    # In float32 alone a sum of many small numbers would stop growing.
    small = before["decay_small"] + form.decay(steps - np.int32(1))
    whole, last = jnp.floor(small / _UNIT), before["decay_whole"]
    total = last + whole.astype(jnp.int32)
    total = jnp.where((whole > 0) & (total < last), total - _ROUND, total)
    return clock | {"decay_small": small - whole * _UNIT, "decay_whole": total}


def _decayed(form: ClosedForm, now: dict[str, jax.Array], then: dict[str, jax.Array]) -> jax.Array:
    if not form.decays:
        return jnp.float32(0)
    # A new row, whose clock is 0, stays far behind however often the whole part goes round.
    whole = now["decay_whole"] - then["decay_whole"]
    whole = jnp.where((whole < 0) & (then["decay_whole"] >= _ROUND), whole + _ROUND, whole)
    return whole.astype(jnp.float32) * _UNIT + (now["decay_small"] - then["decay_small"])


def _for_rows(clock: dict[str, jax.Array], params: Any) -> dict[str, jax.Array]:
    return {name: jnp.broadcast_to(x, params.shape[:-1]) for name, x in clock.items()}
