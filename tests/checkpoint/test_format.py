"""The files of a checkpoint: what is in them, and what is wrong with them is found before anything changes."""

import dataclasses
import shutil
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts

import kvjax
from kvjax._command.main import main
from kvjax.checkpoint._disk import meta, rules
from tests.golden.reference import BUCKETS, bucket_of
from tests.support.checkpoints import DAMAGES, IDS, assert_equal, restore, save, trained
from tests.support.marks import few
from tests.support.tables import drop_all


def test_golden_checkpoint():
    """A checkpoint that an earlier kvjax wrote; this one and every later must read it."""
    folder = Path(__file__).parents[1] / "golden/checkpoint_v1"
    table = kvjax.orbax.TableHandler().restore(folder)["golden"]
    out = table.export(slots=True)
    assert out.keys.tolist() == [2**40, -(2**63), -1, 7]
    assert out.freqs.tolist() == [2, 1, 1, 0] and out.versions.tolist() == [2, 2, 1, 2] and out.last_step == 2
    assert out.has_slots.tolist() == [True, True, True, False] and list(out.slots) == ["trace"]
    np.testing.assert_array_equal(out.values[3], [7.0, 8.0])
    np.testing.assert_allclose(out.slots["trace"][0], [1.5, 1.5])
    np.testing.assert_allclose(out.values[0], [0.75, 0.75])


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_golden_checkpoints_of_later_formats(version, tmp_path):
    """With all that a table may have: a row pool, slots, pins, keys that wait, a sketch, rows of 2 bytes."""
    shutil.unpack_archive(Path(__file__).parents[1] / f"golden/checkpoint_{version}.zip", tmp_path)
    tables = kvjax.orbax.TableHandler().restore(tmp_path)
    one, other = tables["pinned/\u00e4"], tables["half"]
    for table, keys in ((one, [0, 2**40, -1]), (other, [0, 2**40, 2**64 - 1])):
        out = table.export(slots=True)
        assert out.keys.tolist() == keys and out.pinned.tolist() == [False, True, False]
        assert out.freqs.tolist() == [2, 2, 3] and out.versions.tolist() == [2, 1, 2] and out.last_step == 2
        assert list(out.slots) == ["count", "mu", "nu"] and out.slots["count"].tolist() == [2, 1, 2]
    np.testing.assert_array_equal(one.export().values[0], np.float32([3.0000083446502686, 4.000008583068848]))
    np.testing.assert_array_equal(other.export().values[2], np.array([2.015625, 3.015625, 4.03125], jnp.bfloat16))
    assert one.snapshot().admission["pending_counts"].tolist() == [1] and other.snapshot().admission["sketch"].sum() > 0
    np.testing.assert_array_equal(one.spec.initializer.array(), [[1.0, 2.0], [3.0, 4.0]])


@pytest.mark.parametrize("version", few(["v1", "v2", "v3"], "v3"))
def test_golden_checkpoints_are_rewritten_whole(version, tmp_path):
    """By all that makes a checkpoint of one: with the same rows, options and counts, in the present format."""
    golden = Path(__file__).parents[1] / "golden" / f"checkpoint_{version}"
    if version != "v1":
        shutil.unpack_archive(golden.with_suffix(".zip"), golden := tmp_path / "golden")
    want = contents(golden)
    kvjax.checkpoint.save(tmp_path / "saved", kvjax.checkpoint.restore(golden))
    kvjax.checkpoint.compact(golden, tmp_path / "compact")
    kvjax.checkpoint.prune(golden, tmp_path / "prune", kvjax.Prune())
    assert main(["convert", str(golden), str(tmp_path / "convert")]) == 0
    for out in ("compact", "prune", "convert"):
        assert kvjax.checkpoint.verify(tmp_path / out).ok and kvjax.checkpoint.diff(golden, tmp_path / out).same
        assert kvjax.checkpoint.diff(tmp_path / "saved", tmp_path / out).same
        for name, (spec, rows, counts) in contents(tmp_path / out).items():
            assert spec == want[name][0]
            assert_equal(rows, want[name][1])
            np.testing.assert_array_equal(rows.pinned, want[name][1].pinned)
            np.testing.assert_equal(counts, want[name][2])


def contents(path):
    drop_all()
    tables = kvjax.checkpoint.restore(path)
    return {name: (t.spec, t.export(slots=True), t.snapshot().admission) for name, t in tables.items()}


