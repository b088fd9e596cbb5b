"""Shapes of keys that are asked for wrongly."""

import numpy as np
import pytest

import kvjax


@pytest.mark.parametrize("sizes", [(3,), (-1, 3), (-1, -1), (-4,), (2.0,), (None,), ("4",)])
def test_shapes_of_other_numbers_of_keys(sizes):
    """Of keys, not of their words, which have another axis."""
    with pytest.raises((TypeError, ValueError), match=r"^kvjax: Keys.reshape: want another shape of (these )?keys"):
        kvjax.keys([1, 2, 3, 4]).reshape(*sizes)
    assert kvjax.keys(np.zeros((0, 3), np.int64)).reshape(-1, 3).shape == (0, 3)
