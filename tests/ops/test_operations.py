"""Every write, eager and under jit, for all types of keys and rows, any shape, duplicates and nothing at all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import few, wide_is_slow
from tests.support.model import Model, merged

REFUSED = (ValueError, TypeError, jax.errors.JaxRuntimeError)
SGD = optax.sgd(0.5)

# Each takes (table, keys, rows) and gives the next table; the model's takes lists.
WRITES = {
    "lookup_or_insert": (lambda t, k, v: t.lookup_or_insert(k)[1], lambda m, k, v: m.insert(k)),
    "upsert": (lambda t, k, v: t.upsert(k, v), lambda m, k, v: m.upsert(k, v)),
    "assign": (lambda t, k, v: t.assign(k, v), lambda m, k, v: m.assign(k, v)),
    "add": (lambda t, k, v: t.add(k, v), lambda m, k, v: m.add(k, v)),
    "accum": (
        lambda t, k, v: t.accum(k, jnp.zeros_like(v), v, t.contains(k)),
        lambda m, k, v: m.accum(k, [np.zeros_like(x) for x in v], v, m.found(k)),
    ),
    "pin": (lambda t, k, v: t.pin(k), lambda m, k, v: m.pin(k)),
    "unpin": (lambda t, k, v: t.unpin(k), lambda m, k, v: m.pin(k, False)),
    "remove": (lambda t, k, v: t.remove(k), lambda m, k, v: m.remove(k)),
    "apply": (
        lambda t, k, v: t.apply(SGD, kvjax.SparseRows(k, v))[0],
        lambda m, k, v: m.apply(k, v, lambda value, slot, grad: (value - np.float32(0.5) * grad, None)),
    ),
}
SHAPES = [(0,), (), (1,), (5,), (2, 3), (0, 4), (2, 1, 2)]
KEYS = {
    "numpy int64": lambda x: x,
    "numpy uint64": lambda x: x.astype(np.uint64),
    "Keys": kvjax.keys,
    "hashed": lambda x: kvjax.hash_keys(x.astype(str)),
    "hashed bytes": lambda x: kvjax.hash_keys([str(i).encode() for i in x]),
    "list": lambda x: x.tolist(),
    "jax int32": lambda x: kvjax.keys(jnp.asarray(x % 1000, jnp.int32), key_dtype="int32"),
    "numpy uint8": lambda x: (x % 100).astype(np.uint8),
}


def some_keys(shape):
    """With duplicates."""
    return np.resize(np.array([2**40 + 7, 3, -1, 3, 2**63 - 1, 0]), shape).astype(np.int64)


def some_rows(shape, dim):
    n = int(np.prod(shape))
    return (np.arange(n * dim, dtype=np.float32).reshape(*shape, dim) % 7) / 4 - 0.5


def as_int64(keys):
    return np.asarray(keys).astype(np.int64).reshape(-1).tolist()


def same(table, model):
    out = table.export()
    keys = out.keys.astype(np.int64).tolist()
    assert sorted(keys) == sorted(model.rows)
    np.testing.assert_array_equal(out.values.astype(np.float32), model.lookup(keys))
    np.testing.assert_array_equal(out.freqs, model.frequency(keys))
    np.testing.assert_array_equal(out.versions, model.version_of(keys))
    np.testing.assert_array_equal(
        table.lookup(kvjax.keys(np.array(keys, np.int64))).astype(jnp.float32), model.lookup(keys)
    )


@wide_is_slow
@pytest.mark.parametrize("name", few(WRITES, "apply", "upsert", "remove"))
def test_writes_of_any_shape(name, make, x64):
    write, by_model = WRITES[name]
    table, model = make(2, initializer=0.25), Model(2, lambda key: np.full(2, 0.25, np.float32))
    old = np.array([3, 0, 2**63 - 1])
    table, model_rows = table.upsert(old, np.ones((3, 2))), model.upsert(old.tolist(), np.ones((3, 2)))
    assert model_rows is None
    for compiled in (False, True):
        call = jax.jit(write) if compiled else write
        for shape in SHAPES:
            keys, rows = some_keys(shape), some_rows(shape, 2)
            table = call(table, kvjax.keys(keys), jnp.asarray(rows))
            by_model(model, keys.reshape(-1).tolist(), rows.reshape(-1, 2))
            same(table, model)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("key_dtype", few(["int64", "uint64", "int32", "uint32"], "int64", "uint32"))
def test_every_type_of_keys(kind, key_dtype, make):
    narrow, ids = "32" in key_dtype, some_keys((6,))
    keys = KEYS[kind](ids.astype(np.int32) if narrow else ids)
    keys = kvjax.keys(keys) if narrow and kind.startswith("hashed") else keys
    table, model = make(2, key_dtype=key_dtype), Model(2, lambda key: np.zeros(2))
    listed = as_int64(keys)
    if narrow and not kind.startswith("hashed"):
        listed = as_int64(np.array(listed).astype(key_dtype))
    for write, by_model in WRITES.values():
        rows = some_rows((6,), 2)
        table = write(table, keys, jnp.asarray(rows))
        by_model(model, listed, rows)
        same(table, model)
    assert table.export().keys.dtype == (np.uint64 if key_dtype.startswith("u") else np.int64)


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize("name", WRITES)
def test_every_type_of_rows(name, dtype, make):
    """The numbers are exact in 16 bits, so the model's are too."""
    write, by_model = WRITES[name]
    table, model = make(3, dtype=dtype, initializer=0.5), Model(3, lambda key: np.full(3, 0.5, np.float32))
    keys, rows = some_keys((6,)), some_rows((6,), 3)
    for _ in range(3):
        table = write(table, keys, jnp.asarray(rows))
        by_model(model, keys.tolist(), rows)
    same(table, model)
    assert table.export().values.dtype == jnp.dtype(dtype)


