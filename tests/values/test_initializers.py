"""Initial rows: native kinds, pools, and any function of jax.nn.initializers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._ops.initial_rows import generate
from kvjax._values.function_rows import rng_of
from tests.golden.reference import initial_rows, inverse_normal, pool_rows
from tests.support.marks import few, few_rows, slow, wide_is_slow
from tests.support.tables import on_gpu

JAX = jax.nn.initializers
DTYPES = ["float32", "bfloat16", "float16"]
AWKWARD = np.array([0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**40 + 7, -(2**63), 2**63 - 1])

FUNCTIONS = {
    "zeros": JAX.zeros,
    "ones": JAX.ones,
    "constant": JAX.constant(0.5),
    "normal": JAX.normal(0.1),
    "truncated_normal": JAX.truncated_normal(0.1),
    "uniform": JAX.uniform(0.3),
    "variance_scaling": JAX.variance_scaling(2.0, "fan_out", "normal"),
    "glorot_normal": JAX.glorot_normal(),
    "glorot_uniform": JAX.glorot_uniform(),
    "xavier_normal": JAX.xavier_normal(),
    "xavier_uniform": JAX.xavier_uniform(),
    "he_normal": JAX.he_normal(),
    "he_uniform": JAX.he_uniform(),
    "kaiming_normal": JAX.kaiming_normal(),
    "kaiming_uniform": JAX.kaiming_uniform(),
    "lecun_normal": JAX.lecun_normal(),
    "lecun_uniform": JAX.lecun_uniform(),
    "orthogonal": JAX.orthogonal(),
}


def test_every_function_of_jax_is_tried():
    public = {name for name in dir(JAX) if not name.startswith("_")}
    assert set(FUNCTIONS) == public - {"Initializer", "delta_orthogonal"}


# ---- rows of every width and type --------------------------------------------------------------------------


WIDTHS = [(dim, dtype) for dim in (1, 3, 8, 64, 200, 201, 1025, 4096) for dtype in DTYPES]
QUICK = [(1, "float16"), (8, "float32"), (201, "bfloat16"), (4096, "float32")]


@pytest.mark.parametrize(("dim", "dtype"), few_rows(WIDTHS, *map(WIDTHS.index, QUICK)))
def test_rows_go_round(dim, dtype, make, tmp_path):
    """In by upsert, read, trained, exported, saved and restored, each to the bit."""
    rng = np.random.default_rng(dim)
    values = rng.normal(size=(9, dim)).astype(np.float32)
    table = make(dim, dtype=dtype, initializer=kvjax.initializers.normal(0.5)).upsert(AWKWARD, values)
    rows = values.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(table.lookup(AWKWARD)), rows)
    grads = kvjax.SparseRows(AWKWARD[:4], jnp.asarray(values[:4] / 2))
    table, _ = table.apply(optax.sgd(1.0), grads)
    rows[:4] = (rows[:4].astype(np.float32) - values[:4] / 2).astype(rows.dtype)
    np.testing.assert_array_equal(np.asarray(table.lookup(AWKWARD)), rows)
    out = table.export()
    order = [AWKWARD.tolist().index(key) for key in out.keys.tolist()]
    assert out.values.dtype == rows.dtype
    np.testing.assert_array_equal(out.values, rows[order])
    kvjax.orbax.TableHandler().save(tmp_path, kvjax.orbax.TableSave({"t": table}))
    restored = kvjax.orbax.TableHandler().restore(tmp_path, kvjax.orbax.TableRestore({"t": table.clear()}))["t"]
    np.testing.assert_array_equal(restored.export().values, out.values)
    unseen = kvjax.keys(np.array([5, 2**50]))
    np.testing.assert_array_equal(np.asarray(restored.lookup(unseen)), np.asarray(table.refresh().lookup(unseen)))


def test_float16_is_rounded_as_numpy_rounds(make):
    """Every finite value of the type, and random floats of all magnitudes, as the elements of one initial row."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].astype(np.float32)
    rng = np.random.default_rng(0)
    random = np.ldexp(rng.uniform(-1, 1, 2**17), rng.integers(-40, 18, 2**17)).astype(np.float32)
    values = np.concatenate([every, random])
    with np.errstate(over="ignore"):
        want = values.astype(np.float16)
    held = np.isfinite(want)
    got = np.asarray(make(held.sum(), dtype="float16", initializer=values[held]).lookup(7))
    np.testing.assert_array_equal(got.view(np.uint16), want[held].view(np.uint16))
    far = kvjax.SparseRows(np.array([7]), jnp.asarray(-values[~held][None]))  # which no initial row may have
    table, _ = make(far.rows.shape[1], dtype="float16").apply(optax.sgd(1.0), far)
    np.testing.assert_array_equal(np.asarray(table.lookup(7)).view(np.uint16), want[~held].view(np.uint16))


