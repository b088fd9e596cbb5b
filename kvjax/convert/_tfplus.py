"""TFPlus: KvVariables of a TensorFlow checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from kvjax._formats.bundle import Bundle, latest
from kvjax._formats.columns import MappedColumn
from kvjax._formats.errors import FileError
from kvjax._formats.source import Source, ranges
from kvjax.convert._imported import Imported
from kvjax.convert._incoming import Incoming, Joined, incoming
from kvjax.convert._parts import joined, parts_of, slots_of


def from_tfplus(
    path: str | os.PathLike[str], name: str, *, slots: Mapping[str, str] | None = None,
    fill: Mapping[str, float] | None = None,
) -> Imported:  # fmt: skip
    """Reads a KvVariable of TFPlus, with its frequencies; needs google-crc32c (``pip install kvjax[convert]``).

    It reads the names and types of TFPlus' ``kv_variable_ops.py`` and ``dynamic_save.hpp``: "<name>-keys", "-values",
    "-freq_keys" and "-freq_values" (the low 16 bits are the frequency, the high ones a day); of a partitioned variable,
    those of "<name>/part_0", ... Slots are variables named "<name>/<slot>". Rows without a frequency get 0.

    Args:
      path: a folder of checkpoints (the last is read), or the prefix of one.
      name: name of the variable.
      slots: slots to import: TFPlus' name ("GroupAdam") to the name in kvjax's optimizer, as in `from_deeprec`. Others
        are left.
      fill: see `from_tfra`.

    Returns:
      `Imported`: rows in the order of the files, slots ``(n, dim)`` or ``(n,)`` by their names in kvjax's optimizer.

    Raises:
      FileError: there is no such checkpoint or variable, a part is missing, it is a delta, the bytes are damaged, or
        tensors do not fit each other.
      ImportError: google-crc32c is not installed.

    Example:
      >>> import tempfile, kvjax, numpy as np
      >>> rows = kvjax.convert.from_dense(np.ones((3, 2), np.float32)).rows
      >>> prefix = tempfile.mkdtemp() + "/model.ckpt-1"
      >>> rows.to_deeprec(prefix, "items")  # whose keys and values have the names of TFPlus
      >>> sorted(kvjax.convert.from_tfplus(prefix, "items").rows.keys.tolist())
      [0, 1, 2]
    """
    return open_tfplus(path, name, slots=slots, fill=fill).read()


def open_tfplus(
    path: str | os.PathLike[str], name: str, *, slots: Mapping[str, str] | None = None,
    fill: Mapping[str, float] | None = None,
) -> Incoming:  # fmt: skip
    """As `from_tfplus`, to be read piece by piece."""
    bundle = Bundle(latest(path, "from_tfplus"))
    parts = parts_of(bundle, name)
    for part in parts:
        if f"{part}-need_full_import" in bundle.entries and not bundle.read(f"{part}-need_full_import").all():
            raise FileError(bundle.prefix, "a full checkpoint", f"a delta of {name!r}", "give the full one")
    columns = {"keys": joined(bundle, parts, "-keys"), "values": joined(bundle, parts, "-values")}
    left: list[str] = []
    if any(f"{part}-versions" in bundle.entries for part in parts):
        left.append("frequencies and versions as DeepRec writes them, which from_deeprec reads")
    taken, others = slots_of(bundle, name, parts, slots)
    if any(f"{part}-freq_keys" in bundle.entries for part in parts):
        of, words = joined(bundle, parts, "-freq_keys"), joined(bundle, parts, "-freq_values")
        if of.shape != words.shape[:1] or words.shape[1:] not in ((), (1,)) or words.dtype.kind not in "iu":
            raise FileError(bundle.prefix, "one frequency for each key", f"{words.shape} for {of.shape} keys")
        if words.dtype == np.uint32 and any((words[a:b] >> 16).any() for a, b in ranges(words.shape[0], 4)):
            left.append("the days of the last updates, which are no steps")
        counts = MappedColumn(words, lambda rows: rows.reshape(-1) & 0xFFFF, of.shape)
        frequencies = Source.of({"keys": of, "values": counts}, {})
        taken["freqs"] = Joined(frequencies, "the frequencies", "the frequencies of {} keys without a row")
    for end, what in (("blacklist", "keys whose rows group lasso has removed"), ("init_table", "initial rows")):
        count = sum(bundle.entries[f"{part}-{end}"].shape[0] for part in parts if f"{part}-{end}" in bundle.entries)
        left += [f"{count} {what}"] if count else []
    return incoming(bundle.prefix, f"TFPlus' {name!r}", columns, joined=taken, fill=fill, left=left + others)
