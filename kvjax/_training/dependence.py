"""Dependence: of what each number of a jaxpr is made, as a set of bits, found without computing it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core as jex
from jax.extend.core.primitives import scatter_p

from kvjax._values.equations import evaluate, moved
from kvjax._values.tracing import computed_now

# What a number may depend on.
ROW = (1, 2)
ROWS = 1 | 2
LOSS = 4
KEPT = 8  # a scalar that each row keeps for itself
OF_ALL = 16  # the loss together with both rows, in one number
DRAWN = 32  # random numbers that are drawn for all rows at once

_JAX = os.path.dirname(jax.__file__)
_LIBRARIES = (os.path.dirname(optax.__file__), os.path.dirname(os.path.dirname(__file__)))
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy",
    "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to",
    "lgamma", "log", "log1p", "log2", "logistic", "lt", "lt_to", "max", "mesh_cast", "min", "mul", "mulhi", "ne",
    "neg", "nextafter", "not", "one_minus_square", "optimization_barrier", "or", "polygamma", "population_count",
    "pow", "pvary", "random_gamma_grad", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
}  # fmt: skip


def meet(x: np.ndarray) -> bool:
    """Whether a number depends on several rows."""
    return bool(((x & ROWS) == ROWS).any())


def dependence(closed: Any, args: Sequence[np.ndarray], found: dict[str, None] | None = None) -> list[np.ndarray]:
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
            with computed_now():
                at = number(eqn.invars[1])
                results = None if at is None else _indexed(eqn, operands, at)
        if results is None:
            results = _equation(eqn, operands)
        if found is not None and any(map(meet, results)) and not any(map(meet, operands)):
            found[_function_of(eqn)] = None
        for variable, x in zip(eqn.outvars, results, strict=True):
            env[variable] = x | OF_ALL if x.ndim == 0 and x & ROWS == ROWS and x & LOSS else x
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
        return dependence(inner[0], args)
    if name == "cond":
        results = zip(*(dependence(branch, args[1:]) for branch in params["branches"]), strict=True)
        return [np.bitwise_or.reduce([_all(args[0], x.shape), *each]) for each in results for x in each[:1]]
    if name in _ELEMENTWISE:
        if len(eqn.outvars) > 1:
            return args
        return [np.bitwise_or.reduce([np.broadcast_to(x, shape) for x in args])]
    if name == "random_bits" and shape[:1] == (len(ROW),) and not _union(args) & ROWS:
        return [np.full(shape, _union(args) | DRAWN)]
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
    if name == "fft":
        axes = range(len(shape) - len(params["fft_lengths"]), len(shape))
        return [np.broadcast_to(_along(args[0], axes), shape)]
    if name == "while":
        return _while(params, args)
    if name == "scan":
        return _scan(eqn, args)
    if name == "dynamic_slice":
        return [np.broadcast_to(_along(args[0], _shorter(shape, args[0].shape)), shape) | _union(args[1:])]
    if name == "dynamic_update_slice":
        return [args[0] | _along(args[1], _shorter(args[1].shape, shape)) | _union(args[2:])]
    if name == "gather":
        return _gathered(eqn, *args)
    # Any other: each of its numbers may depend on all of its arguments.
    return [_all(np.array(_union(args)), getattr(v.aval, "shape", ())) for v in eqn.outvars]


def _indexed(eqn: Any, args: list[np.ndarray], at: Any) -> list[np.ndarray] | None:
    """What numbers that are taken from places, or put there, depend on; None if some have no place or share one."""
    if eqn.primitive.name == "gather":
        return [np.asarray(eqn.primitive.bind(jnp.int32(args[0]), at, **eqn.params | {"fill_value": 0}))]
    operand, _, updates = args
    numbers = jnp.arange(1, updates.size + 1, dtype=jnp.int32).reshape(updates.shape)
    params = eqn.params | {"update_jaxpr": None, "update_consts": ()}
    put = np.asarray(scatter_p.bind(jnp.zeros(operand.shape, jnp.int32), at, numbers, **params))
    if np.count_nonzero(put) < updates.size:
        return None
    new = np.append(0, updates)[put]
    return [np.where(put > 0, new, operand) if eqn.primitive is scatter_p else operand | new]


def _gathered(eqn: Any, x: np.ndarray, at: np.ndarray) -> list[np.ndarray]:
    """What numbers that are taken from places depend on, wherever these are."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    anywhere = [axis for axis in numbers.start_index_map if sizes[axis] < x.shape[axis]]
    taken = _indexed(eqn, [np.broadcast_to(_along(x, anywhere), x.shape), at], np.zeros(at.shape, np.int32))
    assert taken is not None  # only numbers that are put there may have no place
    return [taken[0] | np.expand_dims(_over(at, [at.ndim - 1]), numbers.offset_dims)]


def _while(params: Any, args: list[np.ndarray]) -> list[np.ndarray]:
    ends, to = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def step(carry: list[np.ndarray]) -> list[np.ndarray]:
        goes_on = _union(dependence(params["cond_jaxpr"], [*args[:ends], *carry]))
        return [x | goes_on for x in dependence(params["body_jaxpr"], [*args[ends:to], *carry])]

    return settled(step, args[to:])


def _scan(eqn: Any, args: list[np.ndarray]) -> list[np.ndarray]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    # Constants, what is carried, and what each step gets a part of; then what is carried, and what each step adds to.
    # Versions of JAX say in other ways how many there are of each, but parts have always an axis less.
    inner = getattr(body, "jaxpr", body)
    to = sum(x.aval.ndim == v.aval.ndim for x, v in zip(eqn.invars, inner.invars, strict=True))
    start = to - sum(x.aval.ndim == v.aval.ndim for x, v in zip(eqn.outvars, inner.outvars, strict=True))
    consts, xs = args[:start], args[to:]
    all_steps = [_over(x, [0]) for x in xs]
    carry = settled(lambda c: dependence(body, [*consts, *c, *all_steps])[: to - start], args[start:to])
    known: dict[bytes, list[np.ndarray]] = {}  # of long loops, most steps see the same

    def results(i: int) -> list[np.ndarray]:
        seen = b"".join(x[i].tobytes() for x in xs)
        if seen not in known:
            known[seen] = dependence(body, [*consts, *carry, *(x[i] for x in xs)])[to - start :]
        return known[seen]

    if not length:
        return [*carry, *(np.zeros(v.aval.shape, np.int64) for v in eqn.outvars[to - start :])]
    steps = [results(i) for i in range(length)]
    return [*carry, *(np.stack(ys) for ys in zip(*steps, strict=True))]


def settled(step: Callable[[list[np.ndarray]], list[np.ndarray]], state: list[np.ndarray]) -> list[np.ndarray]:
    """What a state depends on after any number of steps: a number may take several to reach another."""
    while True:
        new = [x | y for x, y in zip(state, step(state), strict=True)]
        if all((x == y).all() for x, y in zip(state, new, strict=True)):
            return new
        state = new


def _shorter(sizes: Sequence[int], of: Sequence[int]) -> list[int]:
    """The axes along which a part of this size may be anywhere in an array."""
    return [axis for axis, (size, whole) in enumerate(zip(sizes, of, strict=True)) if size < whole]


def _along(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """What any number along these axes depends on; they keep a size of 1."""
    return np.bitwise_or.reduce(x, axis=tuple(axes), keepdims=True) if len(axes) else x


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
