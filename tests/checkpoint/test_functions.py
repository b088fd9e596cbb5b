"""kvjax.checkpoint without Orbax: save, restore in every way, and verify."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._formats import atomic, source
from kvjax._process import PROCESS, OfModule
from kvjax._table import loads
from kvjax.checkpoint import CheckpointError, compact, diff, prune, restore, save, verify
from tests.support.checkpoints import IDS, assert_equal, many, trained
from tests.support.checkpoints import save as save_by_orbax
from tests.support.marks import slow
from tests.support.tables import by_low_bits

TX = optax.rmsprop(0.1)


def test_a_checkpoint_by_itself(make, tmp_path):
    table = trained(make(3, initializer=kvjax.initializers.normal(0.1), max_capacity=50), TX)
    was, name, spec = table.snapshot(), table.name, table.spec
    save(tmp_path / "a", [table])
    with pytest.raises(CheckpointError, match="nothing there"):
        save(tmp_path / "a", [table])
    assert verify(tmp_path / "a").ok and diff(tmp_path / "a", tmp_path / "a").same
    kvjax.drop_table(name)
    (got,) = restore(tmp_path / "a").values()
    assert got.spec == spec and got.snapshot().slot_types == was.slot_types
    assert_equal(got.snapshot().rows, was.rows)
    save(tmp_path / "a", {name: got.clear()}, overwrite=True)
    assert len(restore(tmp_path / "a")[name]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "rename twice"])
def test_what_was_there_stays_if_it_cannot_be_replaced(exchanges, make, tmp_path, monkeypatch):
    """Whether the system can exchange folders, or not."""
    table, found = many(make(2)), []
    save(tmp_path / "a", [table])
    rename = Path.rename

    def failing(path, to):
        found.extend(restore(tmp_path / "a").values())  # while there is nothing of that name
        return 1 / 0 if path.name.endswith("-new") else rename(path, to)

    def refused(one, other):
        return 1 / 0 if exchanges else False

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", failing)
        patched.setattr(atomic, "_exchange", refused)
        with pytest.raises(ZeroDivisionError):
            save(tmp_path / "a", [table.clear()], overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert len(restore(tmp_path / "a")[table.name]) == 500 and len(found) == (0 if exchanges else 3)
    monkeypatch.setattr(atomic, "_exchange", refused if not exchanges else atomic._exchange)
    save(tmp_path / "a", [table.refresh().clear()], overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"] and len(restore(tmp_path / "a")[table.name]) == 0


def test_two_saves_to_one_path(make, tmp_path):
    """The second is refused while the first is under way; what a killed one has left is in nobody's way."""
    table = many(make(2))
    other = atomic.NewFolder(tmp_path / "a")
    other.begin()
    (other.path / "theirs").write_text("theirs")
    for call in (lambda: save(tmp_path / "a", [table]), lambda: save(tmp_path / "a", [table], overwrite=True)):
        with pytest.raises(CheckpointError, match="alone, got another one that is under way"):
            call()
    assert (other.path / "theirs").read_text() == "theirs"
    os.close(other._lock)  # as the system does when a process ends
    save(tmp_path / "a", [table])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"] and verify(tmp_path / "a").unlisted == ()
    save(tmp_path / ("n" * 255), [table])  # of which the folder beside it has a shorter name
    assert verify(tmp_path / ("n" * 255)).ok


def test_errors_name_the_operation(make, tmp_path):
    save(tmp_path / "a", [make(1)])
    for op, call in (("compact", compact), ("prune", lambda path, out: prune(path, out, kvjax.Prune(min_norm=1.0)))):
        with pytest.raises(CheckpointError, match=f"kvjax: {op}: want a path with nothing there"):
            call(tmp_path / "a", tmp_path / "a")
    meta = next((tmp_path / "a").glob("*/kvjax.json"))
    meta.write_text(meta.read_text() + " ")
    calls = {
        "compact": lambda: compact(tmp_path / "a", tmp_path / "b"),
        "prune": lambda: prune(tmp_path / "a", None, kvjax.Prune(min_norm=1.0)),
        "diff": lambda: diff(tmp_path / "a", tmp_path / "a"),
        "export": lambda: kvjax.convert.export_checkpoint(tmp_path / "a", tmp_path / "a.npz"),
        "write": lambda: kvjax.serving.FrozenTable.write(tmp_path / "a.kvfrozen", tmp_path / "a"),
        "follow": lambda: kvjax.serving.Releases(tmp_path / "model").follow(tmp_path / "a"),
        "restore": lambda: restore(tmp_path / "a"),
    }
    for op, call in calls.items():
        with pytest.raises(CheckpointError, match=f"^kvjax: table 'table0', {op}: want .*kvjax.json as a file of"):
            call()
    (tmp_path / "a/kvjax.json").write_text("{}")
    assert "kvjax: verify: want" in str(verify(tmp_path / "a").problems[0].problem)