def test_prune_on_save(make, tmp_path):
    table = trained(make(3))
    prune = kvjax.Prune(min_frequency=5)
    want = table.export(prune, slots=True)
    assert 0 < len(want) < len(table)
    save(tmp_path, 1, {"t": table}, prune=prune)
    assert_equal(restore(tmp_path, 1, {"t": table})["t"].export(slots=True), want)
    folder = tmp_path / "1/tables/t/shard-00000-of-00001"
    offsets = ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/offsets"}).result().read().result()
    np.testing.assert_array_equal(offsets, np.searchsorted(bucket_of(want.keys), np.arange(BUCKETS + 1)))


@pytest.mark.parametrize("keep", [lambda rows: rows.keys % 7 != 0, lambda rows: rows.keys < 0])
def test_rows_that_a_save_prunes_are_left_out_as_it_is_written(keep, make, tmp_path, monkeypatch):
    """In pieces: a copy of those that are kept would be another one of the table."""
    monkeypatch.setattr("kvjax._formats.source.PIECE_BYTES", 1 << 16)
    table = make(64).upsert(np.arange(20_000), np.arange(1_280_000, dtype=np.float32).reshape(-1, 64)).pin([7, 8])
    kvjax.checkpoint.save(tmp_path / "whole", {"t": table})
    kvjax.checkpoint.prune(tmp_path / "whole", tmp_path / "want", keep)
    tracemalloc.start()
    kvjax.checkpoint.save(tmp_path / "got", {"t": table}, prune=keep)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * 20_000 * 64 * 4
    assert kvjax.checkpoint.diff(tmp_path / "want", tmp_path / "got").same
    assert kvjax.checkpoint.verify(tmp_path / "got").ok
    want = {path.relative_to(tmp_path / "want"): path.read_bytes() for path in (tmp_path / "want").rglob("c.*")}
    assert want == {path.relative_to(tmp_path / "got"): path.read_bytes() for path in (tmp_path / "got").rglob("c.*")}


def test_equal_tables_give_equal_files(make, tmp_path):
    one, other = make(2), make(2)
    one = one.upsert(IDS, np.ones((5, 2)))
    other = other.upsert(IDS[::-1], np.ones((5, 2)))
    save(tmp_path / "a", 1, {"t": one})
    save(tmp_path / "b", 1, {"t": other})
    chunks = sorted((tmp_path / "a/1/tables/t/shard-00000-of-00001").rglob("c.*"))
    assert len(chunks) == 6
    for path in chunks:
        twin = tmp_path / "b" / path.relative_to(tmp_path / "a")
        assert path.read_bytes() == twin.read_bytes(), path


def test_others_can_read_the_arrays(make, tmp_path):
    table = trained(make(3))
    save(tmp_path, 1, {"t": table})
    folder = tmp_path / "1/tables/t/shard-00000-of-00001"
    keys = ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/keys"}).result().read().result()
    np.testing.assert_array_equal(keys, table.export().keys)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused(damage, make, tmp_path):
    good, bad = trained(make(3)), trained(make(3))
    save(tmp_path, 1, {"good": good, "bad": bad})
    damage(tmp_path / "1/tables/bad")
    good, bad = good.clear(), bad.clear()
    with pytest.raises(ValueError, match="table 'bad', restore"):
        restore(tmp_path, 1, {"good": good, "bad": bad})
    assert len(good) == len(bad) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"dim": 4},
            "dim 3, as saved in .*/1/tables, got one with dim 4; make it .* rows with dim 4, restore",
        ),
        ({"seed": 1}, "seed 0, .*, got one with seed 1; make it .*drop_table.*; own_initializer=True"),
        ({"dim": 4, "seed": 1}, "dim 3, seed 0, as saved in .*, got one with dim 4, seed 1; make it"),
        ({"initializer": 1.0}, "initializer"),
        ({"dtype": "bfloat16"}, "dtype 'float32', .*, got one with dtype 'bfloat16'; give dtype='bfloat16' to convert"),
        (
            {"key_dtype": "uint64"},
            "key_dtype 'int64', .*, got one with key_dtype 'uint64'; make it .* rows with",
        ),
    ],
)
def test_another_table_is_refused(options, message, make, tmp_path):
    table = trained(make(3, seed=0))
    other = make(**{"dim": 3, "seed": 0} | options)
    save(tmp_path, 1, {"t": table, other.name: table})
    for call in (lambda: restore(tmp_path, 1, {"t": other}), lambda: restore(tmp_path, 1, {other.name: None})):
        with pytest.raises(ValueError, match=rf"table '{other.name}', restore: want a table with .*{message}"):
            call()


