"""Rows and changes of a checkpoint for other programs: in pieces, of some keys, and followed from delta to delta."""

import contextlib
import shutil

import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings

import kvjax
from kvjax._formats import source
from kvjax.checkpoint import CheckpointError, changes, compact, restore, rows, save
from kvjax.checkpoint._chains import chain_rows
from kvjax.checkpoint._disk.files import Files
from tests.checkpoint.test_deltas import KEYS, OPERATIONS, write
from tests.support import stores
from tests.support.checkpoints import assert_equal, trained
from tests.support.marks import examples, few, slow
from tests.support.tables import AWKWARD


def as_dict(*pieces):
    """By key all that a row has, as text; of slots only those that an optimizer has written."""
    found = {}
    for piece in pieces:
        columns = piece.columns()
        assert not found.keys() & set(piece.keys.tolist())
        for i, key in enumerate(piece.keys.tolist()):
            names = [name for name in sorted(columns) if piece.has_slots[i] or "slot." not in name]
            found[key] = repr([(name, columns[name].dtype, columns[name][i].tolist()) for name in names])
    return found


def joined(pieces):
    """Pieces as one export."""
    pieces = list(pieces)
    columns = [piece.columns() for piece in pieces]
    whole = {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}
    return kvjax.Exported.of_columns(whole, pieces[0].last_step)


class Follower:
    """A program of one's own: rows in a dict, and where they are from."""

    def __init__(self):
        self.rows, self.have, self.step, self.wholes = {}, (), None, 0

    def take(self, delta):
        if delta.whole:
            self.rows, self.wholes = {}, self.wholes + 1
            assert len(delta.removed) == 0
        else:
            assert delta.since in self.have
        for key in delta.removed.tolist():
            self.rows.pop(key, None)
        changed = as_dict(*delta.rows())
        assert not changed.keys() & set(delta.removed.tolist())
        self.rows |= changed
        self.have, self.step = delta.checkpoint, delta.step
        return changed


def saved_chain(make, folder, **options):
    """A table whose keys came in a whole save and two deltas, in which some are others, and some are gone."""
    table = make(2, **options).upsert(AWKWARD, np.arange(16).reshape(8, 2))
    save(folder / "0", [table], cursor="c")
    table = trained(table, optax.adagrad(0.1)).remove(AWKWARD[:2]).upsert([300, 301], np.ones((2, 2)))
    save(folder / "1", [table], since="c")
    table = table.upsert(AWKWARD[:1], np.full((1, 2), 9.0)).remove([300]).pin(AWKWARD[3:4])
    save(folder / "2", [table], since="c")
    return table


# ---- rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", few([False, True], 1))
def test_all_rows_of_a_chain_in_pieces(slots, make, tmp_path, monkeypatch):
    table = saved_chain(make, tmp_path)
    for piece_bytes in (source.PIECE_BYTES, 8):
        monkeypatch.setattr(source, "PIECE_BYTES", piece_bytes)
        pieces = list(rows(tmp_path, slots=slots))
        assert (len(pieces) > 1) == (piece_bytes == 8) and all(len(piece) == piece.total for piece in pieces)
        assert_equal(joined(pieces), table.export(slots=slots))
        assert pieces[0].last_step == table.export().last_step


