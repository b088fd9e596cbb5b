"""Files and arguments of imports that do not fit each other, and rows that are not finite."""

import struct
from pathlib import Path

import numpy as np
import pytest

from kvjax import convert
from kvjax._formats import bundle

GOLDEN = Path(__file__).parents[1] / "golden"
KEYS, VALUES = np.array([1, 2]), np.ones((2, 3), np.float32)
WHOLE = {"v-keys": KEYS, "v-values": VALUES}
PARTS = {f"v/part_{i}-{end}": x for i in (0, 1) for end, x in (("keys", KEYS + 2 * i), ("values", VALUES))}
LOST = "want the tensor 'v/part_1-{}' of numbers, got none of that name"
BUNDLES = {
    "lost part": (
        {name.replace("part_1", "part_2"): x for name, x in PARTS.items()},
        r"m: want all parts of 'v', got the parts \[0, 2\]", ("deeprec", "tfplus"),
    ),
    "other width": (
        PARTS | {"v/part_1-values": VALUES[:, :2].copy()},
        r"m: want parts of values of one width, got \[\(2, 3\), \(2, 2\)\]", ("deeprec", "tfplus"),
    ),
    # Of two parts one has lost it: its rows are not taken as if nobody had kept the column.
    "freqs": (PARTS | {"v/part_0-freqs": KEYS}, LOST.format("freqs"), ("deeprec",)),
    "versions": (PARTS | {"v/part_0-versions": KEYS}, LOST.format("versions"), ("deeprec",)),
    "filtered": (PARTS | {"v/part_0-keys_filtered": KEYS}, LOST.format("keys_filtered"), ("deeprec",)),
    "freq_keys": (PARTS | {"v/part_0-freq_keys": KEYS}, LOST.format("freq_keys"), ("tfplus",)),
    "two frequencies": (
        WHOLE | {"v-freq_keys": KEYS, "v-freq_values": np.ones((2, 2), np.uint16)},
        r"m: want one frequency for each key, got \(2, 2\) for \(2,\) keys", ("tfplus",),
    ),
    "delta": (
        WHOLE | {"v-need_full_import": np.array([False])},
        "m: want a full checkpoint, got a delta of 'v'; give the full one", ("tfplus",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BUNDLES)
def test_bundles(case, tmp_path):
    pytest.importorskip("google_crc32c")
    tensors, text, systems = BUNDLES[case]
    bundle.write(tmp_path / "m", {name: bundle.tensor(array) for name, array in tensors.items()})
    for system in systems:
        with pytest.raises(convert.FileError, match=text):
            getattr(convert, f"from_{system}")(tmp_path / "m", "v")


def dumped(kind, dtype, data):
    return b"e".ljust(256) + struct.pack(">I", kind) + bytes(32) + struct.pack(">I", dtype) + data


DUMPS = {
    "e-key": [(dumped(1, 1, b""), "want SOK's header of kind 0, got 296 bytes of kind 1")],
    "e-weight": [
        (dumped(1, 99, b""), "want SOK's header of kind 1, got 296 bytes of kind 1 and dtype 99"),
        (b"abc", "want SOK's header of kind 1, got 3 bytes"),
        (dumped(1, 5, bytes(23)), "want whole elements of float32, got 23 bytes"),
    ],
    "e-Adam-m": [(dumped(2, 5, bytes(20)), r"want \(2, 3\), got 5 elements")],
    "meta_info": [(b"\0\0\0\2abc", "want 620 bytes for 2 tables, got 7")],
}


@pytest.mark.parametrize("file", DUMPS)
def test_dumps_of_sok(file, tmp_path):
    for data, text in DUMPS[file]:
        (tmp_path / "e-key").write_bytes(dumped(0, 1, KEYS.tobytes()))
        (tmp_path / "e-weight").write_bytes(dumped(1, 5, VALUES.tobytes()))
        (tmp_path / file).write_bytes(data)
        with pytest.raises(convert.FileError, match=f"{file}: {text}"):
            convert.from_sok(tmp_path, "e", slots={"Adam-m": "mu"} if "Adam" in file else None)


@pytest.mark.parametrize("system", ["tfra", "npz"])
def test_rows_that_are_not_finite_are_taken_and_said(system, tmp_path):
    """Which is how a dtype can look that files without one do not have."""
    rows = np.array([[1.0, 2.0], [np.nan, 3.0], [-np.inf, np.inf]], np.float32)
    np.savez(tmp_path / "t.npz", keys=np.arange(3), values=rows)
    np.arange(3).tofile(tmp_path / "t-keys")
    rows.tofile(tmp_path / "t-values")
    read, args = (convert.from_npz, (tmp_path / "t.npz",)) if system == "npz" else (convert.from_tfra, (tmp_path, "t"))
    mend = "" if system == "npz" else ", or say dim=, key_dtype= and dtype= of the variable.*"
    warns = f"2 of 3 rows of .* have a NaN or an infinity, and are taken as they are; look for the cause there{mend}$"
    with pytest.warns(UserWarning, match=warns) as caught:
        np.testing.assert_array_equal(read(*args).rows.values, rows)
    assert len(caught) == 1 and caught[0].filename == __file__
    given = {} if system == "npz" else {"format": "tfra", "variable": "t"}
    with pytest.warns(UserWarning, match=warns):
        report = convert.import_checkpoint(args[0], tmp_path / "out", **given)
    assert (report.dim, report.dtype, report.rows) == (2, "float32", 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_dtype": "int46"}, "want key_dtype= of integers, such as 'int64', got 'int46'"),
        ({"key_dtype": []}, "want key_dtype= of integers"), ({"dtype": "x"}, "want dtype= of numbers, such as"),
        ({"dtype": None}, "want dtype= of numbers, .* got None"),  # of which NumPy makes float64
        ({"dim": 3.0}, "want dim= as an integer of 1 or more, got 3.0; leave it out"),
        ({"dim": 0}, "want dim= as an integer of 1 or more, got 0"),
        ({"slots": {"m": 3}}, "want slots= with a name of kvjax's for 'm', got 3; give a string"),
        ({"slots": {3: "m"}}, "want slots= by the names of slots, got 3; give a string for each"),
        ({"fill": {3: 3}}, "want fill= by the names of slots, got 3; give a string for each"),
        ({"fill": {"m": float("nan")}}, "got nan; give an integer of 32 bits, or a finite float"),
        ({"slots": "m"}, "want slots= by the names of slots, got str"),
        ({"fill": ["m"]}, "want fill= by the names of slots, got list"),
    ],
)  # fmt: skip
def test_what_tfra_files_are_said_to_be(options, message):
    with pytest.raises(convert.FileError, match=message):
        convert.from_tfra(GOLDEN / "tfra", "items", **({"dim": 3} | options))


@pytest.mark.parametrize("system", ["tfra", "dynamicemb", "sok", "deeprec", "tfplus"])
def test_a_variable_has_a_name(system):
    pytest.importorskip("google_crc32c")
    folder = GOLDEN / ("tfra" if system in ("dynamicemb", "sok") else system)
    with pytest.raises(convert.FileError, match="want the name of a variable, got None; give a string"):
        getattr(convert, f"from_{system}")(folder, None)
