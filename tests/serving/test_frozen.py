"""Frozen tables read as the tables they were written from, without JAX."""

import copy
import dataclasses
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.serving import Changes, FrozenError, FrozenTable, Releases
from kvjax.serving._initial import Initial
from kvjax.serving._search import Starts, find, mixed, unmixed
from tests.golden import reference
from tests.support.checkpoints import save
from tests.support.marks import examples, slow
from tests.support.tables import AWKWARD

INITIALIZERS = {
    "constant": 0.5,
    "uniform": kvjax.initializers.uniform(-1.0, 1.0),
    "normal": kvjax.initializers.normal(),
    "truncated": kvjax.initializers.truncated_normal(0.3),
    "pool": np.arange(21.0).reshape(3, 7) / 8,
    "segments": kvjax.initializers.segments({"bias": (0, 0.5)}, rest=kvjax.initializers.normal(0.1)),
}
UNSEEN = np.concatenate([np.arange(100, 400) * 2**54, AWKWARD - 3])


def check(frozen, table, keys):
    np.testing.assert_array_equal(frozen.lookup(keys), np.asarray(table.lookup(keys)).astype(np.float32))
    _, found = frozen.lookup(keys, return_found=True)
    np.testing.assert_array_equal(found, table.contains(keys))
    np.testing.assert_array_equal(frozen.contains(keys), found)
    frozen.verify()


def test_reads_as_the_table(make, tmp_path):
    """Written, read, changed and replaced; every key value, and keys without a row."""
    table = make(7, initializer=INITIALIZERS["normal"], seed=2**63 + 5, dtype="bfloat16")
    rows = np.arange(8 * 7).reshape(8, 7) / 4
    table = table.upsert(AWKWARD, rows)
    frozen = FrozenTable.write(tmp_path / "t", table)
    check(frozen, table, np.concatenate([AWKWARD, UNSEEN]).reshape(4, -1))
    check(frozen, table, kvjax.keys(AWKWARD[3]))
    assert (len(frozen), frozen.dim, frozen.dtype, frozen.error) == (8, 7, "bfloat16", None)
    keys, values = frozen.export()
    np.testing.assert_array_equal(values[np.argsort(keys)], rows[np.argsort(AWKWARD)])

    changed = frozen.update(AWKWARD[:2], rows[2:4], removed=AWKWARD[2:3])
    np.testing.assert_array_equal(changed.lookup(AWKWARD[[0, 1, 3]]), rows[[2, 3, 3]])
    assert len(changed) == 7 and not changed.contains(AWKWARD[2])
    check(frozen, table, AWKWARD)  # as it was
    assert frozen.refresh().lookup(AWKWARD[0]).tolist() == rows[2].tolist() and changed.refresh() is changed
    assert len(pickle.loads(pickle.dumps(changed))) == 7
    assert copy.copy(frozen) is copy.deepcopy(frozen) is frozen  # whose path has another table by now
    with pytest.raises(FrozenError, match=r"unpickle: want the file '.*/t' that was pickled, .*, got another one"):
        pickle.loads(pickle.dumps(frozen))


@slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("initializer", INITIALIZERS.values(), ids=INITIALIZERS)
def test_initial_rows(dtype, initializer, make, tmp_path):
    table = make(7, initializer=initializer, dtype=dtype, seed=2**64 - 3).upsert(AWKWARD, np.ones((8, 7)))
    check(FrozenTable.write(tmp_path / "t", table), table, np.concatenate([AWKWARD, UNSEEN]))


@slow
def test_what_keys_without_a_row_read_as(make, tmp_path):
    admit = kvjax.admit.MinCount(3, unadmitted="zeros")
    zeros = make(2, initializer=1.0, admit=admit).upsert(7, [5.0, 5.0])
    shared = make(2, initializer=1.0, admit=kvjax.admit.MinCount(3, unadmitted=-1)).upsert(-1, [3.0, 4.0])
    unmade = make(2, initializer=1.0, admit=kvjax.admit.MinCount(3, unadmitted=-1))
    for table, want in ((zeros, [0, 0]), (shared, [3, 4]), (unmade, [1, 1])):
        frozen = FrozenTable.write(tmp_path / "t", table)
        check(frozen, table, [7, 8, -1])
        assert frozen.lookup(9).tolist() == want and frozen.lookup(9, missing="init").tolist() == [1, 1]
        assert frozen.lookup(9, missing=[8, 9]).tolist() == [8, 9] and not frozen.lookup(9, missing="zeros").any()
        assert FrozenTable.write(tmp_path / "u", table, missing=[2, 0]).lookup(9).tolist() == [2, 0]
    made = make(2, initializer=jax.nn.initializers.normal()).upsert(7, [5.0, 5.0])
    for source in (made, made.export()):
        with pytest.raises(ValueError, match="write: want missing='zeros' or a row for keys without one, got none"):
            FrozenTable.write(tmp_path / "v", source)
        assert not (tmp_path / "v").exists()
        frozen = FrozenTable.write(tmp_path / "w", source, missing="zeros", name="made")
        assert frozen.lookup([7, 8]).tolist() == [[5, 5], [0, 0]]
        with pytest.raises(ValueError, match="lookup: want missing='zeros' or a row, got missing='init'"):
            frozen.lookup(8, missing="init")


