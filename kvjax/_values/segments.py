"""Segments of a row: columns under names, whatever the width of the row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvjax._values.arguments import is_integer

ColumnsLike: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | np.ndarray
"""An integer, a slice, several integers (negative ones count from the end), or bools, a mask of the first columns."""

Run: TypeAlias = tuple[int, int, str]
"""The columns ``[begin, end)`` of the segment of that name."""


class ColumnsError(ValueError):
    """Of segments with columns that a row has not."""


@dataclasses.dataclass(frozen=True)
class SegmentColumns:
    """Columns of a segment, for rows of any width.

    Attributes:
      indices: integers, or None.
      cut: start, stop and step of a slice, or None.
    """

    indices: tuple[int, ...] | None
    cut: tuple[int | None, int | None, int | None] | None = None

    @classmethod
    def of(cls, columns: Any, name: str) -> SegmentColumns:
        """Those that a user names.

        Raises:
          TypeError: `columns` is no `ColumnsLike`.
        """
        if isinstance(columns, slice):
            return cls(None, (columns.start, columns.stop, columns.step))
        given = (
            [columns] if is_integer(columns) else list(columns) if isinstance(columns, (Sequence, np.ndarray)) else []
        )
        bools = [isinstance(x, (bool, np.bool_)) for x in given]
        if not given or not (all(bools) or all(is_integer(x) for x in given)):
            raise TypeError(
                f"kvjax: segments: want the columns of {name!r} as an integer, a slice, integers or bools, got "
                f"{columns!r}; for instance slice(0, 2)"
            )
        return cls(tuple(i for i, x in enumerate(given) if x) if all(bools) else tuple(map(int, given)))

    def within(self, dim: int) -> list[int]:
        """Which of `dim` columns they are, in order; negative where a negative integer is too low."""
        if self.indices is None:
            return list(range(dim)[slice(*self.cut or (None,))])
        return sorted({i + dim if i < 0 else i for i in self.indices})


def runs(segments: Mapping[str, SegmentColumns], dim: int) -> list[Run]:
    """All columns of a row of width `dim` as runs, in order; those of no segment belong to "rest".

    Raises:
      ColumnsError: a column is in two segments, or not in the row; or a segment or the rest has none.
    """
    owner = dict.fromkeys(range(dim), "rest")
    for name, columns in segments.items():
        for column in columns.within(dim):
            if not 0 <= column < dim:
                raise ColumnsError(
                    f"kvjax: segments: want columns of a row of {dim}, from 0 to {dim - 1}, for {name!r}, got column "
                    f"{column}; leave it out, or count from the end by negative ones"
                )
            if owner[column] != "rest":
                raise ColumnsError(
                    f"kvjax: segments: want each column in one part, got column {column} in {owner[column]!r} and "
                    f"{name!r}; take it out of one of them"
                )
            owner[column] = name
    for name in (*segments, "rest"):
        if name not in owner.values():
            raise ColumnsError(
                f"kvjax: segments: want columns for each part, got none of {dim} for {name!r}; "
                + ("leave it some" if name == "rest" else "leave the part out")
            )
    found: list[Run] = []
    for column, name in owner.items():
        begin = found.pop()[0] if found and found[-1][2] == name else column
        found.append((begin, column + 1, name))
    return found


def check_names(segments: Mapping[str, Any], example: str) -> None:
    """Raises an error unless `segments` are pairs by name, and leave the name "rest" to all other columns."""
    pairs = list(segments.values()) if isinstance(segments, Mapping) else [None]  # pyright: ignore[reportUnnecessaryIsInstance]
    if any(type(x) is not tuple or len(x) != 2 for x in pairs):
        raise TypeError(
            f"kvjax: segments: want a mapping from names to columns and what they get, got {segments!r}; for instance "
            f"{example}"
        )
    if "rest" in segments:
        raise ValueError("kvjax: segments: want names other than 'rest', which is that of all other columns; rename it")
