"""Keys are exact: every dtype, every value, x64 on and off, through every transformation."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from tests.support.tables import finished, on_gpu

AWKWARD = np.array([0, -1, 1, 2**31, -(2**31) - 1, 2**40 + 7, 2**63 - 1, -(2**63)])


@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_numpy_round_trip(ids):
    assert np.asarray(kvjax.keys(np.array(ids, np.int64))).tolist() == ids


def test_unsigned_and_signed_share_bits():
    assert np.asarray(kvjax.keys(np.array([2**64 - 1], np.uint64))).tolist() == [-1]


@pytest.mark.parametrize("ids", [[1, 2], 7, None, np.arange(2)], ids=["list", "int", "None", "array"])
def test_ids_in_place_of_words(make, ids):
    """`kvjax.Keys` takes words, and `kvjax.keys` takes ids."""
    for call in (make(1).lookup, lambda keys: kvjax.SparseRows(keys, np.ones((2, 1)))):
        with pytest.raises(TypeError, match=r"Keys of words \(..., 2\) uint32, got .*kvjax.keys\(ids\) makes keys"):
            call(kvjax.Keys(ids))


def test_shapes():
    keys = kvjax.keys(np.arange(24).reshape(2, 3, 4))
    assert (keys.shape, keys.ndim, keys.size, len(keys)) == ((2, 3, 4), 3, 24, 2)
    assert keys.reshape(6, -1).shape == keys.reshape((6, 4)).shape == (6, 4)
    np.testing.assert_array_equal(np.asarray(keys[1, :, 2]), np.arange(24).reshape(2, 3, 4)[1, :, 2])
    np.testing.assert_array_equal(np.asarray(keys[..., 0]), np.arange(24).reshape(2, 3, 4)[..., 0])
    assert kvjax.keys(5).shape == () and kvjax.keys([]).shape == (0,)
    assert kvjax.keys(np.zeros((0, 3), np.int64)).reshape(0, -1).shape[0] == 0
    assert [np.asarray(k).item() for k in kvjax.keys(np.arange(3))] == [0, 1, 2]
    for index in (2, -3, (5, 0)):
        with pytest.raises(IndexError, match="out of bounds"):
            keys[index]
    mask = np.arange(24).reshape(2, 3, 4) % 5 == 0
    np.testing.assert_array_equal(np.asarray(keys[mask]), np.arange(0, 24, 5))
    np.testing.assert_array_equal(np.asarray(keys[mask[:, 0, 0], ..., 1]), np.arange(24).reshape(2, 3, 4)[:1, :, 1])
    np.testing.assert_array_equal(np.asarray(keys[0, mask[0, :, 0]]), np.arange(24).reshape(2, 3, 4)[0, :1])
    for index in ((0, 0, 0, 0), (mask, 0), (jnp.asarray(mask), 0), (mask[0].tolist(), 0, 0)):
        with pytest.raises(IndexError, match="at most 3"):
            keys[index]


def test_pass_through_jit_and_scan(x64):
    keys = kvjax.keys(AWKWARD)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda k: k)(keys)), AWKWARD)
    _, out = jax.lax.scan(lambda c, k: (c, k), 0, keys)
    np.testing.assert_array_equal(np.asarray(out), AWKWARD)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "int64", "uint64"])
def test_jax_integers_at_their_own_width(dtype, x64):
    if "64" in dtype and not x64:
        pytest.skip("JAX has no 64-bit integers with x64 off")
    info = np.iinfo(dtype)
    ids = np.array([info.min, info.max, 1], dtype)
    np.testing.assert_array_equal(np.asarray(kvjax.keys(jnp.asarray(ids), key_dtype="int32")), ids.astype(np.int64))


@pytest.mark.parametrize("bad", [np.array([1.5]), np.array([True]), ["a"], np.array([2**70], object), np.array([None])])
def test_other_types_are_refused(bad):
    with pytest.raises(TypeError, match=r"hash_keys|cast them|read ids as integers"):
        kvjax.keys(bad)


def test_what_has_keys_is_no_keys(make):
    table = make().upsert([1], np.ones((1, 4)))
    ahead, table = kvjax.prefetch(table, [1])
    assert repr(ahead) == f"Prefetched(keys=Keys([1]), table={table.name!r}, pad_id=None)"
    with pytest.raises(TypeError, match=r"contains: want keys, got Prefetched, which has keys; give its \.keys"):
        table.contains(ahead)  # type: ignore[reportArgumentType]
    assert table.contains(ahead.keys).tolist() == [True]


def test_jax_floats_are_refused(make):
    with pytest.raises(TypeError, match="integers"):
        make().lookup(jnp.ones(3))


def test_arithmetic_on_words_is_refused(make):
    keys = jax.tree.map(lambda w: w * jnp.float32(1), kvjax.keys(AWKWARD).words.astype(jnp.float32))
    with pytest.raises(TypeError, match="uint32"):
        make().lookup(kvjax.Keys(keys))


READS = {
    "lookup": lambda t, ids: t.lookup(ids),
    "embed": lambda t, ids: kvjax.flax.Embed(t).apply({"params": {"table": t}}, ids, salt=3),
    "bag": lambda t, ids: kvjax.lookup_bag(t, ids[None]),
    "many": lambda t, ids: kvjax.lookup_many({"a": (t, ids)})["a"],
}
WRITES = {
    "upsert": lambda t, ids: t.upsert(ids, jnp.ones((1, 4))),
    "apply": lambda t, ids: t.apply(optax.sgd(0.1), kvjax.SparseRows(ids, jnp.ones((1, 4))))[0],
    "partition": lambda t, ids: updated(t, kvjax.SparseRows(ids, jnp.ones((1, 4)))),
    "prefetch": lambda t, ids: kvjax.prefetch(t, ids)[1],
}


def updated(table, grads):
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1))
    updates, _ = tx.update({"t": grads}, tx.init({"t": table}), {"t": table})
    return optax.apply_updates({"t": table}, updates)["t"]


@pytest.mark.parametrize("use", [*READS, *WRITES])
def test_ids_that_jax_may_have_cut_are_refused(use, make):
    """With x64 off, JAX cuts 2**40 + 7 to 7 without a word: nobody can train on what is left unless they say so."""
    table, ids = make(), np.array([2**40 + 7])
    call = (READS | WRITES)[use]
    for cut in (ids, ids.astype(np.uint64)):
        with pytest.raises(TypeError, match=r"want ids of 64 bits.*pass kvjax\.keys\(numpy_ids\).*key_dtype='int32'"):
            jax.jit(call)(table, cut)
    with pytest.raises(TypeError, match=r"kvjax\.keys"):
        call(table, jnp.asarray(ids.astype(np.int32)))
    assert len(table) == 0
    jax.block_until_ready(jax.jit(call)(table, kvjax.keys(ids)))


@pytest.mark.parametrize(
    "form", [lambda ids: ids, list, lambda ids: [list(ids), (1, 2)]], ids=["array", "list", "nested"]
)
def test_ids_that_jax_may_have_cut_are_refused_in_any_form(form, make):
    """A list of JAX's integers holds no more bits than its array, and to hash what was cut brings nothing back."""
    cut = form(jnp.asarray(np.array([7, 2**40 + 7])))
    for call in (kvjax.keys, kvjax.hash_keys, make().lookup):
        with pytest.raises(TypeError, match="while jax_enable_x64 is off"):
            call(cut)
    whole = form(np.array([7, 2**40 + 7]))
    assert kvjax.keys(whole).tolist() == np.asarray(whole).tolist()


