"""Tables of other systems: the files that they wrote, and files that are not as they should be."""

import os
import pickle
import shutil
import struct
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax import convert
from kvjax._formats import bundle
from kvjax.checkpoint._disk.format import LostBaseError
from tests.support.marks import slow
from tests.support.tables import AWKWARD

GOLDEN = Path(__file__).parents[1] / "golden"
TFRA_KEYS = np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**40 + 7, 12, 13])


def by_key(imported):
    rows = imported.rows
    return {int(k): row.tolist() for k, row in zip(rows.keys, rows.values, strict=True)}


def test_tfra(make):
    """Files of TFRA 0.8.1 with TensorFlow 2.16.2, two shards: rows arange(24).reshape(8, 3) / 4 under TFRA_KEYS."""
    imported = convert.from_tfra(GOLDEN / "tfra", "items", dim=3)
    want = dict(zip(TFRA_KEYS.tolist(), (np.arange(24).reshape(8, 3) / 4).tolist(), strict=True))
    assert by_key(imported) == want and imported.left == ()
    table = imported.load(make(3))
    np.testing.assert_array_equal(table.lookup(TFRA_KEYS), np.array(list(want.values()), np.float32))
    assert len(convert.from_tfra(GOLDEN / "tfra", "scope/one").rows) == 2


def test_tfra_slots():
    """Files of TFRA 0.8.1: two steps of Adam(0.1) from rows of 0.5, with the gradients arange(18).reshape(6, 3) / 8."""
    folder, keys = GOLDEN / "tfra_slots", np.array([0, 1, -1, 2**40 + 7, 12, 13])
    imported = convert.from_tfra(folder, "user/emb", slots={"m": "mu", "user/emb_lookup/v": "nu"})
    rows, gradients = imported.rows, dict(zip(keys.tolist(), np.arange(18).reshape(6, 3) / 8, strict=True))
    want = np.array([gradients[key] for key in rows.keys.tolist()])
    np.testing.assert_allclose(rows.slots["mu"], want * (1 - 0.9**2), rtol=1e-5)
    np.testing.assert_allclose(rows.slots["nu"], want**2 * (1 - 0.999**2), rtol=1e-4)
    assert imported.left == () and rows.has_slots.all()
    left = convert.from_tfra(folder, "user/emb", slots={"m": "mu"}).left
    assert left == ("user_emb_user_emb_lookup_v, which may be a slot",)
    with pytest.raises(
        ValueError, match=r"want one slot 'w' of 'user/emb', as user_emb_w_mht_.*, got \['user_emb_user_emb_lookup_m', "
    ):
        convert.from_tfra(folder, "user/emb", slots={"w": "mu"})


def test_slots_of_other_keys_than_the_table_has(tmp_path):
    def write(stem, keys, values):
        np.array(keys).tofile(tmp_path / f"{stem}_mht_1of1_rank0_size1-keys")
        np.array(values, np.float32).tofile(tmp_path / f"{stem}_mht_1of1_rank0_size1-values")

    write("a", [7, 5, 9], [[7, 7], [5, 5], [9, 9]])
    write("a_m", [9, 7, 1], [[9, 0], [7, 0], [1, 0]])
    imported = convert.from_tfra(tmp_path, "a", slots={"m": "mu"})
    assert imported.rows.slots["mu"].tolist() == [[7, 0], [0, 0], [9, 0]]
    assert imported.rows.has_slots.tolist() == [True, False, True]
    assert imported.left == (
        "1 rows of the slot 'a_m' whose keys have no row", "slots of 1 keys, which not all of ['mu'] have",
    )  # fmt: skip
    write("a_m", [9, 9], [[9, 0], [7, 0]])
    with pytest.raises(ValueError, match=r"each key of the slot 'a_m' once, got 1 keys .* again, the first 9"):
        convert.from_tfra(tmp_path, "a", slots={"m": "mu"})
    write("b_m", [3], [[3, 3]])
    write("b_v_m", [3], [[3, 3]])
    write("b", [3], [[3, 3]])
    assert convert.from_tfra(tmp_path, "b", slots={"m": "mu"}).rows.slots["mu"].tolist() == [[3, 3]]  # named wholly


