"""Releases that follow deltas with prune= are what a release of the whole checkpoint with it is."""

import contextlib
import functools
import json
import shutil

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import Prune
from kvjax.checkpoint import save
from kvjax.serving import Changes, FrozenTable, Releases
from kvjax.serving._contents import of_chain
from tests.checkpoint.test_deltas import KEYS, OPERATIONS, step, write
from tests.support.marks import examples, slow
from tests.support.tables import AWKWARD


@pytest.fixture
def wholes(monkeypatch):
    """The names of tables that were read as a whole."""
    names = []

    def counted(chain, name, prune):
        names.append(name)
        return of_chain(chain, name, prune)

    monkeypatch.setattr("kvjax.serving._follow.of_chain", counted)
    return names


def above_two(rows):
    return rows.values[:, 0] > 2


def above(n):
    def rule(rows):
        return rows.values[:, 0] > n

    return rule


def in_function():
    def rule(rows):
        return rows.values[:, 0] > 2

    return rule


class Above:
    def rule(self, rows):
        return rows.values[:, 0] > 2

    @classmethod
    def of_class(cls, rows):
        return rows.values[:, 0] > 2


wrapped_above_two = functools.wraps(above_two)(above(2))  # a closure under the name of another function


def trained_twice(rows):
    assert not rows.slots  # as of a whole table
    return (rows.freqs > 1) | rows.pinned


