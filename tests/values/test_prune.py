"""Pruning: rules alone and together, pieces like the whole, and a dry run that says what each leaves out."""

import dataclasses
import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax._values.exported import Exported
from kvjax._values.prune import norms_of
from kvjax.checkpoint._prune import in_words


def rows_of(n=50, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(n, 3)).astype(np.float32)
    values[::7] = 0
    none = np.zeros(n, bool)
    return Exported(
        rng.permutation(n), values, rng.integers(0, 9, n), rng.integers(0, 20, n), {}, none, none, last_step=20, total=n
    )


def even(rows):
    return rows.keys % 2 == 0


ALL = kvjax.Prune(
    min_frequency=2, max_age=15, min_norm=0.5, zero_rows=True, top_k=6, keep=[1, 3], predicate=even, remove=[2, 99]
)


def test_rules_together():
    rows = rows_of()
    norms = np.linalg.norm(rows.values, axis=1)
    passing = (rows.freqs >= 2) & (20 - rows.versions <= 15) & (norms >= 0.5) & (rows.keys % 2 == 0) & (rows.keys != 2)
    most = sorted(np.flatnonzero(passing), key=lambda i: (-rows.freqs[i], -rows.versions[i]))
    assert rows.freqs[most[5]] == rows.freqs[most[6]]  # so the row version decides
    assert set(rows.keys[ALL.mask(rows)]) == {1, 3, *rows.keys[most[:6]]}
    pieces = np.concatenate([ALL.passing(rows.take(np.arange(50) // 10 == i)) for i in range(5)])
    np.testing.assert_array_equal(ALL.chosen(pieces, rows.keys, rows.freqs, rows.versions), ALL.mask(rows))


def test_a_dry_run_says_what_each_rule_leaves_out():
    rows = rows_of()
    report = ALL.report(rows)
    assert list(report.by_rule) == ["min_frequency", "max_age", "min_norm", "zero_rows", "predicate", "remove", "top_k"]
    mask = ALL.mask(rows)
    norms = np.linalg.norm(rows.values, axis=1)
    assert report.dropped.rows == (~mask).sum() and report.dropped.norm == pytest.approx(norms[~mask].sum())
    assert report.norm_lost == pytest.approx(norms[~mask].sum() / norms.sum())
    assert report.by_rule["predicate"].rows == (rows.keys % 2 == 1).sum()
    assert report.by_rule["remove"].rows == 1
    assert 5 in rows.versions and report.by_rule["max_age"].rows == (rows.versions < 5).sum()
    kept = kvjax.Prune(top_k=6, keep=rows.keys).report(rows)
    assert kept.by_rule["top_k"].rows == 44 and kept.dropped.rows == 0
    assert report.by_rule["zero_rows"].rows == 8 and report.by_rule["zero_rows"].norm == 0
    assert report.total.bytes == sum(a.nbytes for a in rows.columns().values())
    none = kvjax.Prune(top_k=0).report(rows.take(np.zeros(50, bool)))
    assert none.dropped.rows == 0 and none.norm_lost == 0
    with pytest.raises(ValueError, match=r"want a function that gives \(50,\) bool"):
        kvjax.Prune(predicate=lambda rows: 1).mask(rows)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("n", [50, 0])
def test_a_predicate_may_give_a_list(n, kind):
    """Also of no rows, as in an empty table or a delta in which nothing has changed."""
    rows = rows_of().take(np.arange(50) < n)
    rule = kvjax.Prune(predicate=lambda rows: kind(key % 2 == 0 for key in rows.keys))
    np.testing.assert_array_equal(rule.mask(rows), even(rows))
    assert rule.report(rows).dropped.rows == (~even(rows)).sum()


def test_norms_of_large_rows_and_of_nan():
    values = np.float32([[3e38, 3e38], [1e-40, 0], [np.nan, 1], [np.inf, 1], [3, 4], [0, 0]])
    none = np.zeros(6, bool)
    rows = Exported(np.arange(6), values, np.arange(6), np.arange(6), {}, none, none, last_step=9, total=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = kvjax.Prune(min_norm=5.0, max_age=8).report(rows)
        np.testing.assert_allclose(norms_of(values), [2**0.5 * 3e38, 1e-40, np.nan, np.inf, 5, 0], rtol=1e-5)
    assert report.by_rule["min_norm"].rows == 3 and report.by_rule["min_norm"].norm == pytest.approx(1e-40, rel=1e-5)
    assert report.total.norm == pytest.approx(2**0.5 * 3e38) and 0.999 < report.norm_lost <= 1


def test_keys_to_keep_and_numbers_of_rows_are_exact():
    ids = np.array([-1, -(2**63), 2**53 + 1, 3], np.int64)
    table = kvjax.get_table("kept", dim=1).upsert(ids, np.zeros((4, 1), np.float32))
    rows = table.export(prune=kvjax.Prune(zero_rows=True, keep=[-1, 2**63, 2**53 + 1]))
    assert sorted(rows.keys.tolist()) == sorted(ids[:3].tolist())
    rows = table.export(prune=kvjax.Prune(remove=[2**64 - 1, 2**63, 2**53]))
    assert sorted(rows.keys.tolist()) == [3, 2**53 + 1]
    for field in ("keep", "remove"):
        for wrong in ([3.7], ["a"]):
            with pytest.raises(TypeError, match=rf"Prune\({field}=\)\D*want integers"):
                kvjax.Prune(**{field: wrong})
        for cut in (jnp.asarray(ids), [jnp.asarray(ids[0])]):
            with pytest.raises(TypeError, match=rf"Prune\({field}=\): want ids of 64 bits, got a JAX array of 32-bit"):
                kvjax.Prune(**{field: cut})
    kvjax.Prune(keep=kvjax.keys(jnp.arange(3), key_dtype="int32"))
    for name in ("top_k", "min_frequency", "max_age"):
        for wrong in ("5", 2.5, True, -1, np.array([1, 2])):
            with pytest.raises(ValueError, match=f"want an integer >= 0 as {name}, got {re.escape(repr(wrong))}"):
                kvjax.Prune(**{name: wrong})
    for wrong in ("5", float("nan"), float("inf"), -0.5, np.ones(2)):
        with pytest.raises(ValueError, match=f"want a finite number >= 0 as min_norm, got {re.escape(repr(wrong))}"):
            kvjax.Prune(min_norm=wrong)
    with pytest.raises(ValueError, match="want True or False as zero_rows, got 'no'"):
        kvjax.Prune(zero_rows="no")
    kvjax.Prune(min_frequency=np.int64(2), max_age=0, min_norm=np.float32(1.5), zero_rows=np.True_)
    for use in (lambda: table.export(prune=5), lambda: kvjax.Prune(predicate=5)):
        with pytest.raises(TypeError, match=r"want kvjax.Prune, or a function .* got 5"):
            use()
    with pytest.raises(TypeError, match=r"got {'t': Prune\(\)}; give one of these, which is for all tables"):
        table.export(prune={"t": kvjax.Prune()})


OTHERS = {
    "min_frequency": (2**53, 2**53 + 1), "max_age": (0, 1), "min_norm": (0.5, 1.5), "zero_rows": (False, True),
    "top_k": (1, 2), "keep": (np.array([1, 2]), [1, 3]), "predicate": (even, rows_of),
    "remove": (np.array([1, -2]), [1, 3]),
}  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(kvjax.Prune)])
def test_other_rules_are_others(field):
    """For comparisons, and for the words by which releases and processes know them."""
    one, other = (kvjax.Prune(**{field: value}) for value in OTHERS[field])
    again = kvjax.Prune(**{field: OTHERS[field][0]})
    assert one == again and hash(one) == hash(again) and in_words(one) == in_words(again)
    assert one != other and in_words(one) != in_words(other)
    if isinstance(one.max_age or one.top_k, int):
        same = kvjax.Prune(**{field: np.int64(OTHERS[field][1])})
        assert same == other and in_words(same) == in_words(other)
    assert in_words(kvjax.Prune(remove=[-1])) == in_words(kvjax.Prune(remove=[2**64 - 1]))
    assert kvjax.Prune(keep=[2, 1]) == kvjax.Prune(keep=np.array([1, 2, 2])) and one != "a rule"


def test_a_key_is_kept_or_removed(make):
    """Also where a table of 32 bits has both as one key; and the row that unadmitted keys share is none to remove."""
    with pytest.raises(ValueError, match=r"prune: want a key in keep= or in remove=, got 1 in both, as -1"):
        kvjax.Prune(keep=[-1, 2], remove=np.array([3, -1]))
    one = make(1, key_dtype="int32").upsert([-1, 3], np.ones((2, 1)))
    assert one.export(kvjax.Prune(remove=[2**32 - 1])).keys.tolist() == [3]
    with pytest.raises(ValueError, match=rf"table '{one.name}', prune: want a key in keep= or in remove="):
        one.export(kvjax.Prune(keep=[-1], remove=[2**32 - 1]))
    shared = make(1, admit=kvjax.admit.MinCount(2, unadmitted=5))
    with pytest.raises(ValueError, match=rf"table '{shared.name}', prune: want remove= without the key of the row"):
        shared.export(kvjax.Prune(remove=[4, 5]))