def test_deeprec():
    """A bundle that TensorFlow 2.16.2 wrote, with the names and types of DeepRec's."""
    pytest.importorskip("google_crc32c")
    imported = convert.from_deeprec(GOLDEN / "deeprec", "user", slots={"Adagrad": "sum_of_squares"})
    keys = np.array([0, 4, 2**40 + 8, 4000000002, 1, 1001, 2**62 + 1])
    rows = imported.rows
    assert sorted(rows.keys.tolist()) == sorted(keys.tolist())
    np.testing.assert_array_equal(rows.values, rows.keys[:, None] % 97 + np.arange(3) / 4)
    np.testing.assert_array_equal(rows.slots["sum_of_squares"], rows.values + 100)
    np.testing.assert_array_equal(rows.freqs, rows.keys % 7 + 1)
    np.testing.assert_array_equal(rows.versions, np.where(rows.keys % 2 == 0, 0, rows.keys % 50))
    assert rows.has_slots.all() and rows.last_step == rows.versions.max()
    assert imported.left == ("3 keys that its filter had not admitted",)
    left = convert.from_deeprec(GOLDEN / "deeprec/model.ckpt-50", "item").left
    assert left == tuple(f"{name}, which this variable did not keep" for name in ("freqs", "versions"))


def test_tfplus():
    pytest.importorskip("google_crc32c")
    imported = convert.from_tfplus(GOLDEN / "tfplus/model.ckpt-1", "emb")
    rows = imported.rows
    assert by_key(imported) == {int(k): [k % 13, k % 17] for k in (10, 12, 2**50, 11, -3)}
    np.testing.assert_array_equal(rows.freqs, abs(rows.keys) % 9 + 1)
    assert imported.left == (
        "the frequencies of 1 keys without a row", "the days of the last updates, which are no steps",
        "1 keys whose rows group lasso has removed", "8 initial rows",
    )  # fmt: skip


def test_tfplus_slots(tmp_path):
    """By the names that TensorFlow's slot_creator gives them."""
    pytest.importorskip("google_crc32c")
    keys, order = np.array([3, 1, 2]), np.array([1, 2, 0])
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    tensors = {"emb-keys": keys, "emb-values": values}
    tensors |= {"emb/Adam-keys": keys[order], "emb/Adam-values": values[order] + 10}
    tensors |= {"emb/Adam_1-keys": keys[:2], "emb/Adam_1-values": values[:2]}
    bundle.write(tmp_path / "m", {name: bundle.tensor(array) for name, array in tensors.items()})
    imported = convert.from_tfplus(tmp_path / "m", "emb", slots={"Adam": "mu"})
    np.testing.assert_array_equal(imported.rows.slots["mu"], values + 10)
    assert imported.rows.has_slots.all() and imported.left == ("the slot 'Adam_1'",)
    both = convert.from_tfplus(tmp_path / "m", "emb", slots={"Adam": "mu", "Adam_1": "nu"})
    assert both.rows.has_slots.tolist() == [True, True, False]
    with pytest.raises(ValueError, match=r"the slots \['Ftrl'\] of 'emb', got \['Adam', 'Adam_1'\]"):
        convert.from_tfplus(tmp_path / "m", "emb", slots={"Ftrl": "z"})


def write_sok(folder, keys, weights, slots=(), name="emb_0", meta=True):
    """As SOK's dump_load.py has it."""
    kinds = {"int64": 1, "uint32": 2, "float16": 4, "float32": 5}

    def write(end, kind, slot, array):
        head = name.rjust(256).encode() + struct.pack(">I", kind) + slot.rjust(32).encode()
        (folder / f"{name}-{end}").write_bytes(head + struct.pack(">I", kinds[array.dtype.name]) + array.tobytes())

    write("key", 0, "", keys)
    write("weight", 1, "", weights)
    for slot, array in dict(slots).items():
        write(slot, 2, slot.split("-")[-1], array)
    if meta:
        numbers = struct.pack(">IIII", 1, 1, 5, weights.shape[1]) + struct.pack(">Q", len(keys))
        (folder / "meta_info").write_bytes(numbers + name.rjust(256).encode() + b"Adagrad".rjust(32))


