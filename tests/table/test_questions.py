"""Questions that systems answer differently: what is read where there is no row, what duplicates do, whether some
keys are special, what a restart changes, and whether a refused call leaves a trace. Full tables: test_evict.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax

REFUSED = (ValueError, TypeError, MemoryError, jax.errors.JaxRuntimeError)


def gradients(keys, dim=1, grad=1.0):
    return kvjax.SparseRows(kvjax.keys(np.asarray(keys)), jnp.full((len(keys), dim), grad, jnp.float32))


def contents(table):
    """Everything that a write could change, by key."""
    rows = table.export(slots=True)
    columns = (rows.keys, rows.values, rows.freqs, rows.versions, rows.pinned, *rows.slots.values())
    return {row[0]: row[1:] for row in zip(*(c.tolist() for c in columns), strict=True)}


# ---- a key without a row ---------------------------------------------------------------------------------------------


def test_reading_is_the_same_in_training_and_evaluation_and_inserts_nothing(make):
    table = make(dim=3, initializer=kvjax.initializers.normal(1.0))
    keys = kvjax.keys(np.array([5, -5, 2**62]))
    read = table.lookup
    want = read(keys)
    reads = {
        "jit": jax.jit(read)(keys),
        "vmap": jax.vmap(read)(keys),
        "scan": jax.lax.scan(lambda c, k: (c, read(k)), 0, keys)[1],
        "remat": jax.checkpoint(read)(keys),
        "other batch": read(np.array([1, 5, -5, 2**62]))[1:],
    }
    for name, rows in reads.items():
        np.testing.assert_array_equal(rows, want, err_msg=name)
    assert len(table) == 0 and table.refresh().version == table.version and table.stats().inserted == 0
    loss, _ = kvjax.value_and_grad(lambda t: jnp.sum(t.lookup(keys)))(table)
    np.testing.assert_allclose(loss, want.sum(), rtol=1e-6)
    assert len(table) == 0  # the gradient alone is no update
    assert len(table.apply(optax.sgd(1.0), gradients([5, 6], 3))[0]) == 2


# ---- duplicates in a batch -------------------------------------------------------------------------------------------

TWICE = np.array([7, 8, 7])
ROWS = np.array([[1.0], [2.0], [4.0]])


@pytest.mark.parametrize(
    ("write", "want"),
    [
        (lambda t: t.upsert(TWICE, ROWS), {7: 4, 8: 2}),
        (lambda t: t.upsert(np.array([7]), [[9.0]]).assign(TWICE, ROWS), {7: 4}),
        (lambda t: t.add(TWICE, ROWS), {7: 15, 8: 12}),
        (lambda t: t.lookup_or_insert(TWICE)[1], {7: 10, 8: 10}),
        (lambda t: t.accum(TWICE, ROWS, ROWS + 1, np.array([False, False, True])), {7: 3, 8: 3}),
        (lambda t: t.pin(TWICE).restrict(0), {7: 10, 8: 10}),
        (lambda t: t.upsert(np.arange(9), np.ones((9, 1))).remove(TWICE).remove(np.arange(7)), {}),
        (lambda t: t.apply(optax.sgd(1.0), kvjax.SparseRows(TWICE, jnp.asarray(ROWS, jnp.float32)))[0], {7: 5, 8: 8}),
    ],
    ids=["upsert", "assign", "add", "lookup_or_insert", "accum", "pin", "remove", "apply"],
)
def test_duplicates(write, want, make):
    table = write(make(dim=1, initializer=10.0))
    assert {key: row[0][0] for key, row in contents(table).items()} == want


# ---- no key is special -----------------------------------------------------------------------------------------------

# What others take for an empty place, a deleted one, padding or a mark: 0, -1, -2, the ends of the types, HKV's four.
AWKWARD = np.array(
    [0, 1, -1, -2, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1, -3, -4]
)


def test_no_key_is_special(make, x64):
    options = {"dim": 2, "initializer": 0.5, "admit": kvjax.admit.MinCount(2)}
    table, n = make(**options), len(AWKWARD)
    for _ in range(2):
        table, _ = table.apply(optax.trace(1.0), gradients(AWKWARD, 2, grad=np.arange(1.0, n + 1)[:, None]))
    want = 0.5 + np.repeat(np.arange(1.0, n + 1)[:, None], 2, 1)
    np.testing.assert_array_equal(table.lookup(AWKWARD), want)
    assert table.frequency(AWKWARD).tolist() == [2] * n and table.contains(AWKWARD).all()
    np.testing.assert_array_equal(table.slot("trace", AWKWARD), want - 0.5)
    bags = kvjax.lookup_bag(table, AWKWARD, lengths=np.ones(n, np.int32))
    np.testing.assert_array_equal(bags, want)
    copy = make(**options).load(table.snapshot())
    assert contents(copy) == contents(table) and set(contents(copy)) == set(AWKWARD.tolist())
    for i, key in enumerate(AWKWARD):
        kept = table.pin(key).restrict(0)
        assert contents(kept)[int(key)][0] == want[i].tolist() and len(kept) == 1
        table = kept.unpin(key).load(copy.snapshot())
    assert len(table.remove(AWKWARD)) == 0


# ---- a restart -------------------------------------------------------------------------------------------------------


def test_a_restart_changes_nothing(tmp_path, promotion):
    """Training that is saved, forgotten and restored ends with the same bits as one that ran through, with all on."""
    options = {
        "dim": 4,
        "dtype": "bfloat16",
        "rounding": "stochastic",
        "initializer": jax.nn.initializers.normal(1.0),
        "constraint": kvjax.constraints.max_norm(2.0),
        "admit": kvjax.admit.MinCount(2, unadmitted=-7),
        "max_capacity": 60,
        "on_full": "evict",
        "evict": kvjax.evict.LeastFrequent(7, half_life=3.0).every(5),
    }
    batches = np.random.default_rng(0).zipf(1.3, (16, 40))

    @jax.jit
    def write(table, keys):
        grads = kvjax.SparseRows(keys, table.lookup(keys).astype(jnp.float32) - 1)
        return table.apply(optax.adam(0.1), grads)[0]

    def run(table, steps):
        for batch in batches[steps]:
            table = write(table, kvjax.keys(batch))
        return table

    table = run(kvjax.get_table("restarted", **options).pin(10**6), slice(8))
    handler, folder = kvjax.orbax.TableHandler(), tmp_path / "tables"
    folder.mkdir()
    handler.save(folder, kvjax.orbax.TableSave({"restarted": table}))
    whole = run(table, slice(8, None))
    assert sum(whole.stats().evicted.values()) > 10 and whole.stats().tracked > 10
    want = contents(whole), whole.stats().tracked
    kvjax.drop_table("restarted")
    table = kvjax.get_table("restarted", **options)
    table = handler.restore(folder, kvjax.orbax.TableRestore({"restarted": table}))["restarted"]
    table = run(table, slice(8, None))
    assert (contents(table), table.stats().tracked) == want and 10**6 in contents(table)


# ---- a call that is refused changes nothing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.remove(np.array(["a"])), "hash_keys"),
        (lambda t: t.apply(optax.sgd(1.0), gradients([1, 2], 3)), r"apply: want gradient rows \(..., 2\)"),
        (lambda t: t.apply(optax.sgd(1.0), gradients([1], 2, jnp.nan), step=-2), "step"),
        (lambda t: t.restrict(-1), "restrict: want a number of rows"),
        (lambda t: t.restrict(1, by="age"), "restrict: want by in"),
        (lambda t: t.slot("mu", np.array([1, 2])), r"slot: want one of its slots \['trace'\], got 'mu'"),
        (lambda t: t.on_evict("file"), "on_evict: want a function"),
        (lambda t: t.reserve(-1), "reserve: want a number of rows"),
        (lambda t: t.load(t.export().take(np.array([0, 0]))), "twice|distinct"),
    ],
)
def test_a_refused_call_changes_nothing(call, message, make):
    table, _ = make(dim=2).apply(optax.trace(0.5), gradients([1, 5], 2))
    before = contents(table)
    with pytest.raises((*REFUSED, KeyError), match=message):
        call(table)
    assert contents(table.refresh()) == before


def test_a_table_is_no_container_of_one_key(make):
    """What Python asks of containers says which call asks for many keys."""
    table = make(2, dtype="bfloat16")
    assert table.dtype == table.lookup([7]).dtype and table.shape == (0, 2)
    for ask, message in (
        (lambda: 7 in table, r"in: want .* got 7 in table; table\.contains\(keys\)"),
        (lambda: table[7], r"got table\[7\]; table\.lookup\(keys\)"),
        (lambda: list(table), r"table\.lookup\(keys\)"),
        (lambda: table.__setitem__(7, 1), r"got table\[7\] = \.\.\.; table\.assign"),
    ):
        with pytest.raises(TypeError, match=message):
            ask()
    assert table[...] is table  # as NNX reads what is in a Param
