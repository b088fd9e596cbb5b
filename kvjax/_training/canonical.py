"""The canonical form of a jaxpr: a value that is equal for jaxprs that compute the same in the same way.

Programs are kept by it, and not by the functions that were traced: each ``optax.adam(0.1)`` is made of other ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

_OF_DERIVATIVES = {"jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros"}
"""Parameters that say how an equation is differentiated, which are made anew in each trace."""


def canonical(closed: Any) -> Hashable:
    """Of a closed jaxpr whose constants are known. Functions in it, such as callbacks, are equal as Python has it.

    Raises:
      TypeError: something in it cannot be compared.
    """
    found = _of_jaxpr(closed.jaxpr), tuple(map(_of_value, closed.consts))
    hash(found)
    return found


def _of_jaxpr(jaxpr: Any) -> Hashable:
    number = itertools.count()
    numbers = {v: next(number) for v in (*jaxpr.constvars, *jaxpr.invars)}

    def of(atom: Any) -> Hashable:
        return (_of_value(atom.val), str(atom.aval)) if isinstance(atom, jex.Literal) else numbers[atom]

    equations: list[Hashable] = [tuple(str(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))]
    for eqn in jaxpr.eqns:
        operands = tuple(map(of, eqn.invars))
        numbers |= {v: next(number) for v in eqn.outvars}
        params = tuple((k, _of_value(v)) for k, v in sorted(eqn.params.items()) if k not in _OF_DERIVATIVES)
        equations.append((eqn.primitive, operands, tuple(str(v.aval) for v in eqn.outvars), params))
    return tuple(equations), tuple(map(of, jaxpr.outvars))


def _of_value(x: Any) -> Hashable:
    if isinstance(x, jex.ClosedJaxpr):
        return _of_jaxpr(x.jaxpr), tuple(map(_of_value, x.consts))
    if isinstance(x, jex.Jaxpr):
        return _of_jaxpr(x)
    if isinstance(x, (tuple, list)):
        return type(x), tuple(map(_of_value, x))
    if isinstance(x, dict):
        return tuple((k, _of_value(v)) for k, v in sorted(x.items()))
    if isinstance(x, (float, np.ndarray, np.generic, jax.Array)):  # by bits: 0 and -0 are equal, and nan is not
        array = np.asarray(x)
        return str(array.dtype), array.shape, array.tobytes()
    return type(x), x  # 1 and 1.0 and True are equal
