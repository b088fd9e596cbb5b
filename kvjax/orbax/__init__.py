"""Orbax: tables in checkpoints."""

from kvjax.orbax import _flax as _flax
from kvjax.orbax._handler import TableHandler as TableHandler
from kvjax.orbax._handler import TableRestore as TableRestore
from kvjax.orbax._handler import TableSave as TableSave
from kvjax.orbax._split import combine as combine
from kvjax.orbax._split import split as split
from kvjax.orbax._stateful import StatefulTables as StatefulTables

__all__ = ["StatefulTables", "TableHandler", "TableRestore", "TableSave", "combine", "split"]


def __dir__() -> list[str]:
    return sorted(__all__)
