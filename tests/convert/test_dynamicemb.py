"""Dumps of dynamicemb, written as its source has it, and the slots that no file has."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax import convert
from kvjax._command.main import main
from tests.convert.test_imports import GOLDEN, by_key


def dump(folder, ranks, name="ad", optimizer=None, strategy="KLru", opt="_emb_opt_values", **more):
    """As ``key_value_table.py`` and ``batched_dynamicemb_tables.py`` have it.

    Args:
      ranks: of each rank, keys, rows, scores and the optimizer's state, any of the last two None.
    """
    folder.mkdir(exist_ok=True)
    kinds = {"_emb_keys": np.int64, "_emb_values": np.float32, "_emb_scores": np.int64, opt: np.float32}
    for rank, arrays in enumerate(ranks):
        for (kind, dtype), array in zip(kinds.items(), arrays, strict=True):
            if array is not None:
                path = folder / f"{name}{kind}.rank_{rank}.world_size_{len(ranks)}"
                np.asarray(array).astype(dtype).tofile(path)
    said = {"opt_type": optimizer, "evict_strategy": f"EvictStrategy.{strategy}", "dist_type": "roundrobin", **more}
    (folder / f"{name}_opt_args.json").write_text(json.dumps(said, indent=4))


@pytest.fixture
def adam():
    """Two ranks, the second of which has no rows."""
    rows, state = np.arange(6.0).reshape(3, 2), np.arange(12.0).reshape(3, 4)
    return [([7, -1, 2**40], rows, [4, 5, 6], state), ([], rows[:0], [], state[:0])]


def test_rows_scores_and_slots(adam, tmp_path):
    dump(tmp_path, adam, optimizer="adam", strategy="KLfu", iters=9)
    imported = convert.from_dynamicemb(tmp_path, "ad")
    assert by_key(imported) == {7: [0, 1], -1: [2, 3], 2**40: [4, 5]} and imported.rows.freqs.tolist() == [4, 5, 6]
    assert imported.left == ("the slot 'm'", "the slot 'v'", "the slot 'iters'") and not imported.rows.has_slots.any()
    slots = {"iters": "count", "m": "mu", "v": "nu"}
    rows = convert.from_dynamicemb(tmp_path, "ad", slots=slots).rows
    assert rows.slots["mu"].tolist() == [[0, 1], [4, 5], [8, 9]] and rows.slots["nu"][2].tolist() == [10, 11]
    assert rows.slots["count"].tolist() == [9] * 3 and rows.slots["count"].dtype == np.int32 and rows.has_slots.all()
    unsigned = convert.from_dynamicemb(tmp_path, "ad", key_dtype="uint64", scores=[None])
    assert unsigned.rows.keys.tolist() == [7, 2**64 - 1, 2**40] and unsigned.rows.freqs.tolist() == [0] * 3
    assert "1 of the 1 scores of each key" in unsigned.left
    assert convert.from_dynamicemb(tmp_path, "ad", scores=["versions"]).rows.versions.tolist() == [4, 5, 6]
    for rank in (0, 1):
        np.arange(3 - rank).tofile(tmp_path / f"ad_counter_keys.rank_{rank}.world_size_2")
    assert convert.from_dynamicemb(tmp_path, "ad").left[-1] == "the counts of 5 keys that its admission had seen"


@pytest.mark.usefixtures("promotion")
@pytest.mark.parametrize("order", [("iters", "m", "v"), ("v", "iters", "m")])
def test_training_goes_on(order, adam, make, tmp_path):
    """With dynamicemb's Adam, which counts its steps for all rows, as with the Adam that has trained so far."""
    dump(tmp_path, adam, optimizer="adam", iters=3)
    names = {"iters": "count", "m": "mu", "v": "nu"}
    imported = convert.from_dynamicemb(tmp_path, "ad", slots={slot: names[slot] for slot in order})
    table, tx = imported.load(make(2)), optax.adam(0.1)
    if order[0] != "iters":  # the optimizer has them in its own
        table = table.switch_optimizer(tx)
    grads = kvjax.SparseRows(np.array([2**40]), jnp.ones((1, 2)))
    table, _ = table.apply(tx, grads)
    value = jnp.array([4.0, 5.0])
    state = optax.ScaleByAdamState(jnp.int32(3), jnp.array([8.0, 9.0]), jnp.array([10.0, 11.0]))
    updates, _ = tx.update(jnp.ones(2), (state, *tx.init(value)[1:]))
    np.testing.assert_allclose(table.lookup(2**40), optax.apply_updates(value, updates), rtol=1e-6)