def same(one, other):
    for a, b in zip(one.export(), other.export(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.lookup([987654]), other.lookup([987654]))
    assert (one.step, one.dtype, one.missing is None) == (other.step, other.dtype, other.missing is None)


def whole(tmp, checkpoint, name, prune, **how):
    """The frozen table of the whole checkpoint."""
    return FrozenTable.write(tmp / "whole.frozen", checkpoint, name=name, prune=prune, **how)


def test_a_changed_row_that_fails_goes(make, tmp_path, wholes):
    """One that passes again comes back, and one that was left out and is removed is no error."""
    table, releases = make(2).upsert([1, 2, 3], [[5.0, 0.0], [1.0, 0.0], [7.0, 0.0]]), Releases(tmp_path / "model")
    save(tmp_path / "saved/0", [table], cursor="c")
    found = []
    for number, change in enumerate([
        None, lambda t: t.upsert([1, 4], [[0.5, 0.0], [9.0, 0.0]]), lambda t: t.upsert([1, 2], [[6.0, 0.0]] * 2),
        lambda t: t.upsert([2], [[0.0, 0.0]]).remove([3]), lambda t: t.remove([2]),
    ]):  # fmt: skip
        if change is not None:
            table = change(table)
            save(tmp_path / f"saved/{number}", [table], since="c")
        release = releases.follow(tmp_path / "saved", prune=above_two)
        assert releases.follow(tmp_path / "saved", prune=above_two) is release
        found.append(sorted(release[table.name].export()[0].tolist()))
        same(release[table.name], whole(tmp_path, tmp_path / f"saved/{number}", table.name, above_two))
    assert found == [[1, 3], [3, 4], [1, 2, 3, 4], [1, 4], [1, 4]] and wholes == [table.name]
    assert release.info.prune == f"predicate={__name__}.above_two"


def test_another_rule_is_another_table(make, tmp_path, wholes):
    """Whichever way a release has come by its rows, deltas are not laid over those of another rule."""
    saved, releases = tmp_path / "saved", Releases(tmp_path / "model")
    table = make(1).upsert(np.arange(6), np.arange(6.0)[:, None])
    save(saved / "0", [table], cursor="c")
    name = table.name
    rules = [
        None, Prune(min_norm=2), Prune(min_norm=np.float32(2.0)), Prune(min_norm=3), Prune(min_norm=3, keep=[0]),
        Prune(min_norm=3, keep=np.array([0, 0], np.uint64)), Prune(min_norm=3, keep=[1]), Prune(zero_rows=True),
        above_two, Prune(predicate=above_two), Prune(), None,
    ]  # fmt: skip
    sizes = [len(releases.follow(saved, prune=rule)[name]) for rule in rules]
    assert sizes == [6, 4, 4, 3, 4, 4, 4, 5, 3, 3, 6, 6]
    assert len(wholes) == 8  # the same rule in other words is no other
    releases.follow(saved, prune=Prune(min_norm=2))
    releases.update({}, {"x": b"1"})
    assert releases.follow(saved, prune=Prune(min_norm=2)).info.prune == "min_norm=2.0" and len(wholes) == 9
    releases.update({name: Changes([0], [[9.0]])})
    assert len(releases.follow(saved, prune=Prune(min_norm=2))[name]) == 4 and len(wholes) == 10
    number = releases.follow(saved, prune=Prune(zero_rows=True)).number
    releases.follow(saved)
    assert releases.rollback(number).info.prune == "zero_rows=True"
    releases.resume()
    assert len(releases.follow(saved)[name]) == 6
    releases.publish({name: saved / "0"}, prune=Prune(min_norm=2))
    assert releases.current().info.prune is None and releases.current().checkpoint == ()
    path = releases.follow(saved, prune=Prune(min_norm=2)).path / "info"
    said = json.loads(path.read_text())
    del said["prune"]  # as it was before there was any
    path.write_text(json.dumps(said))
    assert len(Releases(tmp_path / "model").follow(saved)[name]) == 4  # which it takes for one of all rows


def test_rules_that_deltas_do_not_tell(make, tmp_path):
    releases = Releases(tmp_path / "model")
    save(tmp_path / "0", [make(1).upsert([1], [[1.0]])])
    for rule, why in ((Prune(max_age=3), "max_age=3: rows that have not"), (Prune(top_k=3), "top_k=3: which rows")):
        with pytest.raises(ValueError, match=f"kvjax: follow: want a prune= .*, got {why}.*Releases.publish.*evict"):
            releases.follow(tmp_path / "0", prune=rule)
    for rule in (lambda rows: rows.freqs > 1, functools.partial(above_two), above(2), in_function(), Above().rule,
                 Above.of_class, wrapped_above_two, Prune(predicate=above(3))):  # fmt: skip
        with pytest.raises(ValueError, match="follow: want a predicate with a name of its own"):
            releases.follow(tmp_path / "0", prune=rule)
    with pytest.raises(TypeError, match=r"want kvjax\.Prune, or a function"):
        releases.follow(tmp_path / "0", prune=3)
    assert not (tmp_path / "model").exists()


def test_the_shared_row_is_not_removed(make, tmp_path):
    """It is a part of the model, as for exports and checkpoints, which refuse it, too."""
    table = make(1, admit=kvjax.admit.MinCount(2, unadmitted=7)).upsert([7, 8], [[1.0], [2.0]])
    releases, rule = Releases(tmp_path / "model"), Prune(remove=[7, 8])
    save(tmp_path / "saved/0", [table], cursor="c")
    for use in (
        lambda: FrozenTable.write(tmp_path / "t.frozen", table, prune=rule),
        lambda: releases.publish({table.name: tmp_path / "saved"}, prune=rule),
        lambda: releases.follow(tmp_path / "saved", prune=rule),
    ):
        with pytest.raises(ValueError, match=r"prune: want remove= without the key of the row that unadmitted .* 7 in"):
            use()
    assert not (tmp_path / "t.frozen").exists() and not (tmp_path / "model/current").exists()
    found = releases.follow(tmp_path / "saved", prune=Prune(min_norm=3))[table.name]
    assert found.lookup([7, 8, 9]).tolist() == [[1.0]] * 3 and found.contains([7, 8]).tolist() == [True, False]


@slow
@pytest.mark.parametrize("key_dtype", ["uint64", "int32"])
def test_keys_of_other_widths(key_dtype, make, tmp_path, wholes):
    keys = AWKWARD.view(np.uint64) if key_dtype == "uint64" else np.array([-1, 5, 7, -(2**31)], np.int32)
    table, releases = make(1, key_dtype=key_dtype), Releases(tmp_path / "model")
    table = table.upsert(keys, np.ones((len(keys), 1)))
    save(tmp_path / "saved/0", [table], cursor="c")
    rule = Prune(zero_rows=True, keep=keys[:1])
    releases.follow(tmp_path / "saved", prune=rule)
    table = table.upsert(keys[:3], np.zeros((3, 1))).remove(keys[3:4])
    save(tmp_path / "saved/1", [table], since="c")
    release = releases.follow(tmp_path / "saved", prune=rule)
    same(release[table.name], whole(tmp_path, tmp_path / "saved/1", table.name, rule))
    assert not release[table.name].contains(keys[1:4]).any() and release[table.name].contains(keys[0])
    assert wholes == [table.name]


RULES = {
    "frequency": Prune(min_frequency=2),
    "values": Prune(zero_rows=True, min_norm=3.0, keep=KEYS[:3]),
    "predicate": trained_twice,
    "all": Prune(min_frequency=1, min_norm=1.0, predicate=above_two, keep=[7]),
}
WAYS = ["follow", "pass over", "rollback", "files", "other rule"]


@slow
@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("rule", RULES)
def test_whatever_is_done_it_is_the_whole_table_pruned(rule, quantise, tmp_path_factory):
    """After deltas that were passed over, too, after rollbacks, after files of their own and other rules."""
    rule = RULES[rule]
    admit = kvjax.admit.MinCount(2, unadmitted=7) if quantise else None

    @given(OPERATIONS, st.lists(st.sampled_from(WAYS), min_size=1))
    @settings(max_examples=examples(2, 3), suppress_health_check=list(HealthCheck))
    def run(operations, ways):
        folder, count = tmp_path_factory.mktemp("pruned"), 0
        with contextlib.suppress(KeyError):
            kvjax.drop_table("ops")
        table, releases = kvjax.get_table("ops", dim=2, admit=admit), Releases(folder / "model")
        save(folder / "saved/0", {"t": table}, cursor="c")
        releases.follow(folder / "saved", prune=rule, quantise=quantise)
        for operation, numbers in [*operations, ("step", range(5)), ("save", []), ("save", [])]:
            if operation == "save":
                count += 1
                save(folder / f"saved/{count}", {"t": table}, since="c")
                way = ways[count % len(ways)]
                if way == "pass over":
                    continue
                if way == "rollback":
                    releases.rollback(releases.history()[0].number)
                    with pytest.warns(UserWarning, match="releases that are not paused"):
                        releases.follow(folder / "saved", prune=rule)
                    releases.resume()
                if way == "files":
                    releases.update({}, {"count": str(count).encode()})
                if way == "other rule":
                    releases.follow(folder / "saved", prune=Prune(zero_rows=True))
                found = releases.follow(folder / "saved", prune=rule, keep=9)["t"]
                same(found, whole(folder, folder / f"saved/{count}", "t", rule, quantise=quantise))
            elif operation == "step":
                table = step(table, KEYS[np.array(numbers, int)])
            elif operation not in ("compact", "restore", "move"):
                with contextlib.suppress(RuntimeError, MemoryError):
                    table = write(table, operation, KEYS[np.array(numbers, int)])
        shutil.rmtree(folder)
        kvjax.drop_table("ops")

    run()