def test_sok(tmp_path):
    weights = np.arange(6, dtype=np.float32).reshape(3, 2)
    write_sok(tmp_path, np.array([-1, 3, 2**40]), weights, {"Adagrad-accumulator": weights + 1})
    imported = convert.from_sok(tmp_path, "emb:0", slots={"Adagrad-accumulator": "sum_of_squares"})
    assert by_key(imported) == {-1: [0, 1], 3: [2, 3], 2**40: [4, 5]} and imported.left == ()
    np.testing.assert_array_equal(imported.rows.slots["sum_of_squares"], weights + 1)
    assert convert.from_sok(tmp_path, "emb:0").left == ("the slot 'Adagrad-accumulator'",)
    (tmp_path / "emb_0-weight").write_bytes((tmp_path / "emb_0-weight").read_bytes()[:-8])
    with pytest.raises(ValueError, match="whole rows for 3 keys, got 4 elements"):
        convert.from_sok(tmp_path, "emb:0")
    write_sok(tmp_path, np.array([-1, 3]), weights[:2])
    (tmp_path / "emb_0-key").write_bytes((tmp_path / "emb_0-key").read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"meta_info: want .* \(1, 4\), as its files have, got \(2, 2\)"):
        convert.from_sok(tmp_path, "emb:0")
    write_sok(tmp_path, np.zeros(0, np.int64), weights[:0])
    assert convert.from_sok(tmp_path, "emb:0").rows.values.shape == (0, 2)
    (tmp_path / "meta_info").unlink()
    with pytest.raises(ValueError, match="or a file meta_info, which say dim, got neither"):
        convert.from_sok(tmp_path, "emb:0")


