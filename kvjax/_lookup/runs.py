"""Runs of lookups: taps of their own for lookups that JAX traces once and runs several times.

The body of a ``scan`` has one trace for all turns, and a jitted function one for all calls. So a lookup there would
have one tap, of which JAX adds the cotangents. Instead the jaxpr of the loss is evaluated anew with more taps in it: a
scan also scans over the taps of its turns, and each call of a function has taps of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex

from kvjax._lookup.taps import Tape, attach_p, types_of, zeros_of
from kvjax._values.equations import CHECKPOINTS, evaluate, scan_sizes
from kvjax._values.errors import fail


@dataclasses.dataclass(frozen=True)
class Run:
    """A lookup where it stands in a jaxpr.

    Attributes:
      tape: that has noted it.
      index: of its place there.
      turns: of the scans around it, outermost first.
      around: the names of all primitives around it.
      types: of its taps in one turn.
    """

    tape: Tape
    index: int
    turns: tuple[int, ...]
    around: frozenset[str]
    types: Sequence[Any]

    def zero_taps(self) -> tuple[Any, ...]:
        """Those of all turns, ``(*turns, ...)`` each."""
        kinds = [
            functools.reduce(lambda kind, n: jex.unmapped_aval(n, 0, kind), self.turns[::-1], k) for k in self.types
        ]
        return zeros_of((tuple(kinds),))[0]


def check_derivatives(closed: jex.ClosedJaxpr) -> None:
    """Whether a loss has no lookup in a function with a derivative of its own, in which taps have no gradient.

    Raises:
      ValueError: it has one.
    """
    for run in _runs(closed):
        if any(name.startswith(("custom_jvp", "custom_vjp")) for name in run.around):
            raise fail(
                ValueError, run.tape.spec.name, "value_and_grad", "lookups outside of functions with derivatives of "
                "their own", "one in a custom_jvp or custom_vjp, whose rule gives the table no gradient",
                "look the rows up before it, and pass them in",
            )  # fmt: skip


def repeated(closed: jex.ClosedJaxpr) -> dict[Tape, set[int]]:
    """The lookups of a loss that get taps for each run: those in a scan, or in a function that is called twice.

    Not those that stand in what cannot be evaluated anew, such as a ``shard_map``. Nor those that ``jax.checkpoint``
    does once more for an inner derivative: their keys have occurred once.
    """
    runs: dict[tuple[Tape, int], list[Run]] = collections.defaultdict(list)
    for run in _runs(closed):
        runs[run.tape, run.index].append(run)
    found: dict[Tape, set[int]] = collections.defaultdict(set)
    for (tape, index), each in runs.items():
        around = frozenset[str]().union(*(run.around for run in each))
        several = "recomputation" not in around if len(each) > 1 else each[0].turns
        if several and around <= _EVALUATED.keys():
            found[tape].add(index)
    return found


def _runs(jaxpr: Any, turns: tuple[int, ...] = (), around: frozenset[str] = frozenset()) -> Iterator[Run]:
    """The lookups in a jaxpr, in the order in which it is evaluated."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive is attach_p:
            types = types_of(*(eqn.invars[i].aval for i in (0, 1, 3)))
            yield Run(params["tape"], params["index"], turns, around, types)
            continue
        inner = (*turns, params["length"]) if name == "scan" else turns
        for body in _bodies(eqn):
            yield from _runs(body, inner, around | {_named(eqn)})


def _named(eqn: Any) -> str:
    """What an equation does, by the name of its primitive."""
    name, params = eqn.primitive.name, eqn.params
    if name in CHECKPOINTS:
        return "recomputation" if params["differentiated"] else "checkpoint"
    if name in ("jit", "pjit"):
        placed = any(isinstance(x, jax.sharding.Sharding) for x in (*params["in_shardings"], *params["out_shardings"]))
        return "jit with shardings" if placed else "jit"
    return name


def _bodies(eqn: Any) -> list[Any]:
    values = [x for value in eqn.params.values() for x in (value if isinstance(value, (tuple, list)) else (value,))]
    return [x for x in values if isinstance(x, (jex.Jaxpr, jex.ClosedJaxpr))]