def test_changes_say_what_keys_without_a_row_read_as(make, tmp_path):
    """As the row that unadmitted keys share, which training changes, and which has no key in a frozen table."""
    releases = Releases(tmp_path)
    releases.publish({"t": make(2).upsert([1], [[1.0, 1.0]])}, missing=[5.0, 5.0])
    for missing, want in ((None, 5.0), ([6.0, 6.0], 6.0), ("zeros", 0.0)):
        release = releases.update({"t": Changes([2], [[9.0, 9.0]], missing=missing)})
        assert release["t"].lookup([1, 2, 77])[:, 0].tolist() == [1.0, 9.0, want]
    with pytest.raises(ValueError, match=r"update: want a missing row \(2,\), got \(3,\)"):
        releases.update({"t": Changes(missing=[1.0, 2.0, 3.0])})
    assert releases.refresh().number == release.number


def test_neither_padding_nor_a_duplicate_makes_an_initial_row(make, tmp_path, monkeypatch):
    """A random row takes as long as dozens that are there, and a batch of histories is mostly padding."""
    table = make(2, initializer=INITIALIZERS["normal"]).upsert([1], [[1.0, 2.0]])
    frozen, made = FrozenTable.write(tmp_path / "t", table), []
    rows_of = Initial.rows
    monkeypatch.setattr(
        Initial, "rows", lambda self, xp, keys, *rest: made.extend(keys) or rows_of(self, xp, keys, *rest)
    )
    rows = frozen.lookup([[1, 7], [-1, 8]], mask=[[True, True], [True, False]], pad_id=-1)
    assert made == [7] and rows[1].tolist() == [[0, 0], [0, 0]]
    np.testing.assert_array_equal(rows[0], table.lookup([1, 7]))
    made.clear()
    np.testing.assert_array_equal(frozen.lookup([9, 7, 9, 1, 9]), table.lookup([9, 7, 9, 1, 9]))
    assert sorted(made) == [7, 9]


