"""DeepRec's layout: an embedding variable as tensors of a TensorFlow bundle, for each part of it.

    <name>-keys  -values  -freqs  -versions             of <name>/part_0, <name>/part_1, ... where it is partitioned
    <name>-keys_filtered  -freqs_filtered  -versions_filtered     keys that its filter has not admitted yet
    <name>-partition_offset  -partition_filter_offset    the first row of each of 1000 buckets, key % 1000

As DeepRec's embedding_var_ckpt_data.cc writes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from kvjax._formats import bundle
from kvjax._formats.errors import FileError

BUCKETS = 1000


def part_names(name: str, parts: int) -> list[str]:
    """Of the parts of a variable."""
    return [name] if parts == 1 else [f"{name}/part_{i}" for i in range(parts)]


def write(
    prefix: str | os.PathLike[str], name: str, columns: Mapping[str, np.ndarray], slots: Mapping[str, np.ndarray],
    parts: int,
) -> None:  # fmt: skip
    """Writes a variable.

    Args:
      prefix: of the files.
      name: of the variable.
      columns: "keys" ``(n,)`` int64, "values" ``(n, dim)``, "freqs" and "versions" ``(n,)`` int64.
      slots: of its slots, ``(n, dim)`` each; DeepRec has a variable for each, named "<part>/<slot>".
      parts: into which it is partitioned, by ``key % 1000 % parts``.

    Raises:
      FileError: a key is negative: DeepRec loses those at its next save, because it takes ``key % 1000`` of C++.
    """
    keys = columns["keys"].view(np.int64)
    if (keys < 0).any():
        raise FileError(
            prefix, "keys from 0 to 2**63 - 1", f"{int((keys < 0).sum())} others, the first {keys[keys < 0][0]}",
            "hash the ids to 63 bits, or leave these rows out with prune",
        )  # fmt: skip
    if not 1 <= parts <= BUCKETS:
        raise FileError(prefix, f"1 to {BUCKETS} partitions", f"{parts}", "choose a number of these")
    buckets = keys % BUCKETS
    tensors: dict[str, bundle.Tensor] = {}
    for i, part in enumerate(part_names(name, parts)):
        mine = np.flatnonzero(buckets % parts == i)
        rows = mine[np.argsort(buckets[mine], kind="stable")]
        offsets = np.searchsorted(buckets[rows], np.arange(BUCKETS + 1)).astype(np.int32)
        variables = {part: columns["values"]} | {f"{part}/{slot}": array for slot, array in slots.items()}
        for variable, values in variables.items():
            kept = {
                "-keys": keys[rows],
                "-values": values[rows],
                "-freqs": columns["freqs"][rows],
                "-versions": columns["versions"][rows],
                "-partition_offset": offsets,
                "-partition_filter_offset": np.zeros(BUCKETS + 1, np.int32),
            } | {f"-{column}_filtered": np.zeros(0, np.int64) for column in ("keys", "freqs", "versions")}
            tensors |= {variable + end: bundle.tensor(array) for end, array in kept.items()}
    bundle.write(prefix, tensors)
