"""Closed forms: what many steps without a gradient make of a row and its slots, at the cost of one.

Such a step multiplies each slot by a number of its own and the row by a number of the step, and moves the row: by a sum
of slots (momentum), or by one of them over the root of another (Adam). So do many of them, with sums over steps in the
place of the rates. The sums over all steps to come are those of a later step, times a factor, and the steps between. So
a row keeps the sums of its last step, and with those of now that gives what lies between, however many steps that are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.quadrature import rational
from kvjax._training.slots import join_leaves, split_leaves

Numbers = dict[str, jax.Array]

_TAIL = 1e-8  # of the sum over the steps that a moment carries a row, what is left out
LONGEST = 4096  # steps that a moment may carry a row
LARGE = 1e30  # a second moment beside which epsilon is nothing
_TINY = 1e-30
_GONE = np.float32(80)  # of the logarithm of a row's decay


@dataclasses.dataclass(frozen=True)
class ClosedForm:
    """Attributes:
    tx: the transform.
    treedef, is_slot: of its state, as `SlotLayout` has them.
    first: of the leaves that are counts, what they start from.
    factors: by which each slot is multiplied in a step.
    movers: slots that move the row.
    root: the slot over whose root the only mover moves it, or None if they move it by their sum.
    decays: whether the row is multiplied by something.
    shrinks: the most by which its logarithm shrinks so in a step, of those that were tried.
    eps: what is added to the root of that slot, after many steps.
    least, most: of what is added to the root in any step, as parts of `eps`.
    """

    tx: optax.GradientTransformationExtraArgs
    treedef: Any
    is_slot: tuple[bool, ...]
    first: tuple[int, ...]
    factors: tuple[float, ...] = ()
    movers: tuple[int, ...] = ()
    root: int | None = None
    decays: bool = False
    shrinks: float = 0.0
    eps: float = 0.0
    least: float = 1.0
    most: float = 1.0

    # ---- what moves a row, over many steps ---------------------------------------------------------------------

    @property
    def rates(self) -> dict[str, float]:
        """The sums that a row needs, each with the factor between its terms of one step and the next."""
        if not self.movers:
            return {}
        if self.root is None:
            return {f"reach{i}": self.factors[i] for i in self.movers}
        fade = math.sqrt(max(self.factors[self.root], _TINY))
        sums = {p: self.factors[self.movers[0]] / fade ** (1 + p / 2) for p in self.powers}
        return {f"reach{i}": rate for i, rate in enumerate(sums.values())}

    @property
    def powers(self) -> tuple[int, ...]:
        """Of the root of epsilon, whose sums over steps a row needs: 0 first, then the others in order."""
        if not self.eps:
            return (0,)
        fade = max(self.factors[self.root or 0], _TINY)
        # Epsilon grows as the root fades, and then may have no mean.
        least = -3 if self.factors[self.movers[0]] < 0.995 * fade else -5
        return (0, *(p for p in range(least, least + 6) if p))

    @property
    def horizon(self) -> int:
        """Steps after which a moment does not move its row any more, beside what is left of the row."""
        largest = max([_TINY, *self.rates.values()]) * math.exp(self.shrinks)
        return max(1, math.ceil(math.log(_TAIL) / math.log(largest))) if largest < 1 else LONGEST + 1

    def reach(self, count: Any) -> Numbers:
        """How far the slots of now carry a row in all steps to come, if it has no gradient in them.

        Args:
          count: steps so far, ``()`` int32.

        Returns:
          ``()`` float32 by name.
        """
        return jax.jit(self._reach)(jnp.asarray(count, jnp.int32)) if self.rates else {}

    def _reach(self, count: jax.Array) -> Numbers:
        steps = np.arange(self.horizon, dtype=np.int32)
        terms = jax.vmap(self._terms)(count + steps)
        # The step itself multiplies the row before it moves it.
        kept = jnp.exp(-jnp.cumsum(terms["decay"])) if self.decays else jnp.ones((), jnp.float32)
        return {
            name: jnp.sum(terms[name] / kept * np.power(rate, steps, dtype=np.float64).astype(np.float32))
            for name, rate in self.rates.items()
        }

    def decay(self, count: Any) -> jax.Array:
        """By how much the logarithm of a row shrinks in the step after `count`, ``()`` float32."""
        return jax.jit(lambda c: -jnp.log1p(self._moved(c, {}, 1.0)))(jnp.asarray(count, jnp.int32))

    def _terms(self, count: Any) -> Numbers:
        """What one step adds to each sum, before the factors."""
        terms = {"decay": self.decay(count)}
        if self.root is None:
            return terms | {f"reach{i}": -self._moved(count, {i: 1.0}) for i in self.movers}
        push, eps = self._push_and_eps(count)
        parts = eps / np.float32(self.eps) if self.eps else eps
        # Where epsilon is not known, the step moves no row.
        root, known = jnp.sqrt(jnp.where(parts == 0, np.float32(1), parts)), jnp.where(parts == 0, np.float32(0), push)
        return terms | {name: known * root**p if p else push for name, p in zip(self.rates, self.powers, strict=True)}

    def _push_and_eps(self, count: Any) -> tuple[jax.Array, jax.Array]:
        """Of a step that moves a row by ``push * mover / (sqrt(root) + eps)``."""
        (mover,), root = self.movers, self.root
        assert root is not None
        far = -self._moved(count, {mover: 1.0, root: LARGE})
        near = -self._moved(count, {mover: 1.0, root: 0.0})
        push = far * np.float32(math.sqrt(LARGE))
        known = (push != 0) & jnp.isfinite(near)
        return push, jnp.where(known, push / jnp.where(known, near, np.float32(1)), np.float32(0))

    def _moved(self, count: Any, slots: dict[int, float], value: float = 0.0) -> jax.Array:
        """The update of a row of one element in a step without a gradient; slots that are not named are 1, or 0 if
        they move rows."""
        values = [slots.get(i, 0.0 if i in self.movers else 1.0) for i in range(len(self.factors))]
        full = [jnp.full((1, 1), x, jnp.float32) for x in values]
        return self.step(count, full, jnp.full((1, 1), value, jnp.float32))[0].reshape(())

    def step(self, count: Any, slots: Sequence[Any], value: Any) -> tuple[Any, list[Any], list[Any]]:
        """A step without a gradient: update, slots and counts, of slots and a row ``(1, dim)``."""
        state = join_leaves(self.treedef, self.is_slot, slots, (jnp.int32(n) + count for n in self.first))
        update, state = self.tx.update(jnp.zeros_like(value), state, value)
        return update, *split_leaves(state, self.is_slot)

    def signs(self) -> list[Any]:
        """Numbers by which this form is told from another: what many steps without a gradient depend on."""
        steps = jnp.asarray([0, 1, 10, 100, 1000, 10000], jnp.int32)
        sums = jax.jit(jax.vmap(self._reach))(steps) if self.rates else {}
        decay = [jax.vmap(self.decay)(steps)] if self.decays else []
        return [np.array(self.factors), np.array(self.eps), *sums.values(), *decay]

    # ---- many steps --------------------------------------------------------------------------------------------

    def after(self, steps: Any, decayed: Any, ahead: Numbers, left: Numbers, slots: Sequence[Any], value: Any) -> Any:
        """Rows and slots after steps without a gradient.

        Args:
          steps: ``(...)`` int32, how many; none if less than 0.
          decayed: ``(...)`` float32, what `decay` is in sum over them.
          ahead: `reach` at their begin, ``(...)`` each.
          left: `reach` at their end.
          slots: ``(..., dim)`` each.
          value: ``(..., dim)``.
        """
        many = jnp.maximum(steps.astype(jnp.float32), np.float32(0))  # a row that is ahead has missed nothing
        missed = many > 0
        kept = [None if i == self.root else self._power(factor, many) for i, factor in enumerate(self.factors)]
        # Beyond _GONE nothing is left of a row, and what grows as it decays would have no end.
        grown = jnp.exp(jnp.where(missed, jnp.minimum(decayed, _GONE), np.float32(0))) if self.decays else None
        gone = {}
        for name, fade in zip(self.rates, self._fades(many, kept), strict=True):
            sum_ = ahead[name] - (fade if grown is None else fade * grown) * left[name]
            # Of the mean of epsilon nothing is left where no step is.
            weighs = self.root is None or name == "reach0"
            gone[name] = (jnp.where(missed, sum_, np.float32(0)) if weighs else sum_)[..., None]
        if self.root is not None:
            value = value + self._over_root(gone, slots)
        else:
            for i in self.movers:
                value = value - slots[i] * gone[f"reach{i}"]
        if grown is not None:
            value = value * (np.float32(1) / grown)[..., None]
        return value, [x if k is None else x * k[..., None].astype(x.dtype) for x, k in zip(slots, kept, strict=True)]

    def _power(self, factor: float, steps: Any) -> Any:
        """``factor ** steps``, or None for 1; steps are float32."""
        # Of a factor near 1 float32 keeps few digits, and thousands of steps lose them; of its logarithm it keeps all.
        return None if factor == 1 else jnp.exp(steps * np.float32(math.log(max(factor, _TINY))))

    def _fades(self, steps: Any, kept: list[Any]) -> list[Any]:
        """The factor of each of `rates` over steps. What the root is multiplied by is put beside the other factors."""
        if self.root is None:
            return [kept[i] for i in self.movers]
        whole = kept[self.movers[0]]
        fade = math.sqrt(max(self.factors[self.root], _TINY))
        faded = self._power(fade, steps)
        if faded is None:
            return [whole] * len(self.rates)
        kept[self.root] = faded * faded
        # Beyond the horizon nothing is left, and the inverse of a power would have no end.
        grown = np.float32(1) / jnp.maximum(faded, np.float32(max(fade ** (2 * self.horizon), _TINY)))
        root = jnp.sqrt(grown)
        return [whole * root ** (2 + p) for p in self.powers]

    def _over_root(self, sums: Numbers, slots: Sequence[Any]) -> jax.Array:
        """The sum over steps of ``-push * mover / (root + eps)``, by means of powers of eps in them."""
        (mover,), root = self.movers, self.root
        assert root is not None
        move, below = slots[mover].astype(jnp.float32), jnp.sqrt(slots[root].astype(jnp.float32))
        if not self.eps:
            return -sums["reach0"] * jnp.where(move == 0, np.float32(0), move / below)
        of = rational({p: sums[f"reach{i}"] for i, p in enumerate(self.powers)}, self.least, self.most)
        low = of.c * np.float32(self.eps)
        below = below + low
        y = low / below
        over = move * (1 + y * (of.n0 + y * of.n1)) / (below * (1 + y * (of.d0 + y * (of.d1 + y * of.d2))))
        return -sums["reach0"] * over