def test_dense_embeddings_and_the_table_they_become():
    values = np.random.default_rng(0).normal(size=(len(AWKWARD), 3)).astype(np.float32)
    table = convert.from_dense(jnp.asarray(values), AWKWARD).make("made")
    np.testing.assert_array_equal(table.lookup(AWKWARD), values)
    with pytest.raises(ValueError, match="want a new name, got that of a live table"):
        convert.from_dense(values).make("made")
    with pytest.raises(ValueError, match=r"rows of .*, got float64; say dtype="):
        convert.from_dense(values.astype(float)).make("other")
    with pytest.raises(TypeError, match="from_dense: want ids of 64 bits, got a JAX array of 32-bit integers"):
        convert.from_dense(values, jnp.asarray(AWKWARD))
    assert list(kvjax.tables()) == ["made"]
    half = convert.from_dense(values).make("other", dtype="float16")
    np.testing.assert_array_equal(half.lookup(np.arange(8)), values.astype(np.float16))
    with pytest.raises(ValueError, match="want rows of float16, got float32; say cast=True"):
        convert.from_dense(values).load(half)
    half = convert.from_dense(values[:2]).load(half, cast=True)
    with pytest.warns(UserWarning, match="1 of 2 rows of an array have a NaN or an infinity"):
        large = convert.from_dense(np.float32([[1, 2, 3], [np.inf, 7e4, 0]]))
    with pytest.raises(ValueError, match="want values that float16 can hold, got larger ones in 1 rows"):
        large.load(half, cast=True)
    assert len(half) == 2
    for other in (np.complex64, np.int64, bool):
        with pytest.raises(ValueError, match=r"want values \(2, dim\) of floats"):
            convert.from_dense(values[:2].astype(other))
    with pytest.raises(ValueError, match=r"from_dense: want keys \(2,\), got \(5,\); give one for each row"):
        convert.from_dense(values[:2], np.arange(5))
    with pytest.raises(ValueError, match=r"from_dense: want an array \(n, dim\) .*; give .*params\['embedding'\]"):
        convert.from_dense({"embedding": values})
    for read in (convert.from_npz, convert.from_safetensors, convert.from_parquet):
        with pytest.raises(ValueError, match=r"missing: want an? .* file, got nothing at that path"):
            read("missing")


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda f: (f / "items_mht_2of2_rank0_size1-keys").unlink(), "want all 2 shards of 'items'"),
        (lambda f: (f / "items_mht_2of2_rank0_size1-values").unlink(), "files -keys and -values"),
        (lambda f: (f / "items_mht_1of2_rank0_size1-keys").write_bytes(b"\0" * 23), "23 and 36 bytes"),
        (lambda f: (f / "items_mht_1of2_rank0_size1-values").write_bytes(b"\0" * 32), "24 and 32 bytes"),
        (lambda f: shutil.copy(f / "items_mht_1of2_rank0_size1-keys", f / "items_mht_1of2_rank0_size2-keys"),
         "one save"),
        (lambda f: (f / "items_mht_1of2_rank0_size1-keys").write_bytes(np.full(3, 7).tobytes()), "each key once"),
        (shutil.rmtree, "files of 'items'"),
    ],
)  # fmt: skip
def test_damaged_tfra(damage, message, tmp_path):
    folder = tmp_path / "tfra"
    shutil.copytree(GOLDEN / "tfra", folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        convert.from_tfra(folder, "items", dim=3)
    with pytest.raises(ValueError, match="want keys of int64 and rows of 4 float32"):
        convert.from_tfra(GOLDEN / "tfra", "items", dim=4)


@slow
def test_damaged_bundles(tmp_path):
    """Whatever byte of the index is another, and whatever the data: an error of ours, or the same rows."""
    pytest.importorskip("google_crc32c")
    for path in (GOLDEN / "tfplus").iterdir():
        shutil.copy(path, tmp_path)
    want = by_key(convert.from_tfplus(tmp_path / "model.ckpt-1", "emb"))
    for end in ("index", "data-00000-of-00001"):
        path = tmp_path / f"model.ckpt-1.{end}"
        data, caught = path.read_bytes(), 0
        for at in range(0, len(data), 3):
            for bad in (data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :], data[:at]):
                path.write_bytes(bad)
                try:
                    assert by_key(convert.from_tfplus(tmp_path / "model.ckpt-1", "emb")) == want
                except ValueError as error:
                    caught += 1
                    assert str(error).startswith("kvjax: "), error
        assert caught > len(data) / 3
        path.write_bytes(data)


def test_what_is_not_there(tmp_path):
    pytest.importorskip("google_crc32c")
    with pytest.raises(ValueError, match=r"want the variable 'usr', got \['item', 'user'\].*did you mean 'user'"):
        convert.from_deeprec(GOLDEN / "deeprec", "usr")
    with pytest.raises(ValueError, match=r"the slots \['Adam'\] of 'user', got \['Adagrad'\]"):
        convert.from_deeprec(GOLDEN / "deeprec", "user", slots={"Adam": "mu"})
    with pytest.raises(ValueError, match="want one TensorFlow checkpoint, got"):
        convert.from_deeprec(tmp_path, "user")
    np.savez(tmp_path / "a.npz", ids=np.arange(2), rows=np.ones((2, 1), np.float32), more=np.ones(2))
    with pytest.raises(ValueError, match=r"want the columns \['keys', 'values'\], got \['ids', 'more', 'rows'\]"):
        convert.from_npz(tmp_path / "a.npz")
    imported = convert.from_npz(tmp_path / "a.npz", {"keys": "ids", "values": "rows"})
    assert imported.left == ("the column 'more'",)
    assert convert.from_npz(tmp_path / "a.npz", {"keys": None, "values": "rows"}).rows.keys.tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"want columns= by kvjax's names"):
        convert.from_npz(tmp_path / "a.npz", {"key": "ids"})
    np.savez(tmp_path / "b.npz", keys=np.array([1, 1]), values=np.ones((2, 1), np.float32))
    with pytest.raises(ValueError, match="each key once, got 1 keys that are there again, the first 1"):
        convert.from_npz(tmp_path / "b.npz")