@slow
def test_masks_and_bad_arguments(make, tmp_path):
    table = make(1, initializer=0.5).upsert([1, 2], [[1.0], [2.0]])
    frozen = FrozenTable.write(tmp_path / "t", table)
    rows, found = frozen.lookup([1, 2, 3], mask=[True, False, True], pad_id=3, return_found=True)
    assert rows.tolist() == [[1], [0], [0]] and found.tolist() == [True, False, False]
    assert frozen.lookup([]).shape == (0, 1) and frozen.lookup(np.zeros((2, 0), int)).shape == (2, 0, 1)
    assert frozen.lookup([2**64 - 1]).tolist() == frozen.lookup([-1]).tolist() == [[0.5]]
    with pytest.raises(ValueError, match="lookup: want ids that are all signed or all unsigned"):
        frozen.lookup([2**64 - 1, -1])
    for keys, mask, want in (
        ([1.5], None, "want integers of at most 64 bits"), (["a"], None, "want integers"), ([2**64], None, "has more"),
        ([1], [1], "want a mask of bool"), (jnp.arange(2), None, "want ids of 64 bits"),
        ([[jnp.int32(1)], [jnp.int32(2)]], None, "want ids of 64 bits"),
        (jnp.ones(1), None, "want integers of at most 64 bits, got float"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=want):
            frozen.lookup(keys, mask=mask)
    for options, want in (
        ({"mask": [True, False]}, "want a mask"), ({"missing": "x"}, "missing='init'"),
        ({"missing": [1, 2]}, "a missing row"), ({"pad_id": [1, 2]}, "want one pad_id"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=want):
            frozen.lookup([1], **options)
    masked, some = np.ma.array([1.0], mask=[True]), np.ma.array([True], mask=[True])
    for call, options in (
        (frozen.lookup, {"mask": some}), (frozen.lookup, {"missing": masked}), (frozen.update, {"rows": masked}),
        *((frozen.lookup_bag, {"lengths": [1], name: masked}) for name in ("weights", "empty")),
        (frozen.lookup_bag, {"lengths": some}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"table 'table0', .*: want all elements, got a masked array"):
            call([4], **options)
    with pytest.raises(ValueError, match="update: want distinct keys, got 4 twice"):
        frozen.update([4, 4], [[1], [2]])
    with pytest.raises(ValueError, match="want keys that change or go"):
        frozen.update([4], [[1]], removed=[4])
    with pytest.raises(ValueError, match=r"want rows \(1, 1\)"):
        frozen.update([4], [[1, 2]])
    with pytest.raises(ValueError, match="write: want quantise= as one of"):
        FrozenTable.write(tmp_path / "t", table, quantise="int4")
    with pytest.raises(TypeError, match="write: want a kvjax"):
        FrozenTable.write(tmp_path / "t", {})
    check(frozen.refresh(), table, [1, 2, 3])
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


@slow
def test_rows_in_fewer_bits(make, tmp_path):
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(500, 24)) * 10.0 ** rng.integers(-30, 4, (500, 1))).astype(np.float32)
    rows[0], rows[1] = 0, -0.0
    table = make(24).upsert(np.arange(500), rows)
    want = {
        None: rows, "float16": rows.astype(np.float16).astype(np.float32),
        "bfloat16": rows.astype(ml_dtypes.bfloat16).astype(np.float32),
    }  # fmt: skip
    for dtype in (None, "float16", "bfloat16", "int8"):
        frozen = FrozenTable.write(tmp_path / str(dtype), table, quantise=dtype)
        got = frozen.lookup(np.arange(500))
        if dtype in want:
            np.testing.assert_array_equal(got, want[dtype])
        else:
            assert (np.abs(got - rows) < np.abs(rows).max(1, keepdims=True) / 250 + 1e-40).all()
        kept = frozen.update([0], rows[:1])
        np.testing.assert_array_equal(kept.lookup(np.arange(500)), got)  # as they were stored, not stored again
        assert frozen.error == kept.error
        exported = table.export().to_npz(tmp_path / "same.npz", quantise=dtype)
        if dtype is None:
            assert frozen.error is exported is None
        else:  # an export of the same rows says the same
            assert vars(frozen.error) == pytest.approx(vars(exported))
            np.testing.assert_allclose(frozen.error.max, np.abs(got - rows.astype(np.float64)).max(), rtol=1e-6)
            other = frozen.update([0], rng.normal(size=(1, 24)) * 1e4 + 4e4)
            assert other.error.max > frozen.error.max and other.error.bytes_after == frozen.error.bytes_after
    for bad, dtype in ((1e6, "float16"), (3.4e38, "bfloat16"), (np.inf, "int8"), (np.nan, "int8")):
        with pytest.raises(ValueError, match=f"want rows that {dtype} can hold"):
            FrozenTable.write(
                tmp_path / "bad", table.upsert(0, np.full(24, bad)).export(), quantise=dtype, missing="zeros"
            )
        table = table.refresh()
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)  # which would become zeros if rounded
    odd = table.upsert(0, np.float32([np.inf, -np.inf, np.nan, 1.0, *nans, *[1.0] * 18]))
    for dtype in (None, "float16", "bfloat16"):
        np.testing.assert_array_equal(
            FrozenTable.write(tmp_path / "odd", odd, quantise=dtype).lookup(0)[:6], [np.inf, -np.inf, np.nan, 1, *nans]
        )


@pytest.mark.parametrize("how, before, after", [({"quantise": "int8"}, 24, 18), ({"quantise": "bfloat16"}, 24, 12)])
def test_what_the_report_of_an_empty_table_says_of_its_first_rows(how, before, after, make, tmp_path):
    frozen = FrozenTable.write(tmp_path / "t", make(2), **how)
    error = frozen.update([1, 2, 3], np.full((3, 2), 1.1, np.float32)).error
    assert (error.rows, error.bytes_before, error.bytes_after) == (3, before, after)


