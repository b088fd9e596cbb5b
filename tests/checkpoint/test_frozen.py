"""Saving while training goes on: what is saved is what the table held, whatever is written before it is copied."""

import itertools
import math
import random

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._table.frozen import freeze_rows
from tests.support.checkpoints import restore
from tests.support.marks import examples, few, slow

N = 70_000  # rows, of which three parts are made
TX = optax.sgd(0.5, momentum=0.9)


def applied(table, keys):
    return table.apply(TX, kvjax.SparseRows(keys, jnp.ones((len(keys), table.dim))))[0]


WRITES = {
    "upsert": lambda t, keys: t.upsert(keys, np.full((len(keys), t.dim), 7.0)),
    "assign": lambda t, keys: t.assign(keys, np.full((len(keys), t.dim), 8.0)),
    "add": lambda t, keys: t.add(keys, np.ones((len(keys), t.dim))),
    "accum": lambda t, keys: t.accum(keys, np.zeros((len(keys), t.dim)), np.ones((len(keys), t.dim)), keys % 2 == 0),
    "apply": applied,
    "pin": lambda t, keys: t.pin(keys),
    "unpin": lambda t, keys: t.unpin(keys),
    "lookup_or_insert": lambda t, keys: t.lookup_or_insert(keys)[1],
    "remove": lambda t, keys: t.remove(keys),
    "restrict": lambda t, keys: t.restrict(N // 2),
    "clear": lambda t, keys: t.clear(),
    "clear_slots": lambda t, keys: t.clear_slots(),
    "load": lambda t, keys: t.load(t.export(slots=True).take(np.arange(len(t)) % 3 > 0)),
}


def filled(make, **options):
    table = make(2, **options).upsert(np.arange(N) * 7, np.arange(2 * N).reshape(N, 2))
    return table.pin(np.arange(5) * 7)


def parts_of(frozen, most=20_000):
    """The columns, at most so many rows at a time."""
    while True:
        space = {
            name: np.full(most * dtype.itemsize * math.prod(shape), 99, np.uint8)
            for name, (dtype, shape) in frozen.types.items()
        }
        if not (rows := frozen.copy_next(space, lambda seconds: None)):
            return
        yield {
            name: space[name].view(dtype).reshape(most, *shape)[:rows] for name, (dtype, shape) in frozen.types.items()
        }


def check(parts, want):
    parts = list(parts)
    assert sum(len(part["keys"]) for part in parts) == len(want)
    for name in parts[0] if parts else ():
        found = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(found, want.columns()[name], err_msg=name)
    assert not parts or parts[0].keys() | {"pinned"} == want.columns().keys()


def keys_of(rng, n=4096):
    """Keys with rows and without."""
    return np.array(rng.sample(range(2 * N), n)) * 7


@pytest.mark.parametrize("kind", few(WRITES, "apply", "clear"))
@pytest.mark.parametrize("trained", [False, pytest.param(True, marks=slow)])
def test_a_write_changes_nothing_of_what_was_frozen(kind, trained, make):
    rng = random.Random(kind)
    table = filled(make)
    if trained:
        table = applied(table, np.arange(9000) * 14)
    frozen, want = freeze_rows(table), table.snapshot().rows
    np.testing.assert_array_equal(frozen.offsets, table.snapshot().offsets)
    parts = parts_of(frozen)
    first = next(parts)
    for _ in range(2):
        table = WRITES[kind](table, keys_of(rng))
        table = WRITES["upsert"](table, keys_of(rng))  # into rows that have become free
    check([first, *parts], want)
    assert len(table.export()) == len(table)


@slow
@pytest.mark.parametrize("place", ["one place", "4", "replicated"])
def test_any_writes_at_any_moment(place, make, places):
    """With several that are copied out at once, of different moments."""
    rng = random.Random(place)
    options = {"max_capacity": N, "on_full": "evict"} if place == "4" else {}
    table, frozen = filled(make, **places[place] if place != "one place" else {}, **options), []
    for _ in range(examples(8, 24)):
        if rng.random() < 0.4:
            frozen.append((parts_of(freeze_rows(table)), [], table.snapshot(once=True).rows))
        table = WRITES[rng.choice(sorted(WRITES))](table, keys_of(rng))
        if len(table) < N // 2:
            table = WRITES["upsert"](table, np.arange(N) * 7)
        for parts, found, _ in rng.sample(frozen, len(frozen) // 2):
            found += itertools.islice(parts, 1)
    for parts, found, want in frozen:
        check([*found, *parts], want)


def test_what_nobody_reads_is_forgotten(make):
    """Also a table that is dropped, or moved, while it is copied out."""
    table = filled(make)
    frozen, want = freeze_rows(table), table.snapshot().rows
    freeze_rows(table)
    parts = parts_of(frozen)
    first, name = next(parts), table.name
    table = WRITES["upsert"](table, keys_of(random.Random(0)))
    kvjax.drop_table(name)
    check([first, *parts], want)


@slow
def test_a_save_is_of_its_handle(make, tmp_path):
    """By Orbax, in the background, while steps are made."""
    import orbax.checkpoint as ocp

    table = applied(filled(make), np.arange(9000) * 14)
    with ocp.CheckpointManager(tmp_path) as manager:
        wants = []
        for step in range(3):
            wants.append(table.snapshot())
            manager.save(step, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({"t": table})))
            for _ in range(20):
                table = applied(table, keys_of(random.Random(step)))
        manager.wait_until_finished()
    for step, want in enumerate(wants):
        found = restore(tmp_path, step, {"t": table})["t"].snapshot()
        table = table.refresh()
        for name, column in want.rows.columns().items():
            np.testing.assert_array_equal(found.rows.columns()[name], column, err_msg=name)
