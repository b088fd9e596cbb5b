"""Recognition: the closed form of a transform's steps without a gradient, found by trying it in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.closed_form import LARGE, LONGEST, ClosedForm
from kvjax._training.rowwise import Rowwise
from kvjax._values.errors import fail
from kvjax._values.tracing import computed_now

_WIDTH = 3  # of the rows that are tried
_COUNTS = (0, 1, 7, 60, 2000)
_SCALES = (1.0, 1e-3, 1e-6, 1e-9, 1e-12)
_SLOWER = 0.75  # beyond it the sums of what moves a row have no end that float32 can hold
_EARLY = 512  # steps in which the bias of moments matters
_WANT = "a transform whose steps without a gradient have a closed form"


class NoClosedForm(ValueError):
    """Of a transform whose missed steps may be replayed: its text says what is wrong, and begins the mend."""


def _no_form(op: str, want: str, got: str, mend: str = "") -> Exception:
    return fail(NoClosedForm, None, op, want, got, mend)


def closed_form_of(made: Any, op: str) -> ClosedForm:
    """The closed form of an optax transform; `op` is for errors.

    Raises:
      ValueError: there is none, with the reason; `NoClosedForm` if missed steps may be replayed.
    """
    layout = Rowwise(made, "global").layout(_WIDTH)
    tx = optax.with_extra_args_support(made)
    if any(shape != (1, _WIDTH) for shape in layout.shapes):
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        raise _no_form(
            op, "a transform that keeps for each element what belongs to it", f"slots {shapes} of a row (1, 3)"
        )
    # In float64 the numbers that users have written come out as they are.
    with computed_now(), jax.enable_x64(True):
        counts = layout.globals_of(tx.init(jnp.zeros((1, _WIDTH))))
        if not all(jnp.issubdtype(jnp.result_type(x), jnp.integer) for x in counts):
            got = "hyperparameters in the state, which may change at any time"
            mend = "give schedules to the transform itself, optax.adam(schedule); or "
            raise _no_form(op, "rates that follow from the step", got, mend)
        bare = ClosedForm(tx, layout.treedef, layout.is_slot, tuple(int(x) for x in counts))
        return _Trial(bare, layout.names, op).form()


class _Trial:
    """Steps of a transform that is tried."""

    def __init__(self, bare: ClosedForm, names: Sequence[str], op: str):
        self.bare, self.names, self.slots, self.op = bare, names, len(names), op
        self.compiled: Callable[..., Any] = jax.jit(jax.vmap(bare.step))
        rng = np.random.default_rng(0)
        slots = rng.uniform(0.1, 1.0, (len(_SCALES), self.slots, _WIDTH)) ** 3 * np.reshape(_SCALES, (-1, 1, 1))
        self.counts = np.repeat(_COUNTS, len(_SCALES))
        self.given = np.tile(slots, (len(_COUNTS), 1, 1))
        self.value = np.broadcast_to(np.abs(rng.normal(size=_WIDTH)) * (1, -1, 1), (len(self.counts), _WIDTH))
        self.update, self.after, counted = self.step(self.counts, self.given, self.value)
        self.still = self.step(self.counts, self.given, np.zeros_like(self.value))[0]
        if any((x != first + self.counts + 1).any() for x, first in zip(counted, bare.first, strict=True)):
            raise _no_form(self.op, "rates that follow from the step", "numbers in the state that do not count steps")

    def step(self, counts: Any, slots: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[Any]]:
        """Updates ``(n, dim)``, slots ``(n, slots, dim)`` and counts, each ``(n,)``, of the steps after `counts`."""
        n = len(counts)
        at = np.arange(max(2 * _EARLY, n)).clip(max=n - 1)  # of one shape, so that one program does
        given = [slots[at, i][:, None] for i in range(self.slots)]
        update, after, counted = self.compiled(np.asarray(counts, np.int32)[at], given, value[at][:, None])
        slots = np.stack([np.asarray(x)[:n, 0] for x in after], 1) if self.slots else slots
        return np.asarray(update)[:n, 0], slots, [np.asarray(x)[:n] for x in counted]

    def form(self) -> ClosedForm:
        factors = tuple(self._factor(i, name) for i, name in enumerate(self.names))
        moved = self.update - self.still
        bare = dataclasses.replace(self.bare, factors=factors, decays=bool(np.any(moved)))
        # The row by a factor of the step alone.
        part = moved[:, :1] / self.value[:, :1]
        if _near(moved, part * self.value):
            if not np.all(part > -1):
                raise fail(
                    ValueError, None, self.op, "weights that decay by less than all of them in a step",
                    f"one that multiplies a row by {float(1 + part.min()):g}",
                    "choose a smaller rate or weight_decay",
                )  # fmt: skip
            bare = dataclasses.replace(bare, shrinks=max(0.0, -math.log1p(float(part.min()))))
            for form in (self._by_sum(bare), *(self._over_root(bare, *pair) for pair in self._pairs())):
                if form is not None:
                    return _fading(form, self.op)
        got = "one that moves rows otherwise than by its slots, or by one of them over the root of another"
        raise _no_form(self.op, _WANT, got)

    def _factor(self, i: int, name: str) -> float:
        each = self.after[:, i] / self.given[:, i]
        if not (np.ptp(each) <= 1e-9 and each.min() >= 0 and each.max() <= 1 + 1e-9):
            raise _no_form(self.op, _WANT, f"slot {name!r}, which changes by more than a factor")
        return min(1.0, float(each.flat[0]))

    def _pairs(self) -> Any:
        return itertools.permutations(range(self.slots), 2)

    def _moved(self, counts: Any, given: dict[int, float]) -> np.ndarray:
        """What slots make of a row of zeros, ``(n,)``; slots that are not named are 0."""
        slots = np.zeros((len(counts), self.slots, _WIDTH))
        for i, x in given.items():
            slots[:, i] = x
        return -self.step(counts, slots, np.zeros((len(counts), _WIDTH)))[0][:, 0]

    def _by_sum(self, bare: ClosedForm) -> ClosedForm | None:
        each = [self._moved(self.counts, {i: 1.0}) for i in range(self.slots)]
        want = -sum((self.given[:, i] * x[:, None] for i, x in enumerate(each)), np.zeros_like(self.value))
        if not _near(self.still, want):
            return None
        return dataclasses.replace(bare, movers=tuple(i for i, x in enumerate(each) if np.any(x)))

    def _over_root(self, bare: ClosedForm, mover: int, root: int) -> ClosedForm | None:
        early = np.arange(_EARLY)
        pushed, eps = self._push_and_eps(self.counts, mover, root)
        over = np.sqrt(self.given[:, root]) + eps[:, None]
        if not _near(self.still, -pushed[:, None] * self.given[:, mover] / over):
            return None
        eps = np.concatenate([eps, self._push_and_eps(early, mover, root)[1]])
        eps = eps[eps > 0]
        if not len(eps):
            return dataclasses.replace(bare, movers=(mover,), root=root)
        least, most = float(eps.min()), float(eps.max())
        if most > 1e6 * least:  # of another form in other steps
            return None
        # Twice as much: in later steps than have been tried it is a little more.
        return dataclasses.replace(bare, movers=(mover,), root=root, eps=most, least=least / most, most=2.0)

    def _push_and_eps(self, counts: Any, mover: int, root: int) -> tuple[np.ndarray, np.ndarray]:
        far = self._moved(counts, {mover: 1.0, root: LARGE}) * math.sqrt(LARGE)
        near = self._moved(counts, {mover: 1.0, root: 0.0})
        with np.errstate(divide="ignore", invalid="ignore"):
            return far, np.where((far != 0) & np.isfinite(near), far / near, 0.0)


def _near(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether rows ``(n, dim)`` are equal, each measured by its greatest element."""
    size = np.abs(want).max(-1, keepdims=True)
    return bool(np.all(np.isfinite(want)) and np.all(np.abs(got - want) <= 1e-6 * size))


def _fading(form: ClosedForm, op: str) -> ClosedForm:
    """The form, if what moves a row fades soon enough."""
    fade = max([1e-30, *form.rates.values()])
    if fade < 1 and form.shrinks > -_SLOWER * math.log(fade):
        got = f"one that multiplies rows by {math.exp(-form.shrinks):.3g} in a step, and what moves them by {fade:.3g}"
        mend = "choose a smaller rate or weight_decay"
        raise fail(ValueError, None, op, "weights that decay more slowly than moments fade", got, mend)
    if form.horizon > LONGEST:
        beta = ""
        if form.root is not None:
            of = form.factors
            beta = f" (beta1 {of[form.movers[0]]:g} over the root of beta2 {of[form.root]:g})"
        raise fail(
            ValueError, None, op, "moments that fade", f"one whose steps without a gradient hardly grow smaller{beta}",
            "choose a smaller beta1 or momentum, or leave it out",
        )  # fmt: skip
    if form.root is None:
        return form
    # At the end of the horizon epsilon weighs as much more as the root has faded.
    return dataclasses.replace(form, most=form.most * form.factors[form.root] ** (-form.horizon / 2))
