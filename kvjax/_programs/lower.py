"""Lowering: a jaxpr about one row to instructions.

What depends on no row (schedules, hyperparameters, their counts) is not lowered: its equations are evaluated where
the program is made, so under `jit` they stay in XLA, and reach the program as shared registers. A register knows of a
shape only how many elements there are, so reshapes and broadcasts cost no instruction; nor does what only takes rows
apart and puts them together, as registers may be parts of others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from kvjax._programs.instructions import FORMS, SUFFIXES, Instruction, NotLowered, Register
from kvjax._programs.registers import Parts, Registers, Shared, Value, joined, shared
from kvjax._values.equations import CHECKPOINTS, evaluate, moved, scan_sizes
from kvjax._values.tracing import computed_now

_MOST_PARTS = 64
_MOST_TURNS = 64
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    **dict.fromkeys(CHECKPOINTS, "jaxpr"),
}
_SAME = {
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "stop_gradient", "pvary",
    "optimization_barrier", "mesh_cast",
}  # fmt: skip
_MOVES = {
    "slice": (0,), "split": (0,), "rev": (0,), "dynamic_slice": (0,), "dynamic_update_slice": (0, 1), "gather": (0,),
    "scatter": (0, 2), "pad": (0, 1), "concatenate": None, "stack": None,
}  # fmt: skip
"""What only moves elements, and which of its operands have them; all where there is none."""
_ELEMENTWISE = {form.removesuffix("_f") for form in FORMS if form.endswith("_f")} | {
    "and", "or", "xor", "not", "clamp", "integer_pow", "round", "square", "convert_element_type", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical",
}  # fmt: skip
"""Elementwise primitives that are instructions."""
_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "rmax",
    "reduce_min": "rmin",
    "reduce_prod": "prod",
    "reduce_and": "rmin",
    "reduce_or": "rmax",
}
_NEUTRAL = {("add", 0.0), ("sub", 0.0), ("mul", 1.0), ("div", 1.0)}
_UNSIGNED = {
    "clamp",
    "lt",
    "le",
    "gt",
    "ge",
    "max",
    "min",
    "div",
    "rem",
    "abs",
    "sign",
    "shift_right_arithmetic",
}  # that int32 does not do for uint32


class Lowering(Registers):
    """The instructions that equations are made to."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self._debug_info: Any = None  # of the jaxpr, as JAX wants it for those made of its parts

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
        self._debug_info = jaxpr.debug_info
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, map(shared, consts), strict=True))
        env |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Value:
            return (
                shared(np.asarray(atom.val, getattr(atom.aval, "dtype", None)))
                if isinstance(atom, jex.Literal)
                else env[atom]
            )

        for eqn in jaxpr.eqns:
            if eqn.effects:
                raise NotLowered(f"{eqn.primitive.name} with a side effect")
            env |= dict(zip(eqn.outvars, self._equation(eqn, [read(x) for x in eqn.invars]), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, args: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        alone = all(isinstance(x, Shared) for x in args) and all(v.aval.size == 1 for v in eqn.outvars)
        if name in ("jit", "pjit") and alone:  # as a whole: it may be long
            return _evaluated(eqn, args, self._debug_info)  # pyright: ignore[reportArgumentType]
        if name in _INLINED:
            return self._inlined(eqn.params[_INLINED[name]], args)
        if name == "cond":
            return self._cond(eqn, args)
        if all(isinstance(x, Shared) for x in args):
            return _evaluated(eqn, args, self._debug_info)  # pyright: ignore[reportArgumentType]
        if name == "while":
            return self._while(eqn, args)
        if name == "scan":
            return self._unrolled(eqn, args)
        if name == "dynamic_slice" and not all(isinstance(x, Shared) for x in args[1:]):
            return [self._picked(eqn, args)]
        if name in _MOVES:
            return self._moved(eqn, args)
        for x in (*eqn.invars, *eqn.outvars):
            self._width(x.aval)
        if name in _SAME and len(args) == len(eqn.outvars):
            return args
        if name in _REDUCTIONS:
            return [self._reduced(_REDUCTIONS[name], eqn, args[0])]
        if name == "dot_general":
            return [self._product(eqn, args)]
        if name not in _ELEMENTWISE:
            raise NotLowered(name)
        return [self._elementwise(name, eqn, args)]

    def _width(self, aval: Any) -> int:
        if aval.size and sum(n != 1 for n in aval.shape) <= 1:
            return aval.size
        raise NotLowered(f"an array of shape {aval.shape}")

    def _inlined(self, inner: Any, args: list[Value]) -> list[Value]:
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args)

    def _cond(self, eqn: Any, args: list[Value]) -> list[Value]:
        index, branches = args[0], eqn.params["branches"]
        if isinstance(index, Shared) and index.concrete:
            return self._inlined(branches[int(np.clip(index.value, 0, len(branches) - 1))], args[1:])
        if all(isinstance(x, Shared) for x in args):
            return _evaluated(eqn, args, self._debug_info)  # pyright: ignore[reportArgumentType]
        *others, result = [
            self._inlined(branch, args[1:]) for branch in branches
        ]  # the last is for all that is greater
        for i, other in reversed(list(enumerate(others))):
            this = self.emit("le_i", np.bool_, index, shared(np.int32(i)))
            result = [
                x if x is y else self.emit("select", v.aval.dtype, this, y, x)
                for x, y, v in zip(other, result, eqn.outvars, strict=True)
            ]
        return result

    def _reduced(self, op: str, eqn: Any, x: Value) -> Value:
        aval, out = eqn.invars[0].aval, eqn.outvars[0].aval
        if self._width(aval) == self._width(out):
            return x  # along an axis of length 1
        name = eqn.primitive.name
        # Of integers "and" and "or" go bit by bit; of numbers of 16 bits XLA may round each partial sum.
        done = {"reduce_and": {"bool"}, "reduce_or": {"bool"}, "reduce_sum": {"float32", "int32", "uint32"}}
        if str(aval.dtype) not in done.get(name, {"float32", "int32"}):
            raise NotLowered(f"{name} of {aval.dtype}")
        return self._over(f"{op}_{_suffix(aval.dtype)}", out.dtype, x, aval.size)

    def _over(self, op: str, dtype: Any, x: Value, width: int) -> Value:
        """One element of all those of a row."""
        parts = x.each if isinstance(x, Parts) else [(x, width)]
        if op not in FORMS:
            raise NotLowered(op)
        first, *others = [self.emitted(op, dtype, [self.widened(y, n)]) if n > 1 else y for y, n in parts]
        name = {"sum": "add", "prod": "mul"}.get(op[:-2], op[1:-2]) + op[-2:]
        return functools.reduce(lambda y, z: self.emit(name, dtype, y, z), others, first)

    def _product(self, eqn: Any, args: list[Value]) -> Value:
        """The inner product of two rows, or of two elements."""
        avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        if self._width(avals[-1]) != 1 or any(x.dtype != np.float32 for x in avals):
            raise NotLowered(f"dot_general of {avals}")
        product, width = self._elementwise("mul", eqn, args), self._width(avals[0])
        return self._over("sum_f", np.float32, product, width) if width > 1 else product

    def _moved(self, eqn: Any, args: list[Value]) -> list[Value]:
        """What moves elements to places that are known: it is done to their numbers, which say where each is from."""
        name, moves = eqn.primitive.name, _MOVES[eqn.primitive.name]
        own = [i for i in range(len(args)) if moves is None or i in moves]
        begins = list(itertools.accumulate((eqn.invars[i].aval.size for i in own), initial=0))
        sources = [args[i] for i in own]
        if eqn.params.get("fill_value") is not None:  # of a gather: one more element, with the next number
            sources.append(_fill_of(eqn))
            eqn = eqn.replace(params=eqn.params | {"fill_value": begins[-1]})
            begins.append(begins[-1] + 1)
        operands: list[Any] = []
        for i, (x, aval) in enumerate(zip(args, (v.aval for v in eqn.invars), strict=True)):
            if i in own:
                numbers = np.arange(aval.size).reshape(aval.shape) + begins[own.index(i)]
                operands.append(numbers.astype(aval.dtype if aval.dtype.itemsize == 4 else np.int32))
            elif isinstance(x, Shared) and x.concrete:
                operands.append(x.full(aval.shape))
            else:
                raise NotLowered(f"{name} to places that are not known")
        results = moved(eqn, operands)
        if results is None:
            with computed_now():
                results = evaluate(eqn, [jnp.asarray(x) for x in operands], self._debug_info)
        return [self._from(sources, begins, v.aval, x) for v, x in zip(eqn.outvars, results, strict=True)]

    def _from(self, operands: list[Value], begins: list[int], aval: Any, numbers: Any) -> Value:
        """The elements of these numbers, which count through the operands; each begins with one of `begins`."""
        self._width(aval)
        numbers = np.ravel(numbers)
        if not ((numbers >= 0) & (numbers < begins[-1])).all():
            raise NotLowered("elements from nowhere")
        of = np.searchsorted(begins, numbers, "right") - 1
        at = numbers.astype(np.int64) - np.asarray(begins)[of]
        alike = np.array([_alike(x) for x in operands])[of[1:]]
        goes_on = (of[1:] == of[:-1]) & (alike | (at[1:] == at[:-1] + 1))
        first = [0, *(np.flatnonzero(~goes_on) + 1).tolist()]
        if len(first) > _MOST_PARTS:
            raise NotLowered(f"a row in more than {_MOST_PARTS} parts")
        spans = [(operands[of[i]], int(at[i]), n - i) for i, n in itertools.pairwise([*first, numbers.size])]
        return joined([(self.part(x, begin, begin + n), n) for x, begin, n in spans])

    def _picked(self, eqn: Any, args: list[Value]) -> Value:
        """One of the values that no row has, by a number of the row's."""
        table, *at = args
        aval = eqn.invars[0].aval
        if not isinstance(table, Shared) or eqn.outvars[0].aval.size != 1 or sum(n != 1 for n in aval.shape) > 1:
            raise NotLowered("a part of a row, by a number of the row's")
        if table.uniform:
            return table
        (index,) = [x for x, n in zip(at, aval.shape, strict=True) if n != 1]
        return self._append("pick", aval.dtype, [self.register(table), self.single(index)], 1)

    def _while(self, eqn: Any, args: list[Value]) -> list[Value]:
        """A loop that each row leaves by itself. What stays as it is in it is no register of its own."""
        p, of_cond = eqn.params, eqn.params["cond_nconsts"]
        known = of_cond + p["body_nconsts"]
        body = p["body_jaxpr"].jaxpr
        stays = [x is y for x, y in zip(body.outvars, body.invars[p["body_nconsts"] :], strict=True)]
        changing = [i for i, same in enumerate(stays) if not same]
        variables = [self.variable(args[known + i], self._width(eqn.outvars[i].aval)) for i in changing]
        carry: list[Value] = list(args[known:])
        for i, variable in zip(changing, variables, strict=True):
            carry[i] = variable
        before = dict(self._made)  # nothing that a loop makes is there if it has not run
        self.instructions.append(Instruction("loop", None, ()))
        (goes_on,) = self._inlined(p["cond_jaxpr"], [*args[:of_cond], *carry])
        self.instructions.append(Instruction("leave", None, (self.owned(goes_on, 1),)))
        after = self._inlined(p["body_jaxpr"], [*args[of_cond:known], *carry])
        new = [self.settled(after[i], x.width) for i, x in zip(changing, variables, strict=True)]
        new = [self.variable(x, x.width) if x.base in variables else x for x in new]
        for x, y in zip(variables, new, strict=True):
            self.instructions.append(Instruction("mov", x, (y,)))
        self.instructions.append(Instruction("again", None, ()))
        self._made = before
        return carry

    def _unrolled(self, eqn: Any, args: list[Value]) -> list[Value]:
        """A loop of a known number of turns, turn by turn."""
        p, (constants, carried) = eqn.params, scan_sizes(eqn)
        known, carry = args[:constants], args[constants:]
        if len(carry) > carried or len(eqn.outvars) > carried or p["length"] > _MOST_TURNS:
            raise NotLowered("scan over arrays, or of many turns")
        for _ in range(p["length"]):
            carry = self._inlined(p["jaxpr"], [*known, *carry])
        return carry

    def _elementwise(self, name: str, eqn: Any, args: list[Value]) -> Value:
        dtype, result = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
        if dtype == np.uint32 and name in _UNSIGNED:
            raise NotLowered(f"{name} of uint32")
        s = _suffix(dtype)
        if name == "convert_element_type":
            return self._converted(args[0], dtype, result)
        if name == "select_n":
            if dtype != np.bool_:
                raise NotLowered("select_n of many")
            return self.emit("select", result, *args)
        if name == "clamp":
            least = self.emit(f"max_{s}", result, args[1], args[0])
            return self.emit(f"min_{s}", result, least, args[2])
        if name == "not":
            return self.emit("xor_i", result, args[0], shared(np.bool_(True) if dtype == np.bool_ else np.int32(-1)))
        if name in ("integer_pow", "square"):
            return self._power(s, result, args[0], eqn.params.get("y", 2))
        if name == "round":
            name = "round_away" if eqn.params["rounding_method"] == lax.RoundingMethod.AWAY_FROM_ZERO else "round_even"
        if name == "pow":
            args = [args[0], self._converted(args[1], eqn.invars[1].aval.dtype, dtype)]
        for x, y in ((args, args[::-1]) if name in ("add", "mul") else (args,)) if len(args) == 2 else ():
            if _is_neutral(name, y):  # as XLA's simplifier has it
                return x
        return self._rounded(self.emit(f"{name}_{s}", result, *args), result)

    def _converted(self, x: Value, dtype: Any, to: Any) -> Value:
        dtype, to = np.dtype(dtype), np.dtype(to)
        if isinstance(x, Shared):
            return shared(jnp.asarray(x.value, to)) if dtype != to else x
        if to == np.bool_ and dtype != np.bool_:
            return self.emit(f"ne_{_suffix(dtype)}", to, x, shared(np.zeros((), dtype)))
        if _suffix(dtype) == _suffix(to):
            return self._rounded(x, to) if dtype != to else x
        op = f"{_suffix(dtype)}_to_{_suffix(to)}"
        if np.uint32 in (dtype, to):
            if op != "i_to_f":
                raise NotLowered(f"a cast of {dtype} to {to}")
            op = "u_to_f"
        return self._rounded(self.emit(op, to, x), to)

    def _rounded(self, x: Value, dtype: Any) -> Value:
        """What has 16 bits in JAX has a value that 16 bits can have."""
        return self.emit(f"{dtype}_f", dtype, x) if str(dtype) in ("bfloat16", "float16") else x

    def _power(self, s: str, dtype: Any, x: Value, y: int) -> Value:
        if y < 0:
            return self.emit(f"div_{s}", dtype, shared(np.ones((), dtype)), self._power(s, dtype, x, -y))
        if y < 2:
            return x if y else shared(np.ones((), dtype))
        half = self._power(s, dtype, x, y // 2)
        squared = self._rounded(self.emit(f"mul_{s}", dtype, half, half), dtype)
        return self._rounded(self.emit(f"mul_{s}", dtype, squared, x), dtype) if y % 2 else squared


def _fill_of(eqn: Any) -> Shared:
    fill, dtype = eqn.params["fill_value"], eqn.outvars[0].aval.dtype
    try:
        return shared(np.asarray(fill, dtype))
    except (ValueError, OverflowError):  # JAX casts it as it likes
        raise NotLowered(f"a fill of {fill} in {dtype}") from None


def _alike(value: Value) -> bool:
    """Whether all its elements are the same one."""
    return value.kind != "vector" if isinstance(value, Register) else isinstance(value, Shared) and value.uniform


def _evaluated(eqn: Any, args: Sequence[Shared], debug_info: Any) -> list[Value]:
    """An equation on values of no row, outside of the program."""
    if eqn.primitive.name in _SAME and len(args) == len(eqn.outvars) and all(x.uniform for x in args):
        return list(args)
    alike = eqn.primitive.name in _ELEMENTWISE and all(x.uniform for x in args)  # what one element does, all do
    known = all(x.concrete for x in args)
    with computed_now() if known else contextlib.nullcontext():
        if alike:
            return [shared(eqn.primitive.bind(*[jnp.asarray(x.value) for x in args], **eqn.params))]
        values = [x.full(v.aval.shape) for v, x in zip(eqn.invars, args, strict=True)]
        return [shared(x) for x in evaluate(eqn, values, debug_info)]


def _is_neutral(name: str, y: Value) -> bool:
    return isinstance(y, Shared) and y.uniform and y.concrete and (name, float(y.value)) in _NEUTRAL


def _suffix(dtype: Any) -> str:
    if str(dtype) not in SUFFIXES:
        raise NotLowered(f"dtype {dtype}")
    return SUFFIXES[str(dtype)]
