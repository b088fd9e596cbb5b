"""Coupling: whether the rows of a dense array depend on each other in a transform's update, found in its jaxpr.

Every number of a jaxpr gets the set of what it depends on: of each of two rows, of the loss. Nothing is computed, so
the answer holds for all numbers, and takes about as long as the trace.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core as jex
from jax.extend.core.primitives import scatter_p

from kvjax._training.refusals import check_update, other_state
from kvjax._values.equations import evaluate, moved
from kvjax._values.facts import ROW_FACTS, fact_types

# What a number may depend on.
_ROW = (1, 2)
_ROWS = 1 | 2
_MANY = 1 << 20
_LOSS = 4
_KEPT = 8  # a scalar that each row keeps for itself
_OF_ALL = 16  # the loss together with both rows, in one number
_DRAWN = 32  # random numbers that are drawn for all rows at once

_JAX = os.path.dirname(jax.__file__)
_LIBRARIES = (os.path.dirname(optax.__file__), os.path.dirname(os.path.dirname(__file__)))
_ELEMENTWISE = {
    "abs", "add", "and", "atan2", "bitcast_convert_type", "cbrt", "ceil", "clamp", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "mesh_cast", "min", "mul", "ne", "neg",
    "nextafter", "not", "optimization_barrier", "or", "pow", "pvary", "reduce_precision", "rem", "round", "rsqrt",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip


class Coupling(NamedTuple):
    """Attributes:
    updates: the update of a row depends on other rows.
    where: the functions in which rows come to depend on each other, as far as JAX tells.
    loss: a number of the update is made of the loss (``value=``) and all rows together.
    drawn: a number of the update is random, and not by what belongs to its row.
    leaves: of each leaf of the state, whether a number in it depends on several rows.
    of_rows: of each leaf, whether it depends on a row, or on what each row keeps for itself.
    starts: of each leaf, whether it starts from the values of the parameters.
    """

    updates: bool
    where: tuple[str, ...]
    loss: bool
    drawn: bool
    leaves: tuple[bool, ...]
    of_rows: tuple[bool, ...]
    starts: tuple[bool, ...]


def coupling_of(tx: Any, dim: int, kept: Sequence[bool], extra: dict[str, Any] | None = None) -> Coupling | None:
    """The coupling of the rows of a dense array, or None if the transform cannot be traced with these arguments.

    Args:
      tx: an optax transform.
      dim: width of the rows.
      kept: of each leaf of its state, whether each row keeps it for itself.
      extra: extra arguments of its update; by default none, or a loss if it wants one.
    """
    tx = optax.with_extra_args_support(tx)
    rows, many = (jax.ShapeDtypeStruct((n, dim), jnp.float32) for n in (len(_ROW), _MANY))
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(tx.init, rows)
    # Facts about rows belong to each of them, as their numbers do. What takes none is asked without.
    facts = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(_ROW),), x.dtype), fact_types())
    wanted = ({}, {"value": loss}) if extra is None else (extra,)
    for given in (some for each in wanted for some in (each | {ROW_FACTS: facts}, each)):
        try:
            init = jax.make_jaxpr(tx.init)(rows)
            update, out = jax.make_jaxpr(lambda g, s, p, e: tx.update(g, s, p, **e), return_shape=True)(
                rows, state, rows, given
            )
        except (AttributeError, TypeError, ValueError):
            continue
        check_update(out)
        if jax.tree.structure(out[1]) != jax.tree.structure(state):
            raise other_state(jax.tree.structure(state), jax.tree.structure(out[1]))
        if (before := jax.tree.map(jnp.shape, state)) != (after := jax.tree.map(jnp.shape, out[1])):
            raise other_state(before, after)
        found = {}
        if not _grows_by_rows(state, jax.eval_shape(tx.init, many)):
            found["the shapes of its state"] = None
        extras = [
            np.array(_ROW) if name == ROW_FACTS else np.full(np.shape(x), _LOSS)
            for name in sorted(given)
            for x in jax.tree.leaves(given[name])
        ]
        return _coupling(init, update, dim, kept, extras, found)
    return None


def _grows_by_rows(two: Any, many: Any) -> bool:
    """Whether all leaves of a state are as large for any number of rows, or as many times larger."""
    pairs = zip(jax.tree.leaves(two), jax.tree.leaves(many), strict=True)
    return all(x.ndim == y.ndim and y.size in (x.size, x.size * _MANY // len(_ROW)) for x, y in pairs)


def _coupling(
    init: Any, update: Any, dim: int, kept: Sequence[bool], extra: list[np.ndarray], found: dict[str, None]
) -> Coupling:
    rows = np.broadcast_to(np.array(_ROW)[:, None], (len(_ROW), dim))
    several = bool(found)
    first = _dependence(init, [rows], found)
    state = [x | _KEPT if own else x for x, own in zip(first, kept, strict=True)]
    while True:  # a number of the state may take a step to reach another
        updates, *new = _dependence(update, [rows, *state, rows, *extra], found)
        new = [x | y for x, y in zip(state, new, strict=True)]
        if all((x == y).all() for x, y in zip(state, new, strict=True)):
            break
        state = new
    others = bool((updates & _ROWS & ~rows).any())  # also where rows only change places
    if others and not found:
        found["its update"] = None
    return Coupling(
        updates=several or others,
        where=tuple(found),
        loss=bool((updates & _OF_ALL).any()),
        drawn=bool((updates & _DRAWN).any()),
        leaves=tuple(map(_coupled, state)),
        of_rows=tuple(bool((x & (_ROWS | _KEPT)).any()) for x in state),
        starts=tuple(bool((x & _ROWS).any()) for x in first),
    )


def _coupled(x: np.ndarray) -> bool:
    return bool(((x & _ROWS) == _ROWS).any())


def _dependence(closed: Any, args: Sequence[np.ndarray], found: dict[str, None] | None = None) -> list[np.ndarray]:
    """What each number of the results depends on, as sets of bits, by what each number of the arguments does.

    found: gets the names of the functions in which rows come to depend on each other.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    env: dict[Any, np.ndarray] = {v: np.zeros(v.aval.shape, np.int64) for v in jaxpr.constvars}
    env |= dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> np.ndarray:
        return np.zeros(np.shape(atom.val), np.int64) if isinstance(atom, jex.Literal) else env[atom]

    constants = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False))
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}

    def number(atom: Any) -> Any:
        """The value of what depends on no argument, else None."""
        if isinstance(atom, jex.Literal):
            return atom.val
        if atom in constants or atom not in makers:
            return constants.get(atom)
        eqn = makers[atom]
        values = [number(x) for x in eqn.invars]
        if any(x is None for x in values):
            return None
        return evaluate(eqn, values, jaxpr.debug_info)[eqn.outvars.index(atom)]

    for eqn in (each for each in jaxpr.eqns if each.outvars):  # jax.debug.print has none
        operands = [read(x) for x in eqn.invars]
        results = None
        if eqn.primitive.name == "gather" or eqn.primitive.name.startswith("scatter"):
            with jax.ensure_compile_time_eval():
                at = number(eqn.invars[1])
                results = None if at is None else _indexed(eqn, operands, at)
        if results is None:
            results = _equation(eqn, operands)
        if found is not None and any(map(_coupled, results)) and not any(map(_coupled, operands)):
            found[_function_of(eqn)] = None
        for variable, x in zip(eqn.outvars, results, strict=True):
            env[variable] = x | _OF_ALL if x.ndim == 0 and x & _ROWS == _ROWS and x & _LOSS else x
    return [read(x) for x in jaxpr.outvars]


