"""Ids that are no integers: refused with the mend that gives the ids that were meant."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

arrow = pytest.importorskip("pyarrow")


def test_ids_of_python_are_exact_or_described():
    assert np.asarray(kvjax.keys([-1, 2**63])).tolist() == [-1, -(2**63)]
    assert np.asarray(kvjax.keys(np.array([1, 2**64 - 1], object))).tolist() == [1, -1]
    for bad, got, mend in (
        (2**64, "18446744073709551616, which has more", "hash strings"),
        (np.array(["2020-01-01"], "datetime64[s]"), r"datetime64\[s\]", "hash strings"),
        ([1, "a"], "str 'a' among them|<U21", "hash strings"),
        (np.array(["a", None], object), "str 'a' among them", "hash strings"),
        ([True], "bool True among them", r"cast them by np\.asarray\(ids, np\.int64\)$"),
        ([[5], [True]], "bool True among them", "cast them"),  # which NumPy would make 1
        ({5}, r"set \{5\} among them", r"make a list of it, list\(ids\)$"),  # no ids to hash
        (map(int, "12"), "map .* among them", r"make a list of it, list\(ids\)$"),
        (kvjax.serving.Changes([5]), r"Changes .*\(keys=.* among them", r"give the ids that it has, its \.keys"),
        (list(arrow.array([5])), "Int64Scalar .* among them", "give the column of Arrow"),
    ):
        with pytest.raises(TypeError, match=f"want integers of at most 64 bits, got {got}; {mend}"):
            kvjax.keys(bad)


class NAType:
    """As pandas has one."""


@pytest.mark.parametrize(
    "bad, got",
    [
        ([1, None], r"a missing id \(None\) among them"),
        (np.array([7.0, np.nan], object), r"a missing id \(nan\) among them"),
        ([np.datetime64("NaT", "s"), 7], r"a missing id \(.*NaT.*\) among them"),
        (np.array(["2020-01-01", "NaT"], "datetime64[s]"), r"datetime64\[s\] with missing ids \(NaT\)"),
        (np.array([7, NAType()], object), r"a missing id \(.*NAType.*\) among them"),
        (np.array([2.0**60, np.nan]), r"float64 with missing ids \(nan\)"),
        (np.array([2.0**60]), "float64"),
        (np.array([1], np.float32), "float32"),
        ([1.0, 2.0], r"float 1\.0 among them"),
    ],
)
def test_ids_that_went_through_floats_are_not_to_be_cast(bad, got):
    """A column of integers with nulls is one of floats: those above 2**53 are other ids, and NaN has none."""
    with pytest.raises(TypeError, match=rf"^kvjax: keys: want .* 64 bits, got {got}; read ids as .* Int64\).*2\*\*53"):
        kvjax.keys(bad)


def test_floats_in_an_array_of_jax_have_the_same_mend():
    with pytest.raises(TypeError, match=r"kvjax: keys: want integers.*, got float32; read ids as .* 2\*\*53"):
        kvjax.keys(jnp.array([1.0, 2.0]))
