"""`FrozenTable`: an immutable table in a mapped file, read by NumPy alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

import numpy as np

from kvjax._formats.choices import Quantised
from kvjax._formats.paths import PathLike, kept
from kvjax._formats.regular import identity_of
from kvjax._values.arguments import is_integer, is_name
from kvjax._values.arrays import ArrayLike
from kvjax._values.errors import fail
from kvjax._values.lookups import Missing
from kvjax.serving._contents import RowsLike, row_of, with_contents
from kvjax.serving._format import FrozenError, MappedFile, check, finding, read
from kvjax.serving._info import SUFFIX
from kvjax.serving._reads import FrozenReads, IdsLike
from kvjax.serving._write import write_again, write_changes, write_whole

if TYPE_CHECKING:
    from kvjax._values.prune import PruneLike
    from kvjax.serving._jax import FrozenArrays


class FrozenTable(FrozenReads):
    """A table that never changes: one file, mapped, for any number of threads and processes at once.

    Reading needs only NumPy: ``import kvjax.serving`` does not load JAX. Processes that open the same file share its
    memory. If another file is written to the same path, open tables stay as they are; `refresh` opens the new file. A
    pickle has only the path: it loads where the same file is there, and is a `FrozenError` where another is.

    Attributes:
      path: of the file, absolute: it stays that file if the process changes its folder.
      name: of the table it was written from.
      dim: width of a row.
      dtype: dtype in which rows are stored, "float32", "float16", "bfloat16" or "int8".
      step: the table's last step when it was written.
      error: the report of the quantisation error with ``max``, ``rms`` and ``cosine``, as for exports; None without
        quantisation. After an update, the worse of the old report and that of the changed rows.
      missing: the row ``(dim,)`` float32 that keys without a row read as; None if they read as their initial rows.

    Raises:
      TypeError: ``FrozenTable(path)`` is called; `open` and `write` make one.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> table = kvjax.get_table("doc_frozen", dim=2, initializer=0.5).upsert(np.array([2**40, -1]), [[1, 2], [3, 4]])
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     frozen = kvjax.serving.FrozenTable.write(f"{folder}/user.frozen", table)
      >>> frozen
      FrozenTable('doc_frozen', dim=2, dtype=float32, rows=2, step=0)
      >>> frozen.lookup([-1, 7, 2**40])
      array([[3. , 4. ],
             [0.5, 0.5],
             [1. , 2. ]], dtype=float32)
      >>> kvjax.drop_table("doc_frozen")
    """

    def __init__(self, path: Path, mapped: MappedFile | None = None, released: bool = False) -> None:
        """For `open` and `write`, and for what is of a release, whose files never change."""
        if mapped is None:
            raise fail(
                TypeError, None, "FrozenTable", "a file that has been opened", f"FrozenTable({path!r:.80})",
                "call FrozenTable.open(path), or FrozenTable.write(path, table) for a new file",
            )  # fmt: skip
        super().__init__(mapped)
        self.path, self._mapped, self._released, self.error = path, mapped, released, mapped.description.error

    # ---- files -----------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: PathLike, verify: bool = False) -> FrozenTable:
        """Opens a file, in the same time for any size: arrays are read from the disk as they are used.

        Args:
          path: of a file that `write` or `update` has made.
          verify: whether to read all of the file and check its digests, see `verify`.

        Returns:
          The open table.

        Raises:
          FrozenError: the file is not a frozen table, or not complete.
          OSError: it cannot be opened.
          TypeError, ValueError: `path` is not the path of a file on this machine.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_frozen_open", dim=1).upsert([7], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     _ = kvjax.serving.FrozenTable.write(folder + "/t.frozen", table)
          ...     frozen = kvjax.serving.FrozenTable.open(folder + "/t.frozen", verify=True)
          >>> frozen
          FrozenTable('doc_frozen_open', dim=1, dtype=float32, rows=1, step=0)
          >>> kvjax.drop_table("doc_frozen_open")
        """
        place = kept(path, "FrozenTable.open")
        frozen = cls(place, read(place))
        if verify:
            frozen.verify()
        return frozen

    @classmethod
    def write(
        cls,
        path: PathLike,
        source: RowsLike,
        *,
        quantise: Quantised | None = None,
        prune: PruneLike | None = None,
        missing: Missing | None = None,
        name: str | None = None,
        base: PathLike | Sequence[PathLike] | None = None,
    ) -> FrozenTable:
        """Writes a file, as a whole or not at all, and opens it.

        A table is copied as by its ``export()``. To save that memory, save the table, and write from the checkpoint:
        its rows are read some at a time, with about 180 MiB in memory and 4 bytes for each row; pruning takes about 24
        more for each row of the checkpoint and 2 for each test, and ``top_k`` or ``keep`` 24 more. More than 32 MiB of
        rows go through unnamed files beside the new one, which take as much space as the rows.

        Args:
          path: of the file. An existing file is replaced; readers that have it open keep the old one.
          source: a `kvjax.Table`, the result of its ``export()``, or the path of a checkpoint, as for
            `kvjax.checkpoint.restore`; or a frozen table, which is copied as it is.
          quantise: "float16", "bfloat16" or "int8" (with a scale for each row), to store rows with fewer bits; by
            default rows are not quantised. `error` reports the error.
          prune: `kvjax.Prune`, or a function from an export to ``(n,)`` bool, true for rows to keep.
          missing: what keys without a row read as: "init" (their initial row, to the bit), "zeros", or a row
            ``(dim,)``. By default the same as in the table; for keys that wait for admission, what ``unadmitted=``
            says. It must be given for an export, which does not contain it, and if a function of yours makes the
            initial rows, because that function needs JAX.
          name: name of the table in the checkpoint, if it has several; or of the frozen table, by default that of
            `source`, or for an export that of the file.
          base: where to look for the checkpoints that a delta builds on, as in `kvjax.checkpoint.restore`.

        Returns:
          The open table.

        Raises:
          TypeError: `source` is none of these, or `prune` is neither a rule nor a function.
          ValueError: rows cannot be quantised in this way, `missing` must be given, `name` is of no table, or an
            argument does not fit the source.
          CheckpointError: the checkpoint is not there, or damaged.
          RuntimeError: the handle of a table is stale.
          OSError: the file cannot be written.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_frozen_write", dim=2).upsert([7, 8], [[127.0, 1.0], [0.0, 0.0]])
          >>> prune = kvjax.Prune(zero_rows=True)
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     frozen = kvjax.serving.FrozenTable.write(folder + "/t.frozen", table, quantise="int8", prune=prune)
          >>> frozen, frozen.lookup(7).tolist()
          (FrozenTable('doc_frozen_write', dim=2, dtype=int8, rows=1, step=0), [127.0, 1.0])
          >>> kvjax.drop_table("doc_frozen_write")
        """
        place = kept(path, "FrozenTable.write")
        if isinstance(source, FrozenTable):
            options = {"quantise": quantise, "missing": missing, "prune": prune, "name": name, "base": base}
            write_again(place, source, source._mapped, options)
            return cls.open(place)
        mine = unquote(place.name.removesuffix(SUFFIX))
        mine = mine if is_name(mine) else "frozen"
        with_contents(source, name, mine, prune, base, lambda contents: write_whole(place, contents, quantise, missing))
        return cls.open(place)

    def update(
        self,
        keys: IdsLike = (),
        rows: ArrayLike = (),
        *,
        removed: IdsLike = (),
        path: PathLike | None = None,
        step: int | None = None,
        missing: Literal["zeros"] | ArrayLike | None = None,
    ) -> FrozenTable:
        """Writes this table with some rows changed, added and removed to a new file, and opens it.

        Unchanged rows are copied as they are stored, so it costs as much as copying the file. This table stays as it
        is, so a reader sees either the old rows or the new ones, never a mixture.

        Args:
          keys: ``(n,)``, distinct.
          rows: ``(n, dim)``, the new rows of these keys.
          removed: ``(m,)`` keys whose rows are removed; they need not have a row.
          path: of the new file; by default it replaces this file. For a table of a `Release` a path is required.
          step: the table's last step now.
          missing: what keys without a row read as in the new table, "zeros" or a row ``(dim,)``; by default as before.

        Returns:
          The new table.

        Raises:
          ValueError: a key occurs twice, or the rows have another shape.
          TypeError: the keys are not integers.
          OSError: the file cannot be written.

        Example:
          >>> import tempfile, kvjax, numpy as np
          >>> table = kvjax.get_table("doc_frozen_update", dim=1).upsert(np.arange(3), np.ones((3, 1)))
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     before = kvjax.serving.FrozenTable.write(f"{folder}/t.frozen", table)
          ...     after = before.update([2, 9], [[5.0], [6.0]], removed=[0])
          >>> before.lookup([0, 1, 2, 9])[:, 0].tolist(), after.lookup([0, 1, 2, 9])[:, 0].tolist()
          ([1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 5.0, 6.0])
          >>> kvjax.drop_table("doc_frozen_update")
        """
        bits, gone = self._bits(keys, "update"), self._bits(removed, "update")
        values: Any = rows
        if bits.size == 0 and np.size(values) == 0:
            values = np.zeros((0, self.dim), np.float32)
        path = self.path if path is None else kept(path, "FrozenTable.update")
        if self._released and path == self.path:
            raise fail(
                ValueError, self.name, "update", "path= of another file", "a table of a release, which never changes",
                "publish a new release, with Releases.update",
            )  # fmt: skip
        if step is not None and not (is_integer(step) and step >= 0):
            mend = "leave it out where it has not changed"
            raise fail(ValueError, self.name, "update", "step= as an integer of 0 or more", repr(step), mend)
        default = None if missing is None else row_of(self.name, "update", missing, self.dim)
        write_changes(path, self._mapped, bits.reshape(-1), values, gone, step, default)
        return type(self).open(path)

    def refresh(self) -> FrozenTable:
        """The table that is at this path now: this one, unless another file has taken its place.

        Returns:
          This table, or the open one of the new file.

        Raises:
          FrozenError, OSError: the new file cannot be opened; this table can still be read.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_frozen_refresh", dim=1).upsert([7], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     frozen = kvjax.serving.FrozenTable.write(folder + "/t.frozen", table)
          ...     same = frozen.refresh() is frozen
          ...     _ = kvjax.serving.FrozenTable.write(folder + "/t.frozen", table.upsert([7], [[2.0]]))
          ...     newer = frozen.refresh()
          >>> same, frozen.lookup(7).tolist(), newer.lookup(7).tolist()
          (True, [1.0], [2.0])
          >>> kvjax.drop_table("doc_frozen_refresh")
        """
        with finding(self.path, "refresh"):
            now = identity_of(os.stat(self.path))
        return self if now == self._mapped.identity else type(self).open(self.path)

    def verify(self) -> None:
        """Reads all of the file and checks its digests.

        Lookups do not check digests. They never read outside the file, whatever its bytes are, but rows of a damaged
        file may be wrong.

        Raises:
          FrozenError: the file is not as it was written.

        Example:
          >>> import tempfile, kvjax
          >>> table = kvjax.get_table("doc_frozen_verify", dim=1).upsert([7], [[1.0]])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     kvjax.serving.FrozenTable.write(folder + "/t.frozen", table).verify()  # no error
          >>> kvjax.drop_table("doc_frozen_verify")
        """
        check(self.path, self._mapped)

    def __reduce__(self) -> Any:
        return _of_digest, (str(self.path), self._mapped.digest, self._released)

    def __copy__(self) -> FrozenTable:
        return self  # nothing in it changes, and its path may have another file by now

    def __deepcopy__(self, memo: object) -> FrozenTable:
        return self

    @property
    def nbytes(self) -> int:
        """The size of the file's arrays in bytes."""
        return sum(array.nbytes for array in self._mapped.arrays.values())

    def __repr__(self) -> str:
        return f"FrozenTable({self.name!r}, dim={self.dim}, dtype={self.dtype}, rows={len(self)}, step={self.step})"

    def as_jax(self, *, capacity: int | None = None) -> FrozenArrays:
        """The same table as arrays of JAX, on the default device, to look up inside ``jit``: plain JAX without custom
        calls, for any platform, with x64 on or off. Flax layers, `kvjax.lookup_bag` and `kvjax.lookup_many` read it,
        too, in the place of the table.

        Args:
          capacity: how many rows the arrays have room for, by default as many as there are. Programs are compiled for
            the sizes of arrays. So the releases of a growing table share a program if they have the same capacity. The
            arrays then have this size from the first release on; the host has a copy of them while they are made.

        Returns:
          A pytree. Pass it to compiled functions as an argument: if a function closes over it, its rows become
          constants of the program.

        Raises:
          ValueError: there are 2**30 rows or more, or more than the capacity.
          FrozenError: a capacity is given, and the file is damaged, so that its hashes are not in order.

        Example:
          >>> import jax, tempfile, kvjax, numpy as np
          >>> table = kvjax.get_table("doc_as_jax", dim=1, initializer=0.5).upsert(2**40, [1.0])
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     arrays = kvjax.serving.FrozenTable.write(f"{folder}/t.frozen", table).as_jax()
          >>> jax.jit(lambda t, keys: t.lookup(keys))(arrays, kvjax.keys([2**40, 7])).tolist()
          [[1.0], [0.5]]
          >>> kvjax.drop_table("doc_as_jax")
        """
        from kvjax.serving._jax import arrays_of

        return arrays_of(self._mapped, capacity)


def _of_digest(path: str, digest: int, released: bool) -> FrozenTable:
    """A table that was pickled, from its file.

    Raises:
      FrozenError: another file has taken its place, or it is damaged.
      OSError: it cannot be opened.
    """
    frozen = FrozenTable(Path(path), mapped := read(Path(path)), released)
    if mapped.digest != digest:
        raise fail(
            FrozenError, frozen.name, "unpickle", f"the file {path!r} that was pickled, of CRC-32 {digest:08x}",
            f"another one in its place, of {mapped.digest:08x}",
            "give the other process the path, and have it open what is there",
        )  # fmt: skip
    return frozen
