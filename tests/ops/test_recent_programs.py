"""Programs with a user's numbers in them: only the last few stay in memory."""

import gc

import jax
import numpy as np
import pytest

from kvjax import evict
from kvjax._ops import call
from kvjax._ops.programs import recent_programs
from kvjax._sharded import writes
from tests.support.marks import few, slow


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
