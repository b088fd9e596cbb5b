"""Programs of calls outside of jit: how they are found, and those with a user's numbers, of which the last few stay."""

import gc

import jax
import numpy as np
import pytest

from kvjax import evict
from kvjax._ops import call
from kvjax._ops.programs import recent_programs
from kvjax._sharded import writes
from tests.support.marks import few, slow


@pytest.mark.cpu_table  # the other tables use the same calls
@pytest.mark.parametrize("name", few(["lookup", "contains", "upsert", "pin"], 2))
def test_a_program_is_found_without_what_jax_compares_in_python(name, make, monkeypatch):
    table, keys = make(2), np.arange(9)
    rows = [np.ones((9, 2), np.float32)] if name == "upsert" else []
    run = lambda: getattr(table, name)(keys, *rows)  # noqa: E731
    table = run() if name in ("upsert", "pin") else (run(), table)[1]
    compared = []
    for method in ("__init__", "__hash__", "__eq__"):
        old = getattr(jax.ShapeDtypeStruct, method)
        noted = lambda *given, method=method, old=old, **named: (compared.append(method), old(*given, **named))[1]  # noqa: E731
        monkeypatch.setattr(jax.ShapeDtypeStruct, method, noted)
    run()
    assert compared == []


def test_the_last_programs_are_kept():
    traced = []

    def run(n, x):
        traced.append(n)
        return x + n

    program = recent_programs(run, kept=2)
    assert [int(program(n, 1)) for n in (1, 2, 1, 3, 1, 2, 2)] == [2, 3, 2, 4, 2, 3, 3]
    assert traced == [1, 2, 3, 2]  # 3 took the place of 2, which had to be made again


@pytest.mark.parametrize("write", few([lambda t, n: t.restrict(n), lambda t, n: t.evict(evict.LeastRecent(n))], 1))
@pytest.mark.parametrize("module, name, run", [
    (call, "_numbered_program", call._within),
    pytest.param(writes, "_numbered_everywhere", writes._write_everywhere, marks=(slow, pytest.mark.cpu_table)),
])  # fmt: skip
def test_other_numbers_leave_no_programs_behind(module, name, run, write, make, mesh, monkeypatch):
    table = make(2, **({"mesh": mesh(2)} if module is writes else {})).upsert(np.arange(9), np.ones((9, 2)))
    monkeypatch.setattr(module, name, recent_programs(run, kept=2))
    programs = []
    for n in range(20, 26):
        table = write(table, n)
        gc.collect()
        programs.append(len(jax.devices()[0].client.live_executables()))
    assert programs[2] == programs[-1], programs
