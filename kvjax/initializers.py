"""Initial rows: what a key reads as before it has been trained.

The initial row of a key depends only on the table's seed, the key and the column. It is the same before and after a
restart, an eviction or a change of the number of shards. The kinds in this module give the same bits on every platform.

`kvjax.get_table` takes as ``initializer``: a number; an array, which is one row ``(dim,)`` for all keys, or a pool of
rows ``(p, dim)`` of which each key gets one; the functions of this module; or any function ``(rng, shape, dtype)``, for
instance of ``jax.nn.initializers``, which is called for each key with the shape ``(1, dim)``.

Source: the counter-based generator is Philox4x32-10 (Salmon et al., SC 2011); normal deviates come from it by
Wichura's inverse, AS 241.

Example:
  >>> import jax, kvjax, numpy as np
  >>> kvjax.initializers.normal(0.1)
  Initializer(kind='normal', a=0.0, b=0.1)
  >>> table = kvjax.get_table("doc_row", dim=2, initializer=[1.0, 2.0])
  >>> table.lookup(np.array([7, -1])).tolist()
  [[1.0, 2.0], [1.0, 2.0]]
  >>> kvjax.drop_table("doc_row")
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from kvjax._values.arguments import is_integer
from kvjax._values.arrays import ArrayLike, check_all_there
from kvjax._values.dtypes import is_float
from kvjax._values.errors import fail
from kvjax._values.function_initializer import Generated
from kvjax._values.generators import Initializer, Segments, check_held
from kvjax._values.segments import ColumnsLike, SegmentColumns, check_names, runs

__all__ = [
    "Generated", "Initializer", "Pool", "Segments", "constant", "from_pool", "normal", "ones", "segments",
    "truncated_normal", "uniform", "variance_scaling", "zeros",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


Mode: TypeAlias = Literal["fan_in", "fan_out", "fan_avg", "fan_geo_avg"]
ScaledDistribution: TypeAlias = Literal["truncated_normal", "normal", "uniform"]


def _number(kind: str, name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise fail(TypeError, None, f"initializers.{kind}", f"a number {name}", repr(value), "give a float") from None


def constant(value: float) -> Initializer:
    """Every element is `value`.

    Args:
      value: the number.

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Raises:
      TypeError: `value` is not a number.
      ValueError: in `kvjax.get_table`: the dtype of the rows cannot hold such elements.

    Example:
      >>> import kvjax
      >>> kvjax.get_table("doc_constant", dim=2, initializer=kvjax.initializers.constant(0.5)).lookup(7).tolist()
      [0.5, 0.5]
      >>> kvjax.drop_table("doc_constant")
    """
    return Initializer("constant", _number("constant", "value", value))


def zeros() -> Initializer:
    """Every element is 0.

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Example:
      >>> import kvjax
      >>> kvjax.get_table("doc_zeros", dim=2, initializer=kvjax.initializers.zeros()).lookup(7).tolist()
      [0.0, 0.0]
      >>> kvjax.drop_table("doc_zeros")
    """
    return constant(0.0)


def ones() -> Initializer:
    """Every element is 1.

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Example:
      >>> import kvjax
      >>> kvjax.get_table("doc_ones", dim=2, initializer=kvjax.initializers.ones()).lookup(7).tolist()
      [1.0, 1.0]
      >>> kvjax.drop_table("doc_ones")
    """
    return constant(1.0)


def uniform(low: float | None = None, high: float | None = None) -> Initializer:
    """Uniform between `low` and `high`.

    Args:
      low: the lower bound, -0.05 if none is given.
      high: the upper bound, 0.05 if none is given.

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Raises:
      TypeError: only one of the two is given, which other libraries take as a scale, each in its own way; or it is not
        a number.
      ValueError: in `kvjax.get_table`: `low` is above `high`, or the dtype of the rows cannot hold such elements.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_uniform", dim=4, initializer=kvjax.initializers.uniform(-1.0, 1.0))
      >>> rows = table.lookup(np.arange(5000))
      >>> bool(rows.min() >= -1 and rows.max() <= 1)
      True
      >>> kvjax.drop_table("doc_uniform")
    """
    if (low is None) != (high is None):
        got = f"low={low!r} alone" if high is None else f"high={high!r} alone"
        mend = "give both, as uniform(-0.1, 0.1), or uniform(0.0, 0.1) for that of jax.nn.initializers.uniform(0.1)"
        raise fail(TypeError, None, "initializers.uniform", "low and high, or none of them", got, mend)
    if low is None or high is None:
        low, high = -0.05, 0.05
    return Initializer("uniform", _number("uniform", "low", low), _number("uniform", "high", high))


def normal(stddev: float = 0.01, mean: float = 0.0) -> Initializer:
    """Normal with mean `mean` and standard deviation `stddev`.

    Args:
      stddev: 0 or more.
      mean: the mean.

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Raises:
      TypeError: an argument is not a number.
      ValueError: in `kvjax.get_table`: `stddev` is negative, or the dtype of the rows cannot hold such elements.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_normal", dim=4, initializer=kvjax.initializers.normal(2.0))
      >>> rows = table.lookup(np.arange(5000))
      >>> bool(1.9 < rows.std() < 2.1)
      True
      >>> kvjax.drop_table("doc_normal")
    """
    return Initializer("normal", _number("normal", "mean", mean), _number("normal", "stddev", stddev))


def truncated_normal(stddev: float = 0.01, mean: float = 0.0) -> Initializer:
    """`mean` plus `stddev` times a standard normal cut at -2 and 2, as in ``jax.nn.initializers``.

    Args:
      stddev: 0 or more; the standard deviation before the cut.
      mean: the mean.

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Raises:
      TypeError: an argument is not a number.
      ValueError: in `kvjax.get_table`: `stddev` is negative, or the dtype of the rows cannot hold such elements.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_truncated_normal", dim=4, initializer=kvjax.initializers.truncated_normal(2.0))
      >>> rows = table.lookup(np.arange(5000))
      >>> bool(abs(rows).max() <= 4)
      True
      >>> kvjax.drop_table("doc_truncated_normal")
    """
    return Initializer(
        "truncated_normal", _number("truncated_normal", "mean", mean), _number("truncated_normal", "stddev", stddev)
    )


@dataclasses.dataclass(frozen=True)
class VarianceScaling:
    """`variance_scaling` of a table whose dim is not known yet."""

    scale: float
    distribution: ScaledDistribution

    def of_dim(self, dim: int) -> Initializer:
        variance = self.scale / dim
        if self.distribution == "normal":
            return normal(variance**0.5)
        if self.distribution == "uniform":
            return uniform(-((3 * variance) ** 0.5), (3 * variance) ** 0.5)
        return truncated_normal(variance**0.5 / 0.87962566103423978)  # what cutting at -2 and 2 leaves of the deviation


def variance_scaling(
    scale: float = 1.0, mode: Mode = "fan_in", distribution: ScaledDistribution = "truncated_normal"
) -> VarianceScaling:
    """Elements of mean 0 and variance ``scale / dim``, as ``jax.nn.initializers.variance_scaling`` distributes them.

    Args:
      scale: above 0.
      mode: "fan_in", "fan_out", "fan_avg" or "fan_geo_avg". A table has no number of rows, so every fan is its dim.
      distribution: "truncated_normal", "normal" or "uniform".

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Raises:
      ValueError: an argument is none of these.

    Source: Glorot, Bengio, "Understanding the difficulty of training deep feedforward neural networks", AISTATS 2010
    ("fan_avg"); He et al., "Delving Deep into Rectifiers", ICCV 2015 ("fan_in", scale 2).

    Example:
      >>> import kvjax
      >>> glorot = kvjax.initializers.variance_scaling(1.0, "fan_avg", "uniform")
      >>> kvjax.get_table("doc_scaling", dim=12, initializer=glorot).spec.initializer
      Initializer(kind='uniform', a=-0.5, b=0.5)
      >>> kvjax.drop_table("doc_scaling")
    """
    modes, distributions = get_args(Mode), get_args(ScaledDistribution)
    if mode not in modes or distribution not in distributions or not 0 < scale < float("inf"):
        raise fail(
            ValueError, None, "variance_scaling", f"scale > 0, mode in {modes} and distribution in {distributions}",
            f"{scale!r}, {mode!r}, {distribution!r}", "choose of these",
        )  # fmt: skip
    return VarianceScaling(float(scale), distribution)


@dataclasses.dataclass(frozen=True)
class SegmentsOfAnyDim:
    """`segments` of a table whose dim is not known yet."""

    columns: tuple[tuple[str, SegmentColumns], ...]
    parts: tuple[tuple[str, InitializerLike], ...]

    def of_dim(self, dim: int) -> Segments:
        found, parts = runs(dict(self.columns), dim), dict(self.parts)
        widths = {name: sum(end - begin for begin, end, its in found if its == name) for name in parts}
        made = {name: _of_segment(name, part, widths[name]) for name, part in parts.items()}
        return Segments(tuple(end for _, end, _ in found), tuple(made[name] for *_, name in found))


def _of_segment(name: str, part: Any, width: int) -> Initializer:
    try:
        made = resolve(part, width)
    except (TypeError, ValueError) as error:
        raise type(error)(f"segment {name!r}: {error}") from error
    if isinstance(made, Initializer):
        return made
    raise TypeError(
        f"want a number or a distribution of kvjax.initializers for the segment {name!r}, got {type(made).__name__}; "
        "give an array or a function for the whole row"
    )


def segments(parts: Mapping[str, tuple[ColumnsLike, InitializerLike]], rest: InitializerLike) -> SegmentsOfAnyDim:
    """Makes segments of a row by different initializers, for example a bias of 0 beside random factors.

    A segment is a set of columns. `variance_scaling` takes the width of its segment for the dim. An element has the
    bits that it would have if its initializer made the whole row.

    Args:
      parts: the columns and the initializer of each segment, by name. Columns are those of `kvjax.optax.segments`: an
        integer, a slice, several integers (negative ones count from the end), or bools. An initializer is a number, or
        one of this module that is not an array of rows.
      rest: initializer of all other columns.

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Raises:
      TypeError: an argument is not a mapping, not columns, or not such an initializer.
      ValueError: a column is in two segments, or not in the row; a segment has no columns; a name is "rest"; or there
        are more than 8 runs of columns. Errors that depend on the dim are raised when a table is made.

    Source:
      Monolith's slices (https://arxiv.org/abs/2209.07663), each of which has an initializer and an optimizer.

    Example:
      >>> import kvjax
      >>> first_order = kvjax.initializers.segments({"bias": (0, 0.0)}, rest=kvjax.initializers.uniform(1.0, 2.0))
      >>> row = kvjax.get_table("doc_segments_init", dim=3, initializer=first_order).lookup(7)
      >>> float(row[0]), bool((row[1:] >= 1).all())
      (0.0, True)
      >>> kvjax.drop_table("doc_segments_init")
    """
    check_names(parts, '{"bias": (0, 0.0)}')
    columns = tuple((name, SegmentColumns.of(given, name)) for name, (given, _) in parts.items())
    return SegmentsOfAnyDim(columns, (*((name, part) for name, (_, part) in parts.items()), ("rest", rest)))


@dataclasses.dataclass(frozen=True)
class Pool:
    """A row pool, of which each key gets one row; made by `from_pool`. Pools with equal contents are equal.

    Attributes:
      data: the bytes of ``(rows, dim)`` float32.
      rows: number of rows.
      dim: their width.

    Example:
      >>> import kvjax, numpy as np
      >>> kvjax.initializers.from_pool(np.eye(2))
      Pool(rows=2, dim=2)
    """

    data: bytes = dataclasses.field(repr=False)
    rows: int
    dim: int

    def array(self) -> np.ndarray:
        """``(rows, dim)`` float32.

        Example:
          >>> import kvjax, numpy as np
          >>> kvjax.initializers.from_pool(np.eye(2)).array().tolist()
          [[1.0, 0.0], [0.0, 1.0]]
        """
        return np.frombuffer(self.data, np.float32).reshape(self.rows, self.dim)


def from_pool(array: ArrayLike) -> Pool:
    """Each key reads as one row of `array`, chosen by a hash of the key.

    Args:
      array: ``(p, dim)`` or one row ``(dim,)``, real numbers; kept as float32.

    Returns:
      What `kvjax.get_table` takes as ``initializer``.

    Raises:
      TypeError: the array does not have real numbers.
      ValueError: the array has another number of axes, no rows, or a number that float32 cannot hold.

    Source:
      DeepRec's ``default_value`` pool of ``default_value_dim`` rows.

    Example:
      >>> import kvjax, numpy as np
      >>> pool = kvjax.initializers.from_pool(np.eye(2))
      >>> kvjax.get_table("doc_pool", dim=2, initializer=pool).lookup(np.arange(4)).tolist()
      [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
      >>> kvjax.drop_table("doc_pool")
    """
    try:
        return _pool(array)
    except (TypeError, ValueError) as error:
        raise type(error)(f"kvjax: from_pool: {error}") from error


def _pool(array: ArrayLike) -> Pool:
    check_all_there(array)
    try:
        given = np.asarray(array)
    except ValueError:  # of sequences of several lengths
        raise ValueError("want an initializer (dim,) or (p, dim), got rows of several lengths; give rows") from None
    if not (np.issubdtype(given.dtype, np.integer) or is_float(given.dtype)):
        raise TypeError(f"want an initializer of real numbers, got {given.dtype}; see kvjax.initializers")
    with np.errstate(over="ignore"):
        rows = np.atleast_2d(given.astype(np.float32))
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"want an initializer (dim,) or (p, dim) with p > 0, got {given.shape}; give rows")
    if not np.isfinite(rows).all():
        raise ValueError("want an initializer of finite numbers in float32, got others; remove them first")
    return Pool(rows.tobytes(), *rows.shape)


ResolvedInitializer: TypeAlias = Initializer | Segments | Pool | Generated
"""What a table has of it."""

InitializerLike: TypeAlias = ArrayLike | ResolvedInitializer | VarianceScaling | SegmentsOfAnyDim | Callable[..., Any]
"""What `kvjax.get_table` takes as ``initializer``, see the head of this file."""


def resolve(initializer: Any, dim: int, dtype: str = "float32") -> ResolvedInitializer:
    """What `get_table` takes as ``initializer``, for rows of width `dim` and a dtype.

    Raises:
      TypeError: it is none of what the head of this file names.
      ValueError: its numbers are not finite in that dtype, or its rows have another width.
    """
    initializer = _of_jax(initializer)
    if isinstance(initializer, (VarianceScaling, SegmentsOfAnyDim)):
        initializer = initializer.of_dim(dim)
    single = isinstance(initializer, np.ndarray) and initializer.ndim == 0 and initializer.dtype != bool
    if single or isinstance(initializer, np.floating | float) or is_integer(initializer):
        initializer = constant(float(initializer))
    if isinstance(initializer, (np.ndarray, list, tuple)):
        initializer = _pool(initializer)
    if isinstance(initializer, Segments) and initializer.ends[-1:] != (dim,):
        raise ValueError(
            f"want segments of rows of width dim={dim}, got those that end at {initializer.ends}; make them anew by "
            "kvjax.initializers.segments"
        )
    if isinstance(initializer, (Initializer, Segments)):
        initializer.check(dtype)
        return initializer
    if isinstance(initializer, Pool):
        if initializer.dim != dim:
            raise ValueError(
                f"want an initializer of rows of width dim={dim}, got width {initializer.dim}; give one row (dim,), or "
                "(p, dim) for a pool"
            )
        check_held(initializer.array(), dtype, "rows")
        return initializer
    if isinstance(initializer, Generated) or callable(initializer):
        return Generated.of(initializer, dim, dtype)
    known = isinstance(initializer, str) and initializer in ("normal", "truncated_normal", "uniform", "zeros", "ones")
    mend = f"give kvjax.initializers.{initializer}()" if known else "see kvjax.initializers"
    raise TypeError(
        f"want as initializer a number, an array, one of kvjax.initializers or a function (rng, shape, dtype), got "
        f"{initializer!r}; {mend}"
    )


def _of_jax(initializer: Any) -> Any:
    """An array of JAX's as one of NumPy's, and a function of zeros or ones, JAX's or ours, as the number; anything else
    as it is."""
    numbers: list[tuple[Any, float]] = [(zeros, 0.0), (ones, 1.0)]
    if sys.modules.get("jax") is not None:  # else nobody has any of its own
        import jax

        if isinstance(initializer, jax.Array):
            return np.asarray(initializer)
        numbers += [(jax.nn.initializers.zeros, 0.0), (jax.nn.initializers.ones, 1.0)]
    return next((number for function, number in numbers if initializer is function), initializer)