def test_rows_of_some_keys_read_few_chunks(make, tmp_path, monkeypatch):
    """Of a checkpoint, and of a delta over it."""
    monkeypatch.setattr("kvjax.checkpoint._disk.format._CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(chain_rows, "_NEAR_BYTES", 1 << 12)
    read, bytes_read = Files.read_into, []
    monkeypatch.setattr(Files, "read_into", lambda *args: bytes_read.append((args[1], len(args[2]))) or read(*args))
    keys = np.arange(20_000)
    table = make(16).upsert(keys, np.random.default_rng(0).normal(size=(20_000, 16)).astype(np.float32))
    save(tmp_path / "0", [table], cursor="c")
    save(tmp_path / "1", [table := table.upsert([5, 20_001], np.ones((2, 16))).remove([7])], since="c")
    whole, columns = table.export(), {"keys", "values", "freqs", "versions", "has_slots"}
    for wanted in ([], [7], [5], [5, 5, 8, 7, 20_001, -1], keys[::500], keys):
        bytes_read.clear()
        (piece,) = rows(tmp_path / "1", keys=wanted)
        assert_equal(piece, whole.take(np.isin(whole.keys, wanted)))
        chunks = [each for each in bytes_read if "/offsets/" not in each[0] and "/removed/" not in each[0]]
        assert len(set(chunks)) == len(chunks)  # none is read twice
        if len(wanted) < 10:
            # Of each key and each of the two checkpoints, at most two chunks of each column.
            assert len(chunks) <= len(wanted) * 2 * 2 * len(columns)
    for wanted in ([], [7], [5, 7, 8, 19_999]):  # nor does a restore of them read more
        bytes_read.clear()
        some = restore(tmp_path / "0", {table.name: "some"}, keys=np.array(wanted, np.int64))[table.name]
        assert sorted(some.export().keys.tolist()) == wanted
        chunks = [path for path, _ in bytes_read if "/offsets/" not in path]
        assert len(chunks) <= len(wanted) * 2 * (len(columns) + 1)  # of the keys twice
        kvjax.drop_table("some")
    monkeypatch.setattr(source, "PIECE_BYTES", 1 << 12)
    pieces = list(rows(tmp_path / "1", keys=keys[::2]))
    assert 10 < len(pieces) < 300
    assert_equal(joined(pieces), whole.take(np.isin(whole.keys, keys[::2])))


@pytest.mark.parametrize("key_dtype", few(["int64", "uint64", "int32", "uint32"], "uint32"))
def test_keys_of_all_widths(key_dtype, make, x64, tmp_path):
    info = np.iinfo(key_dtype)
    keys = np.array([0, 1, info.min, info.max, info.max - 1], key_dtype)
    table = make(2, key_dtype=key_dtype).upsert(np.unique(keys), np.ones((len(np.unique(keys)), 2)))
    save(tmp_path / "0", [table], cursor="c")
    save(tmp_path / "1", [table.remove(keys[3:4])], since="c")
    delta = changes(tmp_path / "1")
    wide = np.uint64 if key_dtype.startswith("u") else np.int64
    assert delta.removed.dtype == wide and delta.removed.tolist() == [info.max]
    (piece,) = rows(tmp_path / "1", keys=keys)
    assert piece.keys.dtype == wide and set(piece.keys.tolist()) == set(keys[[0, 1, 2, 4]].tolist())
    forms = [kvjax.keys(keys[:2].astype(np.int64)), keys[:2].reshape(1, 2, 1), keys[:2].tolist(), keys[1]]
    if key_dtype.endswith("32"):  # whose 32 bits are one key, with a sign or without
        forms.append(keys[-1:].view(np.int32 if wide == np.uint64 else np.uint32))
    for form, n in zip(forms, [2, 2, 2, 1, 1], strict=False):
        assert sum(map(len, rows(tmp_path / "1", keys=form))) == n


def test_an_empty_table_and_empty_deltas(make, tmp_path):
    save(tmp_path / "0", [table := make(3, dtype="bfloat16")], cursor="c")
    save(tmp_path / "1", [table], since="c")
    (piece,) = rows(tmp_path / "0")
    assert piece.values.shape == (0, 3) and piece.values.dtype == table.export().values.dtype
    delta = changes(tmp_path / "1")
    (piece,) = delta.rows()
    assert len(piece) == len(delta.removed) == 0 and not delta.whole and changes(tmp_path / "0").whole
    (piece,) = rows(tmp_path / "1", keys=[1])
    assert piece.values.shape == (0, 3)


def test_rows_of_a_store_and_of_several_tables(make, tmp_path):
    store = stores.begin()
    a, b = make(2).upsert([1, 2], [[1.0, 1.0], [2.0, 2.0]]), make(1).upsert([3], [[3.0]])
    save("gs://bucket/run/0", {"a": a, "b": b}, cursor="c")
    save("gs://bucket/run/1", {"a": a.remove([1]), "b": b.upsert([4], [[4.0]])}, since="c")
    assert store.store and set(as_dict(*rows("gs://bucket/run", "b"))) == {3, 4}
    assert changes("gs://bucket/run", "a").removed.tolist() == [1]
    assert set(as_dict(*changes("gs://bucket/run", "b").rows())) == {4}
    for call in (rows, changes):
        with pytest.raises(ValueError, match=r"want one table of the checkpoint, got \['a', 'b'\]; say which: table="):
            call("gs://bucket/run")
        with pytest.raises(ValueError, match=r"got 'user' of \['a', 'b'\]"):
            call("gs://bucket/run", "user")
        with pytest.raises(ValueError, match=r"got \['a'\] of \['a', 'b'\]; give the name of one as table=$"):
            call("gs://bucket/run", ["a"])


def test_what_is_asked_wrongly_or_damaged(make, tmp_path):
    table = saved_chain(make, tmp_path)
    for call in (rows, changes):
        with pytest.raises(CheckpointError, match=f"{call.__name__}: want|checkpoint: want"):
            call(tmp_path / "nowhere")
    with pytest.raises(TypeError, match=f"table '{table.name}', rows: want integers"):
        rows(tmp_path, keys=["a"])
    for since in ("0123456789abcdef", 3, b"0123456789abcdef", b"", [3], [b"abc"], [["abc"]]):
        with pytest.raises(TypeError, match="changes: want since= as a collection of digests"):
            changes(tmp_path, since=since)
    chunk = next((tmp_path / "2").glob("*/shard*/values/c.0.0"))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    delta = changes(tmp_path / "2")  # which says what went; its rows are read when they are asked for
    for pieces in (delta.rows(), rows(tmp_path), rows(tmp_path, keys=AWKWARD)):
        with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
            list(pieces)
    shutil.rmtree(tmp_path / "0")
    assert not changes(tmp_path / "1").whole  # for which its base need not be there
    for call in (lambda: rows(tmp_path / "1"), lambda: changes(tmp_path / "1", since=())):
        with pytest.raises(CheckpointError, match="give its folder as base="):
            call()


def test_rows_that_are_behind_are_said(make, tmp_path):
    """They are known by the slot of `kvjax.optax.catch_up`."""
    n, yes = np.arange(8), np.ones(8, bool)
    slots = {"last_step": n.astype(np.int32)}
    columns = kvjax.Exported(AWKWARD, np.ones((8, 2), np.float32), n, n, slots, yes, ~yes, 8, 8)
    save(tmp_path / "0", [make(2).load(columns)])
    for call in (rows, changes):
        with pytest.warns(UserWarning, match=f"{call.__name__}: it reads rows as they are stored.*slots=True"):
            call(tmp_path / "0")
    assert next(rows(tmp_path / "0", slots=True)).slots["last_step"].dtype == np.int32


# ---- following ---------------------------------------------------------------------------------------------


def test_a_program_follows_deltas(make, tmp_path):
    table, each, late = saved_chain(make, tmp_path), Follower(), Follower()
    changed = [set(each.take(changes(tmp_path / str(i), slots=True))) for i in range(3)]
    assert changed == [{*AWKWARD.tolist()}, changed[1], {AWKWARD[0], AWKWARD[3]}] and each.wholes == 1
    want = as_dict(table.export(slots=True))
    assert each.rows == want and each.step == table.export().last_step
    late.take(changes(tmp_path / "0", since=late.have))
    late.take(changes(tmp_path, since=late.have, slots=True))  # of both deltas since then
    assert late.rows.keys() == want.keys() and late.wholes == 1
    nothing = changes(tmp_path, since=each.have)
    assert len(each.take(nothing)) == 0 and each.rows == want and "since=" in repr(nothing)
    lost = changes(tmp_path, since=["0" * 16], slots=True)  # of what nothing builds on: all of it
    each.take(lost)
    assert lost.whole and each.rows == want and "whole" in repr(lost)
    compact(tmp_path / "2", tmp_path / "whole")
    assert len(late.take(changes(tmp_path / "whole", since=late.have))) == 0  # it stands for what one has


@slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_dtype": "uint64"},
        {"admit": kvjax.admit.MinCount(2, max_age=2)},
        {"max_capacity": 8, "on_full": "evict", "evict": kvjax.evict.LeastFrequent()},
        {"mesh": 4, "dtype": "bfloat16"},
    ],
    ids=["plain", "unsigned", "admission", "full", "sharded"],
)
def test_whatever_is_done_a_follower_has_it(options, mesh, tmp_path_factory, monkeypatch):
    """One that takes each delta, one that takes every third, and one that comes late have the rows of the table."""
    options, left_out = dict(options), {"move"} if "mesh" in options else set()
    if "mesh" in options:
        options["mesh"] = mesh(options["mesh"])
        left_out |= {"evict", "restrict"} if kvjax.ffi.on_device() else set()
    monkeypatch.setattr(source, "PIECE_BYTES", 64)

    @given(OPERATIONS)
    @settings(max_examples=examples(2, 5), suppress_health_check=list(HealthCheck))
    def run(operations):
        folder = tmp_path_factory.mktemp("followed")
        with contextlib.suppress(KeyError):
            kvjax.drop_table("ops")
        table, count = kvjax.get_table("ops", dim=2, **options), 0
        each, third, late = Follower(), Follower(), Follower()
        save(folder / "0", {"t": table}, cursor="c")
        each.take(changes(folder / "0", slots=True))
        for operation, numbers in [*operations, ("save", [])]:
            keys, last = KEYS[np.array(numbers, int)], folder / str(count)
            keys = keys.view(np.uint64) if options.get("key_dtype") == "uint64" else keys
            if operation == "save":
                count += 1
                save(folder / str(count), {"t": table}, since="c")
                want = as_dict(table.export(slots=True))
                each.take(changes(folder / str(count), slots=True))
                assert each.rows == want and each.step == table.export().last_step
                if count % 3 == 0:
                    third.take(changes(folder, since=third.have, slots=True))
                    assert third.rows == want
            elif operation == "compact":
                compact(last, folder / "new")
                shutil.rmtree(last)
                (folder / "new").rename(last)
            elif operation not in left_out | {"restore"}:
                with contextlib.suppress(RuntimeError, MemoryError):
                    table = write(table, operation, keys)
        for follower in (third, late):
            follower.take(changes(folder, since=follower.have, slots=True))
            assert follower.rows == want
        assert as_dict(*rows(folder, slots=True)) == want
        some = KEYS[::2].view(np.uint64) if options.get("key_dtype") == "uint64" else KEYS[::2]
        found = as_dict(*rows(folder, keys=some, slots=True))
        assert found == {key: row for key, row in want.items() if key in set(some.tolist())}
        shutil.rmtree(folder)
        kvjax.drop_table("ops")

    run()