def test_ids_of_32_bits_are_taken_where_somebody_says_so(make):
    rows = jnp.arange(8.0).reshape(2, 4)
    table = make(key_dtype="int32").upsert(jnp.array([7, -1]), rows)
    read = jax.jit(lambda t, ids: t.lookup(ids))
    np.testing.assert_array_equal(read(table, np.array([-1, 7], np.int32)), rows[::-1])
    said = functools.partial(kvjax.keys, key_dtype="int32")
    other = make().upsert(said(jnp.array([7, -1])), rows)
    np.testing.assert_array_equal(jax.jit(lambda t, ids: t.lookup(said(ids)))(other, np.array([7, -1])), rows)


def test_narrow_ids_are_keys_of_the_tables_type(make):
    """Ids of 32 bits that a table calls unsigned are, where JAX has read a sign in them."""
    ids = np.array([2**32 - 1, 7])
    for key_dtype, theirs in (("uint32", ids), ("int32", ids.astype(np.int32).astype(np.int64))):
        table = make(key_dtype=key_dtype).upsert(theirs, np.ones((2, 4)))
        for cut in (jnp.asarray(ids.astype(np.int32)), jnp.asarray(ids.astype(np.uint32))):
            assert table.contains(cut).all() and jax.jit(lambda t, x: t.contains(x))(table, cut).all()
            table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(cut, jnp.ones((2, 4))))
        assert len(table) == 2 and sorted(table.export().keys.tolist()) == sorted(theirs.tolist())


