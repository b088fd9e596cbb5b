"""Hyperparameters of the transforms of kvjax.optax: what is refused, of whatever type it is."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import kvjax.optax as of

PARTITION = of.partition(dense=optax.sgd(0.1), tables=optax.sgd(0.1))
STRENGTHS = (-1.0, np.float32(-1), -1, np.int64(-1), ml_dtypes.bfloat16(-1), np.nan, np.inf, "1", None, True, [0.1])
STEPS = (0, -1, 2.5, 2.0, np.int64(0), np.float32(2), np.nan, "1", None, True)
FRACTIONS = (-0.1, 2, 2.0, np.int64(2), np.float32(1.5), np.array(1.5), np.nan, "1", None)
FINITE = (np.nan, np.inf, np.float32(np.nan), "1", None)
rated = functools.partial(functools.partial, learning_rate=0.1)
NUMBERS = [  # a transform, its numbers, and what they may not be
    (of.add_row_noise, "eta", STRENGTHS), (functools.partial(of.add_row_noise, 1.0), "gamma", FINITE),
    (of.scale_by_cowclip, "r zeta", STRENGTHS), (of.scale_by_frequency, "power", FINITE),
    (of.scale_by_frequency, "least", STEPS), (of.ema_rows, "decay", FRACTIONS),
    (rated(of.rowwise_adagrad), "initial_accumulator_value eps", STRENGTHS),
    (rated(of.adagrad_decay), "initial_accumulator_value eps", STRENGTHS), (rated(of.adagrad_decay), "every", STEPS),
    (rated(of.adagrad_decay), "decay", FRACTIONS), (rated(of.gap_adam), "eps", STRENGTHS),
    (rated(of.gap_adam), "b1 b2", (*FRACTIONS, 1, 1.0)), (rated(of.group_adam), "b1 b2", (*FRACTIONS, 1, 1.0)),
    (rated(of.group_adam), "learning_rate eps l1 l2 l21", STRENGTHS),
    (rated(of.ftrl), "learning_rate l1 l2 l2_shrinkage beta initial_accumulator_value", STRENGTHS),
    (rated(of.sparse_group_ftrl), "learning_rate l1 l2 l21 l2_shrinkage beta initial_accumulator_value", STRENGTHS),
    (functools.partial(of.group_lasso, optax.sgd(0.1)), "l1 l2 l21", STRENGTHS),
    (functools.partial(of.accumulate, PARTITION), "every", STEPS),
    (functools.partial(of.apply_if_finite, PARTITION), "max_consecutive_errors", (-1, 2.5, np.int64(-1), None)),
    (functools.partial(of.scale_loss, PARTITION), "initial", (0, *STRENGTHS)),
    (functools.partial(of.scale_loss, PARTITION), "factor", (1, 1.0, np.int64(1), *STRENGTHS)),
    (functools.partial(of.scale_loss, PARTITION), "period", STEPS),
]  # fmt: skip
CASES = [(make, name, wrong) for make, names, wrong in NUMBERS for name in names.split()]
INJECTED = [case for case in CASES if not isinstance(case[0], functools.partial) or case[0].func not in (
    of.group_lasso, of.accumulate, of.apply_if_finite, of.scale_loss,
)]  # fmt: skip


def label(case):
    make, name, _ = case
    return f"{getattr(make, 'func', make).__name__}-{name}"


@pytest.mark.parametrize("case", CASES, ids=label)
def test_numbers_that_would_spoil_rows_are_refused(case):
    make, name, wrong = case
    for value in wrong:
        with pytest.raises(ValueError, match=rf"kvjax: {label(case).split('-')[0]}: want .* as {name}, got .*; see"):
            make(**{name: value})


@pytest.mark.parametrize("case", INJECTED, ids=label)
def test_numbers_of_any_type_and_those_that_are_injected_are_taken(case):
    make, name, _ = case
    for value in (1, np.int64(1)) if name in ("every", "least") else (0.9375, np.float32(0.9375), np.array(0.9375)):
        make(**{name: value})
    jax.make_jaxpr(lambda x: jnp.zeros(len(make(**{name: x}))))(0.9375)  # traced
    with pytest.raises(TypeError, match=f"want a number as {name}, got a schedule; optax.inject_hyperparams"):
        make(**{name: optax.constant_schedule(0.9375)})


def test_injected_numbers_go_on_working():
    tx = optax.inject_hyperparams(of.adagrad_decay)(0.1, every=2, decay=optax.constant_schedule(0.5))
    want = of.adagrad_decay(0.1, every=2, decay=0.5)
    rows = jnp.ones((2, 3))
    state, alone = tx.init(rows), want.init(rows)
    for _ in range(4):
        updates, state = jax.jit(tx.update)(rows, state)
        other, alone = jax.jit(want.update)(rows, alone)
    np.testing.assert_allclose(updates, other, rtol=1e-6)
