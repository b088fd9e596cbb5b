"""Facts about rows: what a transform gets as row_facts=, by a row program, in chunks, and over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._training.update import lowered
from kvjax.ffi import is_device
from tests.support.marks import few, slow

pytestmark = pytest.mark.usefixtures("promotion")
WORDS = [f"{fact}.{word}" for fact in ("last_step", "step", "key") for word in ("low", "high")]
NAMES = ["occurrences", "frequency", "missed", *WORDS]


def moved(updates, row_facts):
    return updates * row_facts.occurrences[..., None].astype(jnp.float32)


def apart():
    """Keeps each fact as a slot, and moves rows by their occurrences."""

    def update(updates, state, params=None, *, row_facts=None, **extra):
        return moved(updates, row_facts), dict(zip(NAMES, jax.tree.leaves(row_facts), strict=True))

    def init(params):
        dtypes = dict.fromkeys(NAMES[:3], jnp.int32)
        return {name: jnp.zeros(params.shape[:-1], dtypes.get(name, jnp.uint32)) for name in NAMES}

    return optax.GradientTransformationExtraArgs(init, update)


def together():
    """The same in one slot, which no program can."""

    def update(updates, state, params=None, *, row_facts=None, **extra):
        facts = [x.astype(jnp.uint32) for x in jax.tree.leaves(row_facts)]
        return moved(updates, row_facts), {"facts": jnp.stack(facts, -1)}

    def init(params):
        return {"facts": jnp.zeros((*params.shape[:-1], len(NAMES)), jnp.uint32)}

    return optax.GradientTransformationExtraArgs(init, update)


WAYS = {"program": apart(), "chunks": together()}


def facts_in(table, keys):
    """The facts of a step that the table has kept, by name."""
    if "facts" in table.export(slots=True).slots:
        kept = np.asarray(table.slot("facts", keys))
        return {name: kept[:, i].view(np.int32) if i < 3 else kept[:, i] for i, name in enumerate(NAMES)}
    return {name: np.asarray(table.slot(name, keys)) for name in NAMES}


def words(low, high):
    return (np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low)).astype(np.int64)


def check_steps(table, steps, tx):
    """Trains and compares the facts of each step with what the table says before and after it."""
    apply = jax.jit(lambda table, grads, step: table.apply(tx, grads, step=step)[0])
    for step, (keys, counts) in steps:
        distinct = np.unique(keys[counts > 0])
        ids, rows = kvjax.keys(distinct), table.export()
        known = dict(zip(rows.keys.tolist(), zip(rows.freqs, rows.versions, strict=True), strict=True))
        before, last = np.array([known.get(key, (0, -1)) for key in distinct.tolist()], np.int64).reshape(-1, 2).T
        rows = jnp.ones((len(keys), table.dim))
        grads = kvjax.SparseRows(kvjax.keys(keys), rows, jnp.asarray(counts, jnp.int32))
        table = apply(table, grads, np.int32(step))
        trained = before > 0
        got = facts_in(table, ids)
        want = np.array([counts[keys == key].sum() for key in distinct], np.int32)
        np.testing.assert_array_equal(got["occurrences"], want)
        np.testing.assert_array_equal(got["frequency"], np.asarray(table.frequency(ids)))
        np.testing.assert_array_equal(got["missed"], np.where(trained, np.maximum(step - last - 1, 0), 0))
        last = np.where(trained, last, -1)
        for name, values in (("last_step", last), ("step", np.full(len(ids), step)), ("key", distinct)):
            np.testing.assert_array_equal(words(got[f"{name}.low"], got[f"{name}.high"]), values)
    return table


def batches(n=4, size=24, seed=0):
    rng = np.random.default_rng(seed)
    for i in range(n):
        keys = rng.integers(0, 12, size) * 7919**3 - 5
        yield 1 + i * i, (keys, rng.integers(0, 3, size))


@pytest.mark.parametrize("way", few(WAYS, "chunks"))
@pytest.mark.parametrize("dim", few([4, 1], 0))
def test_facts_are_what_the_table_says(dim, way, make):
    table = check_steps(make(dim=dim), batches(), WAYS[way])
    if not is_device(table.spec.storage.backend):
        program = lowered(table.spec, kvjax.optax.rowwise(WAYS[way]), (), {}, True)
        assert (program is not None) == (way == "program")


@pytest.mark.parametrize("way", WAYS)
@slow
def test_rows_that_are_made_and_written_before_they_are_trained(way, make):
    tx = WAYS[way]
    table = check_steps(make(dim=2), [(5, (np.array([1, 2]), np.ones(2, int)))], tx)
    table = table.upsert(np.array([3, 1]), jnp.ones((2, 2)))  # 3 is new: made, and not trained
    table = check_steps(table, [(9, (np.array([1, 3, 4]), np.ones(3, int)))], tx)
    # A step again, and the one behind it, count as the table says.
    empty = (np.zeros(0, np.int64), np.zeros(0, int))
    check_steps(table, [(9, empty), (9 + 2**20, (np.array([1, 2, 3]), np.array([2, 1, 0])))], tx)


@pytest.mark.parametrize("way", WAYS)
@slow
def test_occurrences_while_a_key_waits_are_those_of_its_frequency(way, make):
    table = make(dim=2, admit=kvjax.admit.MinCount(3))
    one = np.ones(2, np.int32)
    for step, count in ((1, one), (2, 2 * one)):
        grads = kvjax.SparseRows(np.array([7, 8]), jnp.ones((2, 2)), jnp.asarray(count))
        table, _ = table.apply(WAYS[way], grads, step=step)
    got = facts_in(table, np.array([7]))
    assert (got["occurrences"].tolist(), got["frequency"].tolist(), got["missed"].tolist()) == ([2], [3], [0])


@pytest.mark.parametrize("way", WAYS)
@slow
def test_the_shared_row_has_all_occurrences_that_it_stands_for(way, make):
    table = make(dim=2, admit=kvjax.admit.MinCount(9, unadmitted=-1))
    grads = kvjax.SparseRows(np.array([7, 8, -1]), jnp.ones((3, 2)), jnp.array([1, 2, 4], jnp.int32))
    table, _ = table.apply(WAYS[way], grads, step=3)
    got = facts_in(table, np.array([-1]))
    assert (got["occurrences"].tolist(), got["key.high"].tolist()) == ([7], [2**32 - 1])


@pytest.mark.parametrize("way", WAYS)
@slow
def test_facts_on_shards(way, make, mesh):
    check_steps(make(dim=2, mesh=mesh(2)), batches(), WAYS[way])


@slow
def test_counts_of_batches(make):
    for tx in WAYS.values():
        check_steps(make(dim=2, count="batch"), batches(), tx)


@slow
def test_accumulated_steps_have_the_occurrences_of_all(make):
    tx = kvjax.optax.accumulate(kvjax.optax.partition(dense=optax.sgd(1.0), tables=WAYS["program"]), 2)
    params = {"t": make(dim=1)}
    state = tx.init(params)
    for keys in ([7, 8], [7, 7]):
        grads = {"t": kvjax.SparseRows(np.array(keys), jnp.ones((2, 1)))}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert params["t"].slot("occurrences", np.array([7, 8])).tolist() == [3, 1]


def test_who_gets_facts(make):
    """Also within a chain; not whoever takes other arguments; and never those of the user, which are of dense rows."""
    table, grads = make(dim=2), kvjax.SparseRows(np.array([7, 7]), jnp.ones((2, 2)))
    chained = optax.chain(optax.clip(5.0), optax.masked(apart(), True), optax.scale(-1.0))
    table, _ = table.apply(chained, grads, row_facts="of the user's")
    assert table.lookup(7).tolist() == [-4.0, -4.0]

    def update(updates, state, params=None, *, rate):
        return jax.tree.map(lambda g: -rate * g, updates), state

    strict = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    table, _ = make(dim=2).apply(strict, grads, rate=0.5)
    assert table.lookup(7).tolist() == [-1.0, -1.0]
    with pytest.raises(TypeError, match="rate"):
        make(dim=2).apply(strict, grads)
