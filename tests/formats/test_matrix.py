"""Every target of an export, of every rule, in every number of bits, of tables in one place and over a mesh.

Run with --backend=emulated, the tables are those of a device. What is wanted is said here in plain Python.
"""

import ml_dtypes
import numpy as np
import pytest

import kvjax
from kvjax import convert
from tests.support.checkpoints import assert_equal
from tests.support.checkpoints import restore as restore_by_orbax
from tests.support.checkpoints import save as save_by_orbax
from tests.support.marks import slow

KEYS = np.array([0, 1, 7, 2**31, 2**32, 2**40 + 7, 2**62 + 1, 2**63 - 1, *range(100, 116)])
N, DIM, LAST = len(KEYS), 3, 50
VALUES = (np.random.default_rng(0).normal(size=(N, DIM)) * (np.arange(N) % 4)[:, None]).astype(np.float32)
ROWS = kvjax.Exported(
    KEYS, VALUES, (np.arange(N) * 7 + 3) % N, (np.arange(N) * 11) % LAST, {"nu": VALUES + 1}, np.ones(N, bool),
    np.zeros(N, bool), LAST, N,
)  # fmt: skip
FREQUENCY, VERSION = (dict(zip(KEYS.tolist(), each.tolist(), strict=True)) for each in (ROWS.freqs, ROWS.versions))
ROW = dict(zip(KEYS.tolist(), VALUES, strict=True))
NORM = {key: float(np.sqrt((row.astype(np.float64) ** 2).sum())) for key, row in ROW.items()}


def most_frequent(keys, k):
    return sorted(keys, key=lambda key: -FREQUENCY[key])[:k]


def odd(rows):
    return rows.keys % 2 == 1


RULES = {
    "none": (None, list(ROW)),
    "min_frequency": (kvjax.Prune(min_frequency=9), [key for key in ROW if FREQUENCY[key] >= 9]),
    "max_age": (kvjax.Prune(max_age=20), [key for key in ROW if LAST - VERSION[key] <= 20]),
    "min_norm": (kvjax.Prune(min_norm=2.0), [key for key in ROW if NORM[key] >= 2]),
    "zero_rows": (kvjax.Prune(zero_rows=True), [key for key in ROW if NORM[key] > 0]),
    "top_k": (kvjax.Prune(top_k=5), most_frequent(ROW, 5)),
    "predicate": (kvjax.Prune(predicate=odd), [key for key in ROW if key % 2 == 1]),
    "function": (odd, [key for key in ROW if key % 2 == 1]),
    "all": (
        kvjax.Prune(min_frequency=3, max_age=45, min_norm=0.5, zero_rows=True, top_k=3, keep=[0], predicate=odd),
        [0, *most_frequent([k for k in ROW if k % 2 and FREQUENCY[k] >= 3 and VERSION[k] >= 5 and NORM[k] >= 0.5], 3)],
    ),
    "nothing is left": (kvjax.Prune(top_k=0), []),
}


def stored(row, bits):
    """What a reader gets for a row."""
    if bits == "int8":
        scale = np.float32(np.abs(row).max()) / np.float32(127)
        return np.rint(row / scale if scale else row) * scale
    return row.astype({"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, None: np.float32}[bits]).astype(
        np.float32
    )


def check(rows, wanted, bits=None):
    assert set(rows.keys.tolist()) == set(wanted) and len(rows) == len(wanted)
    for i, key in enumerate(rows.keys.tolist()):
        np.testing.assert_allclose(rows.values[i].astype(np.float32), stored(ROW[key], bits), rtol=2e-7, err_msg=key)
        assert (rows.freqs[i], rows.versions[i]) == (FREQUENCY[key], VERSION[key])
        np.testing.assert_array_equal(rows.slots["nu"][i], ROW[key] + 1)


@slow
@pytest.mark.parametrize("place", ["one place", "mesh"])
@pytest.mark.parametrize("rule", RULES)
def test_every_target_has_the_rows_that_the_rule_keeps(rule, place, make, mesh, tmp_path):
    prune, wanted = RULES[rule]
    table = (make(DIM) if place == "one place" else make(DIM, mesh=mesh(4))).load(ROWS)
    rows, whole, path = table.export(prune, slots=True), table.export(slots=True), tmp_path / "rows"
    check(rows, wanted)
    kvjax.checkpoint.save(tmp_path / "saved", [table])
    for format in ("npz", "safetensors", "parquet"):
        pytest.importorskip({"npz": "numpy", "parquet": "pyarrow"}.get(format, format))
        for bits in (None, "float16", "bfloat16", "int8") if place == "one place" else ("int8",):
            error = getattr(rows, f"to_{format}")(path, quantise=bits)
            check(getattr(convert, f"from_{format}")(path).rows, wanted, bits)
            by_table = path.read_bytes()
            report = convert.export_checkpoint(
                tmp_path / "saved", path, format=format, quantise=bits, prune=prune, slots=True
            )
            assert (report.rows, report.total, report.error) == (len(wanted), N, error)
            if format != "npz":  # which says when it was written
                assert path.read_bytes() == by_table  # one writer, the same rows in the same order
    pytest.importorskip("google_crc32c")
    rows.to_deeprec(path, "t", partitions=2, slots=True)
    check(convert.from_deeprec(path, "t", slots={"nu": "nu"}).rows, wanted)
    convert.export_checkpoint(tmp_path / "saved", path, format="deeprec", prune=prune, slots=True, partitions=2)
    check(convert.from_deeprec(path, "table0", slots={"nu": "nu"}).rows, wanted)
    with pytest.raises(ValueError, match="quantise= for DeepRec"):
        convert.export_checkpoint(tmp_path / "saved", path, format="deeprec", quantise="int8")
    save_by_orbax(tmp_path / "manager", 1, {"t": table}, prune=prune)
    kvjax.checkpoint.save(tmp_path / "pruned", {"t": table}, prune=prune)
    assert_equal(table.export(slots=True), whole)  # it stays as it is
    kvjax.drop_table(table.name)
    check(restore_by_orbax(tmp_path / "manager", 1)["t"].export(slots=True), wanted)
    check(kvjax.checkpoint.restore(tmp_path / "pruned")["t"].export(slots=True), wanted)
    if prune is not None:
        kvjax.checkpoint.prune(tmp_path / "saved", tmp_path / "offline", prune)
        check(kvjax.checkpoint.restore(tmp_path / "offline")["table0"].export(slots=True), wanted)
