"""merge(): checkpoints of tables that were trained apart, against rules in a few lines over dicts."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax._command.main import main
from kvjax._formats import source
from kvjax._values.exported import Exported
from kvjax.checkpoint import CheckpointError, MergeReport, diff, merge, restore, rows, save
from kvjax.convert import Imported
from tests.support.marks import examples, few, slow

KEYS = [0, -1, 7, 2**40, -(2**63), 2**63 - 1]


def write(path, contents, with_slots=True, last_step=None, **options):
    """A checkpoint of the table "t".

    Args:
      contents: of each key its row (2 numbers), count and mu or None, frequency, row version, and whether it is pinned.
      last_step: of the table; by default the greatest row version.
    """
    keys = np.array(list(contents), np.int64)
    columns = list(zip(*contents.values(), strict=True)) or [()] * 5
    has = np.array([slots is not None for slots in columns[1]], bool)
    slots = [(0, 0.0) if each is None else each for each in columns[1]]
    count, mu = (np.array([each[i] for each in slots], dtype) for i, dtype in ((0, np.int32), (1, np.float32)))
    exported = Exported(
        keys, np.array(columns[0], np.float32).reshape(-1, 2), np.array(columns[2], np.int64),
        np.array(columns[3], np.int64), {"count": count, "mu": mu} if with_slots else {},
        has & with_slots, np.array(columns[4], bool),
        max(columns[3], default=0) if last_step is None else last_step, len(keys),
    )  # fmt: skip
    options = {"dim": 2, "seed": 1} | options
    table = Imported(exported, "int64", "a test", ()).load(kvjax.get_table("t", **options), cast=True)
    save(path, [table])
    kvjax.drop_table("t")


def read(path):
    (found,) = rows(path, "t", slots=True)
    slots = [(found.slots["count"][i], found.slots["mu"][i]) if has else None for i, has in enumerate(found.has_slots)]
    columns = found.values.tolist(), slots, found.freqs.tolist(), found.versions.tolist(), found.pinned.tolist()
    return dict(zip(found.keys.tolist(), zip(*columns, strict=True), strict=True))


def compared(row, slots):
    """What makes a row another one; -0.0 is not 0.0."""
    return repr(row[:4] if slots else (row[0], *row[2:4]))


def merged(parts, rule, weights, ancestor=(), slots=True):
    """As `merge` should. slots: whether all have been saved with slots."""
    out, ancestor = {}, dict(ancestor)
    for key in {key for part in parts for key in part}:
        found = [(part[key], w) for part, w in zip(parts, weights, strict=True) if key in part]
        before, has = 0, found
        if key in ancestor:
            old, pins = ancestor[key], [key in part and part[key][4] for part in parts]
            before, pinned = old[2], all(pins) if old[4] else any(pins)
            differ = [item for item in found if compared(item[0], slots) != compared(old, slots)]
            if not differ and len(found) < len(parts) and not pinned:
                continue
            same = [item for item in found if item[0][1] is not None] or found
            found = [((*row[:4], pinned), w) for row, w in differ or same[-1:]]
        newest = max(enumerate(found), key=lambda item: (item[1][0][3], item[0]))[1][0]
        pinned = any(row[4] for row, _ in found)
        if rule == "newest":
            out[key] = (*newest[:4], pinned)
            continue

        def gained(row, before=before):
            return row[2] - before if row[2] >= before else row[2]

        def mean(items, value, rule=rule, gained=gained):
            counts = [gained(row) if rule == "frequency" else 1 for row, _ in items]
            shares = [c * w for c, (_, w) in zip(counts if any(counts) else [1] * len(items), items, strict=True)]
            return np.average([value(row) for row, _ in items], 0, shares)

        freq = sum(gained(row) for row, _ in has) + (before if any(row[2] >= before for row, _ in has) else 0)
        if len(found) == 1:
            out[key] = (*newest[:2], freq, newest[3], pinned)
            continue
        trained = [item for item in found if item[0][1] is not None]
        slots = None
        if trained:
            slots = max(row[1][0] for row, _ in trained), np.float32(mean(trained, lambda row: row[1][1]))
        values = np.float32(mean(found, lambda row: row[0])).tolist()
        out[key] = (values, slots, freq, max(row[3] for row, _ in found), pinned)
    return out


number = st.floats(-8, 8, width=16)
row = st.tuples(
    st.tuples(number, number).map(list), st.none() | st.tuples(st.integers(0, 9), number), st.integers(0, 3),
    st.integers(0, 3), st.booleans(),
)  # fmt: skip
parts = st.lists(st.dictionaries(st.sampled_from(KEYS), row), min_size=1, max_size=3)


@settings(max_examples=examples(10, 25))
@given(
    parts=parts, begun=st.booleans(), rule=st.sampled_from(["newest", "mean", "frequency"]), data=st.data(),
    small=st.booleans(),
)  # fmt: skip
def test_every_row_is_what_the_rule_says(parts, begun, rule, data, small, tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    ancestor, slotless = None, data.draw(st.sets(st.integers(0, len(parts) - 1), max_size=1))
    if begun:
        ancestor = data.draw(st.dictionaries(st.sampled_from(KEYS), row))
        kept = [data.draw(st.sets(st.sampled_from(KEYS))) for _ in parts]  # of which a part has what the ancestor had
        parts = [
            part | {k: ancestor[k] for k in keep & ancestor.keys()} for part, keep in zip(parts, kept, strict=True)
        ]
        write(folder / "ancestor", ancestor, last_step=3)
    parts = [
        {key: (row[0], None, *row[2:]) for key, row in part.items()} if i in slotless else part
        for i, part in enumerate(parts)
    ]
    weights = [1.0] * len(parts)
    if rule != "newest":
        weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=len(parts), max_size=len(parts)))
    for i, part in enumerate(parts):
        write(folder / f"{i}", part, i not in slotless, last_step=3)
    with pytest.MonkeyPatch.context() as patched:
        if small:
            patched.setattr(source, "PIECE_BYTES", 16)  # a bucket or a few at a time
        paths = [folder / f"{i}" for i in range(len(parts))]
        weighted = None if rule == "newest" else weights
        began = folder / "ancestor" if begun else None
        report = merge(paths, folder / "out", rule, ancestor=began, weights=weighted)["t"]
    wanted, found = merged(parts, rule, weights, ancestor or (), not slotless), read(folder / "out")
    assert found.keys() == wanted.keys()
    for key, (values, slots, *rest) in wanted.items():
        np.testing.assert_allclose(found[key][0], values, rtol=1e-6, atol=1e-7)
        assert (found[key][1] is None) == (slots is None)
        if slots is not None:
            np.testing.assert_allclose(found[key][1], slots, rtol=1e-6, atol=1e-7)
        assert list(found[key][2:]) == rest
    old = {key: compared(row, not slotless) for key, row in (ancestor or {}).items()}
    differ = [[key in part and compared(part[key], not slotless) != old.get(key) for part in parts] for key in wanted]
    shared = sum(sum(each) > 1 for each in differ)
    assert report == MergeReport(len(wanted), tuple(map(len, parts)), shared)
    table = restore(folder / "out")["t"]
    assert len(table) == len(wanted)
    kvjax.drop_table("t")


def test_slots_that_were_not_seen_weigh_as_their_checkpoints(tmp_path):
    for name, slots, freq in (("a", (1, 0.0), 0), ("b", (1, 4.0), 0), ("c", None, 2)):
        write(tmp_path / name, {7: ([0.0, 0.0], slots, freq, 1, False)})
    merge([tmp_path / name for name in "abc"], tmp_path / "out", "frequency", weights=[1, 3, 1])
    assert read(tmp_path / "out")[7][1] == (1, 3.0)


def test_a_row_that_nobody_has_changed_keeps_its_slots(tmp_path):
    for name, with_slots in (("0", True), ("a", True), ("b", False)):
        write(tmp_path / name, {7: ([1.0, 2.0], (1, 4.0) if with_slots else None, 3, 1, False)}, with_slots)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", ancestor=tmp_path / "0")
    assert read(tmp_path / "out")[7][1] == (1, 4.0)


def test_what_one_checkpoint_alone_has_is_copied_to_the_bit(make, tmp_path):
    table = make(3, dtype="bfloat16").upsert(np.array(KEYS), np.random.default_rng(0).normal(size=(6, 3)))
    table = table.pin([7])
    save(tmp_path / "a", {"t": table}), save(tmp_path / "b", {"t": table.clear()})
    save(tmp_path / "c", {"other": make(1).upsert([1], [[1.0]])})
    for rule in ("newest", "mean", "frequency"):
        out = merge(
            [tmp_path / "a", tmp_path / "b", tmp_path / "c"], tmp_path / "out", rule, overwrite=rule != "newest"
        )
        assert out == {"t": MergeReport(6, (6, 0, 0), 0), "other": MergeReport(1, (0, 0, 1), 0)}
        found = diff(tmp_path / "a", tmp_path / "out")
        assert found.tables["t"].same and found.added == ("other",)


@pytest.mark.parametrize("rule", few(["newest", "mean"]))
def test_counts_of_keys_without_a_row(rule, make, tmp_path):
    """Those of waiting keys and of sketches; a key that has a row anywhere waits no more."""
    sgd, ones = optax.sgd(0.1), lambda keys: kvjax.SparseRows(np.array(keys), jnp.ones((len(keys), 2)))
    for admit in (kvjax.admit.MinCount(4), kvjax.admit.Sketch(4)):
        for name, keys, row in (("a", [1, 1, 2, 3], 5), ("b", [1, 2, 2, 5], 9)):
            table = kvjax.get_table("t", dim=2, admit=admit, seed=3).upsert([row], [[1.0, 1.0]])
            save(tmp_path / admit.__class__.__name__ / name, [table.apply(sgd, ones(keys))[0]])
            kvjax.drop_table("t")
        folder = tmp_path / admit.__class__.__name__
        merge([folder / "a", folder / "b"], folder / "out", rule)
        table = restore(folder / "out")["t"]
        counts = [2, 2, 1] if rule == "newest" else [3, 3, 1]
        assert len(table) == 2 and table.frequency(np.array([1, 2, 3])).tolist() == counts
        assert table.contains([5, 9]).all()
        assert table.stats().tracked == (3 if isinstance(admit, kvjax.admit.MinCount) else 0)  # a sketch counts no keys
        kvjax.drop_table("t")


@pytest.mark.parametrize("rule", few(["newest", "mean"]))
def test_counts_since_an_ancestor(rule, tmp_path):
    """What the ancestor has counted counts once; and a key that it had alone, and both forgot, waits no more."""
    sgd, ones = optax.sgd(0.1), lambda keys: kvjax.SparseRows(np.array(keys), jnp.ones((len(keys), 2)))
    for admit in (kvjax.admit.MinCount(9), kvjax.admit.Sketch(9)):
        folder = tmp_path / admit.__class__.__name__
        table = kvjax.get_table("t", dim=2, admit=admit, seed=3).apply(sgd, ones([1, 1, 2, 4]))[0]
        save(folder / "0", [table])
        for name, keys in (("a", [1, 2, 3]), ("b", [1, 1, 2, 2])):
            kvjax.drop_table("t")
            table = restore(folder / "0")["t"].apply(sgd, ones(keys))[0]
            save(folder / name, [table.remove([4])])
        merge([folder / "a", folder / "b"], folder / "out", rule, ancestor=folder / "0")
        kvjax.drop_table("t")
        table = restore(folder / "out")["t"]
        counts = [4, 3, 1] if rule == "newest" else [5, 4, 1]
        assert table.frequency(np.array([1, 2, 3])).tolist() == counts and len(table) == 0
        assert table.stats().tracked == (3 if isinstance(admit, kvjax.admit.MinCount) else 0)
        kvjax.drop_table("t")


def test_what_a_key_was_seen_before_it_had_a_row_counts_once(tmp_path):
    """7 waits in the ancestor, and has rows in two tables; 8 has a row in one, and waits in the other."""

    def train(table, key, delta, times):
        rows = jnp.full((times, 1), -delta / times)
        return table.apply(optax.sgd(1.0), kvjax.SparseRows(np.full(times, key), rows))[0]

    table = kvjax.get_table("t", dim=1, admit=kvjax.admit.MinCount(3), seed=1)
    save(tmp_path / "0", [train(train(table, 7, 1.0, 2), 8, 1.0, 2)])
    for name, steps in (("a", [(7, 10.0, 1), (8, 1.0, 3)]), ("b", [*[(7, 5.0, 1)] * 4])):
        kvjax.drop_table("t")
        table = restore(tmp_path / "0")["t"]
        for step in steps:
            table = train(table, *step)
        save(tmp_path / name, [table])
    for rule, row, freqs in (("newest", 20.0, [6, 5]), ("mean", 15.0, [7, 5]), ("frequency", 18.0, [7, 5])):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / rule, rule, ancestor=tmp_path / "0")
        kvjax.drop_table("t")
        table = restore(tmp_path / rule)["t"]
        assert table.lookup([7]).tolist() == [[row]] and table.frequency(np.array([7, 8])).tolist() == freqs
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "none", "mean")
    assert read(tmp_path / "none")[8][2] == 5 + 2 and read(tmp_path / "none")[7][2] == 3 + 6
    kvjax.drop_table("t")
    save(tmp_path / "other", [kvjax.get_table("other", dim=1)])
    kvjax.drop_table("other")
    with pytest.raises(ValueError, match=r"want an ancestor that has a table of \['t'\], got one with \['other'\]"):
        merge([tmp_path / "a"], tmp_path / "no", ancestor=tmp_path / "other")


@pytest.mark.parametrize("rule", ["newest", "mean"])
def test_windows_of_forgotten_keys_are_no_counts(rule, tmp_path):
    """A key of the last window has 2**30 more in a checkpoint; 7 waits in one and has a row in the other."""

    def job(name, batches):
        table = kvjax.get_table("t", dim=1, seed=1, admit=kvjax.admit.MinCount(5, max_age=4))
        for keys in batches:
            rows = kvjax.SparseRows(np.array(keys), jnp.ones((len(keys), 1)))
            table = table.apply(optax.sgd(1.0), rows)[0]
        save(tmp_path / name, [table])
        kvjax.drop_table("t")

    job("a", [[5, 5], [7], [7], [7]]), job("b", [[5], *[[7]] * 6])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", rule)
    table = restore(tmp_path / "out")["t"]
    assert table.frequency(np.array([7, 5])).tolist() == ([6, 2] if rule == "newest" else [9, 3])
    kvjax.drop_table("t")


def test_the_only_key_that_waits_may_be_0(tmp_path):
    table = kvjax.get_table("t", dim=1, admit=kvjax.admit.MinCount(2))
    for key in (7, 7, 0):
        table = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))))[0]
    save(tmp_path / "a", [table])
    kvjax.drop_table("t")
    assert restore(tmp_path / "a")["t"].frequency(np.array([0, 7])).tolist() == [1, 2]
    kvjax.drop_table("t")


@slow
def test_halved_cells_are_not_taken_for_what_was_counted_since(tmp_path):
    admit = kvjax.admit.Sketch(60, halve_every=2)
    ones = lambda key, n: kvjax.SparseRows(np.full(n, key), jnp.ones((n, 1)))  # noqa: E731
    table = kvjax.get_table("t", dim=1, admit=admit, seed=1).apply(optax.sgd(1.0), ones(7, 8))[0]
    save(tmp_path / "0", [table])
    for name in ("a", "b"):
        kvjax.drop_table("t")
        table = restore(tmp_path / "0")["t"]
        for _ in range(2):
            table = table.apply(optax.sgd(1.0), ones(9, 1))[0]
        save(tmp_path / name, [table])
    halved = int(table.frequency([7])[0])
    assert halved < 8
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", "mean", ancestor=tmp_path / "0")
    kvjax.drop_table("t")
    assert restore(tmp_path / "out")["t"].frequency([7]).tolist() == [2 * halved]
    kvjax.drop_table("t")


def test_an_ancestor_with_another_optimizer(tmp_path):
    """Whose slots nobody compares."""
    table = kvjax.get_table("t", dim=1, seed=1)
    ones = kvjax.SparseRows(np.arange(3), jnp.ones((3, 1)))
    save(tmp_path / "0", [table.apply(optax.trace(0.9), ones)[0]])
    with pytest.warns(UserWarning, match="slots kept none"):
        table = table.refresh().switch_optimizer(optax.rmsprop(0.1))
    table = table.apply(optax.rmsprop(0.1), ones)[0]
    save(tmp_path / "a", [table])
    save(tmp_path / "b", [table.remove([0])])
    assert merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", "mean", ancestor=tmp_path / "0")["t"].rows == 3
    kvjax.drop_table("t")


def test_training_apart_from_an_ancestor_and_its_deltas(mesh, tmp_path):
    """Each table takes the rows of the other, of what one removed nothing is left, and the ancestor is a delta."""
    tx, keys = optax.trace(0.5), np.arange(40)

    def train(table, keys):
        return table.apply(tx, kvjax.SparseRows(keys, jnp.ones((len(keys), 2))))[0]

    table = kvjax.get_table("t", dim=2, mesh=mesh(2), seed=1).upsert([99], [[1.0, 1.0]])
    save(tmp_path / "0", [table], cursor="c")
    save(tmp_path / "1", [train(table, keys)], since="c")
    kvjax.drop_table("t")
    wanted = restore(tmp_path / "1")["t"]
    for name, part, gone in (("a", keys[:20], [30, 39]), ("b", keys[20:30], [0, 38])):
        table = train(restore(tmp_path / "1", {"t": name})["t"], part).remove(gone)
        save(tmp_path / name, {"t": table})
        kvjax.drop_table(name)
    report = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", "mean", ancestor=tmp_path / "1")["t"]
    # 0 was trained in one and removed in the other, so it stays; 30, 38 and 39 were removed and not trained.
    assert report == MergeReport(38, (39, 39), 0)
    wanted = train(train(wanted, keys[:20]), keys[20:30]).remove([30, 38, 39])
    save(tmp_path / "wanted", [wanted])
    (one,), (other,) = (rows(tmp_path / name, "t", slots=True) for name in ("out", "wanted"))
    np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_array_equal(one.freqs, other.freqs)
    np.testing.assert_array_equal(one.values, other.values)
    for name in one.slots:
        np.testing.assert_array_equal(one.slots[name], other.slots[name])
    with pytest.raises(ValueError, match=r"'t', merge: want an ancestor .* step 2 .* steps \[2, 1\]; give the"):
        merge([tmp_path / "a", tmp_path / "1"], tmp_path / "no", ancestor=tmp_path / "a")


def test_deltas_shards_and_pools(make, mesh, tmp_path):
    pool = np.arange(6, dtype=np.float32).reshape(3, 2)
    table = make(2, initializer=pool, mesh=mesh(2)).upsert(np.arange(50), np.ones((50, 2)))
    save(tmp_path / "a/0", {"t": table}, cursor="c")
    table = table.remove(np.arange(10)).upsert([99], [[5.0, 5.0]])
    save(tmp_path / "a/1", {"t": table}, since="c")
    other = make(2, initializer=pool, seed=table.spec.seed).upsert([0, 49], np.full((2, 2), 3.0))
    save(tmp_path / "b", {"t": other})
    assert merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out", "mean")["t"] == MergeReport(42, (41, 2), 1)
    found = restore(tmp_path / "out", {"t": "merged"})["t"]
    assert found.lookup([0, 49, 48, 99])[:, 0].tolist() == [3.0, 2.0, 1.0, 5.0]
    np.testing.assert_array_equal(found.lookup(np.arange(100, 110)), table.lookup(np.arange(100, 110)))
    kvjax.drop_table("merged")
    save(tmp_path / "c", {"t": make(2, initializer=pool + 1, seed=table.spec.seed)})
    with pytest.raises(ValueError, match="'t', merge: want tables with the same pool of initial rows"):
        merge([tmp_path / "b", tmp_path / "c"], tmp_path / "no")


def test_what_does_not_fit_is_refused_and_leaves_nothing(tmp_path):
    one = {1: ([1.0, 2.0], None, 1, 1, False)}
    write(tmp_path / "a", one)
    write(tmp_path / "seed", one, seed=2)
    write(tmp_path / "bfloat16", one, dtype="bfloat16")
    for name, got in (("seed", "seed: 1 and 2"), ("bfloat16", "dtype: float32 and bfloat16")):
        with pytest.raises(ValueError, match=f"'t', merge: want tables with the same options, got others .*{got}"):
            merge([tmp_path / "a", tmp_path / name], tmp_path / "out")
    write(tmp_path / "untrained", one, with_slots=False)
    assert merge([tmp_path / "untrained", tmp_path / "a"], tmp_path / "fits")["t"].rows == 1
    for paths, rule, weights, message in (
        ([], "newest", None, r"want the paths of checkpoints, got \[\]"),
        (str(tmp_path / "a"), "newest", None, "want the paths of checkpoints, got '"),
        (tmp_path / "a", "newest", None, "want the paths of checkpoints, got PosixPath"),
        (["a"], "latest", None, r"want a rule of \['newest', 'mean', 'frequency'\], got 'latest'"),
        (["a"], "newest", [1.0], "want no weights with the rule 'newest'"),
        (["a"], "mean", [1.0, 2.0], "want 1 weights, a positive number for each"),
        (["a"], "mean", [0.0], "want 1 weights"),
        (["a"], "mean", [float("inf")], "want 1 weights"),
    ):
        with pytest.raises(ValueError, match=message):
            merge(paths, tmp_path / "out", rule, weights=weights)
    for out, message in (("a", "which exists"), ("a/t/new", "want a place outside of checkpoints")):
        with pytest.raises(CheckpointError, match=message):
            merge([tmp_path / "fits", tmp_path / "a"], tmp_path / out)
    with pytest.raises(CheckpointError, match="want another place than that of the checkpoint it reads"):
        merge([tmp_path / "fits", tmp_path / "a"], tmp_path / "a", overwrite=True)
    with pytest.raises(CheckpointError, match="none"):
        merge([tmp_path / "a", tmp_path / "none"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "bfloat16", "fits", "seed", "untrained"]


@slow
def test_the_command(tmp_path, capsys):
    write(tmp_path / "a", {1: ([1.0, 2.0], None, 1, 1, False), 2: ([0.0, 0.0], None, 1, 1, False)})
    write(tmp_path / "b", {1: ([3.0, 4.0], None, 3, 1, False)})
    paths = [str(tmp_path / name) for name in ("a", "b", "out")]
    assert main(["merge", *paths, "--rule", "frequency", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"t": {"rows": 2, "of": [2, 1], "shared": 1}}
    assert read(tmp_path / "out")[1][:1] == ([2.5, 3.5],)
    assert main(["merge", *paths, "--overwrite", "--weight", "3", "--weight", "1", "--rule", "mean"]) == 0
    assert "shared" in capsys.readouterr().out and read(tmp_path / "out")[1][:1] == ([1.5, 2.5],)
    began = str(tmp_path / "a")
    assert main(["merge", *paths, "--overwrite", "--rule", "mean", "--ancestor", began, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["t"]["rows"] == 1 and read(tmp_path / "out").keys() == {1}
    assert main(["merge", *paths]) == 2 and "which exists" in capsys.readouterr().err
