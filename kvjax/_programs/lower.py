"""Lowering: a jaxpr about one row to instructions.

What depends on no row (schedules, hyperparameters, their counts) is not lowered: its equations are evaluated where
the program is made, so under `jit` they stay in XLA, and reach the program as shared registers. A register knows of a
shape only whether it is that of a row or of one element, so reshapes and broadcasts cost no instruction.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex

from kvjax._programs.instructions import CONSTANT, FORMS, SUFFIXES, Field, Instruction, NotLowered, Register
from kvjax._values.equations import evaluate


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value that no row has, of any shape; if `uniform`, it is ``()`` and stands for an array of equal elements."""

    value: Any
    uniform: bool

    @property
    def concrete(self) -> bool:
        return not isinstance(self.value, Tracer)

    def full(self, shape: Sequence[int]) -> Any:
        return jnp.broadcast_to(self.value, shape) if self.uniform else self.value


Value = Register | Shared

_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
}
_SAME = {
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "stop_gradient", "pvary",
    "optimization_barrier", "mesh_cast", "split",
}  # fmt: skip
_ELEMENTWISE = {form.removesuffix("_f") for form in FORMS if form.endswith("_f")} | {
    "and", "or", "xor", "not", "clamp", "integer_pow", "square", "convert_element_type", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical",
}  # fmt: skip
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


class Lowering:
    """The instructions of rows of `dim` elements, so far."""

    def __init__(self, dim: int):
        self.dim = dim
        self.instructions: list[Instruction] = []
        self._made: dict[Any, Register] = {}  # what an instruction has made of these operands before
        self._shared: dict[Any, Register] = {}
        self._debug_info: Any = None  # of the jaxpr, as JAX wants it for those made of its parts

    # ---- registers ---------------------------------------------------------------------------------------------

    def load(self, field: Field, dtype: Any = None) -> Register:
        """The register of a part of the row, as `dtype`."""
        kind = "vector" if field.width == self.dim > 1 else "scalar"
        register = Register(kind, np.dtype(jnp.dtype(dtype or field.dtype)), field)
        return register if field.in_place(self.dim) else self._emitted("load", kind, register.dtype, [register])

    def register(self, value: Value) -> Register:
        if isinstance(value, Register):
            return value
        dtype = jnp.result_type(value.value)
        row = not value.uniform and np.size(value.value) == self.dim > 1 and dtype.itemsize <= 4
        if not (value.uniform or row) or str(dtype) not in SUFFIXES:
            raise NotLowered(f"a value of no row, {dtype}{list(np.shape(value.value))}")
        key = (str(dtype), np.asarray(value.value).tobytes()) if value.concrete else id(value.value)
        if (row, key) not in self._shared:
            register = Register("shared", dtype, value=value.value)
            if row:
                field = Field(CONSTANT - len(self._shared), "float32", self.dim)
                register = Register("vector", dtype, field, (np if value.concrete else jnp).ravel(value.value))
            self._shared[row, key] = register
        return self._shared[row, key]

    def emit(self, op: str, dtype: Any, *args: Value) -> Register:
        """Appends an instruction; its result has the elements of its widest operand."""
        if op not in FORMS:
            raise NotLowered(op)
        registers = [self.register(x) for x in args]
        if op == "select" and any(r.dtype == np.float64 for r in registers):
            raise NotLowered("select of float64")
        vector = any(r.kind == "vector" for r in registers) and not FORMS[op].reduces
        if vector and (op.endswith("_d") or any(r.dtype == np.float64 for r in registers)):
            raise NotLowered("float64 rows")
        return self._emitted(op, "vector" if vector else "scalar", np.dtype(dtype), registers)

    def widened(self, value: Value) -> Register:
        """A vector of equal elements."""
        register = self.register(value)
        if register.kind == "vector":
            return register
        if register.dtype == np.float64:
            raise NotLowered("float64 rows")
        return self._emitted("mov", "vector", register.dtype, [register])

    def single(self, value: Value) -> Register:
        """One element: of the row's own, or that all rows share."""
        register = self.register(value)
        if register.kind == "vector":
            raise NotLowered("a row in the place of one element")
        return register

    def section(self) -> list[Instruction]:
        """The instructions up to here; those that follow know nothing of them."""
        instructions, self.instructions, self._made = self.instructions, [], {}
        return instructions

    def _emitted(self, op: str, kind: Any, dtype: Any, args: Sequence[Register]) -> Register:
        key = (op, kind, dtype, *(a.field or a for a in args))
        if key not in self._made:
            self._made[key] = Register(kind, dtype)
            self.instructions.append(Instruction(op, self._made[key], tuple(args)))
        return self._made[key]

    # ---- equations ---------------------------------------------------------------------------------------------

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
        if aval.size == 1 or (aval.size == self.dim and sum(n != 1 for n in aval.shape) == 1):
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
        return self.emit(f"{op}_{_suffix(aval.dtype)}", out.dtype, self.widened(x))

    def _product(self, eqn: Any, args: list[Value]) -> Value:
        """The inner product of two rows, or of two elements."""
        avals = [x.aval for x in (*eqn.invars, *eqn.outvars)]
        if self._width(avals[-1]) != 1 or any(x.dtype != np.float32 for x in avals):
            raise NotLowered(f"dot_general of {avals}")
        product = self._elementwise("mul", eqn, args)
        return self.emit("sum_f", np.float32, self.widened(product)) if self._width(avals[0]) > 1 else product

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
            op = {"i_to_f": "u_to_f"}.get(op, "")
        return self._rounded(self.emit(op, to, x), to)

    def _rounded(self, x: Register, dtype: Any) -> Register:
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


def shared(x: Any) -> Shared:
    if np.size(x) == 1:
        return Shared(jnp.reshape(x, ()) if isinstance(x, jax.Array) else np.asarray(x).reshape(()), True)
    if not isinstance(x, Tracer) and np.size(x) and (np.asarray(x) == np.ravel(x)[0]).all():
        return Shared(np.ravel(x)[0], True)
    return Shared(x, False)


def _evaluated(eqn: Any, args: Sequence[Shared], debug_info: Any) -> list[Value]:
    """An equation on values of no row, outside of the program."""
    if eqn.primitive.name in _SAME and len(args) == len(eqn.outvars) and all(x.uniform for x in args):
        return list(args)
    alike = eqn.primitive.name in _ELEMENTWISE and all(x.uniform for x in args)  # what one element does, all do
    known = all(x.concrete for x in args)
    with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
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
