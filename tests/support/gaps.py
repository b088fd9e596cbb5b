"""What tables of a device cannot do yet: the tests that fail for it on a backend, and how.

A test that is named here has to fail with the gap's message. Once it passes, the run fails until the test is taken off
the list; and a test that is not on the list fails like any other.
"""

from __future__ import annotations

import dataclasses
import traceback

DEVICE = ("emulated", "cuda")
EVICTION = "tests/sharded/test_eviction.py::"
RESHARD = "tests/table/test_reshard.py::"


@dataclasses.dataclass(frozen=True)
class Gap:
    """The text of an error, and the tests that it fails: by their ids, without [parameters] for all of theirs, or with
    the first of several for all with that."""

    message: str
    backends: tuple[str, ...]
    tests: tuple[str, ...]

    def explains(self, error: BaseException) -> bool:
        """Whether an error, or one of a group or of another process, is the gap's."""
        return self.message in text_of(error)


def text_of(error: BaseException) -> str:
    """All that an error says, with those that it comes from."""
    return "".join(traceback.format_exception(error))


GAPS = (
    Gap(
        "mesh= beside max_capacity=, which is not on CUDA yet",
        DEVICE,
        (
            *(EVICTION + f"test_training_at_capacity[{shards}" for shards in (2, 4, 8)),
            EVICTION + "test_on_full_error_is_about_all_shards_and_changes_nothing",
            EVICTION + "test_what_may_go_is_counted_on_all_shards",
            EVICTION + "test_copies_choose_alone_and_alike",
            EVICTION + "test_sinks_get_each_row_once",
            EVICTION + "test_a_function_that_fails_on_one_shard_changes_nothing_on_any",
            EVICTION + "test_admission[2-admission1-12]",
            EVICTION + "test_admission[4-admission2-12]",
            EVICTION + "test_admission[8-admission3-12]",
            EVICTION + "test_admission[4-admission6-12]",
            EVICTION + "test_admission[4-admission8-12]",
            EVICTION + "test_admission[4-admission9-12]",
            EVICTION + "test_eviction_inside_shard_map",
            EVICTION + "test_processes_choose_together",
            "tests/sharded/test_failures.py::test_apply_says_what_one_shard_refuses[limited]",
            "tests/table/test_steps.py::test_a_fresh_optimizer_state_does_not_evict_the_newest[4]",
            "tests/table/test_steps.py::test_a_fresh_optimizer_state_does_not_evict_the_newest[replicated]",
            "tests/checkpoint/test_frozen.py::test_any_writes_at_any_moment[4]",
        ),
    ),
    Gap(
        "mesh= beside a row that unadmitted keys share, which is not on CUDA yet",
        DEVICE,
        (
            EVICTION + "test_admission[4-admission4-None]",
            EVICTION + "test_admission[4-admission7-None]",
            EVICTION + "test_the_shared_row_is_looked_up_inside_shard_map",
            "tests/table/test_admit.py::test_waiting_keys_read_alike_wherever_they_are[-1]",
            RESHARD + "test_counts_of_admission_move_too[admit0-4]",
            RESHARD + "test_counts_of_admission_move_too[admit1-one place]",
        ),
    ),
    Gap(
        "evict of a table with mesh=, which is not on CUDA yet",
        DEVICE,
        (
            *(EVICTION + f"test_policies_by_hand[{shards}" for shards in (2, 4, 8)),
            EVICTION + "test_a_dry_run_changes_nothing_on_any_shard",
            RESHARD + "test_the_wire_the_sink_and_the_other_arguments_stay",
            "tests/sharded/test_programs.py::test_writes",
        ),
    ),
    Gap("which is not on CUDA yet", DEVICE, (EVICTION + "test_any_sequence_of_writes",)),  # it meets them all
    Gap(
        "restrict of a table with mesh=, which is not on CUDA yet",
        DEVICE,
        (
            EVICTION + "test_restrict_and_pins",
            EVICTION + "test_ties_are_broken_alike",
        ),
    ),
)


def of(test: str, backend: str) -> Gap | None:
    """The gap that a test, by its id, falls into on a backend, if so."""
    names = {test, test.split("[")[0], test.split("-")[0]}
    return next((gap for gap in GAPS if backend in gap.backends and names & set(gap.tests)), None)
