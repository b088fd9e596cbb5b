"""Frozen tables inside compiled programs, in plain JAX."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.serving import FrozenError, FrozenTable, _jax
from kvjax.serving._search import unmixed
from tests.serving.test_frozen import INITIALIZERS, UNSEEN
from tests.support.marks import few, slow
from tests.support.tables import AWKWARD

QUERY = np.concatenate([AWKWARD, UNSEEN, AWKWARD[:3]])
lookup = jax.jit(lambda arrays, keys, **options: arrays.lookup(keys, **options), static_argnames="return_found")


@slow
@pytest.mark.parametrize("initializer", INITIALIZERS)
def test_reads_as_by_numpy(initializer, x64, make, tmp_path):
    table = make(7, initializer=INITIALIZERS[initializer], seed=2**64 - 3)
    table = table.upsert(AWKWARD, np.arange(56.0).reshape(8, 7))
    frozen = FrozenTable.write(tmp_path / "t", table)
    want, there = frozen.lookup(QUERY, return_found=True)
    for capacity in (None, 8, 1000):
        arrays = frozen.as_jax(capacity=capacity)
        assert (len(arrays), arrays.dim) == (8, 7) and not jax.tree.leaves(arrays)[0].weak_type
        rows, found = lookup(arrays, kvjax.keys(QUERY), return_found=True)
        np.testing.assert_array_max_ulp(np.asarray(rows), want, 1)
        np.testing.assert_array_equal(found, there)
    assert "custom_call" not in lookup.lower(arrays, kvjax.keys(QUERY)).as_text()
    np.testing.assert_array_equal(lookup(arrays, kvjax.keys(AWKWARD)), want[:8])


def test_the_search_is_one_program_outside_of_jit(make, tmp_path, caplog):
    """Else it would be one for each operation and each shape of the keys, 15 and more."""
    arrays = FrozenTable.write(tmp_path / "t", make(3).upsert(AWKWARD, np.ones((8, 3)))).as_jax()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        found = arrays._find(jax.device_put(kvjax.keys(np.tile(AWKWARD, 99)).words))[1]
    assert found.all() and sum("Finished XLA compilation" in r.message for r in caplog.records) == 1


OPTIONS = [{}, {"missing": "zeros"}, {"missing": [1.0, 2.0, 3.0]}, {"pad_id": int(AWKWARD[2])}]
MASK = np.arange(16).reshape(2, 8) % 2 == 0


def all_forms(table, keys):
    plain = [table.lookup(keys, **options) for options in OPTIONS]
    return plain, table.lookup(keys, mask=MASK, return_found=True), table.lookup(keys[:0])


@slow
@pytest.mark.parametrize("quantise", [None, "float16", "int8"])
def test_forms(quantise, make, tmp_path):
    rows = np.ones((8, 3)) * AWKWARD[:, None] % 7
    table = make(3, initializer=INITIALIZERS["uniform"], dtype="bfloat16").upsert(AWKWARD, rows)
    frozen = FrozenTable.write(tmp_path / "t", table, quantise=quantise)
    arrays, ids = frozen.as_jax(), QUERY[:16].reshape(2, 8)
    got, want = jax.jit(all_forms)(arrays, kvjax.keys(ids)), all_forms(frozen, ids)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_max_ulp(np.asarray(one, np.float32), other.astype(np.float32), 1)
    by_one = jax.jit(jax.vmap(lambda table, keys: table.lookup(keys), in_axes=(None, 0)))(arrays, kvjax.keys(ids))
    np.testing.assert_array_equal(by_one, got[0][0])
    none = table.export().take(np.zeros(8, bool))
    empty = FrozenTable.write(tmp_path / "e", none, missing=[1, 2, 3], quantise=quantise)
    np.testing.assert_array_equal(lookup(empty.as_jax(), kvjax.keys(ids)), empty.lookup(ids))
    for error, keys, options, words in (
        (TypeError, jnp.arange(2), {}, "lookup: want ids of 64 bits"),
        (ValueError, [1], {"missing": "init"}, "missing='init' of a file"),
        (ValueError, [1], {"missing": [1.0]}, "want a missing row"),
    ):
        with pytest.raises(error, match=words):
            jax.eval_shape(lambda: empty.as_jax().lookup(keys, **options))  # noqa: B023


@pytest.mark.parametrize("n", few([0, 1, 3, 31, 32, 33, 200]))
def test_buckets_of_any_length(n, make, tmp_path):
    """Keys that collide on purpose make buckets too long for one window, which are searched step by step."""
    hashes = np.array([*range(n), 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
    keys = unmixed(hashes).view(np.int64)
    table = make(1, initializer=-1.0).upsert(keys[: n + 2], np.arange(n + 2.0)[:, None])
    frozen = FrozenTable.write(tmp_path / "t", table)
    query = np.concatenate([keys, unmixed(np.array([n, n + 1], np.uint64)).view(np.int64)])  # also of the sentinel
    full = FrozenTable.write(tmp_path / "full", table.upsert(keys[-1], [7.0]))  # whose hash is that of the sentinel
    for capacity in (None, n + 3, 4096):
        arrays = frozen.as_jax(capacity=capacity)
        assert (arrays.window == 0) == (n > 32)
        rows, found = lookup(arrays, kvjax.keys(query), return_found=True)
        np.testing.assert_array_equal(rows[:, 0], [*np.arange(n + 2.0), -1, -1, -1])
        assert found.tolist() == [True] * (n + 2) + [False] * 3
        assert lookup(full.as_jax(capacity=capacity), kvjax.keys(keys[-1:])).tolist() == [[7.0]]


@pytest.mark.parametrize("quantise", [None, pytest.param("int8", marks=slow)])
def test_releases_of_one_capacity_share_a_program(quantise, make, tmp_path):
    table, programs = make(2, initializer=0.25), jax.jit(lambda arrays, keys: arrays.lookup(keys))
    for n in (0, 5, 80, 1000):
        table = table.upsert(np.arange(n), np.arange(2.0 * n).reshape(n, 2))
        frozen = FrozenTable.write(tmp_path / "t", table, quantise=quantise)
        arrays = frozen.as_jax(capacity=np.int64(1000))
        assert arrays and f"FrozenArrays({table.name!r}, dim=2" in repr(arrays) and "capacity=1000" in repr(arrays)
        np.testing.assert_array_equal(programs(arrays, kvjax.keys(np.arange(1100))), frozen.lookup(np.arange(1100)))
        assert len(arrays) == n
    assert programs._cache_size() == 1
    for wrong in (999, 2**30, 1000.0, True):
        with pytest.raises(ValueError, match="as_jax: want capacity=None, or an integer from 1000, its rows, to"):
            frozen.as_jax(capacity=wrong)


def test_a_model_with_a_capacity_is_put_together_in_a_program(make, tmp_path):
    table = make(2).upsert([7], [[1.0, 2.0]])
    state = {"t": table, "w": jnp.float32(3.0)}
    dense, _ = kvjax.orbax.split(state)

    @jax.jit
    def rows(arrays, keys):
        whole = kvjax.orbax.combine(dense, {table.name: arrays})
        return whole["t"].lookup(keys) * whole["w"]

    for capacity in (None, 10):
        arrays = FrozenTable.write(tmp_path / f"{capacity}", table).as_jax(capacity=capacity)
        assert rows(arrays, kvjax.keys([7])).tolist() == [[3.0, 6.0]]


def test_a_damaged_order_is_an_error(make, tmp_path):
    frozen = FrozenTable.write(tmp_path / "t", make(1).upsert(np.arange(9), np.ones((9, 1))))
    mapped = frozen._mapped
    hashes = np.array(mapped.arrays["hashes"])
    hashes[:2] = hashes[1::-1]
    damaged = dataclasses.replace(mapped, arrays={**mapped.arrays, "hashes": hashes})
    with pytest.raises(FrozenError, match="as_jax: want the hashes of a frozen table in order"):
        _jax.arrays_of(damaged, 20)


def test_lookups_outside_of_jit_compile_once(make, tmp_path):
    """A branch that each call makes anew was compiled anew, and never freed."""
    arrays = FrozenTable.write(tmp_path / "t", make(2).upsert([1], [[1.0, 2.0]])).as_jax()
    arrays.lookup(kvjax.keys(np.array([1, 5])))
    before = _jax._with_initial._cache_size()
    for i in range(3):
        arrays.lookup(kvjax.keys(np.array([1, i])))
    assert _jax._with_initial._cache_size() == before


@pytest.mark.parametrize("ids", [kvjax.keys([1, 2]), np.array([1, 2])], ids=["keys", "integers"])
def test_a_file_is_not_read_in_a_program(ids, tmp_path):
    frozen = FrozenTable.write(tmp_path / "t", kvjax.get_table("t", dim=2))
    for read in (frozen.lookup, lambda keys: frozen.lookup_bag(keys[None])):
        with pytest.raises(TypeError, match=r"want keys that are there.*give compiled functions frozen.as_jax\(\)"):
            jax.jit(read)(ids)
