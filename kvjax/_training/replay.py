"""Replay: steps that rows have missed, taken one after the other, where they have no closed form."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.rowwise import CatchUp, Rowwise, stepping
from kvjax._training.signature import signature
from kvjax._training.slots import SlotLayout, join_leaves, split_leaves
from kvjax._values.errors import fail
from kvjax._values.tracing import computed_now

_BEGUN, _BEYOND = 6, 300  # steps with a gradient, and steps more than are replayed, in which a transform is tried
_NEAR = 1e-5  # of the way that such a row goes


class ReplayRows(NamedTuple):
    """What is kept beside parameters ``(..., dim)``.

    Attributes:
      last_step: ``(...)`` int32, the step up to which the parameters and the slots are those of dense training.
    """

    last_step: jax.Array


class ReplayState(NamedTuple):
    """State of `kvjax.optax.catch_up` with ``replay=``.

    Attributes:
      steps: ``()`` int32, steps so far.
      past: what the transform kept for all rows together before each of the last steps, ``(replay, ...)`` each; that of
        step i at i modulo their number.
      rows: `ReplayRows`.
      inner: state of the transform.
      made_by: ``()`` float32, the `signature` of the transform that made it.
    """

    steps: jax.Array
    past: tuple[jax.Array, ...]
    rows: ReplayRows
    inner: Any
    made_by: jax.Array


def replaying(made: Any, name: str, number: int, shrink: Callable[[Any, Any], Any] | None) -> CatchUp:
    """A transform whose rows take the steps that they have missed, up to a number of them, when they are touched.

    Of more steps it takes the first ones, in which moments move it. In the rest nothing but what multiplies rows and
    slots goes on: that is a power. Rates of steps so long ago that they are not kept are those of the oldest that are.

    Args:
      made: the transform.
      name: of the function that is asked for it.
      number: of steps.
      shrink: as for `catching_up`.
    """
    tx, replay = optax.with_extra_args_support(made), _Replay(made, number, shrink)

    def init(params: Any) -> ReplayState:
        inner = tx.init(params)
        past = tuple(jnp.zeros((number, *jnp.shape(x)), jnp.result_type(x)) for x in replay.shared(inner))
        rows = ReplayRows(jnp.zeros(params.shape[:-1], jnp.int32))
        return ReplayState(jnp.zeros((), jnp.int32), past, rows, inner, jnp.float32(replay.signature))

    def step(grads: Any, state: ReplayState, params: Any, **extra: Any) -> tuple[Any, ReplayState]:
        state, value = replay.catch_up(state, params)
        past = replay.remembered(state.past, state.inner, state.steps)
        value, inner = replay.step(grads, state.inner, value, **extra)
        steps = state.steps + np.int32(1)
        rows = ReplayRows(jnp.broadcast_to(steps, params.shape[:-1]))
        return value, ReplayState(steps, past, rows, inner, jnp.float32(replay.signature))

    replay.signature = _check(replay, init, name)
    made = stepping(init, step, name)
    layout = functools.lru_cache(maxsize=16)(functools.partial(_layout, replay, init))
    return CatchUp(
        made, "global", catch_up=replay.catch_up, step=step, name=name, signature=replay.signature, layout_of=layout
    )


class _Replay:
    """Steps of a transform without a gradient."""

    def __init__(self, made: Any, number: int, shrink: Callable[[Any, Any], Any] | None):
        self.tx: Any = optax.with_extra_args_support(made)
        self.rowwise, self.number, self.shrink = Rowwise(made, "global"), number, shrink
        self.is_slot = self.rowwise.layout(3).is_slot
        self.counts = self._counts()
        self.signature = np.float32(0)

    def shared(self, inner: Any) -> list[Any]:
        """What is kept for all rows together."""
        return split_leaves(inner, self.is_slot)[1]

    def _counts(self) -> list[Any]:
        """Of what is kept for all rows together, what counts steps starts from; None for what does not."""
        params, seen = jnp.ones((1, 3), jnp.float32), []
        with computed_now():
            state = self.tx.init(params)
            for size in (0.5, 0.0, -1.0, 0.0):
                seen.append([np.asarray(x) for x in self.shared(state)])
                state = self.tx.update(jnp.full_like(params, size), state, params)[1]
        return [
            x[0] if x[0].ndim == 0 and x[0].dtype.kind == "i" and all(n == x[0] + i for i, n in enumerate(x)) else None
            for x in zip(*seen, strict=True)
        ]

    def remembered(self, past: tuple[Any, ...], inner: Any, steps: Any) -> tuple[Any, ...]:
        at = steps % np.int32(self.number)
        return tuple(old.at[at].set(x) for old, x in zip(past, self.shared(inner), strict=True))

    def step(self, grads: Any, inner: Any, value: Any, **extra: Any) -> tuple[Any, Any]:
        updates, inner = self.tx.update(grads, inner, value, **extra)
        value = jnp.asarray(optax.apply_updates(value, updates))
        if self.shrink is not None:
            value = self.shrink(value, jnp.ones(value.shape[:-1], jnp.float32))
        return value, inner

    def catch_up(self, state: ReplayState, params: Any) -> tuple[ReplayState, Any]:
        last = state.rows.last_step
        oldest = state.steps - np.int32(self.number)
        end = jnp.minimum(last + np.int32(self.number), state.steps)

        def replayed(carry: Any) -> Any:
            i, inner, value = carry
            at = jnp.maximum(i, oldest) % np.int32(self.number)
            counted = zip(state.past, self.counts, strict=True)
            known = self.joined(
                inner,
                [
                    jax.lax.dynamic_index_in_dim(x, at, keepdims=False) if n is None else (n + i).astype(x.dtype)
                    for x, n in counted
                ],
            )
            after, next_ = self.step(jnp.zeros_like(value), known, value)
            now = None if last.size == 1 else (last <= i) & (i < end)  # a row alone has missed each of these steps
            return (
                i + np.int32(1),
                self._changed(functools.partial(_where, now), inner, next_),
                _where(now, value, after),
            )

        def missed(carry: Any) -> Any:
            return carry[0] < jnp.max(end)

        def went_on(carry: Any) -> Any:
            left, *row = carry
            return jnp.zeros_like(left), *self._beyond(left, *row)

        _, inner, value = jax.lax.while_loop(missed, replayed, (jnp.min(last), state.inner, params))
        beyond = jnp.maximum(oldest - last, np.int32(0))
        _, inner, value = jax.lax.while_loop(lambda carry: jnp.any(carry[0] > 0), went_on, (beyond, inner, value))
        rows = ReplayRows(jnp.broadcast_to(state.steps, params.shape[:-1]))
        return state._replace(rows=rows, inner=inner), value

    def _beyond(self, steps: Any, inner: Any, value: Any) -> tuple[Any, Any]:
        """Rows and slots after as many steps more, in which what moves rows has ended."""
        none, many = jnp.zeros_like(value), steps.astype(jnp.float32)
        updates, after = self.tx.update(none, inner, value)
        still = self.tx.update(none, inner, none)[0]
        part = jnp.where(value == 0, 0, (updates - still) / jnp.where(value == 0, 1, value))
        value = value * jnp.exp(many[..., None] * jnp.log1p(jnp.clip(part, -0.999999, 0)))
        if self.shrink is not None:
            value = self.shrink(value, many)

        def faded(old: Any, new: Any) -> Any:
            if not jnp.issubdtype(jnp.result_type(old), jnp.floating):
                return old
            factor = jnp.clip(jnp.where(old == 0, 1, new / jnp.where(old == 0, 1, old)), 1e-30, 1)
            return (old * jnp.exp(_by_row(many, old) * jnp.log(factor))).astype(old.dtype)

        return self._changed(faded, inner, after), value

    def joined(self, inner: Any, shared: list[Any]) -> Any:
        return join_leaves(jax.tree.structure(inner), self.is_slot, split_leaves(inner, self.is_slot)[0], shared)

    def _changed(self, change: Callable[[Any, Any], Any], old: Any, new: Any) -> Any:
        """The old state with other slots: what a function makes of the old and the new ones."""
        slots, shared = split_leaves(old, self.is_slot)
        slots = map(change, slots, split_leaves(new, self.is_slot)[0])
        return join_leaves(jax.tree.structure(old), self.is_slot, slots, shared)


def _where(missed: Any, old: Any, new: Any) -> Any:
    if missed is None:
        return new.astype(jnp.result_type(old))
    return jnp.where(_by_row(missed, old), new, old).astype(jnp.result_type(old))


def _by_row(x: Any, like: Any) -> Any:
    """``(...)`` so that it meets the rows of a leaf ``(..., dim)`` or ``(...)``; of one row any leaf will do."""
    if x.size == 1:
        return x.reshape(())
    return x.reshape(*x.shape, *[1] * (like.ndim - x.ndim))


def _layout(replay: _Replay, init: Callable[[Any], ReplayState], dim: int) -> SlotLayout:
    inner = replay.rowwise.layout(dim)
    state = jax.eval_shape(init, jax.ShapeDtypeStruct((1, dim), jnp.float32))
    return SlotLayout(
        jax.tree.structure(state),
        (False, *[False] * len(state.past), True, *inner.is_slot, False),
        ("last_step", *inner.names),
        (jax.ShapeDtypeStruct((), jnp.int32), *inner.types),
        ((1,), *inner.shapes),
        (".rows", *(f".inner{part}" for part in inner.parts)),
        inner.coupled,
    )


def _check(replay: _Replay, init: Callable[[Any], ReplayState], name: str) -> np.float32:
    """Whether rows that miss more steps than are replayed come out as if they had taken all of them; and by what that
    is, the `signature` of the transform.

    Raises:
      ValueError: they do not.
    """
    rng, last = np.random.default_rng(0), _BEGUN + replay.number + _BEYOND
    grads = np.zeros((last, 1, 3))
    grads[:_BEGUN] = rng.normal(size=(_BEGUN, 1, 3))

    def run(start: Any, grads: Any) -> Any:
        def step(carry: Any, grad: Any) -> Any:
            i, past, inner, value = carry
            past, before = replay.remembered(past, inner, i), inner
            value, inner = replay.step(grad, inner, value)
            inner = jax.tree.map(lambda x, y: x.astype(jnp.result_type(y)), inner, before)
            return (i + np.int32(1), past, inner, value), (inner, value)

        first = init(start)
        (steps, past, inner, want), (states, values) = jax.lax.scan(
            step, (jnp.int32(0), first.past, first.inner, start), grads
        )
        begun, value = jax.tree.map(lambda x: x[_BEGUN - 1], (states, values))
        behind = replay.joined(begun, replay.shared(inner))
        rows = ReplayRows(jnp.full(1, _BEGUN, jnp.int32))
        return value, replay.catch_up(ReplayState(steps, past, rows, behind, jnp.float32(0)), value)[1], want

    with computed_now(), jax.enable_x64(True):
        value, got, want = (np.asarray(x) for x in jax.jit(run)(jnp.asarray(rng.normal(size=(1, 3))), grads))
    way, off = np.abs(want - value).max(), np.abs(got - want).max()
    if not off <= _NEAR * way + 1e-12:
        raise fail(
            ValueError, None, name,
            f"steps without a gradient that have hardly anything to move after {replay.number} of them",
            f"a row that is {off / max(way, 1e-30):.1e} of its way off when it misses {replay.number + _BEYOND}",
            "choose a larger replay= if its moments fade later; one whose steps keep their size (lion, signum, lamb) "
            "is for lazy training",
        )  # fmt: skip
    return signature([want - value])