def test_keys_made_inside_of_a_program_are_refused_too(make):
    """Three ids that would be one: `kvjax.keys` around the ids where they are used is too late."""
    table, ids = make(), np.array([7, 2**40 + 7, 2**50 + 7])
    inside = jax.jit(lambda t, ids: t.lookup(kvjax.keys(ids)))
    for call in (inside, lambda t, ids: t.lookup(kvjax.keys(jnp.asarray(ids, jnp.int32)))):
        with pytest.raises(TypeError, match=r"keys: want ids of 64 bits.*key_dtype='int32'"):
            call(table, ids)
    with pytest.raises(ValueError, match="want key_dtype 'int64' or 'int32', got 'int8'"):
        kvjax.keys(ids, key_dtype="int8")


def test_truncated_keys_are_refused_by_a_table_of_wide_ones(make):
    """Also by one of ids that are said to have 32 bits: the table notices that it holds wider keys."""
    table = make(key_dtype="int32").upsert(kvjax.keys(np.array([2**40 + 7])), np.ones((1, 4)))
    read = jax.jit(lambda table, ids: table.lookup(ids))
    train = jax.jit(lambda table, ids: table.apply(optax.sgd(0.1), kvjax.SparseRows(ids, jnp.ones((1, 4))))[0])
    for use in (read, train):
        for dtype in (np.int64, np.uint64):
            with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"kvjax\.keys\(numpy_ids\)"):
                finished(use(table, np.array([2**40 + 7], dtype)))
    assert len(table) == 1
    np.testing.assert_array_equal(read(table, kvjax.keys(np.array([2**40 + 7]))), np.ones((1, 4)))
    np.testing.assert_array_equal(read(table, kvjax.keys(jnp.array([7]), key_dtype="int32")), np.zeros((1, 4)))


def test_with_x64_jax_cuts_nothing(make):
    with jax.enable_x64(True):
        table = make().upsert(jnp.array([7, -1], jnp.int32), jnp.ones((2, 4)))
        assert table.contains(np.array([7, -1, 8])).tolist() == [True, True, False]


def test_hash_keys():
    assert kvjax.hash_keys([["a", "b"], ["c", "a"]]).shape == (2, 2)
    assert kvjax.hash_keys("a") == kvjax.hash_keys(b"a") != kvjax.hash_keys("a", salt=1)
    assert kvjax.hash_keys([b"a", b"a\0"])[0] != kvjax.hash_keys([b"a", b"a\0"])[1]
    ids = np.arange(-500, 500)
    hashed = np.concatenate([kvjax.hash_keys(ids, salt=s) for s in range(5)])
    assert hashed.dtype == np.int64 and len(np.unique(hashed)) == 5000
    assert kvjax.hash_keys([]).shape == (0,)
    np.testing.assert_array_equal(kvjax.hash_keys(np.array([1, 2**60], object)), kvjax.hash_keys([1, 2**60]))
    assert kvjax.hash_keys([1, 2**64 - 1]).tolist() == kvjax.hash_keys([1, -1]).tolist()
    with pytest.raises(TypeError, match=r"want str and bytes, or integers alone, got bytearray bytearray\(b'b'\)"):
        kvjax.hash_keys([b"a", bytearray(b"b")])
    for wrong in ([1.5], [1, 2.5], [True], np.array([1.0])):
        with pytest.raises(TypeError, match=r"hash_keys: want .*, got (float|int|bool) "):
            kvjax.hash_keys(wrong)
    for salt in (2**64, -(2**63) - 1):
        with pytest.raises(TypeError, match="want an integer of at most 64 bits as salt"):
            kvjax.hash_keys("a", salt)


