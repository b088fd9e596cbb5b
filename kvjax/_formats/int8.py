"""Rows of int8: each element times the scale of its row."""

from __future__ import annotations

import numpy as np


def to_int8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as int8, rounded to the nearest, ties to the even one.

    Args:
      rows: ``(n, dim)`` float32, finite.

    Returns:
      ``(n, dim)`` int8, and the scale of each row ``(n,)`` float32, of which its largest element is 127. A row so small
      that its scale would be 0 becomes zeros.

    Source: symmetric quantisation by rows, as of FBGEMM's row-wise tables.
    """
    scales = np.max(np.abs(rows), axis=1, initial=0) / np.float32(127)
    divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
    return np.clip(np.rint(rows / divisor), -127, 127).astype(np.int8), scales
