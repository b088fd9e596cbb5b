"""Strings that `hash_keys` reads where they lie, and columns that it refuses with the mend that is meant."""

from array import array

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.ffi import host

TEXTS = ["cat", "", "a longer text, of more than 32 bytes", "cat", "dog"]
arrow = pytest.importorskip("pyarrow")

COLUMNS = {
    "string": arrow.array(TEXTS),
    "large_string": arrow.array(TEXTS, arrow.large_string()),
    "string_view": arrow.array(TEXTS, arrow.string_view()),
    "binary": arrow.array([text.encode() for text in TEXTS]),
    "dictionary": arrow.array(TEXTS).dictionary_encode(),
    "chunks": arrow.chunked_array([TEXTS[:1], [], TEXTS[1:]]),
    "slice": arrow.array(["x", *TEXTS, "y"])[1:-1],
    "bytes": np.array([text.encode() for text in TEXTS]),
    "ascii": np.array(TEXTS),
    "every other": np.array([each for text in TEXTS for each in (text, "x")])[::2],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_are_hashed_where_they_lie(name, monkeypatch):
    if name == "string_view":
        pytest.importorskip("pyarrow", "21", "an older Arrow casts no views, so that they are taken as objects")
    salts = np.array([1, 2, 1, 2**63, 1], np.uint64)
    want = kvjax.hash_keys(TEXTS, 3), kvjax.hash_keys(TEXTS, salts)
    assert kvjax.hash_keys(TEXTS[1], 2) == want[1][1]
    monkeypatch.delattr(host, "hash_strings")  # no string becomes an object
    for salt, keys in zip((3, salts), want, strict=True):
        np.testing.assert_array_equal(kvjax.hash_keys(COLUMNS[name], salt), keys)


@pytest.mark.parametrize(
    "column",
    [
        np.array(["dür", "\0a\0b"]), np.array(["dür", "\0a\0b"], ">U5"), arrow.array(["dür", "\0a\0b"]),
        np.array(["dür", "\0a\0b"], np.dtypes.StringDType()),
    ],
    ids=["U", "big endian", "Arrow", "StringDType"],
)  # fmt: skip
def test_text_beyond_ascii_and_zeros_within(column):
    assert kvjax.hash_keys(column).tolist() == kvjax.hash_keys(["dür", "\0a\0b"]).tolist()
    assert kvjax.hash_keys(np.array([["\0a"], ["b"]])).tolist() == kvjax.hash_keys([["\0a"], ["b"]]).tolist()


def test_what_is_no_column_of_strings_is_as_before():
    assert kvjax.hash_keys(arrow.array([], arrow.string())).shape == kvjax.hash_keys(np.array([], "U3")).shape == (0,)
    assert kvjax.hash_keys(np.array(["", ""])).tolist() == kvjax.hash_keys(["", ""]).tolist()
    for ids in (arrow.array([7, 2**60 + 1]), arrow.array([7, 2**60 + 1]).dictionary_encode()):
        assert kvjax.hash_keys(ids).tolist() == kvjax.hash_keys([7, 2**60 + 1]).tolist()
    with pytest.raises(ValueError, match="hash_keys: want strings inside of their buffer"):
        host.hash_spans(np.zeros(3, np.uint8), np.array([0, 2]), np.array([2, 4]), 0)


@pytest.mark.parametrize(
    "column, got, mend",
    [
        (arrow.array(["cat", None]), "NoneType None", "drop missing ones, or fill them with a string"),
        (arrow.array(["cat", None]).dictionary_encode(), "NoneType None", "drop missing ones, or fill them"),
        (arrow.array([7, None, 2**60 + 1]), "float nan", "read ids as integers"),
        (np.array([7, None], object), "NoneType None", "read ids as integers"),
        (np.array([7.0]), "float 7.0", "read ids as integers"),
        (arrow.array([None, [1, 2], [3]]), r"ndarray array\(\[1, 2\]\)", r"give what is in the lists .*lengths="),
        (np.array([(1, "a"), None], object)[:1], r"tuple \(1, 'a'\)", r"make keys of each part, and .*salted\(second"),
        (["a", 7], "int 7", "make strings, bytes or integers of them"),
    ],
)
def test_errors_of_columns_say_what_helps(column, got, mend):
    with pytest.raises(TypeError, match=f"hash_keys: want .*, got {got} among them; {mend}"):
        kvjax.hash_keys(column)


@pytest.mark.parametrize("call", [kvjax.keys, kvjax.hash_keys])
def test_bytes_by_another_name_are_no_small_integers(call):
    for items in (bytearray(b"cat"), [memoryview(b"cat")]):
        mend = r"make bytes of it, bytes\(x\)"
        with pytest.raises(TypeError, match=f"want an array of ids, got a .*, whose bytes would be an id each; {mend}"):
            call(items)
    with pytest.raises(TypeError, match=r"want .*, got .*StringScalar.*; give the column of Arrow"):
        call(list(arrow.array(["cat"])))  # whose bytes an older Arrow does not show
    for numbers in (memoryview(np.array([1, 2])), array("b", [1, 2]), [array("B", [1, 2])]):
        np.testing.assert_array_equal(np.asarray(call(numbers)).reshape(-1), np.asarray(call([1, 2])))


def test_columns_of_lists_are_no_ids():
    with pytest.raises(TypeError, match=r"got ndarray array\(\[1, 2\]\) among them; give what is in .*lengths="):
        kvjax.keys(arrow.array([[1, 2], [3]]))


def test_stacking_by_jax_is_pointed_at_keys():
    keys = kvjax.keys([1, 2**40])
    with pytest.raises(TypeError, match=r"cut keys to 32; .*kvjax\.keys\(\[a, b\]\) stacks"):
        jnp.stack([keys, keys])  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert kvjax.keys([keys, keys]).tolist() == [[1, 2**40]] * 2
