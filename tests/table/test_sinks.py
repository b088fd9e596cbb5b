"""Functions of the user's that eviction calls: sinks of rows, and scores."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax import admit, evict
from tests.support.eviction import SGD, filled, many, train
from tests.support.policies import mix

REFUSED = (ValueError, MemoryError, jax.errors.JaxRuntimeError)


def test_a_sink_gets_what_goes(make, promotion):
    got = []

    def sink(keys, values, slots, freqs, versions, reason):
        got.append((keys.tolist(), values.tolist(), {k: v.shape for k, v in slots.items()}, freqs.tolist(),
                    versions.tolist(), reason))  # fmt: skip

    table = make(2, initializer=1.0, max_capacity=3, on_full="evict").on_evict(sink)
    step = jax.jit(lambda t, k: t.apply(optax.adagrad(0.1), kvjax.SparseRows(k, jnp.ones((*k.shape, 2))))[0])
    for key in [1, 1, 2, 3, 4]:
        table = step(table, kvjax.keys([key]))
    jax.block_until_ready(table)
    ((keys, values, slots, freqs, versions, reason),) = got
    assert (keys, slots, freqs, versions, reason) == ([1], {"sum_of_squares": (1, 2)}, [2], [2], "capacity")
    assert np.shape(values) == (1, 2) and values[0][0] < 1.0
    assert len(table.on_evict(None).restrict(0)) == 0 and len(got) == 1


def test_a_sink_that_fails_leaves_the_table_as_it_was(make):
    table = filled(make(1)).on_evict(lambda *rows: 1 / 0)
    before = table.export()
    for write in (lambda t: t.restrict(3), jax.jit(lambda t: t.evict(evict.MaxAge(0), 100))):
        with pytest.raises(REFUSED, match="division by zero"):
            jax.block_until_ready(write(table))
        table = table.refresh()
    np.testing.assert_array_equal(before.values, table.export().values)
    with pytest.raises(TypeError, match="on_evict"):
        table.on_evict(3)
    with pytest.raises(
        TypeError, match=r"on_evict: want a function of \(keys, values, .*\), got one of \(keys\): too many"
    ):
        table.on_evict(lambda keys: None)  # now, not at the first eviction


class Dumb(Exception):
    """One that fails to say why."""

    def __str__(self):
        raise RuntimeError("no text")


class Surrogate(Exception):
    def __str__(self):
        return "\ud800"


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (KeyError(7), "KeyError: 7"),
        (ValueError(), "ValueError"),
        (Dumb(), "Dumb, which cannot say why"),
        (Surrogate(), "Surrogate, whose text is not Unicode"),
        (OSError("a\0b"), "OSError: a b"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_what_the_users_code_raises_is_the_cause(raised, text, make):
    def fails(*rows):
        raise raised

    table = filled(make(1)).on_evict(fails)
    for write, what in (
        (lambda t: t.restrict(3), "sink"),
        (lambda t: t.evict(evict.LowestScore(3, fails)), "score function"),
    ):
        with pytest.raises(REFUSED, match=f"'{table.name}', evict: want a {what} that works, got {text};") as info:
            len(write(table))
        assert info.value.__cause__ is raised
        table = table.refresh()
    assert len(table) == 40


def test_a_sink_that_calls_the_table_gets_an_error_and_no_deadlock(make):
    table = filled(make(1))
    other = make(1)

    def sink(keys, values, slots, freqs, versions, reason):
        assert len(other) == 0  # another table is free
        len(table)

    table.on_evict(sink)
    with pytest.raises(REFUSED, match="one from that function, which is a sink"):
        jax.block_until_ready(table.restrict(3))


@pytest.mark.parametrize(
    "score", [lambda rows: rows.keys[:1], lambda rows: np.full(len(rows), np.nan), lambda rows: 1 / 0]
)
def test_bad_scores_change_nothing(score, make):
    table = filled(make(1))
    with pytest.raises(REFUSED, match="score function"):
        jax.block_until_ready(table.evict(evict.LowestScore(3, score)))
    assert len(table.refresh()) == 40


def test_scores_are_compared_in_full(make):
    """Times of now, a minute apart, are equal in float32; steps beyond 2**24 too."""
    table = make(1).upsert(np.arange(20), np.ones((20, 1)))
    table = table.evict(evict.LowestScore(7, lambda rows: 1.75e9 + 60.0 * rows.keys))
    assert sorted(table.export().keys.tolist()) == list(range(7, 20))
    table = table.evict(evict.MinScore(2**24 + 9, lambda rows: rows.keys + 2**24))
    assert sorted(table.export().keys.tolist()) == list(range(9, 20))
    for score in (lambda rows: np.full(len(rows), 1e300) ** 2, lambda rows: rows.keys * 1j, lambda rows: rows.keys > 3):
        with pytest.raises(REFUSED, match="finite real numbers"), np.errstate(over="ignore"):
            jax.block_until_ready(table.evict(evict.LowestScore(1, score)))
        table = table.refresh()


def test_rows_that_are_not_numbers_have_no_norm(make):
    table = make(2).upsert(np.arange(3), [[np.nan, 1.0], [1.0, 1.0], [np.inf, 0.0]])
    assert sorted(table.evict(evict.MinNorm(1.0)).export().keys.tolist()) == [1, 2]


def test_the_shared_row_stays_and_its_sum_has_one_order(make):
    """That of the hashes of the keys, in float64, where 1e17 + 1 is 1e17."""
    sums = set()
    for keys in ([5, 6, 7], [7, 5, 6], [6, 7, 5]):
        table = make(1, admit=admit.MinCount(9, unadmitted=-1), max_capacity=1, on_full="evict")
        rows = {5: 1e17, 6: 1.0, 7: -1e17}
        grads = kvjax.SparseRows(np.array(keys), jnp.asarray([[rows[k]] for k in keys]))
        table, _ = table.apply(SGD, grads)
        sums.add(float(table.lookup(-1)[0]))
        assert table.restrict(0).export().keys.tolist() == [-1]
    a, b, c = (float(np.float32(rows[key])) for key in sorted(rows, key=mix))
    assert sums == {0.0 - (a + b + c)}


def test_loading_rows_leaves_waiting_keys_waiting(make):
    table = train(make(1, admit=admit.MinCount(3)), [1, 2])
    table = table.upsert(np.array([5]), [[1.0]])
    table = table.load(table.export())
    assert table.stats().tracked == 2
    table = table.load(kvjax.Exported(**many(2)))  # keys 0 and 1 get rows
    assert table.stats().tracked == 1


def test_scores_see_the_whole_row(make, promotion):
    seen = []

    def score(rows):
        seen.append(rows)
        return rows.freqs + rows.slots["sum_of_squares"][:, 0]

    table, tx = make(1, max_capacity=3, on_full="evict", evict=evict.LowestScore(None, score)), optax.adagrad(0.1)
    for key in [1, 1, 2, 3, 3, 4]:
        table, _ = table.apply(tx, kvjax.SparseRows(np.array([key]), jnp.ones((1, 1))))
    assert sorted(table.export().keys.tolist()) == [1, 3, 4]
    assert seen[0].last_step == 6 and seen[0].versions.max() == 5


def test_a_sink_cannot_drop_its_table(make):
    table = make(1, max_capacity=3, on_full="evict").upsert(np.arange(3), np.ones((3, 1)))
    other = make(1)

    def sink(*_):
        kvjax.drop_table(other.name)
        kvjax.drop_table(table.name)

    table = table.on_evict(sink)
    with pytest.raises(REFUSED, match="drop_table: want a call once the user's function that it waits for has"):
        jax.block_until_ready(table.upsert(np.array([9]), [[1.0]]))
    assert table.name in kvjax.tables() and other.name not in kvjax.tables()
    kvjax.drop_table(table.name)  # it was no longer waited for