HALF = [
    (1e5, r"constant\(value=100000.0\) with elements up to 100000"), (np.float32(-65520), "up to 65520"),
    ([1e5, -7e4], "rows with elements up to 100000"), ([[1.0, 2.0], [1.0, -7e4]], "rows with elements up to 70000"),
    (kvjax.initializers.from_pool([65520.0, 0.0]), "rows"), (kvjax.initializers.uniform(-7e4, 0.0), "up to 70000"),
    (kvjax.initializers.normal(1.03e4), r"normal\(stddev=10300.0, mean=0.0\) with elements up to 65920"),
    (kvjax.initializers.normal(1.0, -65520.0), "normal"), (kvjax.initializers.truncated_normal(3.3e4), "up to 66000"),
    (kvjax.initializers.segments({"bias": (0, 7e4)}, rest=0.0), "constant"), (JAX.constant(7e4), "a function with"),
]  # fmt: skip


@pytest.mark.parametrize(("initializer", "got"), HALF)
def test_rows_of_a_dtype_hold_their_initial_elements(initializer, got, make):
    with pytest.raises(ValueError, match=f"'bad', get_table: want .* numbers that float16 holds, got .*{got}.*"):
        kvjax.get_table("bad", dim=2, dtype="float16", initializer=initializer)
    assert "bad" not in kvjax.tables()
    for dtype in ("float32", "bfloat16"):
        assert np.isfinite(np.asarray(make(2, dtype=dtype, initializer=initializer).lookup(7), np.float32)).all()


@pytest.mark.parametrize("initializer", [
    65519.0, [65504.0, -65519.0], kvjax.initializers.uniform(-65519.0, 65519.0), kvjax.initializers.normal(1.023e4),
    kvjax.initializers.truncated_normal(3.27e4),
])  # fmt: skip
def test_numbers_that_are_just_small_enough(initializer, make):
    rows = np.asarray(make(2, dtype="float16", initializer=initializer).lookup(np.arange(1000)))
    assert np.isfinite(rows).all()
    assert 6.3 < inverse_normal(np.array([1 - 2.0**-33]))[0] < 6.4  # the farthest that a normal element is


