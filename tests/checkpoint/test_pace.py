"""Pace: saves beside training take an eightieth of the machine, all together, and end."""

import itertools

import numpy as np

from kvjax.checkpoint._disk import pace


def test_saves_take_their_share_together(monkeypatch, tmp_path):
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    clock = itertools.count()  # each write takes a second
    monkeypatch.setattr(pace.time, "thread_time", lambda: next(clock))
    spent = pace.Spent()
    assert spent.write(tmp_path / "a", np.zeros(3, np.uint8))[0] == 3 and spent.write(tmp_path / "b", b"")[0] == 0
    monkeypatch.setattr(pace.time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pace.time, "sleep", sleep)
    monkeypatch.setattr(pace.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(pace.Pace, "_until", 0.0)
    one, other = pace.Pace(spent), pace.Pace(pace.Spent())
    one.pause(0.5)
    assert slept == [2.0 * 80 / 4]
    one.pause(0.5)  # nothing was spent
    now[0] -= 35
    other.pause(0.5)  # which waits for what the first has spent
    assert slept[1:] == [0.5, 34.5]
    for _ in range(100):
        one.pause(5.0)
    assert sum(slept) - 34.5 == 300.0 and len(slept) < 70
