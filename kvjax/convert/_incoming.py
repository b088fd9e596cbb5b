"""Incoming rows: another system's table, to be read piece by piece, or whole as an `Imported`."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import numpy as np

from kvjax._formats.columns import Repeated
from kvjax._formats.errors import FileError
from kvjax._formats.source import Column, Source
from kvjax._values.arguments import is_integer, is_real
from kvjax._values.dtypes import dtype_name, is_float
from kvjax._values.errors import warn
from kvjax._values.exported import SLOT, Exported
from kvjax._values.integers import wide
from kvjax._values.key_width import KEY_DTYPES
from kvjax._values.snapshot import Columns
from kvjax.convert._imported import Imported


@dataclasses.dataclass(frozen=True)
class Joined:
    """A column whose rows are under keys in an order of their own.

    Attributes:
      source: "keys" and "values".
      what: for errors.
      left: what is said of those whose keys have no row, with "{}" for their number.
    """

    source: Source
    what: str
    left: str

    @classmethod
    def slot(cls, file: str | os.PathLike[str], name: str, keys: Column, values: Column) -> Joined:
        """A slot by its name there, which is a table of its own.

        Raises:
          FileError: it has not as many rows as keys.
        """
        if keys.shape != values.shape[:1]:
            got = f"{keys.shape[0]} and {values.shape[0]}"
            raise FileError(file, f"as many keys as rows of the slot {name!r}", got)
        source = Source.of({"keys": keys, "values": values}, {})
        return cls(source, f"the slot {name!r}", f"{{}} rows of the slot {name!r} whose keys have no row")


@dataclasses.dataclass(frozen=True)
class Incoming:
    """Rows of another system's table, whose types fit each other; nothing is read of them yet.

    Attributes:
      file: for errors.
      source: what it is, in words.
      rows: "keys", "values", and those of the columns of `kvjax.Exported` that are in the same order.
      joined: those that are in another, by their names.
      last_step: of the table, if it is known.
      key_dtype: of the table; by default that of the keys there.
      left: what was not taken.
      unsaid: the mend where files do not say what they have; empty for those that say all.
    """

    file: str | os.PathLike[str]
    source: str
    rows: Source
    joined: Mapping[str, Joined]
    last_step: int | None
    key_dtype: str
    left: tuple[str, ...]
    unsaid: str

    @property
    def sources(self) -> dict[str, Source]:
        """All that there is to read: the rows, as "", and what is joined to them."""
        return {"": self.rows} | {name: each.source for name, each in self.joined.items()}

    def read(self) -> Imported:
        """All of it.

        Raises:
          FileError: it is damaged, or a key is there twice.
        """
        parts = {name: source.read(list(source.types), 0, source.num_rows) for name, source in self.sources.items()}
        lost = Counter[str]()
        columns = self.together(parts, lost)
        columns["values"] = np.ascontiguousarray(columns["values"])
        step = int(columns["versions"].max(initial=0)) if self.last_step is None else self.last_step
        rows = Exported.of_columns(columns, step, key_dtype=self.key_dtype)
        return Imported(rows, self.key_dtype, self.source, self.left_of(lost))

    def together(self, parts: Mapping[str, Columns], lost: Counter[str]) -> dict[str, np.ndarray]:
        """The columns of `kvjax.Exported`, of all rows or of those of some buckets, in the order of the rows.

        Args:
          parts: what `sources` have of these.
          lost: gets the numbers of what is left out.

        Raises:
          FileError: a key is there twice, or a count is negative.
        """
        columns = dict(parts[""])
        keys = wide(columns["keys"])
        words, n = keys.view(np.int64), len(keys)
        mend = f"leave all but one of their rows out{self._or_say}"
        _check_once(self.file, "each key once", np.sort(words), keys, mend)
        lost[_NOT_FINITE] += int((~np.isfinite(columns["values"]).all(axis=1)).sum())
        has_slots = columns.get("has_slots", np.full(n, any(name.startswith(SLOT) for name in self.columns)))
        for name, each in self.joined.items():
            found = parts[name]
            at, there = _places(self.file, each.what, wide(found["keys"]).view(np.int64), words)
            columns[name] = np.zeros((n, *found["values"].shape[1:]), found["values"].dtype)
            columns[name][there] = found["values"][at[there]]
            lost[name] += len(found["keys"]) - int(there.sum())
            if name.startswith(SLOT):
                has_slots = has_slots & there
        lost[_WITHOUT] += int((~has_slots).sum()) if any(name.startswith(SLOT) for name in self.joined) else 0
        for name in ("freqs", "versions"):
            columns[name] = columns.get(name, np.zeros(n, np.int64)).astype(np.int64)
            if (columns[name] < 0).any():
                raise FileError(self.file, "freqs and versions of at least 0", "negative ones")
        newest = int(columns["versions"].max(initial=0))
        if self.last_step is not None and newest > self.last_step:
            want = f"versions up to last_step={self.last_step}, as the metadata says"
            raise FileError(self.file, want, f"{newest}", "give the metadata the greatest version")
        columns["freqs"] = np.minimum(columns["freqs"], MOST_FREQUENT)
        pinned = columns.get("pinned", np.zeros(n, bool)).astype(bool)
        return columns | {"keys": keys, "has_slots": has_slots.astype(bool), "pinned": pinned}

    @property
    def columns(self) -> list[str]:
        """Names of those that there are."""
        return [*self.rows.types, *self.joined]

    @property
    def _or_say(self) -> str:
        return self.unsaid and f", or {self.unsaid}"

    def left_of(self, lost: Counter[str]) -> tuple[str, ...]:
        """What was not taken, a line each, once all is read. Warns of rows that are taken and are not finite."""
        if n := lost[_NOT_FINITE]:
            warn(
                f"kvjax: {os.fspath(self.file)}: {n} of {self.rows.num_rows} rows of {self.source} have a NaN or an "
                f"infinity, and are taken as they are; look for the cause there{self._or_say}"
            )
        slots = [name.removeprefix(SLOT) for name in self.joined if name.startswith(SLOT)]
        texts = {name: each.left for name, each in self.joined.items()}
        texts[_WITHOUT] = f"slots of {{}} keys, which not all of {slots} have"
        found = (text.replace("{}", str(lost[name]), 1) for name, text in texts.items() if lost[name])
        return (*found, *self.left)


MOST_FREQUENT = 2**62 - 1
"""A frequency stops there, as in a table."""

_WITHOUT = ""
"""Under which `Incoming.together` counts keys without slots."""

_NOT_FINITE = "values"
"""Under which it counts rows with a NaN or an infinity, which are not left out."""


def incoming(
    file: str | os.PathLike[str], source: str, columns: Mapping[str, Column], *,
    joined: Mapping[str, Joined] | None = None, fill: Mapping[str, float] | None = None, last_step: int | None = None,
    key_dtype: str | None = None, left: Sequence[str] = (), unsaid: str = "",
) -> Incoming:  # fmt: skip
    """Rows to read, if their types fit each other.

    Args:
      file: for errors.
      source: what it is, in words.
      columns: "keys" ``(n,)``, "values" ``(n, dim)``, "freqs", "versions", "has_slots", "pinned" ``(n,)`` if known, and
        slots ``(n, ...)``, as "slot.<name>".
      joined: columns that are in another order.
      fill: numbers of slots that are in no file, by their names in kvjax's optimizer: each row gets these.
      last_step: of the table; by default the last row version.
      key_dtype: of the table; by default that of the keys.
      left: what was not taken.
      unsaid: the mend where files do not say what they have.

    Raises:
      FileError: they do not.
    """
    keys, values = columns["keys"], columns["values"]
    if len(keys.shape) != 1 or dtype_name(keys.dtype) not in KEY_DTYPES:
        raise FileError(
            file, f"keys (n,) of {list(KEY_DTYPES)}", f"{keys.shape} {keys.dtype}",
            "write integers of 32 or 64 bits; kvjax.hash_keys makes them of strings",
        )  # fmt: skip
    n = keys.shape[0]
    fits = len(values.shape) == 2 and values.shape[0] == n and values.shape[1] != 0
    if not fits or not is_float(values.dtype):
        mend = [] if is_float(values.dtype) else ["write floats"]
        raise FileError(file, f"values ({n}, dim) of floats", f"{values.shape} {values.dtype}", *mend)
    for name, column in columns.items():
        if column.shape[:1] != (n,) or (name != "values" and not name.startswith(SLOT) and len(column.shape) != 1):
            raise FileError(file, f"{name!r} for {n} keys", f"{column.shape}")
    for name in ("freqs", "versions"):
        if name in columns and columns[name].dtype.kind not in "iu":
            raise FileError(file, f"{name} of integers", f"{columns[name].dtype}")
    for name, column in columns.items():
        if name.startswith(SLOT) and column.dtype.kind not in "biu" and not is_float(column.dtype):
            raise FileError(file, f"{name!r} of numbers", f"{column.dtype}", "leave it out")
    for name in ("has_slots", "pinned"):
        if name in columns and columns[name].dtype.kind not in "biu":
            raise FileError(file, f"{name} of bool", f"{columns[name].dtype}", "write true or false for each key")
    filled = _filled(file, fill or {}, n)
    if twice := sorted(filled.keys() & (columns.keys() | (joined or {}).keys())):
        names = [name.removeprefix(SLOT) for name in twice]
        raise FileError(
            file, "fill= of slots that no file has", f"{names}, which slots= takes", "leave one of the two out"
        )
    rows, own = Source.of({**filled, **columns}, {}), key_dtype or dtype_name(keys.dtype)
    return Incoming(file, source, rows, dict(joined or {}), last_step, own, tuple(left), unsaid)


def _filled(file: str | os.PathLike[str], fill: Mapping[str, float], num_rows: int) -> dict[str, Column]:
    """The columns of slots that have the same number in each row: int32 and float32, as optax has them."""
    _check_by_name(file, "fill", fill)
    found: dict[str, Column] = {}
    for name, value in fill.items():
        whole = is_integer(value)
        if (not whole and not is_real(value)) or (whole and not -(2**31) <= value < 2**31):
            raise FileError(
                file, f"fill= with a number for the slot {name!r}", f"{value!r:.50}",
                "give an integer of 32 bits, or a finite float",
            )  # fmt: skip
        found[SLOT + name] = Repeated(np.int32(value) if whole else np.float32(value), num_rows)
    return found


def _check_by_name(file: str | os.PathLike[str], argument: str, given: object) -> None:
    if not isinstance(given or {}, Mapping):
        raise FileError(
            file, f"{argument}= by the names of slots", type(given).__name__, "give a mapping, or leave it out"
        )
    for name in cast("Mapping[object, object]", given or {}):
        if not isinstance(name, str):
            raise FileError(file, f"{argument}= by the names of slots", f"{name!r:.50}", "give a string for each")


def check_asked(file: str | os.PathLike[str], name: object, dim: float | None = None) -> None:
    """Whether a variable is asked for by a name, and as rows of an integer.

    Raises:
      FileError: it is not.
    """
    if not isinstance(name, str):
        raise FileError(file, "the name of a variable", f"{name!r:.50}", "give a string")
    if dim is not None and (not is_integer(dim) or dim < 1):
        raise FileError(
            file, "dim= as an integer of 1 or more", f"{dim!r:.50}", "leave it out to have it computed from the sizes"
        )


def check_wanted(file: str | os.PathLike[str], slots: Mapping[str, str] | None) -> None:
    """Whether each slot that is asked for gets a name of its own.

    Raises:
      FileError: two get one.
    """
    _check_by_name(file, "slots", slots)
    of: dict[str, list[str]] = {}
    for theirs, ours in (slots or {}).items():
        if not isinstance(cast("object", ours), str):
            raise FileError(file, f"slots= with a name of kvjax's for {theirs!r}", f"{ours!r:.50}", "give a string")
        of.setdefault(ours, []).append(theirs)
    if twice := {ours: theirs for ours, theirs in of.items() if len(theirs) > 1}:
        raise FileError(file, "slots= with a name of kvjax's for each", f"{twice}", "give each another name")


def chosen_slots(
    file: str | os.PathLike[str], name: str, slots: Mapping[str, str] | None, there: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Which slots of a variable to take.

    Args:
      file: for errors.
      name: of the variable.
      slots: those that are asked for, their names to ours.
      there: the names of those that it has.

    Returns:
      Those to take, and a line for each of the others.

    Raises:
      FileError: one is not there, or two get one name.
    """
    check_wanted(file, slots)
    wanted = dict(slots or {})
    if lost := sorted(wanted.keys() - set(there)):
        raise FileError(file, f"the slots {lost} of {name!r}", f"{sorted(there)}", "name those that are there")
    return wanted, [f"the slot {slot!r}" for slot in there if slot not in wanted]


def _check_once(
    file: str | os.PathLike[str], want: str, ordered: np.ndarray, like: np.ndarray, mend: str | None = None
) -> None:
    """Whether keys ``(n,)`` in order are distinct; an error has them as `like` are."""
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(again):
        found = np.unique(again).view(like.dtype)
        got = f"{len(found)} keys that are there again, the first {found[0]}"
        raise FileError(file, want, got, *([] if mend is None else [mend]))


def _places(
    file: str | os.PathLike[str], what: str, among: np.ndarray, keys: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Where each of `keys` ``(n,)`` is among others, and whether it is: ``(n,)`` each.

    Raises:
      FileError: of the others one is there twice.
    """
    order = np.argsort(among, kind="stable")
    ordered = among[order]
    _check_once(file, f"each key of {what} once", ordered, ordered)
    if not len(among):
        return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(ordered, keys), len(among) - 1)
    return order[at], ordered[at] == keys