def test_ids_that_jax_may_have_cut_are_not_hashed(x64):
    ids = jnp.asarray(np.array([2**31 - 1, 7]))
    if x64:
        assert kvjax.hash_keys(ids).tolist() == kvjax.hash_keys([2**31 - 1, 7]).tolist()
    else:
        with pytest.raises(TypeError, match="hash_keys: want ids of 64 bits, got a JAX array of 32-bit integers"):
            kvjax.hash_keys(ids)
    assert kvjax.hash_keys(ids.astype(jnp.int16)).tolist() == kvjax.hash_keys([-1, 7]).tolist()


def test_lists_that_are_no_array_of_keys(make):
    table = make()
    for op in (table.lookup, kvjax.keys, kvjax.hash_keys):
        with pytest.raises(
            ValueError, match=r"kvjax: .*: want an array of ids, got sequences of several lengths; pad them"
        ):
            op([[1], [2, 3]])
    with pytest.raises(ValueError, match="got sequences of several lengths"):
        kvjax.keys([[5], [True, 3]])
    for nothing in (np.array([]), [], jnp.array([]), np.zeros((0, 2))):
        assert table.lookup(nothing).shape == (*np.shape(nothing), table.dim)
    with pytest.raises(ValueError, match=f"all signed or all unsigned, got -1 and {2**64 - 1}"):
        kvjax.keys([2**64 - 1, 5, -1, -1])
    assert kvjax.keys([-1, -1, 2**63]).tolist() == [-1, -1, -(2**63)]


def test_keys_are_compared_one_by_one(x64):
    """Where they come from makes no difference: a mask of equal keys is never one of the same object."""
    ids, other = kvjax.keys(AWKWARD), kvjax.keys(np.r_[AWKWARD[:4], AWKWARD[:4]])
    want = np.asarray(other) == AWKWARD
    for equal in (ids == other, jax.jit(lambda a, b: a == b)(ids, other), ids == np.asarray(other)):
        np.testing.assert_array_equal(equal, want)
    np.testing.assert_array_equal(ids != other, ~want)
    np.testing.assert_array_equal(ids == AWKWARD, np.ones(8, bool))
    np.testing.assert_array_equal(AWKWARD.view(np.uint64) == ids, np.ones(8, bool))
    np.testing.assert_array_equal(ids == 2**40 + 7, AWKWARD == 2**40 + 7)
    pairs = ids.reshape(8, 1) == ids.reshape(1, 8)
    np.testing.assert_array_equal(pairs, np.eye(8, dtype=bool))
    twins = jax.jit(lambda k: k.reshape(8, 1) == k.reshape(1, 8))(kvjax.keys([1, 2**40] * 4))
    assert twins.sum() == 32
    assert (ids == "a") is False and (ids != None) is True  # noqa: E711
    for numbers in (1.0, [1.0], np.float32([1]), jnp.ones(8)):
        with pytest.raises(TypeError, match="Keys, ==: want integers"):
            ids == numbers  # noqa: B015
    with pytest.raises(ValueError, match=r"want shapes that broadcast, got \(8,\), \(3,\);"):
        ids == kvjax.keys([1, 2, 3])  # noqa: B015
    with pytest.raises(TypeError, match="unhashable"):
        hash(ids)


