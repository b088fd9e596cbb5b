"""Changes since a cursor: on a device the rows that are others and no more, on the CPU those at least."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._table.changes import changes_since, close_cursor, open_cursor
from kvjax.checkpoint import restore, save
from tests.support.marks import few
from tests.support.tables import Small

KEYS = np.array([0, -1, 7, 2**40, -(2**63), 2**63 - 1, *range(100, 110)])
on_device = pytest.mark.skipif(not kvjax.ffi.on_device(), reason="wants tables on a device")


def step(table, keys, tx=None):
    tx = tx or optax.adagrad(0.1)
    return table.apply(tx, kvjax.SparseRows(np.asarray(keys), jnp.ones((len(keys), table.dim))))[0]


def trained(make, **options):
    """A table with slots in all rows but the last two."""
    return step(make(3, **options), KEYS[:-2]).upsert(KEYS[-2:], np.full((2, 3), 0.5))


def again(table, number, value=None):
    """Removes a row and inserts one, of the same value or another."""
    value = table.lookup([number]) if value is None else np.full((1, 3), value)
    return table.remove([number]).upsert([number], value)


def rows_of(snapshot, *keys):
    """By key all that a row has, as text."""
    columns = snapshot.rows.columns()
    at = range(len(snapshot.rows)) if not keys else np.flatnonzero(np.isin(columns["keys"], keys))
    return {int(columns["keys"][i]): repr([columns[name][i].tolist() for name in sorted(columns)]) for i in at}


# What is done, and the keys whose rows are others or new, those that have none any more.
WRITES = {
    "nothing": (lambda t: t, [], []),
    "the same value": (lambda t: t.upsert([7], t.lookup([7])), [], []),
    "the last element": (lambda t: t.assign([7], t.lookup([7]).at[0, 2].set(9.0)), [7], []),
    "a row without slots": (lambda t: t.assign([109], np.ones((1, 3))), [109], []),
    "pinned": (lambda t: t.pin([7, 109]), [7, 109], []),
    "pinned and not": (lambda t: t.pin([7, 109]).unpin([7, 109]), [], []),
    "trained": (lambda t: step(t, [7, 109]), [7, 109], []),
    "removed": (lambda t: t.remove([7, -1]), [], [7, -1]),
    "removed, and another": (lambda t: again(t, 7, 4.0), [7], []),
    "removed, and without slots": (lambda t: again(t, 7), [7], []),
    "another in its row": (lambda t: t.remove([7]).upsert([55], np.full((1, 3), 4.0)), [55], [7]),
    "removed, and the same": (lambda t: again(t, 109), [], []),
    "two that have changed rows": (
        lambda t: t.remove([108, 109]).upsert([109], np.full((1, 3), 0.5)).upsert([108], np.full((1, 3), 0.5)), [], []
    ),
    "evicted": (lambda t: t.restrict(len(KEYS) - 2), [], None),
    "new and grown": (lambda t: t.upsert(np.arange(1000, 3000), np.ones((2000, 3))), [*range(1000, 3000)], []),
    "reserved": (lambda t: t.reserve(5000), [], []),
    "removed all": (lambda t: t.remove(KEYS), [], [*KEYS]),
}  # fmt: skip
OPTIONS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16 over four": {"dtype": "float16", "mesh": 4},
    "two memories": {"storage": Small(256)},
}


@pytest.mark.parametrize("options", few(OPTIONS, "bfloat16"))
@pytest.mark.parametrize(
    "write", few(WRITES, "the last element", "removed, and another", "another in its row", "trained")
)
def test_what_has_changed(write, options, make, mesh):
    options, (write, changed, removed) = dict(OPTIONS[options]), WRITES[write]
    if "mesh" in options:
        options["mesh"] = mesh(4)
        if removed is None and kvjax.ffi.on_device():
            pytest.skip("no eviction of tables with mesh= there")
    if "storage" in options and not kvjax.ffi.on_device():
        options = {}
    table = trained(make, **options)
    mark, before = open_cursor(table), rows_of(table.snapshot())
    table = write(table)
    changes, now = changes_since(table, mark), table.snapshot()
    keys = set(changes.rows.rows.keys.tolist())
    assert rows_of(changes.rows) == (rows_of(now, *keys) if keys else {})
    assert changes.rows.rows.last_step == now.rows.last_step and changes.rows.slot_types == now.slot_types
    if removed is None:
        removed = set(before) - set(rows_of(now))
        assert len(removed) == 2
    if kvjax.ffi.on_device():
        assert keys == set(changed) and set(changes.removed.tolist()) == set(removed) and changes.counts_of_all
    else:
        assert keys >= set(changed) and set(changes.removed.tolist()) >= set(removed)
    close_cursor(table, mark)
    assert changes_since(table, mark) is None


@on_device
@pytest.mark.parametrize("write", ["clear", "filled again", "load", "half", "restore"])
def test_what_a_table_on_a_device_knows(write, make, tmp_path):
    table = make(3).upsert(KEYS, np.ones((len(KEYS), 3))) if write == "clear" else trained(make)
    mark, before = open_cursor(table), table.export(slots=True)
    save(tmp_path / "base", {"t": table}, cursor="c")
    half = before.keys[: len(KEYS) // 2]
    if write in ("clear", "filled again"):
        table = table.clear()
    if write == "filled again":
        table = table.load(before.take(np.arange(len(half)))).upsert(before.keys[-1:], np.full((1, 3), 9.0))
    elif write in ("load", "half"):
        table = table.remove(KEYS[::2]).load(before if write == "load" else before.take(np.arange(len(half))))
    elif write == "restore":
        table = restore(tmp_path / "base", {"t": step(table, KEYS)})["t"]
    changes = changes_since(table, mark)
    gone = {"clear": before.keys, "filled again": before.keys[len(half) : -1], "half": before.keys[len(half) :]}
    assert set(changes.removed.tolist()) == set(gone.get(write, ()))
    assert changes.rows.rows.keys.tolist() == ([before.keys[-1]] if write == "filled again" else [])
    want = table.snapshot()
    save(tmp_path / "delta", {"t": table}, since="c")
    assert "delta" in (tmp_path / "delta/t/kvjax.json").read_text()
    got = restore(tmp_path / "delta", {"t": step(table, KEYS)})["t"].snapshot()
    assert rows_of(got) == rows_of(want) and got.rows.last_step == want.rows.last_step


def test_slots_that_come_and_go(make):
    table = make(3).upsert(KEYS, np.ones((len(KEYS), 3)))
    mark = open_cursor(table)
    table = step(table, KEYS[:2])
    changes = changes_since(table, mark)
    assert set(changes.rows.rows.keys.tolist()) == set(KEYS[:2].tolist()) and len(changes.rows.slot_types) == 1
    trained = open_cursor(table)
    table = step(table.clear_slots(), KEYS[:1], optax.trace(0.9))
    assert changes_since(table, trained) is None
    if kvjax.ffi.on_device():
        changes = changes_since(table, mark)
        assert set(changes.rows.rows.keys.tolist()) == set(KEYS[:2].tolist()) and len(changes.removed) == 0
        assert rows_of(changes.rows) == rows_of(table.snapshot(), *KEYS[:2])


def test_a_cursor_of_an_empty_table(make):
    table = make(3)
    mark, other = open_cursor(table), open_cursor(table)
    changes = changes_since(table, mark)
    assert len(changes.rows.rows) == len(changes.removed) == 0
    close_cursor(table, other)
    table = step(table, KEYS)
    assert rows_of(changes_since(table, mark).rows) == rows_of(table.snapshot())
    assert len(changes_since(table.remove(KEYS), mark).rows.rows) == 0


def test_cursors_of_another_backend_are_not_known(make):
    """Each backend counts its own, so two may have one of the same number."""
    table = make(3).upsert(KEYS, np.ones((len(KEYS), 3)))
    mark = open_cursor(table)
    other = dataclasses.replace(mark, backend="another")
    close_cursor(table, other)
    assert changes_since(table, other) is None and changes_since(table, mark) is not None


@on_device
def test_a_cursor_stays_behind_when_a_table_moves(make):
    table = trained(make)
    mark = open_cursor(table)
    for storage in (kvjax.storage.Hybrid(4096), kvjax.storage.Device()):
        table = table.to(storage)
        assert changes_since(table, mark) is None