def test_sums_of_deltas_are_rounded_once(make):
    """256 + 1 is 256 in bfloat16; 256 + (1 + 1) is not."""
    table = make(1, dtype="bfloat16").upsert(np.array([7]), [[256.0]])
    table = table.add(np.array([7, 7]), np.ones((2, 1), np.float32))
    assert table.lookup(7).tolist() == [258.0]


@pytest.mark.parametrize("name", ["upsert", "assign", "add", "accum"])
def test_bad_rows_change_nothing(name, make):
    write, _ = WRITES[name]
    table = make(2).upsert(np.array([3]), np.ones((1, 2)))
    before = table.export()
    for rows in (
        np.ones((2, 2), np.float32),
        np.ones((1, 3), np.float32),
        np.ones(2, np.float32),
        np.ones((1, 2), bool),
    ):
        with pytest.raises(REFUSED, match=name):
            write(table, np.array([3]), jnp.asarray(rows))
    with pytest.raises(REFUSED, match="integers"):
        write(table, np.array([3.0]), jnp.ones((1, 2)))
    after = table.export()
    np.testing.assert_array_equal(before.values, after.values)
    assert int(table.version) == int(table.refresh().version)


def test_the_last_of_equal_keys_wins(make):
    keys, rows = np.array([5, 6, 5]), np.array([[1.0], [2.0], [3.0]])
    table = make(1).upsert(keys, rows)
    assert table.lookup(np.array([5, 6]))[:, 0].tolist() == [3.0, 2.0]
    assert table.assign(keys, rows[::-1]).lookup(np.array([5, 6]))[:, 0].tolist() == [1.0, 2.0]


def test_slot_has_the_optimizers_shapes(make, x64, promotion):
    table = make(3)
    with pytest.raises(KeyError, match="slots appear with the first"):
        table.slot("mu", 1)
    table, _ = table.apply(optax.adam(0.1), kvjax.SparseRows(np.array([1, 2]), jnp.ones((2, 3))))
    out = table.export(slots=True)
    for name, array in out.slots.items():
        got = table.slot(name, out.keys.reshape(2, 1))
        np.testing.assert_array_equal(got, array.reshape(2, 1, *array.shape[1:]))
        assert table.slot(name, np.array([99], np.int64)).tolist() == np.zeros((1, *array.shape[1:])).tolist()
        np.testing.assert_array_equal(jax.jit(lambda t, k, n=name: t.slot(n, k))(table, kvjax.keys(out.keys)), array)
        assert table.slot(name, np.zeros((0, 2), np.int64)).shape == (0, 2, *array.shape[1:])


def test_a_compiled_slot_of_another_optimizer_is_refused(make, promotion):
    grads = kvjax.SparseRows(np.array([1]), jnp.ones((1, 3)))
    table, _ = make(3).apply(optax.trace(0.9), grads)
    read = jax.jit(lambda t: t.slot("trace", kvjax.keys([1])))
    assert read(table).tolist() == [[1.0, 1.0, 1.0]]
    table, _ = table.clear_slots().apply(optax.adagrad(0.1), grads)
    with pytest.raises((*REFUSED, RuntimeError), match="the optimizer has changed"):
        jax.block_until_ready(read(table))


def test_reserve_keeps_growth_away(make):
    table = make(8)
    assert table.reserve(50_000) is table
    capacity, index = table.stats().capacity, table.stats().bytes["index"]
    assert capacity >= 50_000
    table = table.upsert(np.arange(50_000), np.ones((50_000, 8)))
    assert table.stats().capacity == capacity and table.stats().bytes["index"] == index
    assert make(8, capacity=50_000).stats().bytes["index"] == index
    for bad in (-1, 2.5, 2**32):
        with pytest.raises(ValueError, match="reserve"):
            table.reserve(bad)


def test_add_is_the_sum_that_merge_makes(make):
    rng = np.random.default_rng(0)
    keys, rows = rng.integers(0, 50, 400), rng.normal(size=(400, 4)).astype(np.float32)
    table = make(4).add(keys, rows)
    for key, row in merged(keys.tolist(), rows).items():
        np.testing.assert_array_equal(table.lookup(key), row)


