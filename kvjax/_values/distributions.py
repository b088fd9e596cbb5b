"""Distributions of the elements of initial rows: their names, which servers take without JAX and ml_dtypes."""

from typing import Literal, TypeAlias, get_args

Distribution: TypeAlias = Literal["constant", "uniform", "normal", "truncated_normal"]
DISTRIBUTIONS = get_args(Distribution)