@slow
def test_a_checkpoint_is_frozen_as_its_table(make, tmp_path, mesh):
    one = make(3, initializer=INITIALIZERS["uniform"], admit=kvjax.admit.MinCount(2, unadmitted=5)).upsert(
        AWKWARD, np.ones((8, 3))
    )
    two = make(7, initializer=INITIALIZERS["pool"], key_dtype="uint64", dtype="float16", mesh=mesh(4))
    two, _ = two.apply(optax.sgd(0.1), kvjax.SparseRows(AWKWARD, jnp.ones((8, 7))), step=3)
    save(tmp_path / "c", 0, {"one": one, "two": two})
    for name, table in (("one", one), ("two", two)):
        frozen = FrozenTable.write(tmp_path / "t", tmp_path / "c/0/tables", name=name)
        check(frozen, table, np.concatenate([AWKWARD, UNSEEN]))
        direct = FrozenTable.write(tmp_path / "d", table)
        assert direct.step == frozen.step
        np.testing.assert_array_equal(direct.export()[0], frozen.export()[0])
    assert frozen.export()[0].dtype == np.uint64 and frozen.step == 3
    with pytest.raises(ValueError, match=r"want name= of one .* holds \['one', 'two'\]"):
        FrozenTable.write(tmp_path / "t", tmp_path / "c/0/tables")
    with pytest.raises(ValueError, match="did you mean 'one'"):
        FrozenTable.write(tmp_path / "t", tmp_path / "c/0/tables", name="on")
    pruned = FrozenTable.write(
        tmp_path / "p", tmp_path / "c/0/tables", name="two", prune=kvjax.Prune(keep=[7], min_frequency=2)
    )
    assert len(pruned) == 0 and pruned.lookup(AWKWARD).shape == (8, 7)


# ---- against a dict ----------------------------------------------------------------------------------------------

_KEYS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3), st.sampled_from(AWKWARD.tolist()))
_CHANGES = st.lists(
    st.tuples(st.dictionaries(_KEYS, st.integers(-99, 99), max_size=20), st.sets(_KEYS, max_size=8)), max_size=4
)


@slow
@settings(max_examples=examples(5, 120))
@given(
    st.dictionaries(_KEYS, st.integers(-99, 99), max_size=60),
    _CHANGES,
    st.lists(_KEYS),
    st.sampled_from([None, "float16", "int8"]),
)
def test_like_a_dict(first, changes, asked, quantise):
    def rows_of(d):
        return np.repeat(np.array(list(d.values()), np.float32)[:, None], 2, 1).reshape(-1, 2)

    zeros = np.zeros(len(first), np.int64)
    keys = np.array(list(first), np.int64)
    rows = kvjax.Exported(keys, rows_of(first), zeros, zeros, {}, zeros > 0, zeros > 0, 0, len(first))
    model = dict(first)
    with tempfile.TemporaryDirectory() as folder:
        frozen = FrozenTable.write(Path(folder) / "t", rows, quantise=quantise, missing=[7, 7])
        for changed, removed in [({}, set()), *changes]:
            removed -= changed.keys()
            frozen = frozen.update(list(changed), rows_of(changed), removed=list(removed))
            model = {k: v for k, v in model.items() if k not in removed} | changed
            frozen.verify()
            assert len(frozen) == len(model) and set(frozen.export()[0].tolist()) == model.keys()
            query = [*model, *asked]
            want = [[model.get(k, 7)] * 2 for k in query]
            np.testing.assert_allclose(frozen.lookup(query), np.array(want).reshape(-1, 2), atol=1e-5)
            assert frozen.contains(query).tolist() == [k in model for k in query]