def test_a_sum_of_many_rows_is_that_of_blocks(make):
    rng = np.random.default_rng(1)
    times = {7: 255, -1: 256, 2**40: 257, 0: 512, 5: 513, 9: 1, 8: 700}
    keys = rng.permutation(np.repeat(list(times), list(times.values())))
    rows = (rng.normal(size=(len(keys), 4)) * 10.0 ** rng.integers(-6, 6, (len(keys), 1))).astype(np.float32)
    grads = kvjax.merge(kvjax.SparseRows(keys, rows))
    table = make(4).add(keys, rows)
    in_order = 0
    for key, row in zip(np.asarray(grads.keys)[: len(times)].tolist(), np.asarray(grads.rows), strict=False):
        own = rows[keys == key]
        blocks = [np.cumsum(own[b : b + 256], 0)[-1] for b in range(0, len(own), 256)]  # in order, in float32
        np.testing.assert_array_equal(row, np.cumsum(blocks, 0)[-1])
        np.testing.assert_array_equal(table.lookup(key), row)
        in_order += np.array_equal(row, np.cumsum(own, 0)[-1])
    assert in_order == sum(n <= 257 for n in times.values())  # so others would have other sums without blocks
    found = zip(np.asarray(grads.keys)[: len(times)].tolist(), grads.counts.tolist(), strict=False)
    assert dict(found) == times


@pytest.mark.parametrize("name", WRITES)
def test_no_write_inside_a_loss(name, make):
    write, _ = WRITES[name]
    table = make(2)

    def loss(table):
        write(table, np.array([1]), jnp.ones((1, 2)))
        return jnp.sum(table.lookup(1))

    with pytest.raises(ValueError, match="a loss that only reads"):
        kvjax.grad(loss)(table)


@pytest.mark.parametrize("name", few(WRITES, "apply", "remove"))
def test_a_write_is_a_value(name, make):
    """A program does it if it uses what it gives, once, and has no effect that would take it off JAX's fast path."""
    write, _ = WRITES[name]
    table = make(1, initializer=1.0).upsert([7, 8], np.ones((2, 1)))
    keys, rows = np.array([7, 9]), jnp.full((2, 1), 3.0)
    before = table.stats()

    def behind(w, table):
        table = write(table, keys, rows)
        return jnp.sum(jnp.sin(w * table.lookup(9))), table

    assert not jax.make_jaxpr(behind)(jnp.ones(()), table).effects
    with pytest.warns(
        UserWarning, match=f"table '{table.name}', {name}: want a compiled function that returns"
    ) as said:
        jax.jit(lambda table: (write(table, keys, rows), jnp.ones(()))[1])(table).block_until_ready()
    assert said[0].filename == __file__ and table.stats() == before  # so the handle is still the live one
    with pytest.raises(ValueError, match=f"table '{table.name}', .*: want one write .* each example of a vmap"):
        jax.vmap(lambda keys: write(table, keys, rows[:1]).version)(kvjax.keys(keys[:, None]))
    once = write(table, keys, rows).export()
    table = table.refresh().clear().upsert([7, 8], np.ones((2, 1)))
    slope, table = jax.jit(jax.grad(jax.checkpoint(behind), has_aux=True))(jnp.ones(()), table)
    row = table.lookup(9)[0]
    np.testing.assert_allclose(slope, row * np.cos(row), rtol=1e-6)
    for column in ("keys", "values", "freqs"):
        np.testing.assert_array_equal(getattr(table.export(), column), getattr(once, column))


def test_writes_of_a_scan_are_said_to_be_unused_where_they_are(make, recwarn):
    """A scan does those that its next turn reads, whatever of its results anybody wants."""
    keys = kvjax.keys(np.arange(6).reshape(3, 2))

    def turn(table, key):
        rows = table.lookup(key)
        return table.after(rows).upsert(key, rows + 1), jnp.sum(rows)

    table = make(1)
    assert jax.jit(lambda table: jax.lax.scan(turn, table, keys)[1])(table).tolist() == [0, 0, 0]
    assert len(table.refresh()) == 6 and not recwarn.list

    def forgetful(carry, key):
        table, total = carry
        turn(table, key)
        return (table, total + jnp.sum(table.lookup(key))), None

    table = make(1)
    with pytest.warns(UserWarning, match=f"'{table.name}', upsert: want a compiled function that returns") as said:
        jax.jit(lambda table: jax.lax.scan(forgetful, (table, 0.0), keys)[0])(table)
    assert len(said) == 1 and len(table) == 0


def test_no_derivative_goes_through_a_write(make):
    table = make(1)
    for name in ("upsert", "add", "apply"):
        write, _ = WRITES[name]
        with pytest.raises(ValueError, match=f"table '{table.name}', {name}: want a derivative .* after the write"):
            jax.grad(lambda rows, write=write: jnp.sum(write(table, np.array([7]), rows).lookup(7)))(jnp.ones((1, 1)))
