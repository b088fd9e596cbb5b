"""Checkpoints of tables: saved, restored, read, verified, compared and pruned; needs no Orbax.

Its names come with the first one that is used, so that the command line can look at the format on disk without JAX.
"""

# ruff: noqa: F403, F405

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.checkpoint._public import *
else:

    def __getattr__(name: str) -> Any:
        if not name.startswith("_"):
            public = importlib.import_module("kvjax.checkpoint._public")
            globals().update({each: each_of for each, each_of in vars(public).items() if not each.startswith("_")})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'kvjax.checkpoint' has no attribute {name!r}")


__all__ = [
    "BaseReport", "CheckpointError", "Diff", "FileReport", "MergeReport", "TableDelta", "TableDiff", "Verified",
    "changes", "compact", "diff", "merge", "prune", "restore", "rows", "save", "verify",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
