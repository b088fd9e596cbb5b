"""Another optimizer for a table that is trained: matching slots stay, others begin anew, and it is said."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import slow

pytestmark = pytest.mark.usefixtures("promotion")
KEYS = np.array([7, 8, 9]) * 2**40


def trained(table, tx, keys=KEYS, n=1):
    state = kvjax.optax.rowwise(tx).init(table.dim)
    for _ in range(n):
        table, state = table.apply(tx, kvjax.SparseRows(keys, jnp.ones((len(keys), table.dim))), state)
    return table


@slow
def test_matching_slots_stay_and_others_begin_anew(make):
    table = trained(make(dim=2, seed=1), optax.adagrad(0.1), KEYS[:2]).upsert(KEYS[2:], jnp.ones((1, 2)))
    before = table.export(slots=True)
    ftrl = kvjax.optax.ftrl(0.1)
    with pytest.raises(Exception, match="the optimizer whose slots the table holds"):
        jax.block_until_ready(trained(table, ftrl).version)
    table = table.refresh()
    with pytest.warns(UserWarning, match="slots kept sum_of_squares; fresh z; dropped none"):
        table = table.switch_optimizer(ftrl)
    after = table.export(slots=True)
    np.testing.assert_array_equal(after.slots["sum_of_squares"], before.slots["sum_of_squares"])
    assert after.slots["z"].shape == (3, 2) and not after.slots["z"].any()
    for name in ("keys", "values", "freqs", "versions", "has_slots"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    trained(table, ftrl)
    assert table.refresh().switch_optimizer(ftrl).export().keys.size == 3  # nothing to say


@slow
def test_moments_that_a_count_corrects_stay_together(make):
    """Adam must not take the second moment of rmsprop for one of its first step."""
    rmsprop, adam, lion = optax.rmsprop(0.1), optax.adam(0.1), optax.lion(0.1)
    table = trained(make(dim=2), rmsprop)
    with pytest.warns(UserWarning, match="kept none; fresh count, mu, nu; dropped nu"):
        table = table.switch_optimizer(adam)
    table = trained(table, adam, n=3)
    mu = table.slot("mu", KEYS)
    with pytest.warns(UserWarning, match="kept count, mu; fresh none; dropped nu"):
        table = table.switch_optimizer(lion)
    np.testing.assert_array_equal(table.slot("mu", KEYS), mu)
    table = trained(table, lion)
    with pytest.warns(UserWarning, match="kept none; fresh count, mu, nu"):
        table = table.switch_optimizer(adam)
    table = trained(table, adam, n=2)
    with pytest.warns(UserWarning, match="kept nu; fresh none; dropped count, mu"):
        assert table.switch_optimizer(rmsprop).slot("nu", KEYS).any()
    assert trained(make(dim=2), adam).switch_optimizer(optax.adamw(0.1)).slot("count", KEYS).tolist() == [1, 1, 1]


@slow
def test_slots_that_start_from_rows_and_other_types(make):
    """Rows without slots begin theirs with their first step, as ever."""
    table = trained(make(dim=2, seed=1), optax.sgd(0.1, momentum=0.9), KEYS[:2]).upsert(KEYS[2:], jnp.ones((1, 2)))
    tx = optax.chain(optax.trace(0.9), optax.contrib.schedule_free_sgd(0.1))
    with pytest.warns(UserWarning, match="kept trace; fresh .*z"):
        table = table.switch_optimizer(tx)
    np.testing.assert_array_equal(table.slot("z", KEYS[:2]), table.lookup(KEYS[:2]))
    with pytest.warns(UserWarning, match="kept none; fresh trace; dropped trace"):
        trained(make(dim=2), optax.trace(0.9)).switch_optimizer(optax.trace(0.9, accumulator_dtype=jnp.bfloat16))
    with pytest.warns(UserWarning, match="kept none; fresh none; dropped trace"):
        assert not trained(make(dim=2), optax.trace(0.9)).switch_optimizer(optax.sgd(0.1)).stats().slots
    assert len(make(dim=2).switch_optimizer(tx)) == 0
    with pytest.raises(ValueError, match="kvjax: rowwise"):
        table.switch_optimizer(optax.contrib.prodigy())


@slow
def test_over_a_mesh_and_from_a_checkpoint(make, mesh, tmp_path):
    adagrad, ftrl = optax.adagrad(0.1), kvjax.optax.ftrl(0.1)
    table = trained(make(dim=2, mesh=mesh(2)), adagrad)
    kvjax.checkpoint.save(tmp_path / "saved", [table])
    want = trained(make(dim=2), adagrad).export(slots=True)
    (restored,) = kvjax.checkpoint.restore(tmp_path / "saved", {table.name: table}).values()
    with pytest.warns(UserWarning, match="kept sum_of_squares; fresh z; dropped none"):
        table = restored.switch_optimizer(ftrl)
    got = table.export(slots=True)
    np.testing.assert_array_equal(got.slots["sum_of_squares"], want.slots["sum_of_squares"])
    trained(table, ftrl)


@slow
def test_moments_are_not_corrected_by_a_count_of_all_rows(make):
    """Which begins anew: those of 200 steps would be taken for those of one."""
    adam = optax.adam(0.1)
    for other in (kvjax.optax.rowwise(adam, count="global"), kvjax.optax.catch_up(adam)):
        table = trained(make(1), adam, n=200)
        before = np.asarray(table.lookup(KEYS))
        with pytest.warns(UserWarning, match="slots kept none; fresh .*dropped count, mu, nu"):
            table = table.switch_optimizer(other)
        grads = kvjax.SparseRows(KEYS, jnp.ones((3, 1)))
        table, state = table.apply(other, grads, other.init(1))
        now = table if other.__class__ is kvjax.optax.Rowwise else kvjax.optax.caught_up(table, state, other)
        np.testing.assert_allclose(before - now.lookup(KEYS), 0.1, rtol=1e-3)
