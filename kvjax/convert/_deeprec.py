"""DeepRec: embedding variables of a TensorFlow checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from kvjax._formats.bundle import Bundle, latest
from kvjax._formats.columns import MappedColumn
from kvjax._formats.source import Column
from kvjax.convert._imported import Imported
from kvjax.convert._incoming import Incoming, incoming
from kvjax.convert._parts import joined, parts_of, slots_of


def from_deeprec(
    path: str | os.PathLike[str], name: str, *, slots: Mapping[str, str] | None = None,
    fill: Mapping[str, float] | None = None,
) -> Imported:  # fmt: skip
    """Reads an embedding variable of DeepRec, with its frequencies and versions; needs google-crc32c
    (``pip install kvjax[convert]``).

    It reads the tensors that DeepRec's ``embedding_var_ckpt_data.cc`` writes: "<name>-keys", "-values", "-freqs" and
    "-versions"; of a partitioned variable, those of "<name>/part_0", "<name>/part_1", ... The version -1, which DeepRec
    uses for rows that no step has written, becomes 0.

    Args:
      path: a folder of checkpoints (the last is read), or the prefix of one ("model.ckpt-1000").
      name: name of the variable.
      slots: slots to import: DeepRec's name ("Adagrad") to the name in kvjax's optimizer ("sum_of_squares"; after a
        table has been trained with it once, ``table.export(slots=True).slots`` has the names). Others are left.
      fill: see `from_tfra`.

    Returns:
      `Imported`: rows in the order of the files, slots ``(n, dim)`` or ``(n,)`` by their names in kvjax's optimizer.

    Raises:
      FileError: there is no such checkpoint or variable, a part is missing, the bytes are damaged, or tensors do not
        fit each other.
      ImportError: google-crc32c is not installed.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> rows = kvjax.convert.from_dense(np.ones((3, 2), np.float32)).rows
      >>> prefix = tempfile.mkdtemp() + "/model.ckpt-1"
      >>> rows.to_deeprec(prefix, "items", partitions=2)
      >>> imported = kvjax.convert.from_deeprec(prefix, "items")
      >>> sorted(imported.rows.keys.tolist())
      [0, 1, 2]
    """
    return open_deeprec(path, name, slots=slots, fill=fill).read()


def open_deeprec(
    path: str | os.PathLike[str], name: str, *, slots: Mapping[str, str] | None = None,
    fill: Mapping[str, float] | None = None,
) -> Incoming:  # fmt: skip
    """As `from_deeprec`, to be read piece by piece."""
    bundle = Bundle(latest(path, "from_deeprec"))
    parts = parts_of(bundle, name)
    columns: dict[str, Column] = {"keys": joined(bundle, parts, "-keys"), "values": joined(bundle, parts, "-values")}
    left: list[str] = []
    for column in ("freqs", "versions"):
        if any(f"{part}-{column}" in bundle.entries for part in parts):
            array = joined(bundle, parts, f"-{column}")
            if array.shape[0]:
                columns[column] = (
                    MappedColumn(array, lambda rows: np.maximum(rows, 0)) if column == "versions" else array
                )
            elif columns["keys"].shape[0]:
                left.append(f"{column}, which this variable did not keep")
    if any(f"{part}-keys_filtered" in bundle.entries for part in parts):
        waiting = joined(bundle, parts, "-keys_filtered").shape[0]
        left += [f"{waiting} keys that its filter had not admitted"] if waiting else []
    if any(f"{part}-freq_keys" in bundle.entries for part in parts):
        left.append("frequencies as TFPlus writes them, which from_tfplus reads")
    taken, others = slots_of(bundle, name, parts, slots)
    return incoming(bundle.prefix, f"DeepRec's {name!r}", columns, joined=taken, fill=fill, left=left + others)