# ---- native kinds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "distribution"),
    few_rows(itertools.product(["fan_in", "fan_out", "fan_avg"], ["truncated_normal", "normal", "uniform"]), 0, 4, 8),
)
def test_variance_scaling_is_that_of_jax(distribution, mode, make):
    """Its element has the distribution that jax gives a square matrix, where every fan is the dim."""
    dim, n = 64, 2000
    table = make(dim, initializer=kvjax.initializers.variance_scaling(2.0, mode, distribution), seed=3)
    rows = np.asarray(table.lookup(np.arange(n)))
    np.testing.assert_array_equal(rows, initial_rows(table.spec.initializer, np.arange(n), dim, 3))
    matrix = jax.vmap(lambda rng: JAX.variance_scaling(2.0, mode, distribution)(rng, (dim, dim), jnp.float32))
    same_distribution(rows, matrix(jax.random.split(jax.random.key(0), n // dim)))
    assert abs(rows.std() - (2.0 / dim) ** 0.5) < 5 * (2.0 / dim) ** 0.5 / (n * dim) ** 0.5


def same_distribution(a, b):
    """Mean, deviation and quantiles agree within 5 standard errors of the smaller sample."""
    a, b = (np.sort(np.asarray(x, np.float64).reshape(-1)) for x in (a, b))
    error = 5 * (1 / len(a) + 1 / len(b)) ** 0.5
    scale = b.std() + 1e-30
    assert abs(a.mean() - b.mean()) <= error * scale
    assert abs(a.std() - b.std()) <= error * scale
    for p in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99):
        assert abs(np.mean(a <= np.quantile(b, p)) - np.mean(b <= np.quantile(b, p))) <= error / 2 + 1e-9


@pytest.mark.parametrize("initializer", few([
    kvjax.initializers.uniform(-1.0, 1.0), kvjax.initializers.normal(1.0), kvjax.initializers.truncated_normal(1.0),
], 2), ids=lambda i: i.kind)  # fmt: skip
def test_native_rows_of_many_keys(initializer, make):
    n, dim = 100_000, 4
    rows = np.asarray(make(dim, initializer=initializer, seed=2).lookup(np.arange(n) * 2**20))
    draws = jax.random.split(jax.random.key(1), 3)
    other = {
        "uniform": lambda: jax.random.uniform(draws[0], (n, dim), minval=-1.0, maxval=1.0),
        "normal": lambda: jax.random.normal(draws[1], (n, dim)),
        "truncated_normal": lambda: jax.random.truncated_normal(draws[2], -2.0, 2.0, (n, dim)),
    }[initializer.kind]()
    same_distribution(rows, other)
    distinct_and_uncorrelated(rows)


def distinct_and_uncorrelated(rows):
    n, dim = rows.shape
    assert len(np.unique(rows, axis=0)) == n
    correlation = np.corrcoef(np.concatenate([rows[:-1], rows[1:]], 1).T.astype(np.float64))
    assert np.abs(correlation - np.eye(2 * dim)).max() < 6 / n**0.5


# ---- arrays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, lambda a: a.tolist(), kvjax.initializers.from_pool])
def test_a_row_and_a_pool(kind, make):
    keys = np.concatenate([AWKWARD, np.arange(1000)])
    pool = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    np.testing.assert_array_equal(make(5, initializer=kind(pool)).lookup(keys), pool_rows(pool, keys))
    np.testing.assert_array_equal(make(5, initializer=kind(pool[0])).lookup(keys), np.tile(pool[0], (len(keys), 1)))
    inserted, table = make(5, initializer=kind(pool), seed=3, dtype="float16").lookup_or_insert(keys)
    np.testing.assert_array_equal(inserted, pool_rows(pool, keys).astype(np.float16))
    np.testing.assert_array_equal(table.lookup(keys), inserted)


def test_pools_are_equal_by_content(make):
    table = make(2, initializer=np.eye(2))
    assert kvjax.get_table(table.name, dim=2, initializer=[[1, 0], [0, 1]]).spec == table.spec
    assert hash(table.spec) == hash(kvjax.get_table(table.name).spec)
    with pytest.raises(ValueError, match=r"initializer Pool\(rows=1, dim=2\) \(not Pool\(rows=2, dim=2\)\)"):
        kvjax.get_table(table.name, dim=2, initializer=[1.0, 0.0])
    with pytest.raises(ValueError, match="initializer"):
        kvjax.get_table(table.name, dim=2, initializer=np.eye(2)[::-1])


def test_pools_are_saved_and_restored(make, tmp_path):
    pool = np.random.default_rng(0).normal(size=(6, 3))
    table = make(3, initializer=pool, dtype="bfloat16", rounding="stochastic").upsert(np.array([1]), np.ones((1, 3)))
    want, spec = np.asarray(table.lookup(AWKWARD)), table.spec
    kvjax.orbax.TableHandler().save(tmp_path, kvjax.orbax.TableSave({table.name: table}))
    kvjax.drop_table(table.name)
    restored = kvjax.orbax.TableHandler().restore(tmp_path)[table.name]
    np.testing.assert_array_equal(np.asarray(restored.lookup(AWKWARD)), want)
    assert restored.spec == spec
    other = make(3, initializer=pool + 1, seed=spec.seed, dtype="bfloat16")
    with pytest.raises(ValueError, match="initializer"):
        kvjax.orbax.TableHandler().restore(tmp_path, kvjax.orbax.TableRestore({spec.name: other}))


# ---- functions of (rng, shape, dtype) ----------------------------------------------------------------------


GENERATED = [name for name in FUNCTIONS if name not in ("zeros", "ones")]
N = len(AWKWARD)


def test_zeros_and_ones_are_native(make):
    for function, value in ((JAX.zeros, 0.0), (JAX.ones, 1.0), (kvjax.initializers.ones, 1.0)):
        assert make(3, initializer=function).spec.initializer == kvjax.initializers.constant(value)


@wide_is_slow
@pytest.mark.parametrize("name", few(GENERATED, "normal"))
def test_functions_are_called_for_each_key_by_itself(name, make, x64):
    """What a table makes of a function is what the function itself gives for the key's random key."""
    function, dim, seed = FUNCTIONS[name], 5, 2**63 + 11
    words = kvjax.keys(AWKWARD).words
    spec = make(dim, initializer=function, seed=seed).spec
    got = np.asarray(generate(spec, words, jnp.int32(N)))[:N]
    with jax.enable_x64(False), jax.threefry_partitionable(True):
        want = [np.asarray(function(rng_of(seed, w), (1, dim), jnp.float32))[0] for w in words]
    np.testing.assert_allclose(got, np.array(want), rtol=1e-5, atol=1e-7)
    assert got.dtype == np.float32
    if name != "constant":
        assert len(np.unique(got, axis=0)) == N


@slow
def test_generated_rows_are_the_same_under_any_flags_and_in_any_batch(make):
    table = make(6, initializer=JAX.normal(1.0), seed=5)
    words = kvjax.keys(np.arange(600) * 2**30).words
    want = np.asarray(generate(table.spec, words, jnp.int32(600)))[:600]
    if not on_gpu():  # where what is not made is what was in that memory
        assert (np.asarray(generate(table.spec, words, jnp.int32(0))) == 0).all()  # nothing is made that is not missing
    for flags in (jax.enable_x64(True), jax.threefry_partitionable(False), jax.default_prng_impl("rbg")):
        with flags:
            got = jax.jit(lambda w, n: generate(table.spec, w, n))(words[300:310], jnp.int32(10))
            np.testing.assert_array_equal(np.asarray(got)[:10], want[300:310])
    other = make(6, initializer=JAX.normal(1.0), seed=6).spec
    assert (np.asarray(generate(other, words, jnp.int32(600)))[:600] != want).all()


def test_generated_rows_are_frozen(make):
    """As far as JAX's own arithmetic is: a checkpoint does not hold the rows of unseen keys."""
    spec = make(3, initializer=JAX.uniform(1.0), seed=5).spec
    words = np.array([[6, 7], [0, 2**31]], np.uint32)
    want = [[0.9264909, 0.52346587, 0.65030801], [0.80056775, 0.84832692, 0.08644664]]
    np.testing.assert_allclose(np.asarray(generate(spec, words, jnp.int32(2)))[:2], want, rtol=1e-6)


@pytest.mark.parametrize("name", few(["normal", "glorot_uniform", "truncated_normal", "orthogonal"]))
def test_generated_rows_of_many_keys(name, make):
    """The moments are those of the function for (1, dim), not those of a matrix."""
    n, dim = 100_000 if name != "orthogonal" else 5000, 4
    spec = make(dim, initializer=FUNCTIONS[name], seed=1).spec
    rows = np.asarray(generate(spec, kvjax.keys(np.arange(n) * 2**20).words, jnp.int32(n)))[:n]
    alone = jax.vmap(lambda rng: FUNCTIONS[name](rng, (1, dim), jnp.float32)[0])
    same_distribution(rows, alone(jax.random.split(jax.random.key(1), n)))
    distinct_and_uncorrelated(rows)


def test_functions_are_equal_by_what_they_make(make):
    table = make(4, initializer=JAX.normal(0.1))
    assert kvjax.get_table(table.name, dim=4, initializer=JAX.normal(0.1)).spec == table.spec
    with pytest.raises(ValueError, match="initializer"):
        kvjax.get_table(table.name, dim=4, initializer=JAX.normal(0.2))


@pytest.mark.parametrize(
    "kind, initializer, message",
    [
        (TypeError, "13", "a number, an array"),
        (TypeError, JAX.delta_orthogonal(), r"array of shape \(1, 3\) float32, got one that raises ValueError"),
        (TypeError, lambda rng: rng, r"\(rng, shape, dtype\) -> array.*TypeError"),
        (TypeError, lambda rng, shape, dtype: jnp.zeros(3), r"got ShapeDtypeStruct\(shape=\(3,\)"),
        (TypeError, lambda rng, shape, dtype: jnp.zeros(shape, jnp.int32), "int32"),
        (TypeError, lambda rng, shape, dtype: None, "got None"),
        (ValueError, lambda rng, shape, dtype: jnp.full(shape, jnp.nan, dtype), "got a function with .* nan"),
        (TypeError, np.array(["a", "b", "c"]), "real numbers"),
        (TypeError, [True, False, True], "real numbers"),
        (ValueError, [1.0, 2.0], "width dim=3, got width 2"),
        (ValueError, np.zeros((2, 2, 3)), r"\(dim,\) or \(p, dim\)"),
        (ValueError, np.zeros((0, 3)), "p > 0"),
        (ValueError, [0.0, np.inf, 0.0], "finite"),
        (ValueError, [0.0, 1e300, 0.0], "finite"),
        (ValueError, kvjax.initializers.normal(float("nan")), "finite"),
        (ValueError, kvjax.initializers.normal(6e37), r"mean=0.0\) with elements up to 3.84e\+38"),
    ],
)
def test_bad_initializers(kind, initializer, message):
    with pytest.raises(kind, match=rf"table 'bad', get_table: want .*{message}"):
        kvjax.get_table("bad", dim=3, initializer=initializer)
    assert "bad" not in kvjax.tables()


@pytest.mark.parametrize("arguments", [(0.0,), (1.0, "fan"), (1.0, "fan_in", "gamma"), (float("inf"),)])
def test_bad_variance_scaling(arguments):
    with pytest.raises(ValueError, match="variance_scaling: want scale"):
        kvjax.initializers.variance_scaling(*arguments)


def test_a_checkpoint_holds_no_functions(make, tmp_path):
    table = make(3, initializer=JAX.normal(0.1)).upsert(np.array([1]), np.ones((1, 3)))
    handler, name = kvjax.orbax.TableHandler(), table.name
    handler.save(tmp_path, kvjax.orbax.TableSave({name: table}))
    assert len(handler.restore(tmp_path, kvjax.orbax.TableRestore({name: table}))[name]) == 1
    other = make(3, initializer=JAX.normal(0.2), seed=table.spec.seed)
    with pytest.raises(ValueError, match="initializer"):
        handler.restore(tmp_path, kvjax.orbax.TableRestore({name: other}))
    kvjax.drop_table(name)
    with pytest.raises(ValueError, match="a checkpoint, which holds no functions; make the table first"):
        handler.restore(tmp_path)
    assert name not in kvjax.tables()


@pytest.mark.parametrize(
    ("initializer", "message"),
    [
        (
            kvjax.initializers.uniform(1.0, 0.05),
            r"want low <= high, got uniform\(low=1\.0, high=0\.05\); give the lower",
        ),
        (kvjax.initializers.normal(-1), r"want stddev >= 0, got normal\(stddev=-1\.0, mean=0\.0\)"),
        (kvjax.initializers.truncated_normal(-2.0, 1.0), r"got truncated_normal\(stddev=-2\.0, mean=1\.0\)"),
        (kvjax.initializers.constant(1e39), r"finite numbers that float32 holds, got constant\(value=1e\+39\)"),
    ],
)
def test_errors_name_the_arguments_of_initializers(initializer, message):
    with pytest.raises(ValueError, match=message):
        kvjax.get_table("bad", dim=2, initializer=initializer)


def test_one_bound_of_uniform_is_an_error():
    """Of JAX's it would be the upper one, of Keras' both."""
    for options, got in (({"low": 0.01}, "low=0.01"), ({"high": 1.0}, "high=1.0")):
        with pytest.raises(TypeError, match=rf"initializers\.uniform: want low and high.* got {got} alone; give both"):
            kvjax.initializers.uniform(**options)
    assert kvjax.initializers.uniform() == kvjax.initializers.uniform(-0.05, 0.05)
    for make_one in (kvjax.initializers.normal, kvjax.initializers.constant):
        with pytest.raises(TypeError, match=r"initializers\..*: want a number (stddev|value), got 'a'"):
            make_one("a")


def test_a_function_draws_from_its_rng_alone():
    draws = np.random.default_rng(0)
    for function in (
        lambda rng, shape, dtype: jnp.asarray(draws.normal(size=shape), dtype),
        lambda rng, shape, dtype: jax.random.normal(rng, shape, dtype) + draws.normal(),
    ):
        with pytest.raises(ValueError, match=r"table 'bad', get_table: .* gives others in a second call.*jax.random"):
            kvjax.get_table("bad", dim=2, initializer=function)
    assert "bad" not in kvjax.tables()