def test_missing_table_is_named(make, tmp_path):
    save(tmp_path, 1, {"t": make(3)})
    with pytest.raises(ValueError, match=r"'u', restore.*holds \['t'\]"):
        restore(tmp_path, 1, {"u": make(3)})


def test_load_checks_its_arrays(make):
    table = trained(make(3))
    rows = table.export(slots=True)
    twice = rows.take(np.r_[np.arange(len(rows)), 0])
    with pytest.raises(ValueError, match="distinct keys"):
        table.load(twice)
    with pytest.raises(ValueError, match="want values"):
        make(4).load(rows)
    with pytest.raises(TypeError, match="keys"):
        table.load(dataclasses.replace(rows, keys=rows.keys.astype(np.float64)))
    assert_equal(table.export(slots=True), rows)
    most = table.load(dataclasses.replace(rows, freqs=np.full(len(rows), 2**63 - 1))).export().freqs
    assert set(most.tolist()) == {2**62 - 1}


def test_a_table_keeps_an_initializer_of_its_own(make, tmp_path):
    """If that is asked for: what keys without a row read as is another then."""
    saved = trained(make(2, initializer=0.0), optax.rmsprop(0.1))
    rows = saved.export(slots=True)
    kvjax.checkpoint.save(tmp_path / "c", [saved])
    other = make(2, initializer=3.0, seed=99)
    with pytest.raises(ValueError, match=r"want a table with seed .*own_initializer=True"):
        kvjax.checkpoint.restore(tmp_path / "c", {saved.name: other})
    with pytest.raises(ValueError, match=r"want cursor= beside all of a checkpoint.*own_initializer"):
        kvjax.checkpoint.restore(tmp_path / "c", {saved.name: other}, own_initializer=True, cursor="c")
    (table,) = kvjax.checkpoint.restore(tmp_path / "c", {saved.name: other}, own_initializer=True).values()
    assert table.spec.seed == 99 and table.lookup([10**15]).tolist() == [[3.0, 3.0]]
    assert_equal(table.export(slots=True), rows)
    kvjax.drop_table(saved.name)
    with pytest.raises(ValueError, match="want a table that is there beside own_initializer=True"):
        kvjax.checkpoint.restore(tmp_path / "c", own_initializer=True)


RULES = [
    kvjax.admit.MinCount(2), kvjax.admit.Probability(0.5), kvjax.admit.Sketch(2), kvjax.evict.LeastFrequent(),
    kvjax.evict.LeastRecent(), kvjax.evict.MaxAge(3).every(2), kvjax.evict.MinFrequency(2),
    kvjax.evict.MinNorm(0.5) | ~kvjax.evict.MaxAge(3), kvjax.constraints.max_norm(1.0),
    kvjax.constraints.non_negative(),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_rule_that_was_written_before_it_had_a_field_has_the_default(rule):
    saved = rules.dump(rule)
    assert rules.load(saved) == rule
    for field in dataclasses.fields(rule):
        earlier = {name: value for name, value in saved.items() if name != field.name}
        if field.default is dataclasses.MISSING:
            with pytest.raises(ValueError, match=f"want {field.name} of the rule {type(rule).__name__}"):
                rules.load(earlier)
        else:
            assert rules.load(earlier) == rule
    with pytest.raises(ValueError, match="a later kvjax may have written it"):
        rules.load(saved | {"more": 1})


def test_checkpoints_from_before_a_field_are_the_same_as_later_ones(make, tmp_path, monkeypatch):
    """To `diff` and `merge`, which compare what tables are."""
    table, written = trained(make(3, admit=kvjax.admit.MinCount(1))), rules.dump

    def earlier(value):
        said = written(value)
        return {k: v for k, v in said.items() if k != "max_age"} if isinstance(said, dict) and "rule" in said else said

    with monkeypatch.context() as patch:
        patch.setattr(meta, "dump", earlier)
        kvjax.checkpoint.save(tmp_path / "old", {"t": table})
    kvjax.checkpoint.save(tmp_path / "new", {"t": table})
    files = [(tmp_path / name / "t/kvjax.json").read_text() for name in ("old", "new")]
    assert ["max_age" in text for text in files] == [False, True]
    assert kvjax.checkpoint.diff(tmp_path / "old", tmp_path / "new").same
    report = kvjax.checkpoint.merge([tmp_path / "old", tmp_path / "new"], tmp_path / "both", ancestor=tmp_path / "old")
    assert report["t"].rows == len(table)