def test_search():
    """The hash is the frozen one; the search is right also where keys were chosen to collide."""
    keys = np.concatenate([AWKWARD.view(np.uint64), np.random.default_rng(0).integers(0, 2**64 - 1, 5000, np.uint64)])
    np.testing.assert_array_equal(mixed(keys), reference.mix(keys))
    np.testing.assert_array_equal(unmixed(mixed(keys)), keys)
    edge = np.array([0, 1, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
    for hashes in (np.unique(mixed(keys)), np.arange(3000, dtype=np.uint64), edge, edge[:0], edge[-1:]):
        counted = Starts(len(hashes))
        for part in np.array_split(hashes, 3):
            counted.add(part)
        starts, steps = counted.finish()
        wanted = np.concatenate([hashes, hashes + np.uint64(1), hashes - np.uint64(1), edge])
        at, found = find(np.append(hashes, np.uint64(2**64 - 1)), starts, steps, wanted)
        np.testing.assert_array_equal(found, np.isin(wanted, hashes))
        np.testing.assert_array_equal(hashes[at[found]], wanted[found])


# ---- without JAX -------------------------------------------------------------------------------------------------


@slow
def test_takes_numpy_alone(make, tmp_path):
    table = make(2, initializer=kvjax.initializers.normal(1.0)).upsert(AWKWARD, np.ones((8, 2)))
    FrozenTable.write(tmp_path / "t", table)
    program = f"""
import sys
import kvjax.serving
from kvjax.serving import *
frozen = FrozenTable.open({str(tmp_path / "t")!r}, verify=True)
rows = frozen.lookup({UNSEEN[:5].tolist()})
frozen = frozen.update([3], [[1.0, 2.0]])
assert not {{"jax", "flax", "orbax", "optax", "ml_dtypes", "tensorstore", "kvjax.ffi"}} & sys.modules.keys()
frozen.lookup(kvjax.hash_keys(["a", "b"], salt=3))
kvjax.Prune(min_frequency=1)
assert "jax" not in sys.modules
print(rows.tolist())
assert sorted(dir(kvjax)) == dir(kvjax) and kvjax.get_table("t", dim=2).dim == 2
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.array(eval(done.stdout), np.float32), table.lookup(UNSEEN[:5]))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"keys": np.arange(3.0)}, r"want keys \(n,\) int64 or uint64, got <f8"),
        ({"keys": np.arange(3, dtype=np.int32)}, "got <i4"),
        ({"keys": np.arange(2)}, "want 2 rows in each column, got .*'values': 3"),
        ({"values": np.ones(3, np.float32)}, r"want values \(n, dim\), got an array \(3,\)"),
        ({"last_step": 2**70}, "want last_step as an integer"), ({"last_step": -1}, "want last_step as an integer"),
        ({"key_dtype": 3}, "want key_dtype= in .* got 3"),
    ],
)  # fmt: skip
def test_an_export_that_somebody_has_put_together_wrongly(fields, text, make, tmp_path):
    """Some were files with other rows, and some took the place of a good one and could not be opened."""
    rows = make(1).upsert(np.arange(3), np.ones((3, 1))).export()
    swapped = dataclasses.replace(rows, keys=rows.keys.astype(">i8"), values=rows.values.astype(">f4"))
    FrozenTable.write(tmp_path / "t", swapped, missing="zeros")
    for prune in (None, kvjax.Prune(zero_rows=True)):
        with pytest.raises((TypeError, ValueError), match=f"^kvjax: table 't', write: .*{text}"):
            FrozenTable.write(tmp_path / "t", dataclasses.replace(rows, **fields), missing="zeros", prune=prune)
    assert FrozenTable.open(tmp_path / "t").lookup(np.arange(4))[:, 0].tolist() == [1.0, 1.0, 1.0, 0.0]


def test_names_and_arguments_that_mean_nothing_for_a_source(make, tmp_path):
    table = make(2).upsert([1], np.ones((1, 2)))
    for source in (table, table.export()):
        frozen = FrozenTable.write(tmp_path / "a", source, missing="zeros", name="other")
        assert frozen.name == FrozenTable.write(tmp_path / "b", frozen, name="other").name == "other"
        with pytest.raises(ValueError, match="write: want base= beside a checkpoint"):
            FrozenTable.write(tmp_path / "b", source, base=tmp_path, missing="zeros")
    for options in ({"name": "another"}, {"base": tmp_path}):
        with pytest.raises(
            ValueError, match=f"'other', write: want a frozen table as it is, got {next(iter(options))}="
        ):
            FrozenTable.write(tmp_path / "b", frozen, **options)


@pytest.mark.parametrize("kind", ["nothing", "folder", "text"])
def test_no_frozen_table(kind, tmp_path):
    path = tmp_path / "t"
    path.mkdir() if kind == "folder" else path.write_text("" if kind == "nothing" else "x" * 5000)
    with pytest.raises(FrozenError, match=r"^kvjax: table .*, open: want a file"):
        FrozenTable.open(path)
    with pytest.raises(TypeError, match=r"got FrozenTable\(.*; call FrozenTable.open\(path\)"):
        FrozenTable(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"kvjax: open: want a file that FrozenTable.write has made, got none"):
        FrozenTable.open(tmp_path / "other")
