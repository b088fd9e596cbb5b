"""Ids of 32 bits are one key, however they are written, in programs and out of them, with x64 off and on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
import kvjax.flax
from kvjax.checkpoint import prune, restore, save
from kvjax.convert import export_checkpoint, from_dense, from_npz
from kvjax.serving import FrozenTable, Releases
from tests.support.checkpoints import assert_equal
from tests.support.marks import few, wide_is_slow

SIGNED = np.array([5, -1, -(2**31), 2**31 - 1])
# Those that a program gets as they are: with x64 off, JAX cuts integers of 64 bits to these before it starts.
FORMS = {
    "numpy int32": lambda ids: ids.astype(np.int32),
    "numpy uint32": lambda ids: ids.astype(np.uint32),
    "numpy int64": lambda ids: ids,
    "numpy uint64": lambda ids: ids.astype(np.uint32).astype(np.uint64),
    "list": lambda ids: ids.tolist(),
    "list of unsigned": lambda ids: ids.astype(np.uint32).tolist(),
    "jax int32": lambda ids: jnp.asarray(ids.astype(np.int32)),
    "jax uint32": lambda ids: jnp.asarray(ids.astype(np.uint32)),
    "Keys": lambda ids: kvjax.keys(ids),
    "Keys of unsigned": lambda ids: kvjax.keys(ids.astype(np.uint32)),
}
SALT = 3


def forms():
    """Each form of the four ids; with x64 also JAX's integers of 64 bits."""
    wide = {"jax int64": jnp.asarray, "jax uint64": lambda ids: jnp.asarray(ids.astype(np.uint32).astype(np.uint64))}
    return FORMS | (wide if jax.config.jax_enable_x64 else {})


def theirs(key_dtype):
    return SIGNED.astype(key_dtype).astype(np.uint64 if key_dtype == "uint32" else np.int64)


READS = {
    "lookup": lambda t, ids: t.lookup(ids),
    "pad_id": lambda t, ids: t.lookup(ids, pad_id=5),
    "bag": lambda t, ids: kvjax.lookup_bag(t, kvjax.keys(ids, key_dtype="int32").reshape(2, 2)),
    "many": lambda t, ids: kvjax.lookup_many({"a": (t, ids), "b": (t, np.array([5]))})["a"],
    "salt": lambda t, ids: kvjax.flax.Embed(t).apply({"params": {"table": t}}, ids, salt=SALT),
    "frequency": lambda t, ids: t.frequency(ids),
}
WRITES = {
    "upsert": lambda t, ids: t.upsert(ids, jnp.ones((4, 2))),
    "apply": lambda t, ids: t.apply(optax.sgd(1.0), kvjax.SparseRows(ids, jnp.ones((4, 2))))[0],
    "merged": lambda t, ids: t.apply(optax.sgd(1.0), kvjax.merge(kvjax.SparseRows(ids, jnp.ones((4, 2)))))[0],
    "trained": lambda t, ids: trained(t, ids),
    "insert": lambda t, ids: t.lookup_or_insert(ids)[1],
    "pin": lambda t, ids: t.pin(ids),
    "prefetch": lambda t, ids: trained(*reversed(kvjax.prefetch(t, ids))),
}


def trained(table, ids):
    grads = kvjax.grad(lambda t: t.lookup(ids).sum())(table)
    return table.apply(optax.sgd(1.0), grads)[0]


def with_rows(table, salted=False):
    """With rows 0, 1, ... under the ids, or under the salted ids."""
    ids = kvjax.keys(theirs(table.spec.key_dtype))
    return table.upsert(ids.salted(SALT) if salted else ids, np.arange(8.0).reshape(4, 2))


def in_program(ids):
    """The ids as they get into a program that is called with them."""
    return ids if isinstance(ids, kvjax.Keys) else jnp.asarray(ids)


@wide_is_slow
@pytest.mark.parametrize("key_dtype", few(["int32", "uint32"], "uint32"))
@pytest.mark.parametrize("name", few(READS, 0, 1))
def test_reads_mean_the_same_keys(name, key_dtype, make, x64):
    read, table = READS[name], with_rows(make(2, key_dtype=key_dtype), salted=name == "salt")
    want = read(table, kvjax.keys(theirs(key_dtype)))
    for form, make_ids in forms().items():
        ids = make_ids(SIGNED)
        np.testing.assert_array_equal(read(table, ids), want, err_msg=form)
        if not isinstance(ids, list) and (x64 or "64" not in form):
            np.testing.assert_array_equal(jax.jit(read)(table, in_program(ids)), want, err_msg=form)


