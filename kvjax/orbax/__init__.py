"""Orbax: tables in checkpoints."""

from kvjax.orbax._handler import TableHandler as TableHandler
from kvjax.orbax._handler import TableRestore as TableRestore
from kvjax.orbax._handler import TableSave as TableSave
from kvjax.orbax._split import combine as combine
from kvjax.orbax._split import split as split

__all__ = ["TableHandler", "TableRestore", "TableSave", "combine", "split"]


def __dir__() -> list[str]:
    return sorted(__all__)
