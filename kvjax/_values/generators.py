"""Generators of initial rows: how the elements of a row are distributed, or those of each segment of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from kvjax._values.distributions import Distribution
from kvjax._values.dtypes import too_large

MOST_SEGMENTS = 8  # kMostSegments in ffi/core/initial.h

# How many deviations from the mean an element may be: it is made of 32 random bits.
_FARTHEST = {"normal": 6.4, "truncated_normal": 2.0}
_MEND = "give smaller ones, or make the table with another dtype="


def check_held(values: np.ndarray, dtype: str, got: str) -> None:
    """Raises a ValueError unless rows of a dtype hold these elements of initial rows."""
    if not np.isfinite(values).all() or too_large(values, dtype).any():
        far = float(np.abs(values).max())
        raise ValueError(
            f"want an initializer of finite numbers that {dtype} holds, got {got} with elements up to {far:g}; {_MEND}"
        )


@dataclasses.dataclass(frozen=True)
class Initializer:
    """A generator of initial rows; made by the functions of `kvjax.initializers`.

    Attributes:
      kind: "constant", "uniform", "normal" or "truncated_normal".
      a: the constant, the lower bound, or the mean.
      b: the upper bound or the standard deviation.

    Example:
      >>> import kvjax
      >>> kvjax.initializers.uniform(-1.0, 1.0)
      Initializer(kind='uniform', a=-1.0, b=1.0)
    """

    kind: Distribution
    a: float = 0.0
    b: float = 0.0

    def check(self, dtype: str) -> None:
        """Raises a ValueError unless there are such elements in rows of a dtype."""
        reach = _FARTHEST.get(self.kind)
        ends = (self.a, self.b) if reach is None else (self.a - reach * self.b, self.a + reach * self.b)
        check_held(np.array(ends), dtype, self._call())
        if self.kind == "uniform" and self.a > self.b:
            raise ValueError(f"want low <= high, got {self._call()}; give the lower bound first")
        if self.kind in ("normal", "truncated_normal") and self.b < 0:
            raise ValueError(f"want stddev >= 0, got {self._call()}; give its absolute value")

    def _call(self) -> str:
        """How the functions of `kvjax.initializers` are called for it."""
        names = {"constant": {"value": self.a}, "uniform": {"low": self.a, "high": self.b}}
        arguments = names.get(self.kind, {"stddev": self.b, "mean": self.a})
        return f"{self.kind}({', '.join(f'{name}={value}' for name, value in arguments.items())})"


@dataclasses.dataclass(frozen=True)
class Segments:
    """A generator for each segment of a row; made by `kvjax.initializers.segments`.

    Attributes:
      ends: the column after each segment, in order; the last one is the table's dim.
      parts: as many generators. An element of a row depends on its column as it would if its generator made all of the
        row.

    Example:
      >>> import kvjax
      >>> parts = kvjax.initializers.segments({"bias": (0, 0.0)}, rest=1.0)
      >>> kvjax.get_table("doc_segments_class", dim=3, initializer=parts).spec.initializer.ends
      (1, 3)
      >>> kvjax.drop_table("doc_segments_class")
    """

    ends: tuple[int, ...]
    parts: tuple[Initializer, ...]

    def check(self, dtype: str) -> None:
        """Raises a ValueError if there are no such segments in rows of a dtype."""
        for part in self.parts:
            part.check(dtype)
        if not 0 < len(self.ends) == len(self.parts) <= MOST_SEGMENTS or list(self.ends) != sorted({0, *self.ends})[1:]:
            raise ValueError(
                f"want at most {MOST_SEGMENTS} runs of columns with initializers of their own, got {len(self.ends)}; "
                "use fewer segments, or put their columns beside each other"
            )