def test_what_would_cut_keys_is_an_error(x64):
    wide, narrow = kvjax.keys(AWKWARD), kvjax.keys([1, -2])
    for dtype in (np.int32, np.float64, np.uint8):
        with pytest.raises(TypeError, match="want a dtype that holds these keys"):
            np.asarray(wide, dtype)
    assert np.asarray(narrow, np.int32).tolist() == [1, -2] and np.asarray(wide, np.uint64)[1] == 2**64 - 1
    if x64:
        np.testing.assert_array_equal(jnp.asarray(wide), AWKWARD)
    else:
        with pytest.raises(TypeError, match="want JAX integers of 64 bits"):
            jnp.asarray(wide)
    with pytest.raises(TypeError):
        np.add(wide, 1)


def test_where(x64):
    ids = kvjax.keys(AWKWARD[:6]).reshape(2, 3)
    for where in (kvjax.Keys.where, jax.jit(kvjax.Keys.where)):
        for condition, other in (([True, False, True], -7), ([[True], [False]], AWKWARD[1:4]), (False, ids.salted(3))):
            got = where(ids, np.array(condition), kvjax.keys(other))
            np.testing.assert_array_equal(np.asarray(got), np.where(condition, np.asarray(ids), np.asarray(other)))
    assert isinstance(ids.where(True, 3).words, np.ndarray)  # as kvjax.keys makes them
    assert ids.salted(2).where(True, ids.salted(1)).has_salt and not ids.salted(1).where(True, 3).has_salt
    with pytest.raises(TypeError, match=r"Keys\.where: want a bool condition, got int32"):
        ids.where(jnp.int32(1), 3)
    with pytest.raises(ValueError, match="Keys: want shapes that broadcast, got"):
        ids.where(np.ones(2, bool), 3)


def test_concatenate():
    a, b = kvjax.keys(np.arange(6).reshape(2, 3)), kvjax.keys(2**40 + np.arange(6).reshape(2, 3))
    for axis in (0, 1, -1):
        for join in (kvjax.Keys.concatenate, jax.jit(kvjax.Keys.concatenate, static_argnums=1)):
            want = np.concatenate([np.asarray(a), np.asarray(b)], axis)
            np.testing.assert_array_equal(np.asarray(join([a, b], axis)), want)


def test_derivatives_with_respect_to_keys_show_that_they_are_nothing():
    """JAX gives them where a function of keys is differentiated: float0, which has no bytes."""
    _, pull = jax.vjp(lambda w, k: jnp.sum(w * k.words[..., 0].astype(jnp.float32)), jnp.ones(2), kvjax.keys([1, 2]))
    nothing = pull(jnp.float32(1))[1]
    assert repr(nothing) == "Keys(shape=(2,))" and nothing.shape == (2,)
    assert np.asarray(nothing).shape == (2,) and np.asarray(nothing).dtype == jax.dtypes.float0
    with pytest.raises(TypeError, match="which is nothing"):
        np.asarray(nothing, np.int64)


def test_repr_shows_ids_or_what_there_is():
    keys = kvjax.keys([[2**40, -1]])
    assert repr(keys) == repr(jax.tree.map(jnp.asarray, keys)) == "Keys([[1099511627776, -1]])"
    assert repr(kvjax.keys(7)) == "Keys(7)" and len(repr(kvjax.keys(np.arange(10**6)))) < 200
    assert repr(jax.eval_shape(lambda: keys)) == "Keys(shape=(1, 2))"
    assert "Keys((1, 2, 2))" in repr(jax.tree.map(jnp.shape, keys))
    seen = []
    jax.jit(lambda k: seen.append(repr(k)))(keys)
    assert seen == ["Keys(shape=(1, 2))"]
    with pytest.raises(TypeError, match="one key"):
        len(kvjax.keys(7))


