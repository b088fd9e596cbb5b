"""Checkpoints of tables: saved, restored, read, verified, compared and pruned; needs no Orbax.

Each name comes when it is used, so that JAX does with those that make or save tables alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.checkpoint._changes import TableDelta as TableDelta
    from kvjax.checkpoint._changes import changes as changes
    from kvjax.checkpoint._diff import Diff as Diff
    from kvjax.checkpoint._diff import TableDiff as TableDiff
    from kvjax.checkpoint._diff import diff as diff
    from kvjax.checkpoint._disk.format import CheckpointError as CheckpointError
    from kvjax.checkpoint._merge import MergeReport as MergeReport
    from kvjax.checkpoint._merge import merge as merge
    from kvjax.checkpoint._rewrite import compact as compact
    from kvjax.checkpoint._rewrite import prune as prune
    from kvjax.checkpoint._rows import rows as rows
    from kvjax.checkpoint._tables.restore import restore as restore
    from kvjax.checkpoint._tables.save import save as save
    from kvjax.checkpoint._verify import BaseReport as BaseReport
    from kvjax.checkpoint._verify import FileReport as FileReport
    from kvjax.checkpoint._verify import Verified as Verified
    from kvjax.checkpoint._verify import verify as verify
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'kvjax.checkpoint' has no attribute {name!r}")
        globals()[name] = found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found

    _HOMES = {
        "BaseReport": "_verify", "CheckpointError": "_disk.format", "Diff": "_diff", "FileReport": "_verify",
        "MergeReport": "_merge", "TableDelta": "_changes", "TableDiff": "_diff", "Verified": "_verify",
        "changes": "_changes", "compact": "_rewrite", "diff": "_diff", "merge": "_merge", "prune": "_rewrite",
        "restore": "_tables.restore", "rows": "_rows", "save": "_tables.save", "verify": "_verify",
    }  # fmt: skip


__all__ = [
    "BaseReport", "CheckpointError", "Diff", "FileReport", "MergeReport", "TableDelta", "TableDiff", "Verified",
    "changes", "compact", "diff", "merge", "prune", "restore", "rows", "save", "verify",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
