"""Bags of a frozen table in NumPy: those of a dict's rows, and to the bit those of the table."""

import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax._lookup import sums
from kvjax.serving import FrozenTable
from tests.lookup.test_bags import BAD, COMBINERS, calls, reference
from tests.support.marks import examples, slow, wide_is_slow
from tests.support.tables import AWKWARD, on_gpu

ROWS = {int(key): row for key, row in zip(AWKWARD, np.random.default_rng(0).normal(size=(8, 3)), strict=True)}
MISSING = np.array([0.5, -0.25, 2.0])


def frozen_dict(folder, rows=ROWS, missing=MISSING):
    keys, values = np.array(list(rows), np.int64), np.array(list(rows.values()), np.float32)
    zeros = np.zeros(len(rows), np.int64)
    export = kvjax.Exported(keys, values, zeros, zeros, {}, zeros > 0, zeros > 0, 0, len(rows))
    return FrozenTable.write(Path(folder) / "t", export, missing=missing)


@settings(max_examples=examples(25, 300))
@given(
    calls(), st.sampled_from(COMBINERS), st.booleans(), st.booleans(), st.sampled_from([None, "zeros", [9, 8, 7]]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_bags_of_a_dict(call, combiner, weighted, with_empty, missing, seed):
    shape, form, bags, leading = call
    rng = np.random.default_rng(seed)
    keys = rng.choice([*ROWS, 5, -7, 2**60], shape)
    weights = rng.uniform(0.5, 2.0, shape) if weighted and combiner != "max" else None
    empty = rng.normal(size=3) if with_empty else None
    with tempfile.TemporaryDirectory() as folder:
        frozen = frozen_dict(folder)
        got = frozen.lookup_bag(keys, combiner=combiner, weights=weights, empty=empty, missing=missing, **form)
    unseen = MISSING if missing is None else np.zeros(3) if missing == "zeros" else missing
    rows = np.array([ROWS.get(int(key), unseen) for key in keys.reshape(-1)]).reshape(-1, 3)
    flat = np.ones(keys.size) if weights is None else weights.reshape(-1)
    want = reference(rows, bags, flat, combiner, np.zeros(3) if empty is None else empty)
    assert got.shape == (*leading, 3) and got.dtype == np.float32
    np.testing.assert_allclose(got.reshape(-1, 3), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_the_tables_bags_to_the_bit(combiner, make, tmp_path):
    """More than NumPy takes at a time; bags of none to hundreds of keys, in any order, with keys without a row."""
    table = make(16, initializer=kvjax.initializers.normal(1.0)).upsert(
        np.arange(500), np.random.default_rng(0).normal(size=(500, 16))
    )
    frozen, rng = FrozenTable.write(tmp_path / "t", table), np.random.default_rng(1)
    ids = np.minimum(rng.geometric(0.02, 9000) - 2, 300)
    keys, weights = rng.integers(0, 700, 9000), rng.normal(size=9000).astype(np.float32)
    options = {"combiner": combiner, "mask": rng.random(9000) < 0.9, "segment_ids": ids, "num_segments": 290}
    options |= {} if combiner == "max" else {"weights": weights}
    same = np.testing.assert_array_equal
    if on_gpu():  # where XLA divides by multiplying

        def same(one, other):
            np.testing.assert_array_max_ulp(one, other, maxulp=4)

    same(frozen.lookup_bag(keys, **options), np.asarray(kvjax.lookup_bag(table, keys, **options)))
    padded = {"pad_id": 7, "combiner": combiner, "empty": np.arange(16.0)}
    keys[:30] = 7  # a whole bag of padding
    got = frozen.lookup_bag(keys.reshape(10, 30, 30), **padded)
    same(got, np.asarray(kvjax.lookup_bag(table, keys.reshape(10, 30, 30), **padded)))
    np.testing.assert_array_equal(got[0, 0], np.arange(16.0))


@slow
@wide_is_slow
def test_all_that_a_table_takes(make, tmp_path, x64):
    """Rows in fewer bits, narrow and unsigned keys, salts, a greatest norm, JAX's arrays, one column."""
    rng = np.random.default_rng(0)
    for number, (dim, options) in enumerate([
        (1, {"dtype": "bfloat16"}), (7, {"key_dtype": "uint64"}), (24, {"key_dtype": "uint32", "dtype": "float16"}),
        (3, {"admit": kvjax.admit.MinCount(2, unadmitted="zeros")}),
    ]):  # fmt: skip
        table = make(dim, initializer=0.5, **options).upsert(np.arange(30), rng.normal(size=(30, dim)))
        frozen = FrozenTable.write(tmp_path / str(number), table)
        ids, mask = rng.integers(-3, 30, (6, 5)), rng.random((6, 5)) < 0.7
        keys = ids if options.get("key_dtype") != "uint64" else ids.astype(np.uint64)
        tight, loose = ({"mask": mask, "combiner": c, "dtype": jnp.float32} for c in ("mean", "sum"))
        np.testing.assert_array_equal(frozen.lookup_bag(keys, mask=mask), kvjax.lookup_bag(table, keys, **tight))
        got = frozen.lookup_bag(keys, mask=jnp.asarray(mask), combiner="sum", max_norm=0.7, weights=jnp.ones((6, 5)))
        want = kvjax.lookup_bag(table, keys, max_norm=0.7, **loose)
        np.testing.assert_allclose(got, want, rtol=2e-2 if "dtype" in options else 1e-5, atol=1e-5)
        salted = kvjax.keys(keys).salted(3)
        np.testing.assert_array_equal(frozen.lookup_bag(salted, mask=mask), kvjax.lookup_bag(table, salted, **tight))
        fewer = FrozenTable.write(tmp_path / f"{number}.int8", table, quantise="int8")
        rows = np.where(mask[..., None], fewer.lookup(keys), 0)
        np.testing.assert_allclose(fewer.lookup_bag(keys, mask=mask, combiner="sum"), rows.sum(1), rtol=1e-5, atol=1e-6)
        lengths = {"lengths": jnp.array([3, 0, 2], jnp.int8)}
        want = kvjax.lookup_bag(table, keys[0], **lengths, dtype=jnp.float32)
        np.testing.assert_array_equal(frozen.lookup_bag(keys[0], **lengths), want)


@slow
def test_infinities_are_results(tmp_path):
    frozen = frozen_dict(tmp_path, {1: [np.inf, np.nan, 3e38], 2: [-np.inf, 1.0, 3e38], 3: [-np.inf, -0.0, 1.0]})
    np.testing.assert_array_equal(frozen.lookup_bag([1, 2], combiner="sum"), [np.nan, np.nan, np.inf])
    np.testing.assert_array_equal(frozen.lookup_bag([2, 1], combiner="max"), [np.inf, np.nan, np.float32(3e38)])
    np.testing.assert_array_equal(frozen.lookup_bag([3], combiner="max"), [-np.inf, 0, 1])
    weights = {"weights": [1.0, -1.0]}
    np.testing.assert_array_equal(frozen.lookup_bag([3, 3], **weights)[1:], [0, 0])  # by a sum of 0
    np.testing.assert_array_equal(frozen.lookup_bag([3, 1], weights=[1.0, np.nan], mask=[True, False])[2], 1)


LENGTHS = [(options, "want lengths of at least 0 that sum to at most 2, got") for options, _ in BAD[-3:]]


@pytest.mark.parametrize(("options", "message"), BAD[:-3] + LENGTHS, ids=[message[:30] for _, message in BAD])
def test_mistakes_are_those_of_a_table(options, message, tmp_path):
    frozen, options = frozen_dict(tmp_path, {1: np.zeros(4)}, "zeros"), dict(options)
    keys = options.pop("keys", [[1, 2, 3], [4, 5, 6]])
    with pytest.raises((ValueError, TypeError), match=message) as error:
        frozen.lookup_bag(np.array(keys), **options)
    assert "table 't', lookup_bag" in str(error.value)


@slow
def test_bags_take_numpy_alone(tmp_path):
    frozen_dict(tmp_path)
    program = f"""
import sys
import numpy as np, kvjax.serving
frozen = kvjax.serving.FrozenTable.open({str(tmp_path / "t")!r})
for combiner in {COMBINERS}:
    print(frozen.lookup_bag([[0, 1, 9], [9, 9, 9]], pad_id=9, combiner=combiner, max_norm=9.0).tolist())
assert not {{"jax", "flax", "optax", "ml_dtypes", "kvjax.ffi"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    a, b = ROWS[0], ROWS[1]
    for line, want in zip(
        done.stdout.splitlines(), [a + b, (a + b) / 2, (a + b) / 2**0.5, np.maximum(a, b)], strict=True
    ):
        np.testing.assert_allclose(eval(line), [want, np.zeros(3)], rtol=1e-5, atol=1e-6)


def test_sums_and_lengths_in_plain_jax():
    ids, rows = jnp.array([0, 0, -1, 2, 3]), jnp.array([[1.0], [-2.0], [9.0], [-3.0], [9.0]])
    weights = jnp.array([1.0, 2.0, 1.0, 1.0, 1.0])
    of_rows = jax.jit(lambda: (sums.PLAIN.sum(3, ids, weights, rows), sums.PLAIN.max(3, ids, rows)))
    assert [bags[:, 0].tolist() for bags in map(np.asarray, of_rows())] == [[-3, 0, -3], [1, 0, -3]]
    ids_of = jax.jit(sums.plain_bag_ids, static_argnums=1)
    for lengths, want in (([2, 0, 1], [0, 0, 2, -1]), ([4, 0, 0], [0] * 4), ([0, 0, 4], [2] * 4)):
        got, fit = ids_of(jnp.array(lengths, jnp.int32), 4)
        assert fit and got.tolist() == want
    for lengths in ([5, 0, 0], [-1, 2, 2], [3, 3, 0], [2**31 - 1, 1, 0]):
        assert not ids_of(jnp.array(lengths, jnp.int32), 4)[1], lengths