@wide_is_slow
@pytest.mark.parametrize("key_dtype", few(["int32", "uint32"], "uint32"))
@pytest.mark.parametrize("name", few(WRITES, "apply", "upsert"))
def test_writes_mean_the_same_keys(name, key_dtype, make, x64):
    table, write = make(2, key_dtype=key_dtype), WRITES[name]
    for form, make_ids in forms().items():
        ids = make_ids(SIGNED)
        table = write(table, ids)
        if not isinstance(ids, list) and (x64 or "64" not in form):
            table = jax.jit(write)(table, in_program(ids))
        assert sorted(table.export().keys.tolist()) == sorted(theirs(key_dtype).tolist()), form


def test_one_key_twice_in_a_gradient(make):
    """Signed and unsigned, which `kvjax.merge`, that knows no table, takes for two keys."""
    for key_dtype in ("int32", "uint32"):
        for merge in (kvjax.merge, lambda grads: grads):
            grads = merge(kvjax.SparseRows(np.array([-1, 2**32 - 1]), jnp.ones((2, 2))))
            table, _ = make(2, key_dtype=key_dtype).apply(optax.sgd(1.0), grads)
            assert len(table) == 1 and table.lookup([-1]).tolist() == [[-2.0, -2.0]]
            assert table.frequency(2**32 - 1) == 2


def test_lists_in_programs(make, x64):
    """JAX makes arrays of a list's numbers before the program sees them."""
    table, read = make(2), jax.jit(lambda t, ids: t.lookup(ids))
    for ids in ([1, 2], [[1], (2,)]):
        if x64:
            assert read(table, ids).shape == (*np.shape(ids), 2)
        else:
            with pytest.raises(TypeError, match="want ids of 64 bits"):
                read(table, ids)
    few_bits = make(2, key_dtype="int32").upsert([1, 2], np.ones((2, 2)))
    assert read(few_bits, [1, 2]).sum() == 4


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_arrays_keep_their_ids_where_x64_is_off(dtype, make):
    """JAX arrays from where it was on, in calls and as arguments of programs."""
    table, ids = make(2), np.array([1, 2**40, -1]).astype(dtype)
    with jax.enable_x64(True):
        wide = jnp.asarray(ids)
    assert (kvjax.keys(wide) == kvjax.keys(ids)).all()
    table = jax.jit(lambda t, x: t.upsert(x, jnp.ones((3, 2))))(table.upsert(wide[:2], np.ones((2, 2))), wide)
    assert len(table) == 3
    assert jax.jit(lambda t, x: t.contains(x))(table, wide).all()
    assert table.contains(ids).all()


def test_padding_of_the_other_sign(make):
    """-1 is padding, however the ids say it, and however it is said."""
    for key_dtype in ("int32", "uint32"):
        table = make(1, key_dtype=key_dtype, initializer=1.0)
        for ids in (np.array([5, -1], np.int32), np.array([5, 2**32 - 1], np.uint32)):
            for pad_id in (-1, 2**32 - 1):
                for read in (lambda t, x, p=pad_id: t.lookup(x, pad_id=p),):
                    assert read(table, ids).tolist() == jax.jit(read)(table, ids).tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("key_dtype", few(["int32", "uint32"], "uint32"))
def test_keys_of_more_bits_are_taken_as_they_are(key_dtype, make, tmp_path):
    """Salted and hashed ones, also as the plain integers that an export gives."""
    wide = kvjax.keys(np.array([5, -1])).salted(SALT)
    table = make(1, key_dtype=key_dtype).upsert(wide, [[1.0], [2.0]]).upsert(np.array([2**40 + 7, -1]), [[3.0], [4.0]])
    rows = table.export()
    assert len(rows.keys) == 4 and table.lookup(wide)[:, 0].tolist() == [1.0, 2.0]
    assert table.lookup(np.array([2**40 + 7, 2**32 - 1, 7]))[:, 0].tolist() == [3.0, 4.0, 0.0]
    frozen = FrozenTable.write(tmp_path / "frozen", table)
    for read in (table.lookup, frozen.lookup):
        np.testing.assert_array_equal(read(rows.keys), rows.values)
        np.testing.assert_array_equal(
            read(rows.keys, pad_id=2**40 + 7), rows.values * (rows.keys != 2**40 + 7)[:, None]
        )
    save(tmp_path / "one", [table])
    assert_equal(restore(tmp_path / "one", {table.name: table}, keys=rows.keys)[table.name].export(), rows)
    assert_equal(table.refresh().export(kvjax.Prune(min_norm=1e9, keep=rows.keys)), rows)
    assert_equal(make(1, key_dtype=key_dtype).load(rows).export(), rows)