def in_need(jaxpr: Any) -> list[Run]:
    """The lookups in the jaxpr of a loss that get taps for each run."""
    return [run for run in _runs(jaxpr) if run.index in run.tape.repeated]


def with_taps(function: Callable[..., Any], runs: Sequence[Run], taps: Sequence[Any], *operands: Any) -> Any:
    """function(*operands), a loss with the taps of all other lookups, with those of runs, too.

    Args:
      function: gives any tree.
      runs: the lookups that the probe of the loss has found to be in need.
      taps: of each of them, as `Run.zero_taps` has them.
      *operands: trees of arrays.

    Raises:
      ValueError: it does not make the lookups that its probe has made; or one is in a ``cond`` that ``vmap`` has made a
        selection. What hides the gradient from examples of another branch is around taps that come from outside.
    """

    def traced(*args: Any) -> list[Any]:
        nonlocal results, tree
        results, tree = jax.tree.flatten(function(*args))
        return [x for x in results if isinstance(x, Tracer)]

    results, tree = [], None
    closed = jax.make_jaxpr(traced)(*operands)
    own = in_need(closed)
    if [(run.tape.probe, run.index, run.turns) for run in own] != [(run.tape, run.index, run.turns) for run in runs]:
        raise runs[0].tape.other_lookups("others in a scan, or in a function that is called twice")
    for run in own:
        if run.index in run.tape.masked:
            raise fail(
                ValueError, run.tape.spec.name, "value_and_grad", "lookups that run once, or that all examples make",
                "one in a scan, or in a function that is called twice, in a cond that vmap makes a selection",
                "look the rows up before it, and pass them in",
            )  # fmt: skip
    made = iter(_evaluated(closed, jax.tree.leaves(operands), taps))
    return jax.tree.unflatten(tree, [next(made) if isinstance(x, Tracer) else x for x in results])


def _evaluated(jaxpr: Any, args: Sequence[Any], taps: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr whose lookups have their taps, in their order."""
    consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, jex.Literal) else values[v]

    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        if eqn.primitive is attach_p and eqn.params["index"] in eqn.params["tape"].repeated:
            results, taps = [attach_p.bind(*operands, *taps[0], **eqn.params)], taps[1:]
        elif inner := sum(len(in_need(body)) for body in _bodies(eqn)):
            results = _EVALUATED[_named(eqn)](eqn, operands, taps[:inner])
            taps = taps[inner:]
        else:
            results = evaluate(eqn, operands, jaxpr.debug_info)
        values |= zip(eqn.outvars, results, strict=True)
    return [value(v) for v in jaxpr.outvars]


def _scan(eqn: Any, args: Sequence[Any], taps: Sequence[Any]) -> list[Any]:
    params, (constants, carried) = eqn.params, scan_sizes(eqn)

    def turn(carry: Any, x: Any) -> tuple[Any, Any]:
        results = _evaluated(params["jaxpr"], [*args[:constants], *carry, *x[0]], x[1])
        return results[:carried], results[carried:]

    first, xs = args[constants : constants + carried], (args[constants + carried :], taps)
    carry, made = jax.lax.scan(turn, first, xs, params["length"], params["reverse"], params["unroll"])
    return [*carry, *made]


def _cond(eqn: Any, args: Sequence[Any], taps: Sequence[Any]) -> list[Any]:
    branches = []
    for branch in eqn.params["branches"]:
        n = len(in_need(branch))
        branches.append(functools.partial(lambda b, own, *xs: _evaluated(b, xs, own), branch, taps[:n]))
        taps = taps[n:]
    return jax.lax.switch(args[0], branches, *args[1:])


def _checkpoint(eqn: Any, args: Sequence[Any], taps: Sequence[Any]) -> list[Any]:
    keep = {name: eqn.params[name] for name in ("prevent_cse", "policy")}
    return jax.checkpoint(functools.partial(_evaluated, eqn.params["jaxpr"]), **keep)(args, taps)


def _call(eqn: Any, args: Sequence[Any], taps: Sequence[Any]) -> list[Any]:
    return _evaluated(eqn.params["jaxpr"], args, taps)


_EVALUATED = {"scan": _scan, "cond": _cond, "jit": _call, "checkpoint": _checkpoint, "recomputation": _checkpoint}
"""What may be around a lookup that gets taps for each run, by `_named`."""
