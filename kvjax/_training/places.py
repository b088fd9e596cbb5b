"""The places of a training step: a table on a host, a table on a device, and a shard among several.

Each does a step whole, or plans it in one call and ends it in another, so that several tables do theirs together:
`plan` makes and checks all that can be refused and changes nothing, and `end` does what has been planned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from kvjax._keys.sparse_rows import SparseRows
from kvjax._ops import order, routing, training
from kvjax._sharded.collectives import agreed
from kvjax._sharded.delivery import deliver
from kvjax._sharded.space import prepare
from kvjax._sharded.writes import settle
from kvjax._spec.spec import TableSpec
from kvjax._spmd.explicit import as_auto
from kvjax._spmd.varying import varying, varying_like, varying_over
from kvjax._training.merge import check_dtypes, merge_on_shard
from kvjax._training.ways import Update, Way, flat
from kvjax.ffi import is_device


class Planned(NamedTuple):
    """A step that is planned.

    Attributes:
      word: ``()`` uint32, by which its end knows it.
      held: what its end wants beside, a tree.
      state: the next globals.
      status: ``()`` uint32, 0 or the number of what it was refused for, if its way reports that. A device's that does
        not, and fails later, has 1.
    """

    word: jax.Array
    held: Any
    state: Any
    status: jax.Array


class Place(Protocol):
    """Where the rows of a step are.

    A status is ``()`` uint32, of what came before, or None. Where it is not 0 the step is not done: a way that reports
    has that status then, and any other raises it.
    """

    def whole(self, update: Update, status: jax.Array | None) -> tuple[jax.Array, Any]:
        """Does a step. Returns the next version and the next globals."""
        ...

    def plan(self, update: Update, status: jax.Array | None) -> Planned: ...

    def end(self, update: Update, word: jax.Array, held: Any, joint: jax.Array) -> jax.Array:
        """Does a planned step once `joint` exists, ``()`` uint32, the greatest status of all steps: where it is not 0,
        nothing is written. Returns the next version."""
        ...


def place_of(spec: TableSpec, way: Way) -> Place:
    if spec.sharded:
        return Shard(spec, way)
    return Device(spec, way) if is_device(spec.storage.backend) else Host(spec, way)


@dataclasses.dataclass(frozen=True)
class _InOnePlace:
    """All rows are here: of a table without a mesh, or on a mesh of one device."""

    spec: TableSpec
    way: Way

    def _before(self, update: Update, status: jax.Array | None) -> tuple[Update, jax.Array | None]:
        """The update and the status, unless that is to be raised."""
        if status is None or self.way.reports:
            return update, status
        (version,) = routing.agree(self.spec, "apply", status, [varying_like(update.version, status)])
        return dataclasses.replace(update, version=version), None

    def _planned(self, word: jax.Array, held: Any, state: Any, status: Any) -> Planned:
        return Planned(word, held, state, status if self.spec.placement is None else agreed(status))


class Host(_InOnePlace):
    """Rows in the memory of the host. The table holds a plan until its end."""

    def whole(self, update: Update, status: jax.Array | None) -> tuple[jax.Array, Any]:
        update, _ = self._before(update, status)
        version, state, _ = self.way.on_host(self.spec, update, holds=False)
        return version, state

    def plan(self, update: Update, status: jax.Array | None) -> Planned:
        update, failed = self._before(update, status)
        plan = functools.partial(self.way.on_host, self.spec, update, holds=True)
        word, state, status = _unless(failed, update, plan, lambda: (jnp.asarray(update.version), update.state, failed))
        return self._planned(word, None, state, status)

    def end(self, update: Update, word: jax.Array, held: Any, joint: jax.Array) -> jax.Array:
        def run(word: jax.Array, joint: jax.Array, grads: SparseRows) -> Any:
            def done() -> jax.Array:
                return settle(training.end_apply(self.spec, word, flat(grads).rows, joint))

            return (), (_unless_refused(self.spec, self.way, update.version, joint, done),)

        return as_auto(run, (), word, joint, update.grads)[1][0]


class Device(_InOnePlace):
    """Rows in the memory of a device, for whose calls nobody waits. A plan tries the step, and the table holds nothing
    of it: the end does all, with what the rows become if XLA makes that."""

    def whole(self, update: Update, status: jax.Array | None) -> tuple[jax.Array, Any]:
        update, _ = self._before(update, status)
        merged = self.way.merged(update.grads)
        made, state = self.way.made(self.spec, update, merged)
        return self.way.written(self.spec, update.version, update, merged, made, planned=False), state

    def plan(self, update: Update, status: jax.Array | None) -> Planned:
        update, failed = self._before(update, status)
        tried = _unless(failed, update, functools.partial(self._tried, update), lambda: failed)
        merged = self.way.merged(update.grads)

        def make() -> tuple[Any, Any]:
            return self.way.made(self.spec, update, merged)

        def none() -> tuple[Any, Any]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make)[0]), update.state

        made, state = _unless(None if failed is None else tried, update, make, none)
        tried = order.after(self.spec, tried, jax.tree.leaves(made))
        return self._planned(jnp.asarray(update.version), (merged, made), state, tried)

    def _tried(self, update: Update) -> jax.Array:
        check_dtypes([update.grads])

        def run(grads: SparseRows) -> Any:
            batch = update.batch(self.spec, flat(grads), self.way.slots)
            return (), (training.plan_apply(self.spec, batch, reports=self.way.reports),)

        return as_auto(run, (), update.grads)[1][0]

    def end(self, update: Update, word: jax.Array, held: Any, joint: jax.Array) -> jax.Array:
        def done(version: jax.Array) -> jax.Array:
            return settle(self.way.written(self.spec, version, update, *held, planned=True))

        if self.way.reports:
            return _unless_refused(self.spec, self.way, word, joint, lambda: done(word))
        # What has been planned is not done for a version that is not the live one.
        version = done(jnp.where(joint == 0, word, ~word))
        return jnp.where(joint == 0, version, word)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Some of the rows, or a copy of all, on one device of several. Each brings a piece ``(n,)`` of the gradients,
    which goes to the devices that have the rows. These plan what changes in them, and agree."""

    spec: TableSpec
    way: Way

    def whole(self, update: Update, status: jax.Array | None) -> tuple[jax.Array, Any]:
        planned = self.plan(update, status)
        return settle(training.commit_step(self.spec, planned.word).version), planned.state

    def plan(self, update: Update, status: jax.Array | None) -> Planned:
        spec, way, version = self.spec, self.way, update.version
        merged, failed = merge_on_shard(spec, update.grads)
        assert status is not None  # over several devices there always is one
        failed = jnp.maximum(status, failed)
        summaries, delivered, traffic = deliver(
            spec, version, merged, update.step, way.slots, update.run, way.facts, failed
        )
        number = prepare(spec, "apply", version, summaries, delivered)

        def agreed() -> tuple[jax.Array, Any]:
            given = [varying_like(version, delivered)]
            (word,) = routing.agree(spec, "apply", number, given, traffic)
            return way.on_shard(spec, word, max(1, update.grads.counts.shape[0]), update)

        def refused() -> tuple[jax.Array, Any]:
            return varying_like(version, delivered), update.state

        word, state = jax.lax.cond(number == 0, agreed, refused) if way.reports else agreed()
        return Planned(word, None, state, number)

    def end(self, update: Update, word: jax.Array, held: Any, joint: jax.Array) -> jax.Array:
        def done() -> jax.Array:
            begun = training.commit_step(self.spec, order.after(self.spec, word, [joint]))
            return settle(begun.version)

        return _unless_refused(self.spec, self.way, update.version, joint, done)


def _unless(status: jax.Array | None, update: Update, do: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """What do() gives; or otherwise(), where there is a status that is not 0."""
    if status is None:
        return do()
    like = functools.partial(varying_over, axes=varying((update.version, update.grads, status)))
    return jax.lax.cond(status == 0, lambda: like(do()), lambda: like(otherwise()))


def _unless_refused(
    spec: TableSpec, way: Way, version: jax.Array, joint: jax.Array, done: Callable[[], jax.Array]
) -> jax.Array:
    """What done() gives; or the version, where ways report and a step was refused."""
    if not way.reports:
        return done()
    return jax.lax.cond(joint == 0, done, lambda: training.end_refused(spec, version, joint))
