"""Pruning of rows that are read piece by piece."""

import dataclasses

import numpy as np
import pytest

from kvjax import Prune
from kvjax._formats.source import Source
from kvjax._values.exported import Exported
from kvjax.checkpoint._prune import judged, kept

COLUMNS = {
    "keys": np.arange(5),
    "values": np.array([[0, 0], [1, 0], [0, 2], [3, 3], [0, 0]], np.float32),
    "freqs": np.array([1, 2, 3, 1, 2]),
    "versions": np.array([5, 4, 3, 2, 1]),
    "has_slots": np.zeros(5, bool),
    "pinned": np.zeros(5, bool),
    "slot.mu": np.ones(5, np.float32),
}
READS = [Prune(min_norm=1.5), Prune(zero_rows=True, min_frequency=2), Prune(predicate=lambda rows: rows.freqs > 1)]
READS_NONE = [Prune(), Prune(min_frequency=2), Prune(max_age=2, keep=[4]), Prune(top_k=2, keep=[0]), Prune(remove=[3])]


@pytest.mark.parametrize("piece", [1, 1 << 20])
@pytest.mark.parametrize("number", range(len(READS) + len(READS_NONE)))
def test_what_is_kept_is_what_a_rule_keeps_of_all(number, piece, monkeypatch):
    rule = [*READS, *READS_NONE][number]
    monkeypatch.setattr("kvjax._formats.source.PIECE_BYTES", piece)
    exported, read = Exported.of_columns(COLUMNS, 5), set()
    source = Source.of(COLUMNS, {"last_step": "5"})

    def noted(names, start, stop):
        read.update(names)
        return source.read(names, start, stop)

    rows = dataclasses.replace(source, read=noted)
    want = rule.mask(exported)
    np.testing.assert_array_equal(kept(rows, rule), want)
    assert ("values" in read) == (rule in READS)
    mask, report = judged(rows, rule)
    np.testing.assert_array_equal(mask, want)
    assert report == rule.report(exported)
