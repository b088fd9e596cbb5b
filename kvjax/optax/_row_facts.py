"""Transforms that use facts about a row: its occurrences, its frequency, its key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kvjax._training.rowwise import check_params
from kvjax._values.arguments import is_integer
from kvjax._values.facts import RowFacts
from kvjax._values.mixing import mix, mixed
from kvjax.optax._checks import AT_LEAST_0, COUNT_FROM_1, FINITE, check
from kvjax.optax._rows import at_least, norm


class RowNoiseState(NamedTuple):
    """State of `add_row_noise`.

    Attributes:
      count: ``()`` int32, steps; all rows of a table share it.
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  (the name every optax state gives it)


def _with_facts(
    op: str, f: Callable[[jax.Array, jax.Array | None, RowFacts], jax.Array], reads_params: bool = False
) -> optax.GradientTransformationExtraArgs:
    """The transform without state that makes f(update, parameter, facts) of each leaf."""

    def update(updates: Any, state: Any, params: Any = None, *, row_facts: Any = None, **extra: Any) -> Any:
        del extra
        if reads_params:
            check_params(params, op)
        return each_row(op, f, updates, params, row_facts), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def each_row(op: str, f: Callable[..., jax.Array], updates: Any, params: Any, row_facts: Any) -> Any:
    leaves, form = jax.tree.flatten(updates)
    if leaves and row_facts is None:
        raise ValueError(
            f"kvjax: {op}: want update(grads, state, params, row_facts=), got no facts about rows: tables give their "
            "own; for dense parameters give kvjax.optax.RowFacts, or another transform as partition(dense=)"
        )
    facts = [row_facts] * len(leaves) if isinstance(row_facts, RowFacts) else form.flatten_up_to(row_facts)
    values = [None] * len(leaves) if params is None else form.flatten_up_to(params)
    return form.unflatten([f(*each) for each in zip(leaves, values, facts, strict=True)])


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _beside(fact: Any, update: jax.Array) -> jax.Array:
    """A fact ``(...)`` as a number beside each element ``(..., dim)`` of an update."""
    return jnp.asarray(fact)[..., None].astype(update.dtype)


def mean_of_duplicates() -> optax.GradientTransformationExtraArgs:
    """Trains a row by the mean of the gradients of its occurrences in a batch, instead of their sum.

    So a key that occurs a hundred times in a batch takes a step as long as one that occurs once. Put it first in a
    chain. In bags, each key in a bag has its own gradient. In dense arrays it needs `RowFacts`, and does not change
    rows without occurrences.

    Returns:
      An optax transform without state.

    Raises:
      ValueError: in ``update``, without facts about rows.

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> table = kvjax.get_table("doc_mean", dim=1)
      >>> tx = optax.chain(kvjax.optax.mean_of_duplicates(), optax.sgd(1.0))
      >>> table, _ = table.apply(tx, kvjax.SparseRows(np.array([7, 9, 7]), jnp.array([[1.0], [1.0], [2.0]])))
      >>> table.lookup(np.array([7, 9]))[:, 0].tolist()
      [-1.5, -1.0]
      >>> kvjax.drop_table("doc_mean")
    """

    def mean(update: jax.Array, value: Any, facts: RowFacts) -> jax.Array:
        del value
        wide = _wide(update)
        return (wide / jnp.maximum(_beside(facts.occurrences, wide), 1)).astype(update.dtype)

    return _with_facts("mean_of_duplicates", mean)


def scale_by_frequency(
    power: float | jax.Array = -0.5, least: int | jax.Array = 1
) -> optax.GradientTransformationExtraArgs:
    """Multiplies the update of a row by ``max(frequency, least) ** power``.

    The frequency is how often the key has occurred in training, including this step. With a power of -0.5 the rate of
    each row falls with the root of its own frequency: rows of rare keys take long steps, however late they come (Li et
    al. 2022, "Frequency-aware SGD for Efficient Embedding Learning with Provable Benefits", with counts in the place of
    relative frequencies).

    Args:
      power: exponent of the frequency.
      least: lower frequencies count as this, so that the first steps are not by far the longest.

    Returns:
      An optax transform without state. In dense arrays it needs `RowFacts`.

    Raises:
      ValueError: `power` is not finite, or `least` is not an integer of 1 or more; or, in ``update``, without facts
        about rows.

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> table = kvjax.get_table("doc_by_frequency", dim=1)
      >>> tx = optax.chain(kvjax.optax.scale_by_frequency(-0.5), optax.sgd(1.0))
      >>> for times in (1, 3):
      ...     table, _ = table.apply(tx, kvjax.SparseRows(np.full(times, 7), jnp.ones((times, 1))))
      ...     print(table.lookup(7).tolist())
      [-1.0]
      [-2.5]
      >>> kvjax.drop_table("doc_by_frequency")
    """
    check("scale_by_frequency", FINITE, power=power)
    check("scale_by_frequency", COUNT_FROM_1, least=least)

    def scaled(update: jax.Array, value: Any, facts: RowFacts) -> jax.Array:
        del value
        wide = _wide(update)
        return (wide * jnp.maximum(_beside(facts.frequency, wide), least) ** power).astype(update.dtype)

    return _with_facts("scale_by_frequency", scaled)


