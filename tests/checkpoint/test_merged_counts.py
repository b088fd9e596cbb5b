"""Counts of keys without a row in a merge, by hand: of waiting keys, of windows, and of sketches."""

import numpy as np
import pytest

from kvjax.checkpoint._merged_counts import _WINDOW, Seen


def waiting(counts):
    return {
        "pending_keys": np.array(list(counts), np.int64),
        "pending_counts": np.array(list(counts.values()), np.int64),
    }


def merged(rule, before, *tables, admit=None):
    """What becomes of the counts of tables, by key; before: the ancestor's."""
    out = Seen([waiting(counts) for counts in tables], waiting(before), admit).of_others(rule)
    return dict(zip(out["pending_keys"].tolist(), out["pending_counts"].tolist(), strict=True))


@pytest.mark.parametrize(
    ("before", "one", "other", "want"),
    [
        ({}, {7: 1, 8: 2}, {7: 3}, {7: 4, 8: 2}),
        ({7: 3}, {7: 3}, {7: 3}, {7: 3}),  # nobody has counted on
        ({7: 3}, {7: 5}, {7: 4}, {7: 6}),
        ({7: 3}, {7: 3}, {}, {}),  # forgotten by one
        ({7: 3}, {7: 5}, {}, {7: 5}),  # unless the other has counted on
        ({7: 3}, {7: 1}, {7: 2}, {7: 3}),  # both have forgotten it, and met it again
        ({7: 3}, {7: 1}, {7: 3}, {7: 4}),
    ],
)
def test_waiting_keys(before, one, other, want):
    assert merged("mean", before, one, other) == want
    assert merged("newest", before, one, other) == {key: max(one.get(key, 0), other.get(key, 0)) for key in want}


def test_windows():
    """A count has a flag above it where keys are forgotten, and does not run into it."""
    admit, most = {"max_age": 9}, _WINDOW - 2
    assert merged("mean", {}, {7: 2 + _WINDOW, 8: most}, {7: 3, 8: 5}, admit=admit) == {7: 5 + _WINDOW, 8: most}


def test_sketches():
    cells = [{"sketch": np.array(counts, np.uint16)} for counts in ([1, 4, 65535], [2, 3, 9])]
    for rule, before, want in (
        ("newest", None, [2, 4, 65535]),
        ("mean", None, [3, 7, 65535]),
        ("mean", [1, 3, 9], [2, 4, 65535]),
    ):
        ancestor = {} if before is None else {"sketch": np.array(before, np.uint16)}
        got = Seen(cells, ancestor, None).of_others(rule)["sketch"]
        assert got.dtype == np.uint16 and got.tolist() == want
