"""dynamicemb: the files of ``DynamicEmbDump``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from kvjax._formats.columns import Concatenated, InFile, MappedColumn, Repeated
from kvjax._formats.errors import FileError
from kvjax._formats.paths import local
from kvjax._formats.regular import check_regular
from kvjax._formats.source import Column, row_bytes
from kvjax._values.exported import SLOT
from kvjax.convert._imported import Imported
from kvjax.convert._incoming import Incoming, check_asked, chosen_slots, incoming

Score: TypeAlias = Literal["freqs", "versions"] | None


def from_dynamicemb(
    folder: str | os.PathLike[str], name: str, dim: int | None = None, *, key_dtype: str = "int64",
    slots: Mapping[str, str] | None = None, fill: Mapping[str, float] | None = None,
    scores: Sequence[Score] | None = None,
) -> Imported:  # fmt: skip
    """Reads a table that ``DynamicEmbDump`` of NVIDIA's dynamicemb (recsys-examples) wrote.

    It follows dynamicemb's source, ``key_value_table.py``; real files have not been tried, because dynamicemb needs a
    GPU. The files are bare arrays, little-endian, one of each kind for each rank: of int64
    "<table>_emb_keys.rank_0.world_size_1" and "_emb_scores", of float32 "_emb_values" and "_emb_opt_values".
    "<table>_opt_args.json" names the optimizer.

    Args:
      folder: folder of the files: that of the embedding collection ("model.<path of the module>") in the folder that
        was dumped to.
      name: name of the table.
      dim: width of the rows; by default computed from the sizes.
      key_dtype: "int64", or "uint64" for a table whose ids are that.
      slots: slots to import: dynamicemb's name to the name in kvjax's optimizer. With Adam these are "iters", the steps
        of the optimizer, which all rows have in common, "m" and "v": ``{"iters": "count", "m": "mu", "v": "nu"}``. With
        Adagrad, row-wise or not, ``{"accumulator": "sum_of_squares"}``. Others are left.
      fill: see `from_tfra`.
      scores: what each score of a key is: "freqs" (strategy LFU), "versions" (STEP), or None to leave it. By default
        ("freqs",) if the table evicts by LFU and has one score for each key; otherwise scores are left.

    Returns:
      `Imported`: rows in the order of the files, slots ``(n, dim)`` or ``(n,)`` by their names in kvjax's optimizer.

    Raises:
      FileError: a rank is missing, or sizes do not fit.

    Example:
      >>> import tempfile, pathlib, kvjax, numpy as np
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> np.array([7, 2**40]).tofile(folder / "ad_emb_keys.rank_0.world_size_1")
      >>> np.ones((2, 3), np.float32).tofile(folder / "ad_emb_values.rank_0.world_size_1")
      >>> kvjax.convert.from_dynamicemb(folder, "ad")
      Imported(rows=2, dim=3, float32, keys int64, of dynamicemb's 'ad')
    """
    return open_dynamicemb(folder, name, dim, key_dtype=key_dtype, slots=slots, fill=fill, scores=scores).read()


def open_dynamicemb(
    folder: str | os.PathLike[str], name: str, dim: int | None = None, *, key_dtype: str = "int64",
    slots: Mapping[str, str] | None = None, fill: Mapping[str, float] | None = None,
    scores: Sequence[Score] | None = None,
) -> Incoming:  # fmt: skip
    """As `from_dynamicemb`, to be read piece by piece."""
    path = local(folder, "from_dynamicemb")
    check_asked(path, name, dim)
    if key_dtype not in ("int64", "uint64"):
        raise FileError(path, "key_dtype of int64 or uint64", f"{key_dtype!r}", "files have 64 bits for each key")
    dump = _Dump(path, name, _ranks(path, name))
    keys = dump.array("_emb_keys", key_dtype, None, 1)
    values = dump.array("_emb_values", "float32", keys.shape, dim)
    if not values.shape[1]:
        raise FileError(path, f"rows of {name!r}, whose size says dim", "none", "say dim=")
    said = _said(path / f"{name}_opt_args.json")
    columns: dict[str, Column] = {"keys": keys, "values": values}
    taken, left = _scores(dump, keys.shape, said, scores)
    columns |= taken
    there = _slots(dump, keys.shape, values.shape[1], said)
    wanted, others = chosen_slots(path, name, slots, there)
    columns |= {SLOT + ours: there[slot] for slot, ours in wanted.items()}
    left += others
    if waiting := dump.size("_counter_keys") // 8:
        left.append(f"the counts of {waiting} keys that its admission had seen")
    return incoming(
        path, f"dynamicemb's {name!r}", columns, fill=fill, left=left, unsaid="say dim= and key_dtype= of the table"
    )


class _Dump:
    """The files of a table, one of each kind for each rank."""

    def __init__(self, folder: Path, name: str, ranks: Sequence[str]) -> None:
        self.folder, self.name, self._ranks = folder, name, ranks

    def size(self, kind: str) -> int:
        """Bytes of the files of a kind; 0 if there are none."""
        return sum(path.stat().st_size for path in self._paths(kind))

    def array(self, kind: str, dtype: str, rows: tuple[int, ...] | None, width: int | None) -> Column:
        """The arrays of all ranks, one behind the other.

        Args:
          kind: of the files.
          dtype: of their elements.
          rows: ``(n,)``; None if the files say it, whose arrays then have one axis.
          width: elements for each row; by default computed from the sizes.

        Raises:
          FileError: a file is missing, or has not as many rows as the file of keys of its rank.
        """
        kind_of, paths = np.dtype(dtype), self._paths(kind)
        if not paths:
            raise FileError(self.folder, f"files {self.name}{kind}.rank_...", "none")
        if width is None:
            size = 0 if rows is None else rows[0] * kind_of.itemsize
            width = -(-self.size(kind) // size) if size else 0  # and if it is not whole, a file has not all of it
        parts: list[InFile] = []
        for path, keys in zip(paths, self._paths("_emb_keys"), strict=True):
            check_regular(path, "an array of DynamicEmbDump")
            shape = (keys.stat().st_size // 8, *(() if rows is None else (width,)))
            if (want := shape[0] * row_bytes((kind_of, shape[1:]))) != path.stat().st_size:
                got = f"{path.stat().st_size}"
                raise FileError(path, f"{want} bytes, for {shape[0]} keys {width} of {kind_of} each", got)
            parts.append(InFile(path, kind_of, shape))
        return Concatenated(parts)

    def _paths(self, kind: str) -> list[Path]:
        """Of all ranks, or of none.

        Raises:
          FileError: some are missing.
        """
        paths = [self.folder / f"{self.name}{kind}.{rank}" for rank in self._ranks]
        there = [path for path in paths if path.exists()]
        if there and len(there) < len(paths):
            lost = sorted(path.name for path in set(paths) - set(there))
            raise FileError(self.folder, f"a file {kind!r} of each rank of {self.name!r}", f"none of {lost}")
        return there


def _ranks(folder: Path, name: str) -> list[str]:
    """What the names of the files of each rank end with.

    Raises:
      FileError: there are none, some are missing, or they are of several dumps.
    """
    if not folder.is_dir():
        raise FileError(folder, "a folder of DynamicEmbDump", "none", "give its path")
    found: dict[int, set[int]] = {}
    for path in folder.iterdir():
        if match := re.fullmatch(re.escape(name) + r"_emb_keys\.rank_(\d+)\.world_size_(\d+)", path.name):
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    if not found:
        names = sorted(path.name for path in folder.glob("*_emb_keys.rank_*"))[:5]
        deeper = sorted(path.parent.name for path in folder.glob(f"*/{name}_emb_keys.rank_*"))
        mend = f"give the folder {deeper[0]!r} in it" if deeper else "give its name and folder"
        raise FileError(folder, f"files {name}_emb_keys.rank_...", f"{names}", mend)
    if len(found) > 1:
        raise FileError(folder, f"one dump of {name!r}", f"world sizes {sorted(found)}", "give a folder that has one")
    ((size, ranks),) = found.items()
    if ranks != set(range(size)):
        raise FileError(folder, f"files of all {size} ranks of {name!r}", f"of ranks {sorted(ranks)}")
    return [f"rank_{rank}.world_size_{size}" for rank in range(size)]


def _said(path: Path) -> dict[str, Any]:
    """What is said of the table; nothing if there is no such file."""
    if not path.exists():
        return {}
    check_regular(path, "what DynamicEmbDump says of a table")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise FileError(path, "JSON", f"{error!s:.100}") from error
    if not isinstance(found, dict):
        raise FileError(path, "an object in JSON", f"{found!r:.100}")
    return found


def _scores(
    dump: _Dump, rows: tuple[int, ...], said: Mapping[str, Any], scores: Sequence[Score] | None
) -> tuple[dict[str, Column], list[str]]:
    """The columns that scores are, by their names, and what is left."""
    size = dump.size("_emb_scores")
    if not size:
        if scores is not None and rows[0]:
            raise FileError(dump.folder, f"scores of {dump.name!r}", "none", "leave scores= out")
        return {}, []
    block = dump.array("_emb_scores", "int64", rows, None)
    width = block.shape[1]
    if scores is None:
        by_count = str(said.get("evict_strategy", "")).lower().endswith("klfu") and width == 1
        scores = ("freqs",) if by_count else (None,) * width
    names = [each for each in scores if each is not None]
    if len(scores) != width or len(set(names)) < len(names) or not set(names) <= {"freqs", "versions"}:
        want = f"scores= with {width} of 'freqs', 'versions' and None, one for each score of a key"
        raise FileError(dump.folder, want, f"{list(scores)}", "say what each of them is")
    taken = {name: _part(block, i, None) for i, name in enumerate(scores) if name is not None}
    lost = width - len(taken)
    return taken, [f"{lost} of the {width} scores of each key"] if lost else []


def _slots(dump: _Dump, rows: tuple[int, ...], dim: int, said: Mapping[str, Any]) -> dict[str, Column]:
    """The slots of the optimizer, by dynamicemb's names."""
    kind = next((each for each in ("_emb_opt_values", "_opt_values") if dump.size(each)), None)
    if kind is None:
        return {}
    block, name = dump.array(kind, "float32", rows, None), said.get("opt_type")
    width = block.shape[1]
    found: dict[str, Column] = {}
    if name == "adam" and width == 2 * dim:
        found = {"m": _part(block, 0, dim), "v": _part(block, dim, dim)}
        iters = said.get("iters")
        if isinstance(iters, int) and not isinstance(iters, bool) and 0 <= iters < 2**31:
            found["iters"] = Repeated(np.int32(iters), rows[0])
    elif name == "exact_adagrad" and width == dim:
        found = {"accumulator": block}
    elif name == "exact_row_wise_adagrad" and width in (1, 4):  # early dumps have it padded to 16 bytes
        found = {"accumulator": _part(block, 0, None)}
    else:
        found = {f"{width} elements of the optimizer {name!r}": block}
    return found


def _part(block: Column, begin: int, width: int | None) -> Column:
    """Some columns of a block, from one on; that one without an axis of its own if `width` is None."""
    if width is None:
        return MappedColumn(block, lambda rows: rows[:, begin], block.shape[:1])
    return MappedColumn(block, lambda rows: rows[:, begin : begin + width], (block.shape[0], width))