def test_other_optimizers_and_layouts(tmp_path):
    keys, rows = [1, 2], np.ones((2, 3))
    dump(tmp_path / "a", [(keys, rows, None, rows * 5)], optimizer="exact_adagrad")
    slots = {"accumulator": "sum_of_squares"}
    assert (
        convert.from_dynamicemb(tmp_path / "a", "ad", slots=slots).rows.slots["sum_of_squares"].tolist()
        == [[5] * 3] * 2
    )
    for width, opt in ((1, "_emb_opt_values"), (4, "_opt_values")):  # the latter is how early dumps were named
        state = np.arange(2.0 * width).reshape(2, width)
        dump(tmp_path / opt, [(keys, rows, None, state)], optimizer="exact_row_wise_adagrad", opt=opt)
        found = convert.from_dynamicemb(tmp_path / opt, "ad", slots=slots).rows.slots["sum_of_squares"]
        assert found.tolist() == state[:, 0].tolist()
    dump(tmp_path / "n", [(keys, rows, [[8, 1], [9, 2]], np.ones((2, 2)))], optimizer="new")
    imported = convert.from_dynamicemb(tmp_path / "n", "ad", scores=[None, "freqs"])
    assert imported.rows.freqs.tolist() == [1, 2]
    assert imported.left == ("1 of the 2 scores of each key", "the slot \"2 elements of the optimizer 'new'\"")
    assert "2 of the 2 scores of each key" in convert.from_dynamicemb(tmp_path / "n", "ad").left
    (tmp_path / "n/ad_opt_args.json").unlink()
    assert len(convert.from_dynamicemb(tmp_path / "n", "ad").rows) == 2
    dump(tmp_path / "e", [([], rows[:0], [], None)], optimizer="sgd")
    assert convert.from_dynamicemb(tmp_path / "e", "ad", dim=3).rows.values.shape == (0, 3)


