"""Optax transforms for trees that hold tables."""

from kvjax._table.commit import CommitState as CommitState
from kvjax._training.rowwise import CatchUp as CatchUp
from kvjax._training.rowwise import Rowwise as Rowwise
from kvjax._training.rowwise import rowwise as rowwise
from kvjax._values.facts import RowFacts as RowFacts
from kvjax._values.facts import Words as Words
from kvjax.optax._accumulate import AccumulateState as AccumulateState
from kvjax.optax._accumulate import accumulate as accumulate
from kvjax.optax._adagrad import AdagradDecayState as AdagradDecayState
from kvjax.optax._adagrad import FadingSquares as FadingSquares
from kvjax.optax._adagrad import RowwiseAdagradState as RowwiseAdagradState
from kvjax.optax._adagrad import adagrad_decay as adagrad_decay
from kvjax.optax._adagrad import rowwise_adagrad as rowwise_adagrad
from kvjax.optax._average import EmaRowsState as EmaRowsState
from kvjax.optax._average import averaged as averaged
from kvjax.optax._average import ema_rows as ema_rows
from kvjax.optax._catch_up import CatchUpRows as CatchUpRows
from kvjax.optax._catch_up import CatchUpState as CatchUpState
from kvjax.optax._catch_up import catch_up as catch_up
from kvjax.optax._catch_up import caught_up as caught_up
from kvjax.optax._catch_up import sweep as sweep
from kvjax.optax._compatibility import Compatibility as Compatibility
from kvjax.optax._compatibility import CountReport as CountReport
from kvjax.optax._compatibility import LeafReport as LeafReport
from kvjax.optax._compatibility import check_compatibility as check_compatibility
from kvjax.optax._conditional import ApplyIfFiniteState as ApplyIfFiniteState
from kvjax.optax._conditional import ApplyIfState as ApplyIfState
from kvjax.optax._conditional import LossScaleState as LossScaleState
from kvjax.optax._conditional import apply_if as apply_if
from kvjax.optax._conditional import apply_if_finite as apply_if_finite
from kvjax.optax._conditional import scale_loss as scale_loss
from kvjax.optax._ftrl import FtrlState as FtrlState
from kvjax.optax._ftrl import GroupAdamState as GroupAdamState
from kvjax.optax._ftrl import ftrl as ftrl
from kvjax.optax._ftrl import group_adam as group_adam
from kvjax.optax._gap_adam import GapAdamRows as GapAdamRows
from kvjax.optax._gap_adam import GapAdamState as GapAdamState
from kvjax.optax._gap_adam import gap_adam as gap_adam
from kvjax.optax._joint import global_norm as global_norm
from kvjax.optax._joint import joint as joint
from kvjax.optax._partition import PartitionState as PartitionState
from kvjax.optax._partition import partition as partition
from kvjax.optax._rename import rename_tables as rename_tables
from kvjax.optax._row_facts import RowNoiseState as RowNoiseState
from kvjax.optax._row_facts import add_row_noise as add_row_noise
from kvjax.optax._row_facts import mean_of_duplicates as mean_of_duplicates
from kvjax.optax._row_facts import scale_by_cowclip as scale_by_cowclip
from kvjax.optax._row_facts import scale_by_frequency as scale_by_frequency
from kvjax.optax._schedule_free import schedule_free_eval_params as schedule_free_eval_params
from kvjax.optax._segments import SegmentsState as SegmentsState
from kvjax.optax._segments import segments as segments
from kvjax.optax._sparse_groups import group_lasso as group_lasso
from kvjax.optax._sparse_groups import sparse_group_ftrl as sparse_group_ftrl

__all__ = [
    "AccumulateState", "AdagradDecayState", "ApplyIfFiniteState", "ApplyIfState", "CatchUp", "CatchUpRows",
    "CatchUpState", "CommitState", "Compatibility", "CountReport", "EmaRowsState", "FadingSquares", "FtrlState",
    "GapAdamRows", "GapAdamState", "GroupAdamState", "LeafReport", "LossScaleState", "PartitionState", "RowFacts",
    "RowNoiseState", "Rowwise", "RowwiseAdagradState", "SegmentsState", "Words", "accumulate", "adagrad_decay",
    "add_row_noise", "apply_if", "apply_if_finite", "averaged", "catch_up", "caught_up", "check_compatibility",
    "ema_rows", "ftrl", "gap_adam", "global_norm", "group_adam", "group_lasso", "joint", "mean_of_duplicates",
    "partition", "rename_tables", "rowwise", "rowwise_adagrad", "scale_by_cowclip", "scale_by_frequency", "scale_loss",
    "schedule_free_eval_params", "segments", "sparse_group_ftrl", "sweep",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
