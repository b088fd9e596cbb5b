"""Optax transforms for trees that hold tables."""

from kvjax._training.rowwise import Rowwise as Rowwise
from kvjax._training.rowwise import rowwise as rowwise
from kvjax.optax._accumulate import AccumulateState as AccumulateState
from kvjax.optax._accumulate import accumulate as accumulate
from kvjax.optax._compatibility import Compatibility as Compatibility
from kvjax.optax._compatibility import LeafReport as LeafReport
from kvjax.optax._compatibility import check_compatibility as check_compatibility
from kvjax.optax._conditional import ApplyIfFiniteState as ApplyIfFiniteState
from kvjax.optax._conditional import ApplyIfState as ApplyIfState
from kvjax.optax._conditional import LossScaleState as LossScaleState
from kvjax.optax._conditional import apply_if as apply_if
from kvjax.optax._conditional import apply_if_finite as apply_if_finite
from kvjax.optax._conditional import scale_loss as scale_loss
from kvjax.optax._joint import global_norm as global_norm
from kvjax.optax._joint import joint as joint
from kvjax.optax._partition import PartitionState as PartitionState
from kvjax.optax._partition import partition as partition

__all__ = [
    "AccumulateState", "ApplyIfFiniteState", "ApplyIfState", "Compatibility", "LeafReport", "LossScaleState",
    "PartitionState", "Rowwise", "accumulate", "apply_if", "apply_if_finite", "check_compatibility", "global_norm",
    "joint", "partition", "rowwise", "scale_loss",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