def _function_of(eqn: Any) -> str:
    """The transform that an equation is from, "scale_by_trust_ratio", or the function of the user's."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    names = (
        f.function_name
        for f in frames
        if not f.file_name.startswith(_JAX)
        and (".<locals>" in f.function_name or not f.file_name.startswith(_LIBRARIES))
    )
    return next((x for x in names if not x.startswith("with_extra_args")), "its update").split(".")[0]


def _equation(eqn: Any, args: list[np.ndarray]) -> list[np.ndarray]:
    name, params, shape = eqn.primitive.name, eqn.params, getattr(eqn.outvars[0].aval, "shape", ())
    inner = [p for p in params.values() if isinstance(p, (jex.Jaxpr, jex.ClosedJaxpr))]
    if len(inner) == 1 and name != "scan" and len(getattr(inner[0], "jaxpr", inner[0]).invars) == len(args):
        return _dependence(inner[0], args)
    if name == "cond":
        results = zip(*(_dependence(branch, args[1:]) for branch in params["branches"]), strict=True)
        return [np.bitwise_or.reduce([_all(args[0], x.shape), *each]) for each in results for x in each[:1]]
    if name in _ELEMENTWISE:
        if len(eqn.outvars) > 1:
            return args
        return [np.bitwise_or.reduce([np.broadcast_to(x, shape) for x in args])]
    if name == "random_bits" and shape[:1] == (len(_ROW),) and not _union(args) & _ROWS:
        return [np.full(shape, _union(args) | _DRAWN)]
    if (results := moved(eqn, args)) is not None:
        return results
    if name.startswith(("reduce_", "arg")) and "axes" in params and len(args) == 1:
        return [_over(args[0], params["axes"])]
    if name == "pad" and all(low >= 0 and high >= 0 for low, high, _ in params["padding_config"]):
        padded, pairs = np.full(shape, args[1]), zip(args[0].shape, params["padding_config"], strict=True)
        padded[tuple(slice(low, low + n * (between + 1), between + 1) for n, (low, _, between) in pairs)] = args[0]
        return [padded]
    if name in ("sort", "top_k") or name.startswith("cum"):
        axis = params["dimension" if name == "sort" else "axis"]
        along = np.bitwise_or.reduce(np.bitwise_or.reduce(args), axis=axis, keepdims=True)
        return [np.broadcast_to(along, shape) for _ in eqn.outvars]
    if name == "dot_general":
        return [_product(args, params["dimension_numbers"])]
    # Loops and the like: each of their numbers may depend on all of their arguments.
    return [_all(np.array(_union(args)), getattr(v.aval, "shape", ())) for v in eqn.outvars]


def _indexed(eqn: Any, args: list[np.ndarray], at: Any) -> list[np.ndarray] | None:
    """What numbers that are taken from places, or put there, depend on; None if some have no place or share one."""
    if eqn.primitive.name == "gather":
        return [np.maximum(np.asarray(eqn.primitive.bind(jnp.int32(args[0]), at, **eqn.params)), 0)]
    operand, _, updates = args
    numbers = jnp.arange(1, updates.size + 1, dtype=jnp.int32).reshape(updates.shape)
    params = eqn.params | {"update_jaxpr": None, "update_consts": ()}
    put = np.asarray(scatter_p.bind(jnp.zeros(operand.shape, jnp.int32), at, numbers, **params))
    if np.count_nonzero(put) < updates.size:
        return None
    new = np.append(0, updates)[put]
    return [np.where(put > 0, new, operand) if eqn.primitive is scatter_p else operand | new]


def _over(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    return np.bitwise_or.reduce(x, axis=tuple(axes)) if len(axes) else x


def _union(args: Sequence[np.ndarray]) -> int:
    return int(np.bitwise_or.reduce([np.bitwise_or.reduce(x, axis=None) for x in args if x.size] or [0]))


def _all(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return np.full(shape, _union([x]))


def _product(args: list[np.ndarray], numbers: Any) -> np.ndarray:
    contracted, batch = numbers
    free, batched = [], ()
    for x, over, kept in zip(args, contracted, batch, strict=True):
        rest = [i for i in range(x.ndim) if i not in over and i not in kept]
        x = _over(x.transpose([*kept, *rest, *over]), range(len(kept) + len(rest), x.ndim))
        batched = x.shape[: len(kept)]
        free.append((x.reshape((*batched, -1)), x.shape[len(kept) :]))
    (left, m), (right, n) = free
    return (left[..., :, None] | right[..., None, :]).reshape((*batched, *m, *n))
