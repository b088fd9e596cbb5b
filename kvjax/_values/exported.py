"""Exported rows: a table's contents as NumPy arrays."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvjax._formats import deeprec, npz, parquet, safetensors
from kvjax._formats.choices import Quantised
from kvjax._formats.quantise import QuantisationReport, Quantiser
from kvjax._formats.quantised_source import quantised
from kvjax._formats.source import Source, native
from kvjax._values.arguments import is_integer
from kvjax._values.arrays import check_all_there, check_no_mask
from kvjax._values.dtypes import is_float
from kvjax._values.errors import fail, warn, where_of
from kvjax._values.key_width import KEY_DTYPES

SLOT = "slot."
"""What the name of a slot's column begins with."""


@dataclasses.dataclass(frozen=True)
class Exported:
    """Rows of a table, sorted by (bucket, key), so that equal tables give equal arrays.

    Attributes:
      keys: ``(n,)`` int64 (uint64 for a table of unsigned keys).
      values: ``(n, dim)`` of the table's dtype.
      freqs: ``(n,)`` int64, occurrences in training.
      versions: ``(n,)`` int64, the step that last wrote the row.
      slots: optimizer slots by name, each ``(n, ...)``. `Table.export` copies them only with ``slots=True``; score
        functions of `kvjax.evict` always get them.
      has_slots: ``(n,)`` bool, false if no optimizer has written the row's slots yet.
      pinned: ``(n,)`` bool, rows that are never evicted.
      last_step: the table's last step; ages are counted from it.
      total: rows in the table, before pruning.
      key_dtype: of the table, which the arrays of keys do not say of one with ids of 32 bits; None for theirs.

    Example:
      >>> import kvjax, numpy as np
      >>> table = kvjax.get_table("doc_exported_class", dim=2).upsert([7], [[1.0, 2.0]])
      >>> rows = table.export()
      >>> rows, rows.keys.tolist(), rows.values.tolist(), rows.freqs.tolist()
      (Exported(rows=1, dim=2, last_step=0, slots=[]), [7], [[1.0, 2.0]], [0])
      >>> kvjax.drop_table("doc_exported_class")
    """

    keys: np.ndarray
    values: np.ndarray
    freqs: np.ndarray
    versions: np.ndarray
    slots: dict[str, np.ndarray]
    has_slots: np.ndarray
    pinned: np.ndarray
    last_step: int
    total: int
    key_dtype: str | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        rows = f"{len(self)} of {self.total}" if len(self) != self.total else f"{self.total}"
        return (
            f"Exported(rows={rows}, dim={self.values.shape[-1]}, last_step={self.last_step}, slots={list(self.slots)})"
        )

    def take(self, keep: np.ndarray) -> Exported:
        """The rows where `keep` is true, as an export of them with the same `last_step` and `total`.

        Args:
          keep: ``(n,)`` bool; or numbers of rows ``(m,)``, in the order in which they are to be.

        Raises:
          IndexError: the mask has another length, or there is no row of a number.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_take", dim=1).upsert(np.arange(3), [[0.0], [1.0], [2.0]])
          >>> rows = table.export()
          >>> kept = rows.take(rows.values[:, 0] > 0.5)
          >>> sorted(kept.keys.tolist()), kept
          ([1, 2], Exported(rows=2 of 3, dim=1, last_step=0, slots=[]))
          >>> kvjax.drop_table("doc_take")
        """
        check_no_mask(keep, "export, take")
        keep = np.asarray(keep)
        if keep.dtype == np.bool_ and keep.shape != (len(self),):
            raise IndexError(
                f"kvjax: export, take: want a mask of its {len(self)} rows, got {keep.shape}; give one bool for each"
            )
        kept = {name: array[keep] for name, array in self.columns().items()}
        return self.of_columns(kept, self.last_step, self.total, self.key_dtype)

    def to_parquet(
        self, path: str | os.PathLike[str], quantise: Quantised | None = None, slots: bool = True
    ) -> QuantisationReport | None:
        """Writes the rows as a Parquet file, which needs pyarrow (``pip install kvjax[parquet]``).

        The file has a column for each array: keys as int64 or uint64, and rows as lists of a fixed size (bfloat16 as
        float32, which holds it exactly). ``last_step`` and ``key_dtype`` are in the metadata of the file.

        Args:
          path: of the file, which is replaced.
          quantise: how to store the rows with fewer bits, as `to_safetensors` does; by default as they are.
          slots: whether to write the slots that the export has.

        Returns:
          What quantisation has changed; None without it.

        Raises:
          ImportError: pyarrow is not installed.
          ValueError: an element is too large for float16 or bfloat16, or is not finite (int8).
          OSError: the file cannot be written.

        Example:
          >>> import tempfile, kvjax, numpy as np
          >>> table = kvjax.get_table("doc_to_parquet", dim=2).upsert([7], [[1.0, 2.0]])
          >>> path = tempfile.mkdtemp() + "/rows.parquet"
          >>> table.export().to_parquet(path)
          >>> kvjax.convert.from_parquet(path).rows.values.tolist()
          [[1.0, 2.0]]
          >>> kvjax.drop_table("doc_to_parquet")
        """
        source, quantiser = self._source(path, quantise, slots)
        parquet.write(path, source)
        return quantiser and quantiser.report()

    def to_safetensors(
        self, path: str | os.PathLike[str], quantise: Quantised | None = None, slots: bool = True
    ) -> QuantisationReport | None:
        """Writes the rows as a safetensors file: a tensor for each array, and ``last_step`` in the metadata.

        Rows can be stored with fewer bits: rounded to ``"float16"`` or ``"bfloat16"``, or as ``"int8"`` with a column
        ``scales`` ``(n,)`` float32, the largest absolute element of each row / 127, so that the row is
        ``values * scales[:, None]`` and no element is off by more than half a scale.

        Read it with NumPy (``safetensors.numpy.load_file``): with x64 off, ``safetensors.flax`` makes int32 of the
        keys.

        Args:
          path: of the file, which is replaced.
          quantise: "float16", "bfloat16" or "int8"; by default rows stay as they are.
          slots: whether to write the slots that the export has.

        Returns:
          What quantisation has changed (the largest and the root mean square change of an element, the least cosine
          of a row, and the bytes); None without it.

        Raises:
          ValueError: an element is too large for float16 or bfloat16, or is not finite (int8).
          OSError: the file cannot be written.

        Example:
          >>> import tempfile, kvjax, numpy as np
          >>> table = kvjax.get_table("doc_st", dim=2).upsert(np.arange(2), [[1.0, 0.5], [0.0, 127.0]])
          >>> error = table.export().to_safetensors(tempfile.mkdtemp() + "/rows.safetensors", quantise="int8")
          >>> round(error.max, 4), error.bytes_before, error.bytes_after
          (0.0039, 16, 12)
          >>> kvjax.drop_table("doc_st")
        """
        source, quantiser = self._source(path, quantise, slots)
        safetensors.write(path, source)
        return quantiser and quantiser.report()

    def to_npz(
        self, path: str | os.PathLike[str], quantise: Quantised | None = None, slots: bool = True
    ) -> QuantisationReport | None:
        """Writes the rows as an npz file, NumPy's archive of arrays, not compressed.

        It has an array for each column. NumPy's format has no bfloat16, so such rows are stored as their bits in
        uint16. The member "kvjax.json" records this, and ``last_step``.

        Args:
          path: of the file, which is replaced.
          quantise: how to store the rows with fewer bits, as `to_safetensors` does; by default as they are.
          slots: whether to write the slots that the export has.

        Returns:
          What quantisation has changed; None without it.

        Raises:
          ValueError: an element is too large for float16 or bfloat16, or is not finite (int8).
          OSError: the file cannot be written.

        Example:
          >>> import tempfile, kvjax, numpy as np
          >>> table = kvjax.get_table("doc_npz", dim=2).upsert(np.array([7]), [[1.0, 2.0]])
          >>> path = tempfile.mkdtemp() + "/rows.npz"
          >>> table.export().to_npz(path)
          >>> np.load(path)["values"].tolist()
          [[1.0, 2.0]]
          >>> kvjax.drop_table("doc_npz")
        """
        source, quantiser = self._source(path, quantise, slots)
        npz.write(path, source)
        return quantiser and quantiser.report()

    def to_deeprec(self, prefix: str | os.PathLike[str], name: str, partitions: int = 1, slots: bool = False) -> None:
        """Writes the rows as an embedding variable of DeepRec, in a TensorFlow checkpoint; needs google-crc32c
        (``pip install kvjax[convert]``).

        The files are "<prefix>.index" and "<prefix>.data-00000-of-00001", with the tensors "<name>-keys", "-values",
        "-freqs", "-versions" and those of an empty filter. With several partitions, "<name>/part_0", "<name>/part_1",
        ... have such tensors. The layout is that of DeepRec's ``embedding_var_ckpt_data.cc``.

        Args:
          prefix: of the files, which are replaced.
          name: of the variable.
          partitions: 1 to 1000; a key is in partition ``key % 1000 % partitions``.
          slots: whether to write the export's slots, as the variables "<name>/<slot>", which have the keys with
            slots alone. Slots that do not have the shape of a row are left out, and pins, with a warning.

        Raises:
          ImportError: google-crc32c is not installed.
          ValueError: a key is negative, or 2**63 or more, which DeepRec cannot save; or partitions are out of range.
          OSError: the files cannot be written.

        Example:
          >>> import os, tempfile, kvjax, numpy as np
          >>> table = kvjax.get_table("doc_to_deeprec", dim=2).upsert([7], [[1.0, 2.0]])
          >>> folder = tempfile.mkdtemp()
          >>> table.export().to_deeprec(folder + "/model.ckpt-1", "items")
          >>> sorted(os.listdir(folder))
          ['model.ckpt-1.data-00000-of-00001', 'model.ckpt-1.index']
          >>> kvjax.drop_table("doc_to_deeprec")
        """
        source, _ = self._source(prefix, None, slots)
        left = deeprec.write(prefix, name, source, {slot: SLOT + slot for slot in self.slots if slots}, partitions)
        if left:
            warn(f"kvjax: {os.fspath(prefix)}: left out {'; '.join(left)}")

    def _source(
        self, path: str | os.PathLike[str], dtype: Quantised | None, slots: bool
    ) -> tuple[Source, Quantiser | None]:
        rows = self.checked(None, os.fspath(path))
        columns = {name: array for name, array in rows.columns().items() if slots or not name.startswith(SLOT)}
        meta = {"last_step": str(rows.last_step), "key_dtype": rows.fitting_key_dtype}
        source = Source.of(columns, meta)
        return (source, None) if dtype is None else quantised(source, dtype, os.fspath(path))

    @property
    def fitting_key_dtype(self) -> str:
        """`key_dtype`, if the keys still have its sign; else theirs."""
        unsigned, own = self.keys.dtype.kind == "u", self.keys.dtype.name
        if self.key_dtype is not None and self.key_dtype.startswith("u") == unsigned:
            return self.key_dtype
        return own if own in KEY_DTYPES else "uint64" if unsigned else "int64"

    def checked(self, table: str | None, op: str) -> Exported:
        """The same as NumPy arrays in the machine's byte order, if it has the form of what a table gives.

        Anybody may have put it together, or replaced some of it.

        Args:
          table: which an error names, if any.
          op: the operation that it names.

        Raises:
          TypeError, ValueError: it does not have that form.

        Example:
          >>> import dataclasses, kvjax, numpy as np
          >>> rows = kvjax.get_table("doc_checked", dim=1).upsert([7, 9], [[1.0], [2.0]]).export()
          >>> try:
          ...     dataclasses.replace(rows, keys=rows.keys[:1]).checked("doc_checked", "load")
          ... except ValueError as error:
          ...     print(str(error)[:63])
          kvjax: table 'doc_checked', load: want 1 rows in each column, g
          >>> kvjax.drop_table("doc_checked")
        """
        slots: Any = self.slots  # the user's, as all that comes below
        if not (isinstance(slots, Mapping) and all(isinstance(name, str) for name in slots)):
            mend = "give what table.export(slots=True) gives, or slots={}"
            raise fail(TypeError, table, op, "slots as a dict of arrays by name", f"{slots!r:.200}", mend)
        mend = "give what table.export() gives"
        if not is_integer(self.last_step) or not 0 <= int(self.last_step) < 2**63:
            want = "last_step as an integer from 0 to 2**63 - 1"
            raise fail(ValueError, table, op, want, f"{self.last_step!r:.200}", mend)
        if self.key_dtype not in (None, *KEY_DTYPES):
            raise fail(ValueError, table, op, f"key_dtype= in {KEY_DTYPES}, or None", f"{self.key_dtype!r:.200}", mend)
        for array in self.columns().values():
            check_all_there(array, where_of(table, op))
        columns = {name: np.asarray(array) for name, array in self.columns().items()}
        columns = {name: array.astype(native(array.dtype), copy=False) for name, array in columns.items()}
        for name, array in columns.items():
            of_slot = name.startswith(SLOT)
            if array.ndim == 0 or not (of_slot or array.ndim == 1 + (name == "values")):
                shape = "(n, ...)" if of_slot else "(n, dim)" if name == "values" else "(n,)"
                raise fail(ValueError, table, op, f"{name} {shape}", f"an array {array.shape}", mend)
        lengths = {name: len(array) for name, array in columns.items()}
        if set(lengths.values()) != {n := len(columns["keys"])}:
            raise fail(ValueError, table, op, f"{n} rows in each column", f"{lengths}", mend)
        check_keys(columns["keys"].dtype, table, op)
        for name, kinds in (("freqs", "iu"), ("versions", "iu"), ("has_slots", "biu"), ("pinned", "biu")):
            if columns[name].dtype.kind not in kinds:
                want = f"{name} of {'integers' if kinds == 'iu' else 'bool'}"
                raise fail(TypeError, table, op, want, f"{columns[name].dtype}", "convert them first")
        numbers = {"values": ("values of numbers", "convert them first")}
        numbers |= {slot_column(name): (f"numbers of the slot {name!r}", "leave it out") for name in slots}
        for name, (want, mend_of_it) in numbers.items():
            dtype = columns[name].dtype
            if dtype.kind not in "biuf" and not is_float(dtype):
                raise fail(TypeError, table, op, want, f"{dtype}", mend_of_it)
        least, most = int(columns["freqs"].min(initial=0)), int(columns["freqs"].max(initial=0))
        if least < 0 or most >= 2**63:
            raise fail(ValueError, table, op, "freqs from 0 to 2**63 - 1", f"{least if least < 0 else most}", mend)
        oldest, newest = int(columns["versions"].min(initial=0)), int(columns["versions"].max(initial=0))
        if oldest < 0 or newest > self.last_step:
            want, got = f"versions from 0 to last_step={self.last_step}", f"{oldest if oldest < 0 else newest}"
            raise fail(ValueError, table, op, want, got, "give last_step= the greatest, from which ages are counted")
        return Exported.of_columns(columns, int(self.last_step), self.total, self.key_dtype)

    def columns(self) -> dict[str, np.ndarray]:
        """Every array of the export by name, slots as "slot.<name>"; each ``(n, ...)``.

        Example:
          >>> import kvjax, numpy as np
          >>> table = kvjax.get_table("doc_columns", dim=2).upsert(np.arange(3), np.ones((3, 2)))
          >>> {name: array.shape for name, array in table.export().columns().items()}
          {'keys': (3,), 'values': (3, 2), 'freqs': (3,), 'versions': (3,), 'has_slots': (3,), 'pinned': (3,)}
          >>> kvjax.drop_table("doc_columns")
        """
        plain = {name: getattr(self, name) for name in ROW_COLUMNS}
        return plain | {SLOT + name: array for name, array in self.slots.items()}

    @classmethod
    def of_columns(
        cls, columns: Mapping[str, np.ndarray], last_step: int, total: int | None = None, key_dtype: str | None = None
    ) -> Exported:
        """Makes an export of these columns.

        Args:
          columns: as `columns` returns them.
          last_step: of the table.
          total: rows in the table; by default as many as the columns have.
          key_dtype: of the table; None for that of the keys.
        """
        slots = {name.removeprefix(SLOT): array for name, array in columns.items() if name.startswith(SLOT)}
        plain = {name: columns[name] for name in ROW_COLUMNS}
        whole = len(plain["keys"]) if total is None else total
        return cls(**plain, slots=slots, last_step=last_step, total=whole, key_dtype=key_dtype)


def check_keys(dtype: np.dtype[Any], table: str | None, op: str) -> None:
    """Whether keys are of a type that tables give them in.

    Raises:
      TypeError: they are of another.
    """
    if dtype not in (np.dtype(np.int64), np.dtype(np.uint64)):
        raise fail(TypeError, table, op, "keys (n,) int64 or uint64", dtype.str, "convert them first")


ROW_COLUMNS = ("keys", "values", "freqs", "versions", "has_slots", "pinned")
"""The columns that the rows of every table have; beside them there is one for each slot."""


def slot_column(slot: str) -> str:
    """The name of a slot's column."""
    return SLOT + slot
