"""Frozen values, on which files and other machines rely: hashes, bucket order, initial rows, frozen tables, to the bit.

If a test here fails, the format has changed: old checkpoints would be read wrongly. Do not mend the numbers.
"""

from __future__ import annotations

import json
import pathlib
import statistics

import jax.numpy as jnp
import numpy as np
import pytest
import xxhash

import kvjax
from tests.golden.reference import BUCKETS, GOLDEN_GAMMA, bucket_of, initial_rows, inverse_normal, mix, philox

FROZEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "frozen.json").read_text())

AWKWARD = [
    0, 1, -1, -2, -3, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**32 - 1, 2**32, 2**40 + 7, -(2**63), 2**63 - 1,
]  # fmt: skip
FIXED = np.concatenate([np.array(AWKWARD, np.int64), np.arange(2, 52, dtype=np.int64) ** 11])
"""64 keys of all magnitudes."""


# ---- hashes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [0, 5])
def test_hashed_integers(salt):
    frozen = FROZEN["hashed_integers"][str(salt)]
    keys = np.array([0, 1, 2, -1, 2**40 + 7, -(2**63), 2**63 - 1], np.int64)
    assert kvjax.hash_keys(keys, salt=salt).tolist() == frozen
    assert kvjax.hash_keys(keys.view(np.uint64), salt=salt).tolist() == frozen
    salts = mix(np.array([salt], np.uint64)) + GOLDEN_GAMMA
    np.testing.assert_array_equal(kvjax.hash_keys(FIXED, salt), mix(FIXED.view(np.uint64) + salts).view(np.int64))


@pytest.mark.parametrize("salt", [0, 5])
def test_hashed_strings(salt):
    items = ["", "a", "cat", "Zürich", "日本", "x" * 33]
    assert kvjax.hash_keys(items, salt).tolist() == FROZEN["hashed_strings"][str(salt)]
    encoded = [item.encode() for item in items]
    assert kvjax.hash_keys(encoded, salt).tolist() == FROZEN["hashed_strings"][str(salt)]