def test_a_save_begins_as_another_ends(make, tmp_path, monkeypatch):
    lock, gone = atomic._lock, []

    def late(folder):
        if not gone:
            gone.append(folder.rmdir())  # the other one has put it into its place
        return lock(folder)

    monkeypatch.setattr(atomic, "_lock", late)
    save(tmp_path / "a", [make(2)])
    assert gone and verify(tmp_path / "a").ok
    (tmp_path / ".b.kvjax-new").write_text("in the way")
    with pytest.raises(FileExistsError):
        save(tmp_path / "b", [make(2)])


@slow
def test_a_new_process_needs_only_the_path(make, tmp_path):
    table = make(
        4, dtype="bfloat16", rounding="stochastic", initializer=kvjax.initializers.uniform(-1, 1), seed=5,
        key_dtype="uint64", max_capacity=100, on_full="evict", evict=kvjax.evict.LeastFrequent(10),
        admit=kvjax.admit.MinCount(1), count="batch", constraint=kvjax.constraints.max_norm(2.0),
    )  # fmt: skip
    save(tmp_path / "a", {"t": trained(table, TX).pin(IDS[:1])})
    code = f"""
import kvjax, numpy as np
t = kvjax.checkpoint.restore({str(tmp_path / "a")!r})["t"]
kvjax.checkpoint.save({str(tmp_path / "b")!r}, [t])
s = t.spec
print(s.dim, s.dtype, s.rounding, s.seed, s.key_dtype, s.max_capacity, s.on_full, s.evict, s.admit, s.count)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    spec = table.spec
    assert out.split("\n")[0] == (f"4 bfloat16 stochastic 5 uint64 100 evict {spec.evict} {spec.admit} batch")
    assert diff(tmp_path / "a", tmp_path / "b").same


@slow
@pytest.mark.parametrize(
    "option, name",
    [
        ({"initializer": lambda rng, shape, dtype: jax.random.normal(rng, shape, dtype)}, "the function that makes"),
        ({"constraint": lambda row: row * 2}, "constraint: .*lambda"),
        (
            {"max_capacity": 9, "on_full": "evict", "evict": kvjax.evict.LowestScore(2, lambda rows: rows.freqs)},
            "evict: .*lambda",
        ),
    ],
)
def test_a_missing_function_is_named(option, name, make, tmp_path):
    table = make(2, **option).upsert(IDS, np.ones((5, 2)))
    save(tmp_path / "a", [table])
    kvjax.drop_table(table.name)
    with pytest.raises(ValueError, match=name):
        restore(tmp_path / "a")
    assert table.name not in kvjax.tables()
    kvjax.get_table(table.name, dim=2, **option)  # as the error says: a table that is there has its functions
    assert len(restore(tmp_path / "a")[table.name]) == 5


@slow
def test_onto_other_shards_and_back(make, mesh, tmp_path):
    table = many(trained(make(3, admit=kvjax.admit.MinCount(2)), TX)).pin(IDS[:2])
    was, name = table.snapshot(), table.name
    for i, place in enumerate([None, 3, 8, None, by_low_bits, None]):
        save(tmp_path / str(i), {name: table})
        kvjax.drop_table(name)
        options = {"partitioner": place} if callable(place) else {}
        shards = 4 if callable(place) else place
        if shards:
            options["mesh"] = mesh(shards, explicit=True)
        table = restore(tmp_path / str(i), **options)[name]
        assert table.spec.num_shards == (shards or 1)
        assert diff(tmp_path / "0", tmp_path / str(i)).tables[name].changed == 0
    same = table.snapshot()
    assert_equal(same.rows, was.rows)
    for column in was.admission:
        np.testing.assert_array_equal(same.admission[column], was.admission[column])


@slow
def test_into_another_storage(make, tmp_path):
    table = many(trained(make(3), TX))
    was, name = table.snapshot(), table.name
    save(tmp_path / "a", [table])
    kvjax.drop_table(name)
    (tmp_path / "rows").mkdir()
    storage = kvjax.storage.Mmap(str(tmp_path / "rows"))
    table = restore(tmp_path / "a", storage=storage)[name]
    assert table.spec.storage == storage
    assert_equal(table.snapshot().rows, was.rows)
    with pytest.raises(ValueError, match=r"restore: want the arguments .*table\.to"):
        restore(tmp_path / "a", storage=kvjax.storage.Host())
    kvjax.drop_table(name)


def test_rows_are_converted_only_when_asked(make, tmp_path):
    table = trained(make(3), TX)
    save(tmp_path / "a", {"t": table})
    half = make(3, dtype="bfloat16", seed=table.spec.seed)
    for dtype in ("int8", "float33", {"t": "bfloat16"}):
        with pytest.raises(ValueError, match=r"restore: want dtype in \('float32', 'bfloat16', 'float16'\), got"):
            restore(tmp_path / "a", dtype=dtype)
    with pytest.raises(ValueError, match="give dtype='bfloat16' to convert"):
        restore(tmp_path / "a", {"t": half})
    with pytest.raises(ValueError, match=r"tables with dtype 'float16' beside dtype='float16', .* one with dtype 'bfl"):
        restore(tmp_path / "a", {"t": half}, dtype="float16")
    got = restore(tmp_path / "a", {"t": half}, dtype="bfloat16")["t"].export(slots=True)
    want = table.export(slots=True)
    np.testing.assert_array_equal(got.values, want.values.astype(jnp.bfloat16))
    np.testing.assert_array_equal(got.slots["nu"], want.slots["nu"])
    save(tmp_path / "b", {"t": table.upsert(IDS[:1], np.full((1, 3), 1e6))})
    with pytest.raises(ValueError, match=r"float16 can hold.*bfloat16"):
        restore(tmp_path / "b", dtype="float16")
    assert "t" not in kvjax.tables()


@slow
def test_stochastic_rounding_ends_with_float32(make, tmp_path):
    save(tmp_path / "a", {"t": trained(make(3, dtype="bfloat16", rounding="stochastic"), TX)})
    table = restore(tmp_path / "a", dtype="float32")["t"]
    assert (table.spec.dtype, table.spec.rounding) == ("float32", "nearest")
    kvjax.drop_table("t")


def test_keys_that_jax_may_have_cut_are_refused(make, tmp_path):
    """As a lookup refuses them: 2**40 would be key 0."""
    wide, narrow = make(1).upsert([0, 7], [[1.0], [2.0]]), make(1, key_dtype="int32").upsert([7, -1], [[3.0], [4.0]])
    save(tmp_path / "a", {"wide": wide, "narrow": narrow})
    for cut in (jnp.asarray([7]), [jnp.asarray(7)]):
        with pytest.raises(TypeError) as looked:
            wide.lookup(cut)
        with pytest.raises(TypeError) as error:
            restore(tmp_path / "a", {"wide": wide}, keys=cut)
        assert str(error.value) == str(looked.value).replace(f"{wide.name!r}, lookup", "'wide', restore")
        assert len(wide) == 2
    keys = kvjax.keys(jnp.asarray([7]), key_dtype="int32")
    assert restore(tmp_path / "a", {"wide": wide}, keys=keys)["wide"].export().keys.tolist() == [7]
    assert restore(tmp_path / "a", {"narrow": narrow}, keys=jnp.asarray([-1]))["narrow"].export().keys.tolist() == [-1]


@pytest.mark.parametrize("num_shards", [None, pytest.param(4, marks=slow)])
def test_some_keys_without_slots_and_merged(num_shards, make, mesh, tmp_path):
    options = {} if num_shards is None else {"mesh": mesh(num_shards, explicit=True)}
    table = trained(make(3, **options), TX)
    save(tmp_path / "a", {"t": table})
    want = table.export(slots=True)
    some = want.keys[:2]
    table = restore(tmp_path / "a", {"t": table}, keys=np.r_[some, 77], slots=False)["t"]
    got = table.export(slots=True)
    assert got.keys.tolist() == some.tolist() and not got.slots and not got.has_slots.any()
    np.testing.assert_array_equal(got.values, want.values[:2])

    table = table.clear().upsert(np.array([want.keys[0], 77]), np.full((2, 3), 9.0))
    table = restore(tmp_path / "a", {"t": table}, merge=True)["t"]
    assert len(table) == len(want) + 1 and table.lookup(77).tolist() == [9.0] * 3
    assert_equal(table.export(slots=True).take(table.export().keys != 77), want)


def test_paths_of_orbax_are_found(make, tmp_path):
    table = make(2).upsert(IDS, np.ones((5, 2)))
    save_by_orbax(tmp_path, 2, {"t": table})
    save_by_orbax(tmp_path, 10, {"t": table.remove(IDS[:1])})
    for path, rows in [(tmp_path / "2/tables", 5), (tmp_path / "2", 5), (tmp_path, 4)]:
        assert len(restore(path, {"t": table})["t"]) == rows
    with pytest.raises(CheckpointError, match="none in"):
        verify(tmp_path / "nothing")


def test_verify_names_the_file(make, tmp_path):
    save(tmp_path / "a", {"t": trained(make(3)), "u": make(2)})
    whole = verify(tmp_path / "a")
    assert whole.ok and whole.has_manifest and {file.table for file in whole.files} == {"", "t", "u"}
    assert whole.bytes == sum(path.stat().st_size for path in (tmp_path / "a").rglob("*") if path.is_file())
    (tmp_path / "a/more").write_text("")
    for file in whole.files:
        path = tmp_path / "a" / file.path
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        found = verify(tmp_path / "a")
        assert [problem.path for problem in found.problems] == [file.path] or file.path == "kvjax.json"
        assert not found.ok
        path.write_bytes(data)
    assert verify(tmp_path / "a").unlisted == ("more",)


def test_the_arguments_of_both_restores_are_the_same():
    import inspect

    ours, orbax = (inspect.signature(f).parameters for f in (restore, kvjax.orbax.TableRestore))
    assert set(ours) - {"path"} == set(orbax)
    assert all(ours[name].default == orbax[name].default for name in orbax)


def test_overwrite_replaces_nothing_but_a_checkpoint(make, tmp_path):
    table = make(2).upsert(np.arange(3), np.ones((3, 2)))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "notes", tmp_path / "notes/mine.txt"):
        with pytest.raises(CheckpointError, match="a checkpoint to replace"):
            save(path, [table], overwrite=True)
    assert (tmp_path / "notes/mine.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", [table], overwrite=True)
    (tmp_path / "link").symlink_to("empty")
    for _ in range(2):
        save(tmp_path / "link", [table], overwrite=True)
    assert (tmp_path / "link").is_symlink() and verify(tmp_path / "link").ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "notes"]


def test_a_place_where_no_folder_can_be_is_an_error(make):
    with pytest.raises(FileNotFoundError, match="kvjax_there"):  # and not an attempt after the other
        save("/proc/kvjax_there", [make(2)])
    for path in (f"{__file__}/a", f"{__file__}/a/b"):
        with pytest.raises((FileExistsError, NotADirectoryError), match=r"save: .*a file is where that path wants a"):
            save(path, [make(2)])


def test_a_restore_has_a_few_rows_in_memory_at_a_time(make, tmp_path, monkeypatch):
    """Of tables that are there, of new ones, and of one that a module has made with another seed."""
    tables = [many(make(2, seed=1)) for _ in range(3)]
    want, sizes = [table.export() for table in tables], []
    save(tmp_path / "a", {"one": tables[0], "two": tables[1], "three": tables[2]})
    of_module = kvjax.get_table("three", dim=2, seed=7)
    PROCESS.of_modules["three"] = OfModule(drawn=True)
    native = loads.rows_to_native
    monkeypatch.setattr(
        loads, "rows_to_native", lambda rows, types: sizes.append(len(rows["keys"])) or native(rows, types)
    )
    monkeypatch.setattr(source, "PIECE_BYTES", 2000)
    got = restore(tmp_path / "a", {"one": tables[0], "two": None, "three": of_module})
    assert sum(sizes) == 1500 and max(sizes) < 80
    assert got["three"].spec.seed == 1
    for table, rows in zip(got.values(), want, strict=True):
        assert_equal(table.export(), rows)
    for name in ("two", "three"):
        kvjax.drop_table(name)


def test_what_is_no_table_is_said(make, tmp_path):
    table = make(2).upsert(np.arange(3), np.ones((3, 2)))
    for given in (table, 5, ["t"], {"t": None}):
        with pytest.raises(TypeError, match="kvjax: save: want "):
            save(tmp_path / "a", given)
    with pytest.raises(TypeError, match=r"save: want tables.* got Partial; give .*kvjax.orbax.split\(state\)\[1\]"):
        save(tmp_path / "a", jax.tree_util.Partial(len, {"t": table}))
    for empty in ({}, []):
        with pytest.warns(UserWarning, match="kvjax: save: want tables, got none, so the checkpoint is empty"):
            save(tmp_path / "empty", empty, overwrite=True)
    with pytest.raises(CheckpointError, match=r"want a cursor 'no' .*restore\(\.\.\., cursor='no'\).*TableRestore"):
        save(tmp_path / "a", [table], since="no")
    save(tmp_path / "a", {"t": table})
    for given in ([5], table, "t", {"t": 5}):
        with pytest.raises(TypeError, match="kvjax: restore: want "):
            restore(tmp_path / "a", given)


def test_a_restore_takes_the_lists_that_a_save_takes(make, tmp_path):
    one, other = (make(2).upsert(np.arange(n), np.ones((n, 2))) for n in (3, 4))
    save(tmp_path / "a", [one, other])
    found = restore(tmp_path / "a", [one.clear(), other.name])
    assert {name: len(table) for name, table in found.items()} == {one.name: 3, other.name: 4}
    restored = kvjax.orbax.TableHandler().restore(tmp_path / "a", kvjax.orbax.TableRestore([other.refresh()]))
    assert list(restored) == [other.name]


def test_a_table_that_is_found_by_name_is_where_it_is_asked_for(make, mesh, tmp_path):
    table = make(2).upsert(np.arange(3), np.ones((3, 2)))
    save(tmp_path / "a", [table])
    for tables in (None, {table.name: None}):
        with pytest.raises(ValueError, match=r"restore: want the arguments.* leave mesh= out.* kvjax.reshard"):
            restore(tmp_path / "a", tables, mesh=mesh(2))
    assert restore(tmp_path / "a", {table.name: table}, mesh=mesh(2))[table.name].spec.placement is None
    kvjax.drop_table(table.name)
    assert restore(tmp_path / "a", mesh=mesh(2))[table.name].spec.num_shards == 2


@pytest.mark.parametrize("key_dtype, key", [("int64", -7), ("uint64", 2**64 - 7), ("int32", -7)])
def test_the_row_that_unadmitted_keys_share_stays(key_dtype, key, make, tmp_path):
    """Whatever a rule says of it, as in a frozen table: it is no row of a key."""
    table = make(1, initializer=0.5, key_dtype=key_dtype, admit=kvjax.admit.MinCount(100, unadmitted=key))
    table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.array([1, 2]), np.ones((2, 1))))
    rule = kvjax.Prune(predicate=lambda rows: np.zeros(len(rows), bool))
    kvjax.checkpoint.save(tmp_path / "all", {"t": table})
    kvjax.checkpoint.prune(tmp_path / "all", tmp_path / "pruned", rule)
    kvjax.checkpoint.save(tmp_path / "saved", {"t": table}, prune=rule)
    kvjax.convert.export_checkpoint(tmp_path / "all", tmp_path / "all.npz", prune=rule)
    for rows in (table.export(rule), kvjax.convert.from_npz(tmp_path / "all.npz").rows):
        assert rows.keys.astype(key_dtype).tolist() == [key] and rows.values.tolist() == [[-1.5]]
    for path in ("pruned", "saved"):
        table = kvjax.checkpoint.restore(tmp_path / path, {"t": table.refresh().clear()})["t"]
        assert len(table) == 1 and table.lookup(np.array([1, 5]))[:, 0].tolist() == [-1.5, -1.5]
