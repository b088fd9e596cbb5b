"""Row programs of many tables: what they share, and what their traces cost."""

import collections
import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._spec.spec import TableSpec
from kvjax._training import update
from kvjax._training.update import lowered
from tests.support.marks import few_rows
from tests.support.transforms import row_by_row

pytestmark = [pytest.mark.usefixtures("promotion"), row_by_row]


def test_tables_share_the_instructions_of_a_transform(make):
    """However many there are; and an error names the table all the same."""
    update._made_alone.cache_clear()
    tables, rowwise = [make(dim=3) for _ in range(4)], kvjax.optax.rowwise(optax.adam(0.1))
    programs = [lowered(table.spec, rowwise, (), {}).run.program for table in tables]
    assert update._made_alone.cache_info().misses == 1
    assert all(program is programs[0] for program in programs)
    rows = jnp.ones((1, 3))

    def stepped(rate, table):
        new = table.apply(optax.sgd(rate), kvjax.SparseRows(np.array([1]), rows))[0]
        return new.version.astype(jnp.float32)

    for table in tables[:2]:
        with pytest.raises(ValueError, match=table.name):
            jax.grad(stepped)(0.1, table)


@pytest.mark.parametrize("constraint", [None, jnp.sort], ids=["program", "chunks"])
def test_traces_of_tables_are_not_compared_with_each_other(constraint, make, monkeypatch):
    """Each with all others it would be, and a step of hundreds of tables take minutes to trace."""
    compared, equal = [], TableSpec.__eq__
    monkeypatch.setattr(TableSpec, "__eq__", lambda a, b: compared.append(a.name != b.name) or equal(a, b))
    tx = kvjax.optax.partition(optax.sgd(0.1), optax.adam(0.1))
    params = [make(dim=2, constraint=constraint) for _ in range(8)]

    @jax.jit
    def step(params, state, keys):
        grads = kvjax.grad(lambda params: sum(jnp.sum(table.lookup(keys)) for table in params))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step.trace(params, tx.init(params), kvjax.keys([1, 2]))
    assert not any(compared)


def test_more_tables_trace_no_more_of_a_transform(make):
    """Neither its update, with a schedule, nor how rows catch up before it."""

    def traced(tables):
        calls = collections.Counter()

        def rate(count):
            calls["rate"] += 1
            return 0.1 / (1 + count)

        def catch_up(state, row):
            calls["row"] += 1
            return made.catch_up(state, row)

        made = kvjax.optax.catch_up(optax.sgd(rate))
        rows = dataclasses.replace(made, catch_up=catch_up)
        tx = kvjax.optax.partition(optax.sgd(0.1), rows)

        @jax.jit
        def step(params, state, keys):
            def loss(params):
                return sum(jnp.sum(table.lookup(keys)) for table in params)

            grads = kvjax.grad(loss)(kvjax.optax.caught_up(params, state, rows))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = [make(dim=2) for _ in range(tables)]
        state, _ = tx.init(params), calls.clear()
        step.trace(params, state, kvjax.keys([1, 2]))
        return calls

    assert traced(3) == traced(1)


@pytest.mark.parametrize(
    ("base", "want"), few_rows([(optax.scale(-1.0), -0.3), (optax.scale_by_schedule(lambda n: -(0.5**n)), -0.2)], 1)
)
def test_a_value_of_one_program_is_not_in_another(base, want, make):
    """A transform may read what the step around it was given."""
    rates, table = [jnp.float32(1)], make(dim=2)

    def update(grads, state, params=None):
        updates, state = base.update(grads, state, params)
        return updates * rates[-1], state

    rowwise = kvjax.optax.rowwise(optax.GradientTransformation(base.init, update))
    grads, state = kvjax.SparseRows(kvjax.keys([1]), jnp.ones((1, 2))), rowwise.init(2)

    def stepped(rate, table, state):
        rates.append(rate)
        return table.apply(rowwise, grads, state)

    for rate in (0.1, 0.2):
        table, state = jax.jit(lambda *args: stepped(*args))(jnp.float32(rate), table, state)
    np.testing.assert_allclose(table.lookup([1])[0], want, rtol=1e-6)


@pytest.mark.parametrize("globals_", [(), (0.0,)], ids=["alone", "computed"])
def test_what_no_instruction_can_do_is_remembered_alone(globals_, make):
    """Without the frames of the call that found it, and without the error that is being handled around this call."""

    def update(grads, state, params=None):
        return jnp.sort(grads), state

    rowwise = kvjax.optax.rowwise(optax.GradientTransformation(lambda params: globals_, update))
    spec, kept = make(dim=2).spec, []

    def retried():
        anything = lambda x: x  # noqa: E731  # of this frame
        kept.append(weakref.ref(anything))
        try:
            raise ValueError
        except ValueError:
            jax.make_jaxpr(lambda *state: anything(lowered(spec, rowwise, state, {})))(*globals_)

    retried()
    gc.collect()
    assert kept[0]() is None