@pytest.mark.parametrize("salt", [0, 5, 2**63, 2**64 - 1])
def test_hashed_bytes_are_xxh64(salt):
    data = bytes((i * 37 + i // 7) % 256 for i in range(101))
    items = np.array([data[:n] for n in range(101)], object)  # with zero bytes, which a bytes_ array would cut
    expected = np.array([xxhash.xxh64_intdigest(item, seed=salt) for item in items], np.uint64)
    np.testing.assert_array_equal(kvjax.hash_keys(items, salt), expected.view(np.int64))


# ---- the order of checkpoints ------------------------------------------------------------------------------


def test_bucket_of_fixed_keys(make):
    copy = make(1).upsert(FIXED, np.zeros((64, 1), np.float32)).snapshot()
    rows, offsets = copy.rows, copy.offsets
    assert offsets.shape == (BUCKETS + 1,) and offsets.dtype == np.int64
    assert (offsets[0], offsets[-1]) == (0, 64)
    bucket = np.repeat(np.arange(BUCKETS), np.diff(offsets))
    found = dict(zip(rows.keys.tolist(), bucket.tolist(), strict=True))
    assert [found[key] for key in FIXED.tolist()] == FROZEN["buckets"]


@pytest.mark.parametrize("key_dtype", ["int64", "uint64"])
def test_rows_are_sorted_by_bucket_and_signed_key(make, key_dtype):
    keys = mix(np.arange(3000, dtype=np.uint64)).view(np.int64)
    table = make(1, key_dtype=key_dtype).upsert(keys, np.zeros((3000, 1), np.float32))
    order = np.lexsort((keys, bucket_of(keys)))
    assert len(np.unique(bucket_of(keys))) < 2980  # or the second criterion would not be tried
    np.testing.assert_array_equal(table.export().keys.view(np.int64), keys[order])


# ---- initial rows ------------------------------------------------------------------------------------------

INITIALIZERS = [
    kvjax.initializers.constant(0.1),
    kvjax.initializers.uniform(-0.3, 0.7),
    kvjax.initializers.normal(0.02, mean=0.5),
    kvjax.initializers.truncated_normal(3.0, mean=-1.0),
]


@pytest.mark.parametrize("dim", [1, 3, 8, 65])
@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda i: i.kind)
def test_initial_rows_have_the_reference_bits(make, initializer, dim):
    seed = {1: 0, 3: 7, 8: 2**63 + 12345, 65: 2**64 - 1}[dim]
    expected = initial_rows(initializer, FIXED, dim, seed)
    table = make(dim, initializer=initializer, seed=seed)
    np.testing.assert_array_equal(np.asarray(table.lookup(FIXED)).view(np.uint32), expected.view(np.uint32))
    for dtype in (jnp.bfloat16, np.float16):
        half = make(dim, initializer=initializer, seed=seed, dtype=dtype)
        rounded = expected.astype(dtype)
        np.testing.assert_array_equal(np.asarray(half.lookup(FIXED)).view(np.uint16), rounded.view(np.uint16))


def test_the_reference_itself():
    """By a published vector of Random123, and by the quantiles of the standard library."""
    words = [np.array([w], np.uint64) for w in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    got = [int(w[0]) for w in philox(words, 0x299F31D0A4093822)]
    assert got == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    p = np.array([1e-13, 2.0**-33, 1e-6, 0.02, 0.07, 0.08, 0.5, 0.7, 0.93, 1 - 2.0**-33])
    expected = [statistics.NormalDist().inv_cdf(x) for x in p.tolist()]
    np.testing.assert_allclose(inverse_normal(p), expected, rtol=2e-7)


def test_frozen_rows(make):
    keys = np.array([0, -1, 2**40 + 7], np.int64)
    for initializer in INITIALIZERS[1:]:
        rows = np.asarray(make(4, initializer=initializer, seed=42).lookup(keys))
        bits = [[f"{int(word):08x}" for word in row] for row in rows.view(np.uint32)]
        assert bits == FROZEN["rows"][initializer.kind]


@pytest.mark.parametrize("quantise", [None, "int8"])
def test_files_of_frozen_tables(quantise, tmp_path):
    """All bytes: rows that int8 holds exactly, a pool of initial rows."""
    rows = np.arange(64 * 3).reshape(64, 3) % 128
    rows[:, 0] = 127
    table = kvjax.get_table("golden", dim=3, initializer=np.arange(6.0).reshape(2, 3), seed=42).upsert(FIXED, rows)
    frozen = kvjax.serving.FrozenTable.write(tmp_path / "t", table, quantise=quantise)
    kvjax.drop_table("golden")
    assert xxhash.xxh64_hexdigest(frozen.path.read_bytes()) == FROZEN["frozen_tables"][str(quantise)]


def test_default_seed_is_the_hash_of_the_name(make):
    table = make(8, initializer=kvjax.initializers.normal(1.0))
    seed = xxhash.xxh64_intdigest(table.name.encode())
    np.testing.assert_array_equal(table.lookup(FIXED), initial_rows(table.spec.initializer, FIXED, 8, seed))


def test_reading_inserting_and_removing_change_no_initial_row(make):
    table = make(3, initializer=kvjax.initializers.uniform(), seed=9)
    first = np.asarray(table.lookup(FIXED))
    inserted, table = table.lookup_or_insert(FIXED)
    np.testing.assert_array_equal(inserted, first)
    table = table.upsert(FIXED, np.zeros_like(first)).remove(FIXED)
    np.testing.assert_array_equal(table.lookup(FIXED), first)


@pytest.mark.parametrize(("initializer", "mean", "deviation"), [
    (kvjax.initializers.uniform(-1.0, 3.0), 1.0, 4 / 12**0.5),
    (kvjax.initializers.normal(0.5, mean=2.0), 2.0, 0.5),
    (kvjax.initializers.truncated_normal(0.5, mean=2.0), 2.0, 0.5 * 0.8796256610342398),
], ids=lambda x: getattr(x, "kind", ""))  # fmt: skip
def test_moments(make, initializer, mean, deviation):
    n, dim = 20_000, 8
    rows = np.asarray(make(dim, initializer=initializer, seed=1).lookup(np.arange(n))).astype(np.float64)
    error = deviation / (n * dim) ** 0.5
    assert abs(rows.mean() - mean) < 5 * error
    assert abs(rows.std() - deviation) < 5 * error
    assert np.abs(rows.mean(axis=0) - mean).max() < 5 * deviation / n**0.5
    assert len(np.unique(rows, axis=0)) == n
    correlation = np.corrcoef(np.concatenate([rows[:-1], rows[1:]], 1).T)  # columns, and keys that are neighbours
    assert np.abs(correlation - np.eye(2 * dim)).max() < 5 / n**0.5
    if initializer.kind == "uniform":
        assert rows.min() >= -1.0 and rows.max() <= 3.0
    if initializer.kind == "truncated_normal":
        assert np.abs(rows - mean).max() <= 2 * 0.5 * (1 + 1e-6)
