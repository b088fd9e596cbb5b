"""Equations of jaxprs: evaluated alone, done to arrays of NumPy if they only move elements, and the sizes of a scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import eval_jaxpr
from jax.extend import core as jex


def evaluate(eqn: Any, args: Sequence[Any], debug_info: Any) -> list[Any]:
    """The results of an equation for values of its operands, literals included. debug_info: of its jaxpr."""
    values = {v: x for v, x in zip(eqn.invars, args, strict=True) if not isinstance(v, jex.Literal)}
    # JAX wants a name for each operand and result where jax_enable_checks is on.
    named = debug_info._replace(arg_names=("",) * len(values), result_paths=("",) * len(eqn.outvars))
    alone = jex.Jaxpr((), list(values), eqn.outvars, [eqn], debug_info=named)
    return eval_jaxpr(alone, (), *values.values())


CHECKPOINTS = ("checkpoint", "remat", "remat2")
"""What versions of JAX call the primitive of ``jax.checkpoint``."""


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """Of a scan the number of its constants, and that of the values that it carries."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()  # jax 0.12
    return len(constants), len(carry)


def moved(eqn: Any, args: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """The results of an equation that only moves elements; None if it is another one, or takes a program of XLA's."""
    name, params, shape = eqn.primitive.name, eqn.params, getattr(eqn.outvars[0].aval, "shape", ())
    if name in ("reshape", "squeeze", "expand_dims"):
        return [args[0].reshape(shape)]
    if name == "broadcast_in_dim":
        at = dict(zip(params["broadcast_dimensions"], args[0].shape, strict=True))
        return [np.broadcast_to(args[0].reshape([at.get(i, 1) for i in range(len(shape))]), shape)]
    if name == "transpose":
        return [args[0].transpose(params["permutation"])]
    if name == "concatenate":
        return [np.concatenate(args, params["dimension"])]
    if name == "stack":
        return [np.stack(args, params["axis"])]
    if name == "split":
        return np.split(args[0], np.cumsum(params["sizes"])[:-1], params["axis"])
    if name == "rev":
        return [np.flip(args[0], params["dimensions"])]
    if name == "slice":
        limits = zip(
            params["start_indices"], params["limit_indices"], params["strides"] or [1] * len(shape), strict=True
        )
        return [args[0][tuple(slice(*each) for each in limits)]]
    return None
