"""Several features on one table and several tables in one call."""

import jax
import numpy as np
import optax
import pytest

import kvjax
from tests.support.tables import finished


def test_lookup_many(make):
    one, two = (make(d, initializer=kvjax.initializers.normal(1.0)) for d in (2, 3))
    mask = np.array([[True, False], [True, True]])
    features = {
        "a": (one, np.array([[1, 2], [3, 4]]), mask),
        "b": (two, np.array([5, 6])),
        "c": (one, kvjax.keys(np.array([1, 2])).salted(1)),
        "d": (one, np.zeros((0, 4), np.int64)),
        "e": (one, 7),
    }
    rows = kvjax.lookup_many(features)
    assert list(rows) == list("abcde")
    assert [r.shape for r in rows.values()] == [(2, 2, 2), (2, 3), (2, 2), (0, 4, 2), (2,)]
    for name, (table, *args) in features.items():
        np.testing.assert_array_equal(rows[name], table.lookup(args[0], mask=args[1] if len(args) > 1 else None))
    assert kvjax.lookup_many({}) == {}


def test_lookup_many_is_one_lookup_and_one_gradient_per_table(make):
    one, two = make(2, initializer=1.0), make(2, initializer=1.0)

    def loss(tables):
        rows = kvjax.lookup_many({
            "x": (tables[0], np.array([1, 2, 3]), np.array([True, True, False])),
            "y": (tables[0], np.array([[1]])),
            "z": (tables[1], np.array([9])),
        })  # fmt: skip
        return rows["x"].sum() + 10 * rows["y"].sum() + rows["z"].sum()

    assert str(jax.make_jaxpr(loss)((one, two))).count("kvjax_lookup") == 2
    grads = jax.jit(kvjax.grad(loss))((one, two))
    merged = kvjax.merge(grads[0])
    assert np.asarray(merged.keys).tolist()[:2] == [1, 2] and merged.counts.tolist() == [2, 1, 0, 0]
    np.testing.assert_array_equal(merged.rows[:2], [[11, 11], [1, 1]])
    table, _ = one.apply(optax.sgd(0.1), grads[0])
    assert sorted(table.export().keys.tolist()) == [1, 2]


def test_lookup_many_refuses_what_it_does_not_know(make):
    table = make(2)
    with pytest.raises(TypeError, match="want features by name, got list"):
        kvjax.lookup_many([(table, [1])])
    for feature in (table, (table,), (np.array([1]), table), [table, np.array([1])]):
        with pytest.raises(TypeError, match="feature 'f', lookup_many: want"):
            kvjax.lookup_many({"f": feature})
    with pytest.raises(TypeError, match="feature 'f'"):
        kvjax.lookup_many({"f": (table, np.array([1.5]))})
    with pytest.raises(ValueError, match="feature 'f': want a mask"):
        kvjax.lookup_many({"f": (table, np.array([1]), np.array([True, False]))})
    with pytest.raises(TypeError, match=r"feature 'f'.* got -1; of padding by an id give \(table, ids, ids != -1\)"):
        kvjax.lookup_many({"f": (table, np.array([1, -1]), -1)})
    stale, live = table, table.upsert(1, np.ones(2))
    with pytest.raises((ValueError, RuntimeError), match="stale"):
        finished(kvjax.lookup_many({"a": (live, 1), "b": (stale, 1)}))
