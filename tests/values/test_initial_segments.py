"""Initial rows whose segments have initializers of their own."""

import json

import jax
import numpy as np
import pytest

import kvjax
from tests.support.marks import few, few_rows
from tests.support.tables import AWKWARD

SEGMENTS = [
    (9, {"bias": (0, 0.5)}, kvjax.initializers.normal(0.1), {0: "bias"}),
    (9, {"bias": (-1, 2), "low": (slice(1, 4), kvjax.initializers.uniform(-1.0, 1.0))}, 0.0,
     {8: "bias", 1: "low", 2: "low", 3: "low"}),
    (6, {"mask": ([False, True, False, True], kvjax.initializers.truncated_normal(0.3))}, kvjax.initializers.ones,
     {1: "mask", 3: "mask"}),
    (2, {"a": ([1], np.float32(0.25))}, kvjax.initializers.zeros(), {1: "a"}),
    (130, {"wide": (slice(64, None, 1), kvjax.initializers.variance_scaling(3.0))}, kvjax.initializers.normal(1.0),
     dict.fromkeys(range(64, 130), "wide")),
]  # fmt: skip


@pytest.mark.parametrize(("dim", "parts", "rest", "owners"), few_rows(SEGMENTS, 0, 1, 2))
@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float16"], "float32"))
def test_segments_have_the_bits_of_rows_that_are_all_like_them(dim, parts, rest, owners, dtype, make, tmp_path):
    table = make(dim, initializer=kvjax.initializers.segments(parts, rest=rest), seed=7, dtype=dtype)
    widths = {name: list(owners.values()).count(name) for name in parts}
    each = {name: getattr(part, "of_dim", lambda _, part=part: part)(widths[name]) for name, (_, part) in parts.items()}
    want = np.asarray(make(dim, initializer=rest, seed=7, dtype=dtype).lookup(AWKWARD)).copy()
    for column, name in owners.items():
        alike = make(dim, initializer=each[name], seed=7, dtype=dtype)
        want[:, column] = np.asarray(alike.lookup(AWKWARD))[:, column]
    np.testing.assert_array_equal(table.lookup(AWKWARD), want)
    inserted, table = table.lookup_or_insert(AWKWARD[::2])
    np.testing.assert_array_equal(inserted, want[::2])
    kvjax.checkpoint.save(tmp_path / "c", [table])  # and a process that knows nothing of it makes the table again
    kvjax.drop_table(table.name)
    again = kvjax.checkpoint.restore(tmp_path / "c")[table.name]
    assert again.spec.initializer == table.spec.initializer
    np.testing.assert_array_equal(again.lookup(AWKWARD), want)


def test_segments_of_another_width_are_refused(make):
    """Those of a table that is there, say of a narrower one."""
    segments = make(3, initializer=kvjax.initializers.segments({"bias": (0, 0.5)}, rest=0.0)).spec.initializer
    assert make(3, initializer=segments).spec.initializer == segments
    for dim in (1, 2, 5):
        with pytest.raises(ValueError, match=rf"want segments of rows of width dim={dim}, got .* \(1, 3\)"):
            make(dim, initializer=segments)


def test_numbers_without_axes_are_numbers(make):
    for zero in (np.array(0.5), jax.numpy.float32(0.5), np.float16(0.5)):
        assert make(2, initializer=zero).lookup(7).tolist() == [0.5, 0.5]
        segments = kvjax.initializers.segments({"a": (0, zero)}, rest=0.0)
        assert make(2, initializer=segments).lookup(7).tolist() == [0.5, 0.0]


def test_what_a_checkpoint_says_of_them(make, tmp_path):
    """Frozen: later versions read it."""
    normal = kvjax.initializers.normal(0.25, mean=1.0)
    table = make(4, initializer=kvjax.initializers.segments({"bias": (-1, 0.5)}, rest=normal))
    kvjax.checkpoint.save(tmp_path / "c", [table])
    said = tmp_path / "c" / table.name / "kvjax.json"
    parts = [{"kind": "normal", "a": 1.0, "b": 0.25}, {"kind": "constant", "a": 0.5, "b": 0.0}]
    assert json.loads(said.read_text())["initializer"] == {"kind": "segments", "ends": [3, 4], "parts": parts}
    frozen = kvjax.serving.FrozenTable.write(tmp_path / "f", table).path.read_bytes()
    assert b'"segments": [[3, "normal", 1.0, 0.25], [4, "constant", 0.5, 0.0]]' in frozen


def test_as_many_segments_as_there_may_be(make):
    def of(n):
        return kvjax.initializers.segments({str(i): (2 * i, float(i + 1)) for i in range(n)}, rest=0.0)

    assert make(8, initializer=of(4)).lookup(7).tolist() == [1, 0, 2, 0, 3, 0, 4, 0]
    with pytest.raises(ValueError, match=r"kvjax: table 'table1', get_table: want at most 8 runs of columns .*, got 9"):
        make(9, initializer=of(5))
    assert kvjax.initializers.segments({"a": (0, 1.0)}, rest=0.0) == kvjax.initializers.segments({"a": ([0], 1.0)}, 0.0)


@pytest.mark.parametrize(
    ("parts", "rest", "error", "message"),
    [
        ({"a": (4, 0.0)}, 1.0, ValueError, "want columns of a row of 4, from 0 to 3, for 'a', got column 4"),
        ({"a": (0, 0.0), "b": (slice(0, 2), 0.0)}, 1.0, ValueError, "got column 0 in 'a' and 'b'"),
        ({"a": (slice(0, 4), 0.0)}, 1.0, ValueError, "got none of 4 for 'rest'; leave it some"),
        ({"a": (slice(4, 9), 0.0)}, 1.0, ValueError, "got none of 4 for 'a'; leave the part out"),
        (
            {"a": (0, jax.nn.initializers.normal())},
            1.0,
            TypeError,
            "for the segment 'a', got Generated; give .* whole row",
        ),
        ({"a": (0, 0.0)}, [1.0, 2.0, 3.0], TypeError, "for the segment 'rest', got Pool; give .* for the whole row"),
        ({"a": (0, kvjax.initializers.uniform(2.0, 1.0))}, 1.0, ValueError, "want low <= high"),
        ({"a": (0, float("inf"))}, 1.0, ValueError, "finite"),
        ({"a": (0, "normal")}, 1.0, TypeError, "get_table: segment 'a': want as initializer"),
        ({"a": (0, float("nan"))}, 1.0, ValueError, "get_table: segment 'a': want an initializer of finite numbers"),
        (
            {"a": (0, 0.0), "b": (0, 1.0)},
            1.0,
            ValueError,
            "^kvjax: table 'table0', get_table: segments: want each",
        ),
    ],
)
def test_segments_that_a_row_cannot_have(parts, rest, error, message, make):
    with pytest.raises(error, match=message):
        make(4, initializer=kvjax.initializers.segments(parts, rest=rest))
    assert not kvjax.tables()


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([("a", (0, 0.0))], TypeError, "want a mapping from names to columns"),
        ({"a": 0.0}, TypeError, "want a mapping from names to columns"),
        ({"a": ("x", 0.0)}, TypeError, "want the columns of 'a' as an integer"),
        ({"rest": (0, 0.0)}, ValueError, "want names other than 'rest'"),
    ],
)
def test_segments_that_are_none(parts, error, message):
    with pytest.raises(error, match=f"kvjax: segments: {message}"):
        kvjax.initializers.segments(parts, rest=0.0)
