"""Parts of rows, and steps that rows have missed, in row programs: what XLA does with the same update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._training.update import lowered
from kvjax.optax import catch_up, segments
from tests.programs.test_programs import assert_same, steps
from tests.support.marks import few_rows
from tests.support.transforms import row_by_row

pytestmark = [pytest.mark.usefixtures("promotion"), row_by_row]


def in_parts(dim):
    parts = {
        "bias": (0, optax.sgd(0.5, momentum=0.9)), "slice": (slice(-2, None), optax.adam(0.1)),
        "apart": ([-3, 1], optax.lamb(0.1)), "mask": (np.arange(dim) == 3, optax.adagrad(0.1)),
    }  # fmt: skip
    return segments(parts, rest=optax.rmsprop(0.2))


def moved(grads, params):
    """What users may do to columns; an index that comes from the row is the one thing that is no program."""

    def of(g, p):
        x = jnp.concatenate([g[..., 1:], p[..., :1]], -1)
        x = x + jnp.roll(g, 2, -1) * 0.5 + jnp.pad(p[..., 2:5], ((0, 0), (3, 2)), constant_values=0.25)
        x = x.at[..., 2].set(jnp.sum(g[..., 2:6], -1)).at[..., 4:6].set(p[..., [5, 1]])
        x = x + p.at[..., jnp.arange(8) + 2].get(mode="fill", fill_value=1)
        x = jax.lax.dynamic_update_slice(x, jnp.max(x, -1, keepdims=True), (0, 7))
        x = x / (1 + jnp.linalg.norm(x, axis=-1, keepdims=True)) + g[..., ::-1] * 0.1
        return -0.1 * jnp.clip(jnp.where(jnp.arange(8) < 3, x, x + jnp.stack([p[..., 0]] * 8, -1)), -9, 9)

    return jax.tree.map(of, grads, params)


def rounded(grads, params):
    """To a grid, in turns of a number that is known."""

    def of(g, p):
        x = jax.lax.fori_loop(0, 3, lambda i, y: y * 0.5 + g * i, p)
        return jnp.round(x * 8) / 64 + jax.lax.round(g * 4) / 64

    return jax.tree.map(of, grads, params)


def last_turn():
    """A row whose number is a multiple of 3 takes no turn, and keeps what it had before the loop."""

    def last(n):
        begins = n * n * 0.25 - n + 2.5
        return jax.lax.fori_loop(0, (n % 3).astype(jnp.int32), lambda i, _: 10.0 * i.astype(jnp.float32), begins)

    def update(grads, n, params=None):
        return grads * last(n[0]), n + 1

    return optax.GradientTransformation(lambda params: jnp.zeros(params.shape[:-1]), update)


def injected():
    return optax.inject_hyperparams(optax.adamw)(learning_rate=optax.exponential_decay(0.1, 2, 0.9))


def fading():
    """Its moments have ended after 9 steps; decay goes on."""
    return optax.chain(optax.scale_by_belief(b1=0.1), optax.add_decayed_weights(0.1), optax.scale(-0.01))


CASES = {
    "two parts": (lambda: segments({"bias": (0, optax.sgd(0.1))}, rest=optax.adam(0.1)), {"dim": 3}),
    "parts": (lambda: in_parts(8), {"dim": 8, "constraint": kvjax.constraints.max_norm(0.5)}),
    "parts of 16 bits": (lambda: in_parts(8), {"dim": 8, "dtype": "bfloat16"}),
    "moved": (lambda: optax.stateless(moved), {"dim": 8}),
    "rounded": (lambda: optax.stateless(rounded), {"dim": 8}),
    "last turn": (last_turn, {"dim": 4}),
    "replay of one element": (lambda: catch_up(optax.radam(0.1), replay=200), {"dim": 1}),
    "replay of rates": (lambda: catch_up(injected(), replay=200), {"dim": 5}),
    "replay of less than all": (lambda: catch_up(fading(), replay=9), {"dim": 5, "dtype": "float16"}),
}


@pytest.mark.filterwarnings("ignore:.*it reads rows as they are stored")
@pytest.mark.parametrize(
    "name, x64",
    few_rows([(name, name in ("parts", "replay of one element")) for name in CASES], 0, 4, 5),
    indirect=["x64"],
)
def test_they_are_programs_that_do_what_chunks_do(name, x64, both):
    tx, options = CASES[name][0](), CASES[name][1]
    late = name.startswith("replay")
    state = tuple(jax.tree.leaves((tx if late else kvjax.optax.rowwise(tx)).init(options["dim"])))
    spec = kvjax.get_table("".join(filter(str.isalpha, name)), **options).spec
    assert lowered(spec, tx if late else kvjax.optax.rowwise(tx), state, {}) is not None
    one, other = both(lambda table: steps(table, tx, n=16 if late else 5, rare=late), **options)
    assert_same(one, other, rtol=2e-2 if "dtype" in options else 3e-6)


def filled(row):
    whole = row.astype(jnp.int32).at[jnp.arange(4) + 1].get(mode="fill", fill_value=1e10)
    return whole.astype(jnp.float32)


def test_what_moves_by_the_row_goes_in_chunks(make):
    by_row = lambda row: jnp.roll(row, row[0].astype(jnp.int32))  # noqa: E731
    for dim, constraint in ((200, lambda row: row[::-1]), (4, by_row), (4, filled)):
        table = make(dim=dim, constraint=constraint)
        assert lowered(table.spec, kvjax.optax.rowwise(optax.sgd(1.0)), (), {}) is None