FORKED = """
import os, sys, threading
import jax.numpy as jnp, numpy as np, optax
from jax.tree import leaves as tree
import kvjax
storage = kvjax.storage.Mmap(sys.argv[1]) if sys.argv[1:] else None
table = kvjax.get_table("t", dim=2, storage=storage).upsert(np.arange(4), np.ones((4, 2)))
native, version, rows = table.spec.host, int(table.version), table.snapshot()
tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1))
grads, opt, handle = kvjax.SparseRows(np.arange(4), jnp.ones((4, 2))), tx.init(table), table.refresh()
if os.fork():
    os.wait()
    print(len(table), "in the parent", table.export().values.sum())
else:
    keys = kvjax.keys(np.array([2**40, -1]))
    joined = kvjax.Keys.concatenate([keys, keys[:1].salted(3)]).reshape(3, 1)
    print(np.asarray(joined).tolist(), (keys == 2**40).tolist(), keys)
    for use in (lambda: table.lookup(keys), lambda: table.upsert(keys, np.ones((2, 2))), lambda: len(table),
                lambda: kvjax.get_table("u", dim=2), lambda: kvjax.drop_table("t"), lambda: kvjax.get_table("t"),
                lambda: table.load(rows), lambda: table.to(kvjax.storage.Host()),
                lambda: table.restrict(1), table.clear, table.export, lambda: tx.update(grads, opt, table),
                lambda: native.export_table("t", 0, version, True), lambda: native.drop("t"), lambda: tree(handle)):
        try:
            use()
        except RuntimeError as error:
            print(str(error).split(";")[0])
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.slow
def test_a_forked_process_makes_keys_and_has_no_tables(tmp_path):
    """As in the workers of a data loader, where JAX would wait for threads that are not there."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED, *([] if on_gpu() else [tmp_path])]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = out.stdout.splitlines()
    assert lines and lines[0].endswith("[True, False] Keys([1099511627776, -1])"), out
    assert lines[-1] == "4 in the parent 8.0", out
    assert len(lines) == 17 and all(
        "want the process that made it, got a forked one" in line for line in lines[1:-1]
    ), out
    assert sum("'t', export: " in line for line in lines) == 2 and "slot" not in out.stdout


@pytest.mark.parametrize("where", ["numpy", "jax"])
def test_what_arrays_have(where):
    keys = kvjax.keys(AWKWARD.reshape(2, 4))
    keys = keys if where == "numpy" else jax.jit(lambda k: k)(keys)
    assert keys.tolist() == AWKWARD.reshape(2, 4).tolist() and keys.dtype == np.asarray(keys).dtype
    assert keys.ravel().tolist() == AWKWARD.tolist() and keys[1, 3].tolist() == -(2**63)
    assert [int(key) for key in keys.ravel()] == AWKWARD.tolist()
    with pytest.raises(TypeError, match=r"^kvjax: Keys: int\(\): want one key, got keys of shape \(2, 4\)"):
        int(keys)


@pytest.mark.parametrize("where", ["numpy", "jax"])
def test_arrays_of_keys_change_no_keys(where):
    """NumPy's copy= is followed, and what shares the keys' memory is read-only."""
    keys = kvjax.keys([5, 2**40])
    keys = keys if where == "numpy" else jax.jit(lambda k: k)(keys)
    for array in (np.asarray(keys), np.asarray(keys, copy=False), np.asarray(keys[1]), np.asarray(keys, np.int64)):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1
    for copy in (np.array(keys), np.asarray(keys, copy=True), np.array(keys, np.uint64)):
        copy[:] = 1
    assert keys.tolist() == [5, 2**40]
    for part, dtype in ((keys, np.uint64), (kvjax.keys([[1, 2], [3, 4]])[:, 0], None)):
        with pytest.raises(ValueError, match=r"^kvjax: Keys: want int64 of contiguous keys where copy=False, got"):
            np.asarray(part, dtype, copy=False)


def test_sequences_of_keys_are_stacked():
    """Exactly, of one key and of many, also among ids and in programs."""
    keys = kvjax.keys(AWKWARD)
    assert kvjax.keys(list(keys)).tolist() == AWKWARD.tolist()
    assert kvjax.keys([keys, AWKWARD]).tolist() == [AWKWARD.tolist()] * 2
    assert kvjax.keys([keys[5], 7]).tolist() == [2**40 + 7, 7]
    assert jax.jit(lambda k: kvjax.keys([k[5], k[0]]))(keys).tolist() == [2**40 + 7, 0]
    with pytest.raises(ValueError, match=r"want a sequence of keys of one shape, got \[\(3,\), \(8,\)\]"):
        kvjax.keys([keys, keys[:3]])
