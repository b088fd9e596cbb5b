"""Tables that a program uses, and how it uses them, found in its jaxpr."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kvjax._process import PROCESS
from kvjax._table.table import Table
from kvjax._values.errors import fail

_OURS = "kvjax_"


@dataclasses.dataclass(frozen=True)
class TableUse:
    """What a program takes a table to be.

    Attributes:
      dim: width of a row.
      dtype: of the rows.
      seed: of the initial rows that a function makes, which are part of the program; None where the table makes them.
    """

    dim: int
    dtype: str
    seed: int | None

    def __str__(self) -> str:
        made = "" if self.seed is None else f", and seed {self.seed} of the function that makes its initial rows"
        return f"a table with dim {self.dim}, dtype {self.dtype}{made}"

    @classmethod
    def of(cls, spec: Any) -> TableUse:
        return cls(spec.dim, spec.dtype, spec.seed if spec.generated else None)


def used_by(jaxpr: Any) -> tuple[set[str], dict[str, TableUse]]:
    """The calls of a program that are kvjax's, and its tables by name.

    Args:
      jaxpr: of the program.

    Raises:
      ValueError: it writes a table, reads one over a mesh, or reads through a handle of one version, which would be
        stale by then.
    """
    targets: set[str] = set()
    names: set[str] = set()
    for equation in _equations(jaxpr):
        target = str(equation.params.get("target_name", ""))
        if not target.startswith(_OURS):
            continue
        name = dict(equation.params.get("attributes", ())).get("table")  # the calls of bags have none
        if not name:
            targets.add(target)
            continue
        if equation.params["has_side_effect"]:
            raise fail(
                ValueError, name, "export", "a function that only reads its tables", f"one that calls {target}",
                "train in the process that has the code",
            )  # fmt: skip
        if PROCESS.spec_of(name).placement is not None:
            raise fail(
                ValueError, name, "export", "tables in one place", "one over a mesh",
                "kvjax.reshard(table, None), or export in a process that restores the table into one place",
            )  # fmt: skip
        if equation.invars[0].aval.shape == ():  # a version; the operand of a following handle has no elements
            raise fail(
                ValueError, name, "export", "tables among the arguments, or following handles",
                "a handle of one version that the function closes over, which would be stale after the next write",
                "give the tree that holds the table as an argument, or close over table.live()",
            )  # fmt: skip
        targets.add(target)
        names.add(name)
    return targets, {name: TableUse.of(PROCESS.spec_of(name)) for name in sorted(names)}


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(each, "jaxpr", each)
                if hasattr(inner, "eqns"):
                    yield from _equations(inner)


def check(uses: dict[str, TableUse], tables: dict[str, Table], op: str) -> None:
    """Whether this process has the tables of a program.

    Raises:
      KeyError: there is none of a name.
      ValueError: one is something else.
    """
    for name, use in uses.items():
        if name not in tables:
            raise fail(
                KeyError, name, op, "the tables of the program in this process", f"{sorted(tables)}",
                "restore them first, with kvjax.checkpoint.restore or kvjax.orbax.TableRestore",
            )  # fmt: skip
        found = TableUse.of(tables[name].spec)
        if found != use or tables[name].spec.placement is not None:
            got = f"{found}" if found != use else "one over a mesh"
            raise fail(
                ValueError, name, op, f"{use}, in one place", got, "restore the table that the program was made for"
            )
