"""Output: tables on a terminal, JSON for programs, and progress bars for long work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

from kvjax._formats.paths import AnyPath


def check_new(path: AnyPath, overwrite: bool, command: str) -> None:
    """Whether a command may write a file: none replaces one without --overwrite.

    Raises:
      ValueError: there is one.
    """
    if not overwrite and path.is_file():
        raise ValueError(
            f"kvjax {command}: want a path with nothing there, got {path}, which exists; give another, or --overwrite"
        )


def print_json(value: object) -> None:
    """As JSON; data classes and NumPy's numbers, too. What is no finite number is null, as JSON has no other."""
    print(json.dumps(_plain(value), indent=1))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if not dataclasses.is_dataclass(value):
        return str(value)
    return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """With columns of numbers on the right; by rich, if it is there."""
    cells = [[text(cell) for cell in row] for row in rows]
    if title:
        print(title)
    given = list(zip(columns, zip(*cells, strict=True) if cells else [()] * len(columns), strict=True))
    right = [bool(cells) and all(_is_number(cell) for cell in column) for _, column in given]
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        widths = [max(map(len, (name, *column))) for name, column in given]
        for line in (columns, *cells) if any(columns) else cells:
            print(
                "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True)).rstrip()
            )
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, show_header=any(columns))
    for name, is_right in zip(columns, right, strict=True):
        table.add_column(name, justify="right" if is_right else "left", overflow="fold")
    for line in cells:
        table.add_row(*map(Text, line))
    # What is written to a file or a pipe is as wide as it is.
    console = Console(width=None if sys.stdout.isatty() else 10_000)
    with console.capture() as lines:
        console.print(table)
    print(lines.get(), end="")  # where nobody reads on, rich would exit with a status of its own, 1


def text(value: object) -> str:
    """A cell: numbers short, nothing as "-"."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        fields = ", ".join(f"{key}={text(each)}" for key, each in value.items() if key not in ("rule", "kind"))
        name = value.get("rule", value.get("kind"))
        return fields or "-" if name is None else f"{name}({fields})"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value)) or "-"
    return str(value)


def _is_number(cell: str) -> bool:
    return cell == "-" or cell.replace(",", "").lstrip("-")[:1].isdigit()


def size(number: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


@contextlib.contextmanager
def progress(what: str, quiet: bool) -> Generator[Callable[[int], None]]:
    """Shows on a terminal that something is under way; gives what is told the bytes that have been read."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        print(f"{what} ...", file=sys.stderr)
        yield lambda _: None
        return
    columns = SpinnerColumn(), TextColumn(what), DownloadColumn(binary_units=True), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda number: bar.advance(task, number)
