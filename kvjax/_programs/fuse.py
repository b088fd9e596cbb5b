"""Fusion: several instructions become one, which goes once over its rows."""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter

import numpy as np

from kvjax._programs.instructions import Instruction, Register
from kvjax._programs.program import Section
from kvjax.ffi import host

_COMMUTES = {"add_f", "mul_f", "fma_f", "add_i"}  # in its first two operands


def contracted(section: Section) -> Section:
    """A product that a single sum or difference reads becomes one fused multiply-add, as LLVM does it for XLA."""
    uses = _uses(section)
    products: dict[Register, tuple[Register, ...]] = {}
    instructions: list[Instruction] = []
    for op, out, args in section.instructions:
        if op == "mul_f" and out is not None and uses[out] == 1 and out.dtype == np.float32:
            products[out] = args
        if op in ("add_f", "sub_f"):
            x, y = args
            if x in products:
                op, args = "fma_f" if op == "add_f" else "fms_f", (*products[x], y)
            elif y in products:
                op, args = "fma_f" if op == "add_f" else "fnma_f", (*products[y], x)
        instructions.append(Instruction(op, out, args))
    return Section(instructions, section.stores)


def fused(section: Section) -> Section:
    """Takes the fused instructions of the C++ side for the calls that they stand for. The bits are the same."""
    uses = _uses(section)
    made = {instruction.out: instruction for instruction in section.instructions if instruction.out is not None}
    kept: list[Instruction] = []
    within: set[Register] = set()  # what a fused instruction computes on its way
    for instruction in reversed(section.instructions):
        if instruction.out in within:
            continue
        for pattern in _PATTERNS:
            match = _Match(pattern, made, uses)
            if match.call(pattern.calls, instruction):
                within |= match.within
                args = tuple(match.names[name] for name in sorted(match.names))
                instruction = Instruction(pattern.name, instruction.out, args)
                break
        kept.append(instruction)
    return Section(kept[::-1], section.stores)


def renamed(section: Section) -> Section:
    """What is made and then copied to a register that changes in a loop is made there, if nothing wants the old one."""
    instructions: list[Instruction | None] = list(section.instructions)
    times, uses = Counter(i.out for i in section.instructions), _uses(section)
    for at, (op, changed, args) in enumerate(section.instructions):
        if op != "mov" or changed is None or times[changed] == 1 or times[args[0]] != 1:
            continue
        made, since, reads = args[0], [], 0
        for i in reversed(range(at)):
            before = instructions[i]
            if before is None:
                continue
            of = [a.base for a in before.args]
            reads += of.count(made)
            since.append(i)
            if before.out in (None, made, changed) or changed in of:
                break
        begin = instructions[since[-1]] if since else None
        apart = begin is None or begin.out is not made or any(a.whole is changed for a in begin.args)
        if apart or reads + 1 != uses[made] or made.kind != changed.kind or made.width != changed.width:
            continue
        for i in since:
            instructions[i] = _with(instructions[i], made, changed)
        instructions[at] = None
    return Section([i for i in instructions if i is not None], section.stores)


def _with(instruction: Instruction | None, old: Register, new: Register) -> Instruction:
    """The instruction with one register in the place of another."""
    assert instruction is not None

    def of(register: Register) -> Register:
        if register.whole is old:
            return dataclasses.replace(register, whole=new)
        return new if register is old else register

    out = None if instruction.out is None else of(instruction.out)
    return Instruction(instruction.op, out, tuple(map(of, instruction.args)))


def _uses(section: Section) -> Counter[Register]:
    read = [*(a for i in section.instructions for a in i.args), *(r for _, r in section.stores)]
    return Counter(register.base for register in read)


@dataclasses.dataclass(frozen=True)
class _Pattern:
    name: str
    kinds: str
    calls: ast.Call

    def takes(self, name: str, register: Register) -> bool:
        return (self.kinds[ord(name) - ord("a")] == "v") == (register.kind == "vector")


def _pattern(name: str, kinds: str, calls: str) -> _Pattern:
    body = ast.parse(calls, mode="eval").body
    assert isinstance(body, ast.Call)
    return _Pattern(name, kinds, body)


_PATTERNS = [_pattern(name, *about) for name, about in host.FUSED.items()]


class _Match:
    """The operands of a pattern, as far as they are known: each is the same wherever it is named."""

    def __init__(self, pattern: _Pattern, made: dict[Register, Instruction], uses: Counter[Register]):
        self.pattern, self.made, self.uses = pattern, made, uses
        self.names: dict[str, Register] = {}
        self.within: set[Register] = set()

    def call(self, calls: ast.Call, instruction: Instruction) -> bool:
        assert isinstance(calls.func, ast.Name)
        if instruction.op != calls.func.id:
            return False
        first, second, *rest = (*instruction.args, None)
        orders = [instruction.args]
        if instruction.op in _COMMUTES:
            orders.append((second, first, *rest[:-1]))  # pyright: ignore[reportArgumentType]
        for args in orders:
            before = dict(self.names), set(self.within)
            if all(self._operand(c, a) for c, a in zip(calls.args, args, strict=True)):
                return True
            self.names, self.within = before
        return False

    def _operand(self, calls: ast.expr, register: Register) -> bool:
        if isinstance(calls, ast.Name):
            known = self.names.setdefault(calls.id, register)
            return known is register and self.pattern.takes(calls.id, register)
        if self.uses[register] != 1 or register not in self.made or not isinstance(calls, ast.Call):
            return False
        self.within.add(register)
        return self.call(calls, self.made[register])