def test_errors(adam, tmp_path):
    dump(tmp_path / "model.a", adam, optimizer="adam", iters=True)
    folder = tmp_path / "model.a"
    for how, message in (
        ({"slots": {"iters": "count"}}, r"the slots \['iters'\] of 'ad', got \['m', 'v'\]"),
        ({"dim": 3}, "rank_0.world_size_2: want 36 bytes, for 3 keys 3 of float32 each, got 24"),
        ({"key_dtype": "int32"}, "key_dtype of int64 or uint64, got 'int32'"),
        ({"scores": ["freqs", None]}, "scores= with 1 of 'freqs', 'versions' and None"),
        ({"scores": ["counts"]}, r"got \['counts'\]"),
        ({"slots": {"m": "mu"}, "fill": {"mu": 1}}, r"fill= of slots that no file has, got \['mu'\]"),
        ({"fill": {"count": "7"}}, "fill= with a number for the slot 'count', got '7'"),
        ({"fill": {"count": 2**31}}, "an integer of 32 bits"),
    ):
        with pytest.raises(convert.FileError, match=message):
            convert.from_dynamicemb(folder, "ad", **how)
    for path, name, message in (
        (tmp_path, "ad", r"got \[\]; give the folder 'model.a' in it"),
        (folder, "bd", r"want files bd_emb_keys.rank_..., got \['ad_emb_keys.rank_0.world_size_2'"),
        (tmp_path / "none", "ad", "want a folder of DynamicEmbDump, got none"),
    ):
        with pytest.raises(convert.FileError, match=message):
            convert.from_dynamicemb(path, name)

    def damaged(message, file, change):
        path = folder / file
        data = path.read_bytes()
        change(path)
        with pytest.raises(convert.FileError, match=message):
            convert.from_dynamicemb(folder, "ad")
        path.write_bytes(data)

    def cut(path):
        path.write_bytes(path.read_bytes()[:-4])

    damaged("want 24 bytes, for 3 keys", "ad_emb_scores.rank_0.world_size_2", cut)
    damaged("ad_emb_keys.rank_0.* want 16 bytes", "ad_emb_keys.rank_0.world_size_2", cut)
    damaged("of all 2 ranks of 'ad', got of ranks", "ad_emb_keys.rank_1.world_size_2", lambda path: path.unlink())
    damaged("'_emb_values' of each rank", "ad_emb_values.rank_1.world_size_2", lambda path: path.unlink())
    damaged("opt_args.json: want JSON", "ad_opt_args.json", lambda path: path.write_text("{"))
    damaged("want an object in JSON", "ad_opt_args.json", lambda path: path.write_text("[]"))
    (folder / "ad_emb_keys.rank_0.world_size_1").touch()
    with pytest.raises(convert.FileError, match=r"one dump of 'ad', got world sizes \[1, 2\]"):
        convert.from_dynamicemb(folder, "ad")
    dump(tmp_path / "e", [([], [], None, None)])
    with pytest.raises(convert.FileError, match="whose size says dim, got none; say dim="):
        convert.from_dynamicemb(tmp_path / "e", "ad")
    with pytest.raises(convert.FileError, match="want scores of 'ad', got none"):
        dump(tmp_path / "s", [([1], [1.0], None, None)])
        convert.from_dynamicemb(tmp_path / "s", "ad", scores=["freqs"])


@pytest.mark.usefixtures("promotion")
def test_slots_that_no_file_has(tmp_path, make):
    """TensorFlow's Adam has one count for all rows, which is in none of TFRA's files."""
    slots, fill = {"m": "mu", "v": "nu"}, {"count": 2, "scale": 0.5}
    rows = convert.from_tfra(GOLDEN / "tfra_slots", "user/emb", slots=slots, fill=fill).rows
    assert set(rows.slots["count"].tolist()) == {2} and rows.slots["count"].dtype == np.int32
    assert set(rows.slots["scale"].tolist()) == {0.5} and rows.slots["scale"].dtype == np.float32
    args = "--from", "tfra", "--table", "user/emb", "--slot", "m=mu", "--slot", "v=nu", "--fill", "count=2"
    assert main(["convert", str(GOLDEN / "tfra_slots"), str(tmp_path / "one"), *args]) == 0
    table = kvjax.checkpoint.restore(tmp_path / "one", {"user/emb": make(3)}, own_initializer=True)["user/emb"]
    key = rows.keys[rows.has_slots][:1]
    table, _ = table.apply(optax.adam(0.1), kvjax.SparseRows(key, jnp.ones((1, 3))))
    assert table.slot("count", key).tolist() == [3]
    assert main(["convert", str(GOLDEN / "tfra_slots"), str(tmp_path / "two"), *args[:4], "--fill", "count=x"]) == 2


def test_the_command(adam, tmp_path, capsys):
    dump(tmp_path / "d", adam, optimizer="adam", iters=3)
    args = "--from", "dynamicemb", "--table", "ad", "--slot", "iters=count", "--score", "versions", "--json"
    assert main(["convert", str(tmp_path / "d"), str(tmp_path / "one"), *args]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 3 and found["left"] == ["the slot 'm'", "the slot 'v'"]
    (rows,) = kvjax.checkpoint.rows(tmp_path / "one", "ad")
    assert sorted(rows.versions.tolist()) == [4, 5, 6] and rows.last_step == 6
    assert (
        main(["convert", str(GOLDEN / "tfra"), str(tmp_path / "x"), *args[2:4], "--from", "tfra", "--score", "freqs"])
        == 2
    )
    assert "--score" in capsys.readouterr().err
