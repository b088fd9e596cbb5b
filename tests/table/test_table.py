"""Tables: creation, the operations eager and under jit, and every error a caller can make."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._table.stats import _summed
from tests.support.marks import few, slow, wide_is_slow
from tests.support.tables import finished, on_gpu

SGD = optax.sgd(1.0)
REFUSED = (ValueError, jax.errors.JaxRuntimeError)
EVERY_KIND = np.array([0, -1, 2**40 + 7, -(2**63), 2**63 - 1])


@wide_is_slow
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("shape", few([(), (0,), (5,), (2, 3), (0, 4), (2, 0, 3)], 0, 1, 3))
@pytest.mark.parametrize("dim", few([1, 3, 200], 1))
def test_any_shape(jit, shape, dim, make, x64):
    wrap = jax.jit if jit else lambda f: f
    n = int(np.prod(shape))
    keys = kvjax.keys(np.arange(n).reshape(shape) * 2**33 - 1)
    values = jnp.asarray(np.arange(n * dim, dtype=np.float32).reshape(*shape, dim))
    table = wrap(lambda t, k, v: t.upsert(k, v))(make(dim), keys, values)
    rows, found = wrap(lambda t, k: t.lookup(k, return_found=True))(table, keys)
    np.testing.assert_array_equal(rows, values)
    assert found.shape == shape and bool(found.all())
    assert table.shape == (n, dim) and bool(table)
    np.testing.assert_array_equal(wrap(lambda t, k: t.frequency(k))(table, keys), np.zeros(shape))
    np.testing.assert_array_equal(wrap(lambda t, k: t.contains(k))(table, keys), np.ones(shape))
    assert len(wrap(lambda t, k: t.remove(k))(table, keys)) == 0


@pytest.mark.parametrize("dim", few([8, 64, 201, 1025, 4096], 2))
def test_any_width_and_growth(dim, make):
    """Rows keep their values while the table grows from nothing."""
    table, rng = make(dim), np.random.default_rng(dim)
    keys = rng.integers(-(2**63), 2**63 - 1, 6000 if dim < 1000 else 300)
    values = rng.normal(size=(len(keys), dim)).astype(np.float32)
    for part in np.array_split(np.arange(len(keys)), 5):
        table = table.upsert(keys[part], values[part])
    np.testing.assert_array_equal(table.lookup(keys), values)
    assert len(table) == len(keys)


def test_a_large_result_is_that_of_its_parts(make):
    """From 16 MiB on rows are written past the caches, in some widths."""
    n, dim, rng = 66_000, 64, np.random.default_rng(0)
    table = make(dim).upsert(np.arange(500), rng.normal(size=(500, dim)).astype(np.float32))
    keys, mask = rng.integers(0, 600, n), rng.random(n) < 0.9
    rows, found = table.lookup(keys, mask=mask, return_found=True)
    parts = [
        table.lookup(k, mask=m, return_found=True)
        for k, m in zip(keys.reshape(2, -1), mask.reshape(2, -1), strict=True)
    ]
    np.testing.assert_array_equal(rows, np.concatenate([part for part, _ in parts]))
    np.testing.assert_array_equal(found, mask & (keys < 500))


def test_the_index_grows_before_searches_get_long(make):
    """It fills to 82 of 100 cells, on a device to 7/8."""
    table = make(1, capacity=100)
    full, device = table.stats(), table.spec.storage.backend != kvjax.storage.Host.backend
    for n in (full.capacity, full.capacity + 1):
        table = table.upsert(np.arange(n), np.zeros((n, 1)))
        assert 0 < table.stats().load <= (7 / 8 if device else 0.82)
    assert table.stats().capacity > full.capacity


def test_duplicates_last_wins(make):
    table = make(2).upsert(np.array([5, 5, 6]), [[1.0, 1], [2, 2], [3, 3]])
    assert table.lookup(np.array([5, 6])).tolist() == [[2, 2], [3, 3]] and len(table) == 2


def test_missing_rows(make):
    table = make(2, initializer=3.0)
    assert table.lookup(9).tolist() == [3, 3]
    assert table.lookup(9, missing="zeros").tolist() == [0, 0]
    assert table.lookup(9, missing=[1.0, 2.0]).tolist() == [1, 2]
    assert len(table) == 0


def test_lookup_or_insert(make):
    table = make(4, initializer=kvjax.initializers.uniform(-1, 1))
    before = table.lookup(EVERY_KIND)
    rows, table = table.lookup_or_insert(EVERY_KIND)
    np.testing.assert_array_equal(rows, before)
    assert len(table) == len(EVERY_KIND)
    np.testing.assert_array_equal(table.remove(EVERY_KIND).lookup(EVERY_KIND), before)


def test_frequency_and_version_are_exact(make, x64):
    table, tx = make(2), optax.sgd(0.1)
    for step, keys in [(3, [1, 1, 2]), (5, [1]), (2**40, [3])]:
        grads = kvjax.SparseRows(np.array(keys), jnp.ones((len(keys), 2)))
        table, _ = table.apply(tx, grads, step=step)
    top = 2**40 if x64 else 2**31 - 1
    assert table.frequency(np.array([1, 2, 3, 4])).tolist() == [3, 1, 1, 0]
    assert table.version_of(np.array([1, 2, 3, 4])).tolist() == [5, 3, top, -1]
    out = table.export()
    assert dict(zip(out.keys.tolist(), out.versions.tolist(), strict=True)) == {1: 5, 2: 3, 3: 2**40}
    assert out.freqs.dtype == out.versions.dtype == out.keys.dtype == np.int64


@pytest.mark.parametrize("integer", [np.int64, np.uint8, jnp.int32, jnp.uint32])
def test_steps_of_any_integer_type(integer, make):
    """By themselves and traced: rows get the step, and eviction counts from it."""
    grads = kvjax.SparseRows(np.arange(3), jnp.ones((3, 1)))

    def apply(table, step):
        return table.apply(SGD, grads, step=step)[0]

    def evict(table, step):
        return table.evict(kvjax.evict.MaxAge(2), step=step)

    for wrap in (lambda f: f, jax.jit):
        table = wrap(apply)(make(1), integer(5))
        assert table.export().versions.tolist() == [5, 5, 5]
        assert [len(table := wrap(evict)(table, integer(step))) for step in (7, 8)] == [3, 0]


def test_removed_rows_leave_nothing_behind(make):
    """A key that comes back starts anew: initial row, no slots, no frequency."""
    table = make(2, initializer=1.0)
    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    first, _ = table.apply(optax.adagrad(0.1), grads)
    want = first.lookup(7)
    again, _ = first.remove(np.array([7])).apply(optax.adagrad(0.1), grads)
    np.testing.assert_array_equal(again.lookup(7), want)
    assert int(again.frequency(7)) == 1


def test_export_is_sorted_and_pruned(make):
    table = make(2)
    for step in range(1, 6):
        keys = np.arange(step) * 2**50
        values = jnp.full((step, 2), -0.1 * step)
        table, _ = table.apply(SGD, kvjax.SparseRows(keys, values), step=step)
    everything = table.export()
    assert everything.freqs[np.argsort(everything.keys)].tolist() == [5, 4, 3, 2, 1]
    keys = lambda prune: sorted((table.export(prune).keys // 2**50).tolist())  # noqa: E731
    assert keys(kvjax.Prune(min_frequency=3)) == [0, 1, 2]
    assert keys(kvjax.Prune(top_k=2)) == [0, 1]
    assert keys(kvjax.Prune(top_k=1, keep=[4 * 2**50])) == [0, 4]
    assert keys(lambda rows: rows.freqs == 5) == [0]
    assert table.export(kvjax.Prune(min_frequency=3), dry_run=True) == (3, 5)
    norm = float(np.linalg.norm(everything.values[everything.freqs == 3][0]))
    assert keys(kvjax.Prune(min_norm=norm)) == [0, 1, 2]
    table, _ = table.apply(SGD, kvjax.SparseRows(np.array([0]), jnp.zeros((1, 2))), step=9)
    assert sorted((table.export(kvjax.Prune(max_age=3)).keys).tolist()) == [0]
    assert len(table.export(kvjax.Prune(max_age=4))) == 5
    table = table.upsert(np.array([-5]), np.zeros((1, 2)))
    assert -5 not in table.export(kvjax.Prune(zero_rows=True)).keys
    with pytest.raises(ValueError, match="min_frequency"):
        kvjax.Prune(min_frequency=-1)


def test_the_most_frequent_rows_are_the_later_ones_of_equals(make):
    table = make(1)
    for step, keys in ((1, [10, 11, 12]), (2, [20, 21]), (3, [30, 30])):
        grads = kvjax.SparseRows(np.array(keys), jnp.ones((len(keys), 1)))
        table, _ = table.apply(SGD, grads, step=step)
    order = table.export().keys.tolist()
    for k, want in ((1, {30}), (3, {30, 20, 21})):
        assert set(table.export(kvjax.Prune(top_k=k)).keys.tolist()) == want
    first = next(key for key in order if key in (20, 21))
    assert set(table.export(kvjax.Prune(top_k=2)).keys.tolist()) == {30, first}


def test_unsigned_export(make):
    table = make(1, key_dtype="uint64").upsert(np.array([2**64 - 1], np.uint64), [[1.0]])
    assert table.export().keys.tolist() == [2**64 - 1]


def test_equal_tables_export_equal_arrays(make):
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 3000)
    values = np.arange(3000, dtype=np.float32)[:, None]
    one, other = make(1).upsert(keys, values), make(1)
    for part in np.array_split(np.random.default_rng(1).permutation(3000), 7):
        other = other.upsert(keys[part], values[part])
    np.testing.assert_array_equal(one.export().keys, other.export().keys)
    np.testing.assert_array_equal(one.export().values, other.export().values)


# ---- handles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.lookup(np.arange(2)),
        lambda t: t.contains(np.arange(2)),
        lambda t: t.upsert(np.arange(2), np.ones((2, 4))),
        lambda t: t.remove(np.arange(2)),
        lambda t: t.clear(),
        lambda t: t.apply(optax.sgd(0.1), kvjax.SparseRows(np.arange(2), jnp.ones((2, 4))))[0],
        lambda t: jax.jit(lambda t: t.lookup(np.arange(2)))(t),
        lambda t: t.size(),
        lambda t: t.export(),
    ],
)
def test_stale_handles_are_refused(use, make):
    stale = make()
    live = stale.upsert(np.arange(2), np.ones((2, 4)))
    with pytest.raises((*REFUSED, RuntimeError), match=rf"table '{live.name}'.*stale.*refresh"):
        finished(use(stale))
    np.testing.assert_array_equal(stale.refresh().lookup(np.arange(2)), np.ones((2, 4)))


def test_showing_a_table_takes_no_error_of_another_call(make):
    """A call on a device may be refused without anybody being told yet, and what shows a table hands no error on."""
    stale = make()
    live, following = stale.upsert(np.arange(2), np.ones((2, 4))), stale.live()
    with pytest.raises((*REFUSED, RuntimeError), match="stale"):
        jax.block_until_ready(stale.remove(np.arange(2)))
        assert "rows=2" in repr(live) and len(following) == 2
        kvjax.stats()


def test_a_handle_of_inserted_rows_waits_for_them(make):
    """On a device the read may be the first call to meet the error of the insertion, and its rows may be dropped."""
    program = jax.jit(lambda t: t.lookup_or_insert(EVERY_KIND)[1])
    assert ("kvjax_lookup" in program.lower(make()).compile().as_text()) == kvjax.ffi.on_device()


def test_names(make):
    table = make(4, initializer=0.5, seed=3)
    assert kvjax.get_table(table.name).spec == table.spec and table.name in kvjax.tables()
    with pytest.raises(ValueError, match=r"dim 5 \(not 4\)"):
        kvjax.get_table(table.name, dim=5, initializer=0.5, seed=3)
    kvjax.drop_table(table.name)
    with pytest.raises(KeyError, match="give dim="):
        kvjax.get_table(table.name)
    again = kvjax.get_table(table.name, dim=4)
    with pytest.raises((*REFUSED, RuntimeError), match="stale"):
        finished(table.lookup(np.arange(2)))
    assert len(again) == 0


def test_arithmetic_on_a_handle_is_refused(make):
    table = make().upsert(np.arange(2), np.ones((2, 4)))
    for arithmetic in (lambda v: v + jnp.uint32(5), lambda v: v.astype(jnp.float32), jnp.linalg.norm):
        with pytest.raises(TypeError, match="kvjax table, not a number"):
            jax.tree.map(arithmetic, table)
        with pytest.raises(TypeError, match="kvjax table, not a number"):
            jax.tree.map(arithmetic, jax.jit(lambda t: t)(table))


def test_repr():
    table = kvjax.get_table("seen here first", dim=4)
    assert repr(table) == f"Table('{table.name}', dim=4, dtype=float32, rows=0, version=0)"
    table = kvjax.get_table("again", dim=4).pin(7)
    # Nobody has looked at its version: JAX 0.11 does not donate what NumPy sees too.
    jax.block_until_ready(jax.jit(lambda t: t.clear(), donate_argnums=0)(table))
    assert "donated" in repr(table)


def test_host_calls_inside_jit_are_refused(make):
    with pytest.raises(TypeError, match="outside jit"):
        jax.jit(lambda t: t.size())(make())


# ---- bad arguments change nothing ----------------------------------------------------------------------------------


def test_bad_arguments(make):
    table = make(4)
    start = int(table.version)
    with pytest.raises(ValueError, match=r"upsert: want values \(2, 4\), got \(2, 3\)"):
        table.upsert(np.arange(2), np.ones((2, 3)))
    with pytest.raises(TypeError, match="real values"):
        table.upsert(np.arange(2), np.ones((2, 4), bool))
    with pytest.raises(ValueError, match=r"gradient rows \(..., 4\)"):
        table.apply(optax.sgd(0.1), kvjax.SparseRows(np.arange(2), jnp.ones((2, 3))))
    with pytest.raises(ValueError, match="the state of this transform, PyTreeDef"):
        tx = optax.sgd(optax.linear_schedule(1, 0, 5))
        table.apply(tx, kvjax.SparseRows(np.arange(2), jnp.ones((2, 4))))
    with pytest.raises(TypeError, match="integer step"):
        table.apply(optax.sgd(0.1), kvjax.SparseRows(np.arange(2), jnp.ones((2, 4))), step=1.5)
    for step in (-7, 2**63):
        with pytest.raises(ValueError, match="step of 0 or more"):
            table.apply(optax.sgd(0.1), kvjax.SparseRows(np.arange(2), jnp.ones((2, 4))), step=step)
    with pytest.raises(TypeError, match="want SparseRows, got dict"):
        table.apply(optax.sgd(0.1), {})
    with pytest.raises(ValueError, match=r"gives \(0,\) bool"):
        table.export(lambda rows: np.arange(0))
    with pytest.raises(ValueError, match="SparseRows: want"):
        kvjax.SparseRows(np.arange(2), jnp.ones((3, 4)))
    with pytest.raises(ValueError, match="missing="):
        table.lookup(1, missing="mean")
    with pytest.raises(ValueError, match="a missing row"):
        table.lookup(1, missing=[1.0])
    assert len(table) == 0 and int(table.refresh().version) == start


def test_another_optimizer_needs_clear_slots(make):
    table = make(2, initializer=1.0)
    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    table, _ = table.apply(optax.rmsprop(0.1), grads)
    with pytest.raises(REFUSED, match=r"slots.*nu float32\[2\].*sum_of_squares.*clear_slots"):
        jax.block_until_ready(table.apply(optax.adagrad(0.1), grads)[0])
    before = table.refresh().lookup(7)
    table, _ = table.refresh().clear_slots().apply(optax.sgd(0.5), grads)
    np.testing.assert_allclose(table.lookup(7), before - 0.5)


@slow
@pytest.mark.skipif(on_gpu(), reason="limits the address space, in which a GPU's memory is not")
def test_memory_exhaustion_is_an_error_that_changes_nothing():
    """Under a limit of address space the write fails, and the table goes on as before."""
    script = """
        import resource, numpy as np, jax, kvjax
        table = kvjax.get_table("t", dim=4096).upsert(np.arange(100), np.ones((100, 4096)))
        keys, values = kvjax.keys(np.arange(20000)), jax.block_until_ready(jax.numpy.ones((20000, 4096)))
        upsert = jax.jit(lambda t, k, v: t.upsert(k, v)).lower(table, keys, values).compile()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, -1))
        try:
            jax.block_until_ready(upsert(table, keys, values))
        except Exception as error:
            text = str(error)
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        assert "RESOURCE_EXHAUSTED" in text and "table 't', upsert" in text, text
        assert len(table) == 100 and float(table.lookup(np.arange(100)).sum()) == 409600
        assert len(upsert(table, keys, values)) == 20000
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=300)


def test_numbers_of_shards_are_one_tables():
    numbers = {
        "size": (3, 1, 4), "probe_mean": (1.0, 5.0, 2.0), "probe_longest": (4, 2, 4), "last_step": (7, 9, 9),
        "rounds": (2, 2, 2), "extra_rounds": (0, 1, 1), "hits": (5, 1, 6),
        "evicted": ({"a": 1}, {"a": 2, "b": 3}, {"a": 3, "b": 3}),
    }  # fmt: skip
    one, other, both = ({name: each[i] for name, each in numbers.items()} for i in range(3))
    assert _summed([one, other]) == both