def test_errors_can_be_pickled():
    """As those of a worker are: a pool that cannot read one waits forever, or is broken."""
    for error in (convert.FileError("a.npz", "rows", "none"), LostBaseError("kvjax: table 't': want its base", "0f")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


def test_bundles_that_others_have_made_up(tmp_path):
    """With the checksums as they should be."""
    crc32c = pytest.importorskip("google_crc32c")
    for kind in range(8):
        entry = bytes([1 << 3 | kind, 0])
        (tmp_path / "m.index").write_bytes(bundle._index({b"": b"", b"t-keys": entry, b"t-values": entry}, crc32c))
        with pytest.raises(convert.FileError):
            convert.from_deeprec(tmp_path / "m", "t")
    (tmp_path / "checkpoint").write_bytes(b"\xff\n")  # names none, so it is the only one there
    with pytest.raises(convert.FileError, match="want the index of a TensorFlow checkpoint"):
        convert.from_deeprec(tmp_path, "t")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_latest_of_several_checkpoints(end, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.index").touch()
    (tmp_path / "checkpoint").write_bytes(f'model_checkpoint_path: "a"{end}'.encode())
    assert bundle.latest(tmp_path, "tfra") == str(tmp_path / "a")


@pytest.mark.parametrize("end", ["npz", "parquet", "safetensors", "index"])
def test_a_file_that_this_process_may_not_read(end, tmp_path, monkeypatch):
    path = tmp_path / f"rows.{end}"
    path.touch()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # a test that root runs may read all
    read = {"npz": convert.from_npz, "parquet": convert.from_parquet, "safetensors": convert.from_safetensors}
    with pytest.raises(PermissionError, match=rf"kvjax: want .*, got Permission denied; let .*rows.{end}"):
        read.get(end, lambda path: convert.from_tfplus(path, "t"))(path)


@slow
def test_a_pipe_is_not_waited_for(tmp_path):
    pytest.importorskip("google_crc32c")
    for name in ("t-keys", "t-values", "m.index", "t-key", "t-weight", "rows"):
        os.mkfifo(tmp_path / name)
    for read, *args in (
        (convert.from_tfra, tmp_path, "t", 2), (convert.from_deeprec, tmp_path / "m", "t"),
        (convert.from_sok, tmp_path, "t"), (convert.from_npz, tmp_path / "rows"),
        (convert.from_parquet, tmp_path / "rows"), (convert.from_safetensors, tmp_path / "rows"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="got something that is no regular file"):
            read(*args)


def test_tfra_of_several_processes(tmp_path):
    for rank in range(2):
        for shard in (1, 2):
            stem = tmp_path / f"a_b_mht_{shard}of2_rank{rank}_size2"
            np.array([10 * rank + shard]).tofile(f"{stem}-keys")
            np.full(2, rank + shard / 4, np.float16).tofile(f"{stem}-values")
    (tmp_path / "a_b_Adam_m_mht_1of2_rank0_size2-keys").touch()
    imported = convert.from_tfra(tmp_path, "a/b", dtype="float16")
    assert by_key(imported) == {1: [0.25] * 2, 2: [0.5] * 2, 11: [1.25] * 2, 12: [1.5] * 2}
    assert imported.left == ("a_b_Adam_m, which may be a slot",)
    (tmp_path / "a_b_mht_2of2_rank1_size2-keys").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"all 4 shards of 'a/b', got shards .* \[\(1, 0\), \(1, 1\), \(2, 0\)\]"):
        convert.from_tfra(tmp_path, "a/b")


@slow
def test_an_import_becomes_a_sharded_table(mesh):
    imported = convert.from_tfra(GOLDEN / "tfra", "items", dim=3)
    table = imported.make("sharded", mesh=mesh(4), dtype="bfloat16")
    assert sum(table.size(by="shard").values()) == 8
    np.testing.assert_array_equal(table.lookup(imported.rows.keys), imported.rows.values.astype(jnp.bfloat16))
    table = imported.load(table, cast=True)
    assert len(table) == 8


@slow
def test_training_goes_on_with_the_slots_of_deeprec(promotion):
    pytest.importorskip("google_crc32c")
    imported = convert.from_deeprec(GOLDEN / "deeprec", "user", slots={"Adagrad": "sum_of_squares"})
    table, key = imported.make("user"), np.array([4])
    row, slot = (np.asarray(array) for array in (table.lookup(key), table.slot("sum_of_squares", key)))
    table, _ = table.apply(optax.adagrad(0.1), kvjax.SparseRows(key, jnp.ones((1, 3))))
    np.testing.assert_array_equal(table.slot("sum_of_squares", key), slot + 1)
    np.testing.assert_allclose(table.lookup(key), row - 0.1 / np.sqrt(slot + 1 + 1e-7), rtol=1e-6)


def test_parquet_of_other_kinds(tmp_path):
    """What is wanted is named by its kind; what nobody asks for may be of any, and is listed."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = arrow.FixedSizeListArray.from_arrays(arrow.array(np.arange(6, dtype=np.float32)), 2)
    numbers = arrow.FixedSizeListArray.from_arrays(arrow.array(np.arange(6)), 2)

    def read(**columns):
        parquet.write_table(arrow.table(columns), tmp_path / "a.parquet")
        return convert.from_parquet(tmp_path / "a.parquet")

    for wrong, want in (
        (
            {"keys": ["a", "b", "c"], "values": rows},
            r"want keys \(n,\) of .* object; write integers of 32 or 64 bits; kvjax.hash_keys",
        ),
        ({"keys": [1.0, 2.0, 3.0], "values": rows}, r"want keys \(n,\) of .* float64; write integers"),
        ({"keys": [1, 2, 3], "values": numbers}, r"want values \(3, dim\) of floats, got \(3, 2\) int64; write floats"),
    ):
        with pytest.raises(ValueError, match=want):
            read(**wrong)
    some = read(keys=[1, 2, 3], values=rows, name=["x", None, "z"], tags=[[1], [], [2, 3]])
    assert by_key(some) == {1: [0, 1], 2: [2, 3], 3: [4, 5]}
    assert some.left == ("the column 'name'", "the column 'tags'")


def test_arrays_as_others_have_them(make, tmp_path):
    """Bytes in the other order are read; what cannot be a column says which and why."""
    path, keys, values = tmp_path / "a.npz", np.arange(2), np.ones((2, 2), np.float32)
    np.savez(path, keys=keys.astype(">i8"), values=values.astype(">f4"), **{"slot.mu": values.astype(">f4")})
    table = convert.from_npz(path).load(make(2))
    assert table.lookup(1).tolist() == [1.0, 1.0] and table.slot("mu", 1).tolist() == [1.0, 1.0]
    for message, columns in (
        ("integers of 32 or 64 bits", {"keys": keys.astype(np.int16)}),
        ("'slot.mu' of numbers, got <U1", {"slot.mu": np.array(["a", "b"])}),
        ("pinned of bool, got <U2", {"pinned": np.array(["no", "no"])}),
        ("'scales' of floats, got <U1", {"values": values.astype(np.int8), "scales": np.array(["a", "b"])}),
    ):
        np.savez(path, **({"keys": keys, "values": values} | columns))
        with pytest.raises(convert.FileError, match=message):
            convert.from_npz(path)
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(path, keys=keys, values=np.asfortranarray(rows), other=rows.astype(">f8").T)
    np.testing.assert_array_equal(convert.from_npz(path).rows.values, rows)
    np.savez(path, keys=keys, values=values)
    for columns, message in (({"values": None}, r"None for \['values'\]"), (["keys"], "by kvjax's names, got list")):
        with pytest.raises(convert.FileError, match=message):
            convert.from_npz(path, columns)
