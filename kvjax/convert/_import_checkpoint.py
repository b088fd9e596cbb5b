"""Imports as checkpoints: another system's table, which need not fit into memory, without a table of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvjax._formats.atomic import fetched, scratch_of
from kvjax._formats.choices import FILE_FORMATS, IMPORTED
from kvjax._formats.errors import FileError
from kvjax._formats.paths import AnyPath, anywhere, local
from kvjax._formats.source import offsets_of, ranges
from kvjax._formats.spread import spread
from kvjax._keys.buckets import buckets_of, by_bucket
from kvjax._spec.options import ENTRIES, Request
from kvjax._values.arguments import check_progress
from kvjax._values.dtypes import ROW_DTYPES, cast
from kvjax._values.errors import meant
from kvjax._values.exported import SLOT
from kvjax._values.integers import wide
from kvjax._values.prune import PruneLike
from kvjax._values.slot_layout import type_text
from kvjax._values.snapshot import column_types
from kvjax.checkpoint._chains.locate import PathLike
from kvjax.checkpoint._chains.new import check_free, check_outside, new_checkpoint
from kvjax.checkpoint._disk.format import FORMAT, Damaged
from kvjax.checkpoint._disk.meta import FIELDS, RULES, check_meta, described
from kvjax.checkpoint._disk.write_shard import write_shard
from kvjax.checkpoint._rewrite import prune as pruned
from kvjax.convert._deeprec import open_deeprec
from kvjax.convert._dynamicemb import open_dynamicemb
from kvjax.convert._files import open_file
from kvjax.convert._incoming import Incoming
from kvjax.convert._sok import open_sok
from kvjax.convert._tfplus import open_tfplus
from kvjax.convert._tfra import FLOATS, dtype_of, open_tfra
from kvjax.ffi import host

OPENERS: Mapping[str, Callable[..., Incoming]] = {
    "tfra": open_tfra, "deeprec": open_deeprec, "tfplus": open_tfplus, "sok": open_sok, "dynamicemb": open_dynamicemb
}  # fmt: skip
"""By the names of `SYSTEMS`."""


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """What an import has written as a checkpoint.

    Attributes:
      table: name of the table.
      rows: number of rows in the checkpoint.
      total: number of rows in the source.
      dim: of the rows.
      dtype: of the rows in the checkpoint.
      left: what was not taken, and why, one line each.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     np.savez(folder + "/items.npz", keys=np.array([7, 8]), values=np.ones((2, 3), np.float32))
      ...     kvjax.convert.import_checkpoint(folder + "/items.npz", folder + "/one")
      ImportReport(table='items', rows=2, total=2, dim=3, dtype='float32', left=())
    """

    table: str
    rows: int
    total: int
    dim: int
    dtype: str
    left: tuple[str, ...]


_OWN = {"format", "path", "folder", "name"}
"""Arguments of what opens a file that `import_checkpoint` has under other names."""


def import_checkpoint(
    source: PathLike, path: PathLike, *, table: str | None = None, format: str | None = None,
    variable: str | None = None, prune: PruneLike | None = None, overwrite: bool = False,
    dtype: str | None = None, source_dtype: str | None = None, seed: int | None = None,
    progress: Callable[[int], object] | None = None, **how: object,
) -> ImportReport:  # fmt: skip
    """Writes another system's table as a checkpoint of one table, without making a table.

    Rows are read and sorted in pieces, with about 200 MiB in memory (for more than 128 GB of rows, a thousandth of
    them), and one row group of a Parquet file. Larger tables go through temporary files beside the checkpoint (in the
    system's temporary folder, if that is in a store), which take as much space as the rows. If the import fails,
    nothing is left. The table has the default options of `kvjax.get_table`, except those given here.

    Args:
      source: a file, or the first argument of ``kvjax.convert.from_...``.
      path: folder of the new checkpoint, where nothing is yet, and not inside another checkpoint; also one of a store.
      table: name of the table; by default the name of the variable or of the file.
      format: "safetensors", "npz", "parquet", "tfra", "deeprec", "tfplus", "sok" or "dynamicemb"; by default the
        extension of the source.
      variable: name of the variable in the other system.
      prune: which rows to leave out, as in `kvjax.checkpoint.prune`; all rows are written once before they are pruned.
      overwrite: replace the checkpoint that is there, if no other builds on it.
      dtype: dtype of the rows in the checkpoint; by default that of the source.
      source_dtype: for "tfra", whose files do not contain it, the dtype of the source; by default `dtype`, or float32.
      seed: seed of the initial rows.
      progress: function that is called with the number of bytes of each piece that is written.
      **how: other arguments of ``kvjax.convert.from_<format>``: ``columns``, ``slots``, ``fill``, ``dim``,
        ``key_dtype``, ``scores``.

    Returns:
      What was written.

    Raises:
      ValueError: the source does not have that format, is damaged, or a table cannot hold it; as the function of the
        format.
      CheckpointError: there is something at the path, or with `overwrite` one that others build on, or the path is
        inside a checkpoint.
      TypeError: `how` has an argument that the function of the format does not take, or `progress` is not a function
        of a number.
      ImportError: a library of the format is not installed.

    Example:
      >>> import kvjax, numpy as np, tempfile
      >>> folder = tempfile.TemporaryDirectory()
      >>> np.savez(folder.name + "/items.npz", keys=np.array([7, 8]), values=np.ones((2, 3), np.float32))
      >>> kvjax.convert.import_checkpoint(folder.name + "/items.npz", folder.name + "/one").rows
      2
      >>> kvjax.checkpoint.restore(folder.name + "/one")["items"].lookup(7).tolist()
      [1.0, 1.0, 1.0]
      >>> kvjax.drop_table("items")
      >>> folder.cleanup()
    """
    kind, out = format or Path(source).suffix.removeprefix("."), anywhere(path, "import_checkpoint").resolve()
    check_outside(out, "import")
    check_progress(progress, "import")
    given = (anywhere if kind in FILE_FORMATS else local)(source, "import_checkpoint")
    if kind not in IMPORTED:
        mend = "say format=, or end the path with it"
        raise FileError(given, f"a format of {[*IMPORTED]}", f"{kind!r}", mend)
    if (variable is None) != (kind in FILE_FORMATS):
        raise FileError(
            given, "variable= for another system's alone", f"{variable!r} for {kind}",
            "leave it out" if variable else "give the name of the variable",
        )  # fmt: skip
    options = {name: value for name, value in {"dtype": dtype, "seed": seed}.items() if value is not None}
    if source_dtype is not None and kind != "tfra":
        mend = "leave it out, and say dtype= for the rows in the checkpoint"
        raise FileError(given, "source_dtype= for tfra alone", f"{source_dtype!r} for {kind}", mend)
    if source_dtype is not None:
        dtype_of(Path(given), "source_dtype", source_dtype, FLOATS)
    if kind == "tfra" and (in_source := source_dtype or dtype) is not None:
        how["dtype"] = in_source
    opened: Any = partial(open_file, kind) if variable is None else partial(OPENERS[kind], name=variable)
    taken = inspect.signature(open_file if variable is None else OPENERS[kind]).parameters.keys() - _OWN
    if unknown := sorted(how.keys() - taken):
        raise TypeError(
            f"kvjax: import_checkpoint: want of from_{kind}'s arguments {sorted(taken)}, got {unknown}; "
            f"{meant(unknown[0], taken)}leave out what it does not take"
        )
    reading = fetched(given, "import_checkpoint") if variable is None else contextlib.nullcontext(given)
    with reading as file:
        incoming: Incoming = opened(file, **how)
        name = table or variable or given.stem
        if prune is None:
            return _write(incoming, name, options, out, overwrite, progress)
        check_free(out, overwrite, "import")
        with tempfile.TemporaryDirectory(dir=scratch_of(out), prefix=".") as folder:
            whole = _write(incoming, name, options, Path(folder) / "whole", False, progress)
            dropped = pruned(Path(folder) / "whole", out, prune, overwrite=overwrite)[name].dropped
        return dataclasses.replace(whole, rows=whole.rows - dropped.rows)


def _write(
    incoming: Incoming, name: str, options: Mapping[str, Any], out: AnyPath, overwrite: bool,
    progress: Callable[[int], object] | None,
) -> ImportReport:  # fmt: skip
    with new_checkpoint(out, overwrite, "import") as folder:
        arrays = _Arrays(incoming, name, options, scratch_of(out))
        left = arrays.write(folder, progress or (lambda _: None))
    dtype, (dim,) = arrays.types["values"]
    return ImportReport(name, incoming.rows.num_rows, incoming.rows.num_rows, dim, dtype.name, left)


class _Arrays:
    """The arrays of a table on disk, made of incoming rows a few buckets at a time.

    Raises:
      FileError: no table can have such rows.
    """

    def __init__(self, incoming: Incoming, name: str, options: Mapping[str, Any], scratch: Path | None) -> None:
        self.incoming, self.scratch, n = incoming, scratch, incoming.rows.num_rows
        dtype, (dim,) = incoming.rows.types["values"]
        if "dtype" not in options and dtype.name not in ROW_DTYPES:
            want, got = f"rows of {list(ROW_DTYPES)}", f"{dtype.name}"
            mend = 'say dtype="float32" to round them, for TFRA beside source_dtype=, which is that of its files'
            raise FileError(incoming.file, want, got, mend)
        joined = {column: each.source.types["values"] for column, each in incoming.joined.items()}
        types = {**incoming.rows.types, **joined}
        slots = {column.removeprefix(SLOT): types[column] for column in types if column.startswith(SLOT)}
        texts = {slot: type_text(*kind) for slot, kind in slots.items()}
        request = Request(name, "import", dim)
        given = {"dtype": dtype.name, "key_dtype": incoming.key_dtype} | dict(options)
        for option, entry in ENTRIES.items():
            if option in (*FIELDS, *RULES):
                request.resolve(option, given.get(option, entry.default))
        last_step, pinned = self._scanned()
        last_step = last_step if incoming.last_step is None else incoming.last_step
        shard = {"rows": n, "last_step": last_step, "slots": [list(item) for item in texts.items()]}
        self.meta = described(
            name, dim, request.options, [shard | {"extras": {"pinned": ["bool", [n]]} if pinned else {}}]
        )
        try:
            check_meta(self.meta, (FORMAT,), name)
        except Damaged as error:
            raise FileError(
                incoming.file, "what a table can have", f"{error}", "leave out what does not fit"
            ) from error
        self.types = column_types(dim, np.dtype(request["dtype"]), request["key_dtype"], texts)
        if not pinned:
            del self.types["pinned"]

    def _scanned(self) -> tuple[int, bool]:
        """The last row version, and whether a row is pinned."""
        rows, last, pinned = self.incoming.rows, 0, False
        names = [name for name in ("versions", "pinned") if name in rows.types]
        for start, stop in ranges(rows.num_rows if names else 0, 8):
            found = rows.read(names, start, stop)
            last = max(last, int(found.get("versions", np.zeros(0, np.int64)).max(initial=0)))
            pinned = pinned or bool(found.get("pinned", np.zeros(0, bool)).any())
        return last, pinned

    def write(self, directory: AnyPath, progress: Callable[[int], object]) -> tuple[str, ...]:
        """Writes them; gives what was left out."""
        n, lost = self.meta["rows"], Counter[str]()
        kinds = {name: (dtype, (n, *shape)) for name, (dtype, shape) in self.types.items()}
        kinds["offsets"] = np.dtype(np.int64), (host.NUM_BUCKETS + 1,)
        write_shard(directory, self.meta, 0, kinds, self._pieces(lost, progress))
        return self.incoming.left_of(lost)

    def _pieces(self, lost: Counter[str], progress: Callable[[int], object]) -> Iterator[Mapping[str, np.ndarray]]:
        counts = np.zeros(host.NUM_BUCKETS, np.int64)
        for parts in spread(self.incoming.sources, self.scratch, _bins_of, host.NUM_BUCKETS):
            columns = self.incoming.together(parts, lost)
            keys, values = columns["keys"], columns["values"]
            columns["values"] = cast(values, self.types["values"][0], keys, self.meta["name"], "import")
            order, buckets = by_bucket(keys)
            counts += np.bincount(buckets, minlength=len(counts))
            for name in self.types:
                rows = columns.pop(name)[order].astype(self.types[name][0], copy=False)
                progress(rows.nbytes)
                yield {name: rows}
            del parts, columns, keys, values  # before the next are read
        yield {"offsets": offsets_of(counts)}


def _bins_of(keys: np.ndarray) -> np.ndarray:
    return buckets_of(wide(keys))