def scale_by_cowclip(r: float = 1.0, zeta: float = 1e-5) -> optax.GradientTransformationExtraArgs:
    """CowClip: clips the gradient of a row to ``occurrences * max(r * norm of the row, zeta)`` by its norm.

    This is adaptive clipping of each row, with which click-through models can train with very large batches (Zheng et
    al. 2022, "CowClip: Reducing CTR Prediction Model Training Time from 12 hours to 10 minutes on 1 GPU",
    arXiv:2204.06240). The occurrences are those of the key in the batch. Put it first in a chain, before
    ``optax.adam``; weight decay (``optax.add_decayed_weights``) comes after it, as in the paper.

    Args:
      r: bound on the gradient of one occurrence, as a multiple of the norm of the row.
      zeta: the least value of that bound, for rows near 0.

    Returns:
      An optax transform without state; its update needs ``params``. In dense arrays it needs `RowFacts`.

    Raises:
      ValueError: `r` or `zeta` is not a finite number of 0 or more; or, in ``update``, without params or facts about
        rows.

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> table = kvjax.get_table("doc_cowclip", dim=2, initializer=1.0)
      >>> tx = optax.chain(kvjax.optax.scale_by_cowclip(r=0.5), optax.sgd(1.0))
      >>> grads = kvjax.SparseRows(np.array([7, 9, 7]), jnp.full((3, 2), 10.0))
      >>> table, _ = table.apply(tx, grads)
      >>> table.lookup(np.array([7, 9]))[:, 0].round(4).tolist()
      [0.0, 0.5]
      >>> kvjax.drop_table("doc_cowclip")
    """
    check("scale_by_cowclip", AT_LEAST_0, r=r, zeta=zeta)

    def clipped(update: jax.Array, value: Any, facts: RowFacts) -> jax.Array:
        wide = _wide(update)
        bound = _beside(facts.occurrences, wide) * jnp.maximum(r * norm(_wide(value)), zeta)
        return (wide * jnp.minimum(1.0, bound / at_least(norm(wide)))).astype(update.dtype)

    return _with_facts("scale_by_cowclip", clipped, reads_params=True)


def add_row_noise(eta: float, gamma: float = 0.0, seed: int = 0) -> optax.GradientTransformationExtraArgs:
    """Adds Gaussian noise of the variance ``eta / (1 + count) ** gamma`` to the gradients of the rows of a step.

    It is ``optax.add_noise`` for tables, which refuse that transform (Neelakantan et al. 2015, "Adding Gradient Noise
    Improves Learning for Very Deep Networks", arXiv:1511.06807). Each row draws its noise from its key, the step, the
    column and the seed. So, up to rounding, the noise is the same for any number of shards, any order of a batch and
    any backend, and after a restore. Rows that a batch leaves out stay as they are.

    Args:
      eta: variance of the noise of the first step.
      gamma: how fast the variance falls.
      seed: 64 bits; two transforms with the same seed draw the same noise.

    Returns:
      An optax transform. In dense arrays it needs `RowFacts`.

    Raises:
      TypeError: the seed is not an integer.
      ValueError: `eta` is negative, or it or `gamma` is not finite; or, in ``update``, without facts about rows.

    Example:
      >>> import jax.numpy as jnp, kvjax, numpy as np, optax
      >>> table = kvjax.get_table("doc_noise", dim=400)
      >>> tx = optax.chain(kvjax.optax.add_row_noise(0.01, seed=3), optax.sgd(1.0))
      >>> grads, state = kvjax.SparseRows(np.array([7]), jnp.zeros((1, 400))), kvjax.optax.rowwise(tx).init(400)
      >>> table, state = table.apply(tx, grads, state)
      >>> f"{table.lookup(7).std():.1f}"
      '0.1'
      >>> kvjax.drop_table("doc_noise")
    """
    if not is_integer(seed):
        raise TypeError(f"kvjax: add_row_noise: want an integer as seed, got {seed!r}; choose one of 64 bits")
    check("add_row_noise", AT_LEAST_0, eta=eta)
    check("add_row_noise", FINITE, gamma=gamma)
    seeds = [np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32 & 0xFFFFFFFF)]

    def init(params: Any) -> RowNoiseState:
        del params
        return RowNoiseState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, *, row_facts: Any = None, **extra: Any) -> Any:
        del params, extra
        deviation = jnp.sqrt(eta / (1.0 + state.count.astype(jnp.float32)) ** gamma)

        def noisy(update: jax.Array, value: Any, facts: RowFacts) -> jax.Array:
            del value
            wide = _wide(update)
            noise = deviation * _normal(facts, seeds, update.shape[-1])
            return (wide + noise.astype(wide.dtype)).astype(update.dtype)

        return each_row("add_row_noise", noisy, updates, None, row_facts), RowNoiseState(state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _normal(facts: RowFacts, seeds: list[np.uint32], dim: int) -> jax.Array:
    """Standard normal numbers ``(..., dim)`` float32, by Box and Muller (1958) of two hashes for each element."""
    state = mixed((*seeds, *facts.step, *facts.key))
    columns = mix(jnp.arange(1, 2 * dim + 1, dtype=jnp.uint32)).reshape(2, *[1] * state.ndim, dim)
    u, v = (
        # In (0, 1), so that the logarithm is finite.
        ((mix(state[..., None] ^ some) >> 8).astype(jnp.float32) + np.float32(0.5)) * np.float32(2**-24)
        for some in columns
    )
    return jnp.sqrt(-2.0 * jnp.log(u)) * jnp.cos(np.float32(2 * np.pi) * v)
