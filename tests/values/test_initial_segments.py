"""Initial rows whose segments have initializers of their own."""

import jax
import numpy as np
import pytest

import kvjax
from tests.support.marks import few
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


@pytest.mark.parametrize(("dim", "parts", "rest", "owners"), SEGMENTS)
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
        ({"a": (0, "normal")}, 1.0, TypeError, "initializers.normal"),
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
