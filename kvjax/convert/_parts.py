"""Parts: a variable of a TensorFlow checkpoint, which may be partitioned, as one."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvjax._formats.bundle import Bundle
from kvjax._formats.columns import Concatenated
from kvjax._formats.errors import FileError
from kvjax._formats.source import Column
from kvjax._values.errors import meant
from kvjax._values.exported import SLOT
from kvjax.convert._incoming import Joined, check_asked, chosen_slots


def parts_of(bundle: Bundle, name: str) -> list[str]:
    """What the tensors of each part of a variable begin with.

    Raises:
      FileError: there is no such variable, or a part of it is missing.
    """
    check_asked(bundle.prefix, name)
    stem = name.removesuffix(":0")
    for whole in (stem, f"{stem}:0"):
        if f"{whole}-keys" in bundle.entries:
            return [whole]
    found = {}
    for entry in bundle.entries:
        if match := re.fullmatch(re.escape(stem) + r"/part_(\d+)(:0)?-keys", entry):
            found[int(match[1])] = entry.removesuffix("-keys")
    if not found:
        names = sorted({re.sub(r"(/part_\d+.*)?(:0)?-keys$", "", e) for e in bundle.entries if e.endswith("-keys")})
        raise FileError(
            bundle.prefix, f"the variable {name!r}", f"{names[:20]}", meant(name, names).strip() or "give its name"
        )
    if sorted(found) != list(range(max(found) + 1)):
        raise FileError(bundle.prefix, f"all parts of {name!r}", f"the parts {sorted(found)}")
    return [found[i] for i in sorted(found)]


def joined(bundle: Bundle, parts: list[str], end: str) -> Column:
    """A tensor of all parts, one after the other.

    Raises:
      FileError: one is missing, or they differ in width.
    """
    columns = [bundle.column(part + end) for part in parts]
    if len({(column.dtype, column.shape[1:]) for column in columns}) > 1 or not columns[0].shape:
        raise FileError(bundle.prefix, f"parts of {end[1:]} of one width", f"{[column.shape for column in columns]}")
    return Concatenated(columns)


def slots_of(
    bundle: Bundle, name: str, parts: list[str], slots: Mapping[str, str] | None
) -> tuple[dict[str, Joined], list[str]]:
    """The slots of a variable, which are variables named "<part>/<slot>".

    Args:
      bundle: of them.
      name: of the variable.
      parts: of it.
      slots: which to take, their names to ours.

    Returns:
      Those, by the columns that they are to be, and what was left.

    Raises:
      FileError: one is not there, or not in all parts.
    """
    there = sorted({slot for part in parts for slot in _slots(bundle, part)})
    wanted, left = chosen_slots(bundle.prefix, name, slots, there)
    taken = {
        SLOT + ours: Joined.slot(
            bundle.prefix, slot,
            *(joined(bundle, [f"{part}/{slot}" for part in parts], end) for end in ("-keys", "-values")),
        )
        for slot, ours in wanted.items()
    }  # fmt: skip
    return taken, left


def _slots(bundle: Bundle, part: str) -> list[str]:
    names = [entry.removeprefix(f"{part}/") for entry in bundle.entries if entry.startswith(f"{part}/")]
    ends = [name.removesuffix("-keys") for name in names if name.endswith("-keys") and not name.startswith("part_")]
    return [name for name in ends if f"{part}/{name}-values" in bundle.entries]