@pytest.mark.parametrize("key_dtype", few(["int32", "uint32"], "uint32"))
def test_a_release_follows_deltas_of_salted_keys(key_dtype, make, tmp_path):
    wide = kvjax.keys(np.array([5, -1])).salted(SALT)
    table = make(1, key_dtype=key_dtype).upsert(wide, [[1.0], [2.0]])
    save(tmp_path / "c" / "0", [table], cursor="serving")
    releases = Releases(tmp_path / "r")
    releases.follow(tmp_path / "c")
    table = table.upsert(wide[:1], [[7.0]])
    save(tmp_path / "c" / "1", [table], since="serving")
    releases.follow(tmp_path / "c")
    assert releases.current()[table.name].lookup(np.asarray(wide))[:, 0].tolist() == [7.0, 2.0]


def test_rows_from_elsewhere_get_the_keys_of_the_table(make, tmp_path):
    """Loads, imports, and what another key_dtype has exported."""
    signed = make(1).upsert(np.array([-1, 5]), [[1.0], [2.0]]).export()
    for key_dtype in ("int32", "uint32"):
        table = make(1, key_dtype=key_dtype).load(signed)
        assert sorted(table.export().keys.tolist()) == sorted(np.array([-1, 5]).astype(key_dtype).tolist())
        assert table.lookup(np.array([-1, 5]))[:, 0].tolist() == [1.0, 2.0]
        table = from_dense(np.ones((2, 1), np.float32), keys=np.array([-1, 2**40])).load(table, merge=True)
        assert len(table) == 3 and table.lookup(np.array([-1, 2**40]))[:, 0].tolist() == [1.0, 1.0]
        both = make(1).upsert(np.array([-1, 2**32 - 1]), [[1.0], [2.0]]).export()
        with pytest.raises(ValueError, match=r"twice|again"):
            table.load(both)
        assert len(table.refresh()) == 3


@wide_is_slow
@pytest.mark.parametrize("key_dtype", few(["int32", "uint32"]))
def test_frozen_tables(key_dtype, make, tmp_path, x64):
    frozen, want = (
        FrozenTable.write(tmp_path / "t", with_rows(make(2, key_dtype=key_dtype))),
        np.arange(8.0).reshape(4, 2),
    )
    arrays, padded = frozen.as_jax(), want * np.array([[1], [0], [1], [1]])
    for form, make_ids in forms().items():
        ids = make_ids(SIGNED)
        for table in (frozen, arrays):
            np.testing.assert_array_equal(table.lookup(ids), want, err_msg=form)
            np.testing.assert_array_equal(table.lookup(ids, pad_id=-1), padded, err_msg=form)
        if not isinstance(ids, list) and (x64 or "64" not in form):
            got = jax.jit(lambda t, x: t.lookup(x, pad_id=2**32 - 1))(arrays, in_program(ids))
            np.testing.assert_array_equal(got, padded, err_msg=form)
        after = frozen.update(ids[:1], [[9.0, 9.0]], removed=ids[1:2], path=tmp_path / "next")
        assert len(after) == 3 and after.lookup(SIGNED)[:, 0].tolist() == [9.0, 0.0, 4.0, 6.0], form


@wide_is_slow
@pytest.mark.parametrize("key_dtype", few(["int32", "uint32"]))
def test_rows_that_are_kept(key_dtype, make, tmp_path, x64):
    """By `kvjax.Prune`, and by a restore of some keys."""
    table = with_rows(make(2, key_dtype=key_dtype))
    save(tmp_path / "one", [table])
    kept = theirs(key_dtype)[1:2].tolist()
    for form, make_ids in forms().items():
        ids = make_ids(SIGNED)[1:2]
        restored = restore(tmp_path / "one", {table.name: table}, keys=ids)[table.name]
        assert restored.export().keys.tolist() == kept, form
        if "jax" in form and not x64:
            continue  # of which Prune knows no table that could say that they are whole
        rule = kvjax.Prune(min_norm=1e9, keep=ids)
        whole = restore(tmp_path / "one", {table.name: table})[table.name]
        assert whole.export(rule).keys.tolist() == kept, form
        assert FrozenTable.write(tmp_path / "t", whole, prune=rule).export()[0].tolist() == kept, form
        export_checkpoint(tmp_path / "one", tmp_path / "rows.npz", prune=rule)
        assert from_npz(tmp_path / "rows.npz").rows.keys.tolist() == kept, form
        prune(tmp_path / "one", tmp_path / "two", rule, overwrite=True)
        save(tmp_path / "three", [whole], prune=rule, overwrite=True)
        for name in ("two", "three"):
            again = restore(tmp_path / name, {table.name: table})[table.name]
            assert again.export().keys.tolist() == kept, form


def test_the_row_that_unadmitted_keys_share(make):
    """Is that of a key as its ids are."""
    for key_dtype, shared in (("uint32", -1), ("int32", 2**32 - 1)):
        admit = kvjax.admit.MinCount(9, unadmitted=shared)
        table = make(1, key_dtype=key_dtype, admit=admit).upsert(np.array([-1]), [[7.0]])
        assert table.lookup([3])[0].tolist() == [7.0]
