"""Several features on one table and several tables in one call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from tests.support.marks import examples
from tests.support.tables import finished, on_gpu

IDS = np.array([[5, 7, -1], [-1, -1, -1], [7, 7, 2**40]])
FORMS = {
    "rows": {},
    "padded": {"combiner": "mean", "pad_id": -1},
    "weighted": {"combiner": "sqrtn", "pad_id": -1, "weights": np.arange(9.0).reshape(3, 3), "max_norm": 0.5},
    "max": {"combiner": "max", "mask": IDS != -1, "dtype": jnp.bfloat16},
    "empty": {"combiner": "sum", "pad_id": -1, "empty": np.array([9.0, 8.0])},
    "salted": {"combiner": "mean", "pad_id": -1, "salt": 3},
    "zeros": {"pad_id": -1, "missing": "zeros", "max_norm": 0.5},
    "row": {"combiner": "sum", "missing": np.array([1.0, 2.0])},
    "lengths": {"combiner": "mean", "lengths": [2, 0, 4]},
    "segments": {"combiner": "sum", "segment_ids": np.arange(9) % 4 - 1, "num_segments": 3},
    "none": {"combiner": "sum"},
    "scalar": {"dtype": jnp.float16},
}


def feature_of(table, form):
    """A feature of each form, with keys that fit it."""
    ids = {"lengths": IDS.reshape(-1), "segments": IDS.reshape(-1), "none": np.zeros((4, 0), np.int64), "scalar": 7}
    return kvjax.Feature(table, ids.get(form, IDS), **FORMS[form])


def alone(feature):
    """What a feature is by the calls for one."""
    options = {name: value for name, value in vars(feature).items() if value is not None}
    table, keys, salt = options.pop("table"), kvjax.keys(options.pop("keys")), options.pop("salt", None)
    if salt is not None:
        options |= {"mask": (keys != options.pop("pad_id"))}
        keys = keys.salted(salt)
    if "combiner" in options:
        return kvjax.lookup_bag(table, keys, **options)
    max_norm, dtype = options.pop("max_norm", None), options.pop("dtype", None)
    rows = table.lookup(keys, **options)
    if max_norm is not None:
        norm = jnp.linalg.norm(rows, axis=-1, keepdims=True)
        rows = jnp.where(norm > max_norm, rows * (max_norm / jnp.where(norm == 0, 1, norm)), rows)
    return rows if dtype is None else rows.astype(dtype)


@settings(max_examples=examples(2, 40))
@given(st.lists(st.sampled_from(sorted(FORMS)), unique=True), st.booleans())
def test_each_is_what_it_is_alone(forms, jit):
    """Values, and the gradient of the table, which is that of all of them together."""
    table = kvjax.get_table("many", dim=2, initializer=kvjax.initializers.normal(1.0)).upsert([5], [[3.0, 4.0]])
    try:

        def loss(read, table):
            rows = read({form: feature_of(table, form) for form in forms})
            return sum((jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in rows.values()), jnp.float32(0)), rows

        def run(read):
            call = kvjax.value_and_grad(lambda table: loss(read, table), has_aux=True)
            return (jax.jit(call) if jit else call)(table)

        (_, rows), grads = run(kvjax.lookup_many)
        (_, want), want_grads = run(lambda features: {name: alone(x) for name, x in features.items()})
        assert sorted(rows) == sorted(want) == sorted(forms)
        for form in forms:
            assert rows[form].dtype == want[form].dtype
            np.testing.assert_allclose(rows[form], want[form], 1e-6, err_msg=form)
        got, wanted = (table_of(kvjax.merge(x)) for x in (grads, want_grads))
        assert got.keys() == wanted.keys()
        # On a GPU, XLA may leave out that gradients, of at most 1, are rounded to 16 bits: twice for a key, at most.
        narrow = [FORMS[form]["dtype"] for form in forms if on_gpu() and "dtype" in FORMS[form]]
        least = 1e-5 + sum(float(jnp.finfo(dtype).eps) / 2 for dtype in narrow)
        for key, (row, count) in wanted.items():
            np.testing.assert_allclose(got[key][0], row, 1e-4, least)
            assert got[key][1] == count
    finally:
        kvjax.drop_table("many")


def table_of(merged):
    keys, counts = np.asarray(merged.keys), np.asarray(merged.counts)
    return {int(k): (row, int(c)) for k, row, c in zip(keys, np.asarray(merged.rows), counts, strict=True) if c > 0}


def test_lookup_many(make):
    one, two = (make(d, initializer=kvjax.initializers.normal(1.0)) for d in (2, 3))
    mask = np.array([[True, False], [True, True]])
    features = {
        "a": (one, np.array([[1, 2], [3, 4]]), mask),
        "b": (two, np.array([5, 6])),
        "c": (one, kvjax.keys(np.array([1, 2])).salted(1)),
        "d": (one, np.zeros((0, 4), np.int64)),
        "e": (one, 7),
    }
    rows = kvjax.lookup_many(features)
    assert list(rows) == list("abcde")
    assert [r.shape for r in rows.values()] == [(2, 2, 2), (2, 3), (2, 2), (0, 4, 2), (2,)]
    for name, (table, *args) in features.items():
        np.testing.assert_array_equal(rows[name], table.lookup(args[0], mask=args[1] if len(args) > 1 else None))
    assert kvjax.lookup_many({}) == {}


def test_lookup_many_is_one_lookup_and_one_gradient_per_table(make):
    one, two = make(2, initializer=1.0), make(2, initializer=1.0)

    def loss(tables):
        rows = kvjax.lookup_many({
            "x": (tables[0], np.array([1, 2, 3]), np.array([True, True, False])),
            "y": (tables[0], np.array([[1]])),
            "z": (tables[1], np.array([9])),
        })  # fmt: skip
        return rows["x"].sum() + 10 * rows["y"].sum() + rows["z"].sum()

    assert str(jax.make_jaxpr(loss)((one, two))).count("kvjax_lookup") == 2
    grads = jax.jit(kvjax.grad(loss))((one, two))
    merged = kvjax.merge(grads[0])
    assert np.asarray(merged.keys).tolist()[:2] == [1, 2] and merged.counts.tolist() == [2, 1, 0, 0]
    np.testing.assert_array_equal(merged.rows[:2], [[11, 11], [1, 1]])
    table, _ = one.apply(optax.sgd(0.1), grads[0])
    assert sorted(table.export().keys.tolist()) == [1, 2]


def lookups(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("kvjax_lookup")


def test_bags_and_rows_of_one_table_are_one_lookup(make):
    table = make(2)
    same = [form for form in FORMS if form not in ("zeros", "row")]
    read = lambda table, forms: kvjax.lookup_many({form: feature_of(table, form) for form in forms})  # noqa: E731
    assert lookups(lambda table: read(table, same), table) == 1
    assert lookups(lambda table: read(table, FORMS), table) == 3  # what keys without a row read as is one for a lookup
    missing = ["init", None, [1.0, 2.0], np.array([1, 2])]
    features = lambda table: {str(i): kvjax.Feature(table, IDS, missing=row) for i, row in enumerate(missing)}  # noqa: E731
    assert lookups(lambda table: kvjax.lookup_many(features(table)), table) == 2
    other = make(2, admit=kvjax.admit.MinCount(2, unadmitted="zeros"))
    assert lookups(lambda table: kvjax.lookup_many(features(table)), other) == 3


@pytest.mark.parametrize("order", [["frozen", "plain"], ["plain", "frozen"]])
def test_handles_of_one_version_are_read_each_as_it_is(make, order):
    """Of which one is not trained, or reads as its average."""
    table = make(1, initializer=1.0)

    def loss(table):
        handles = {"frozen": (jax.lax.stop_gradient(table), [5]), "plain": (table, [7])}
        rows = kvjax.lookup_many({name: handles[name] for name in order})
        return rows["frozen"].sum() + rows["plain"].sum()

    trained, _ = table.apply(optax.sgd(0.1), kvjax.grad(loss)(table))
    assert trained.export().keys.tolist() == [7]

    tx = optax.chain(optax.sgd(1.0), kvjax.optax.ema_rows(0.9))
    table, _ = make(1).apply(tx, kvjax.SparseRows(kvjax.keys([5]), jnp.ones((1, 1))))
    table, _ = table.apply(tx, kvjax.SparseRows(kvjax.keys([5]), jnp.ones((1, 1))))
    handles = {"frozen": kvjax.optax.averaged(table, tx), "plain": table}
    rows = kvjax.lookup_many({name: (handles[name], [5]) for name in order})
    for name in order:
        np.testing.assert_array_equal(rows[name], handles[name].lookup([5]))
    assert rows["frozen"] != rows["plain"]


def test_prefetched_keys_are_read_by_themselves(make):
    table = make(2, initializer=kvjax.initializers.normal(1.0))
    ahead, table = kvjax.prefetch(table, IDS, pad_id=-1)
    table = table.upsert([5], [[1.0, 2.0]])
    bag = {"combiner": "mean", "pad_id": -1}
    rows = kvjax.lookup_many({"ahead": kvjax.Feature(table, ahead, **bag), "now": kvjax.Feature(table, IDS, **bag)})
    np.testing.assert_array_equal(rows["ahead"], rows["now"])
    with pytest.raises(ValueError, match="lookup_many, feature 'f': want no salt beside prefetched keys"):
        kvjax.lookup_many({"f": kvjax.Feature(table, ahead, salt=1)})
    with pytest.raises(ValueError, match="lookup_many, feature 'f': want the mask that the keys were prefetched with"):
        kvjax.lookup_many({"f": kvjax.Feature(table, ahead, IDS != 5)})


def test_a_feature_says_what_it_is(make):
    table = make(2)
    feature = kvjax.Feature(table, IDS, IDS != -1, combiner="mean", weights=np.ones((3, 3)), salt=2, dtype=jnp.float16)
    said = "keys=(3, 3), mask=(3, 3), salt=2, combiner='mean', weights=(3, 3), dtype='float16'"
    assert repr(feature) == f"Feature(table={table.name!r}, {said})"
    assert repr(kvjax.Feature(table, 7)) == f"Feature(table={table.name!r}, keys=7)"
    odd = kvjax.Feature(5, [[1], [1, 2]], salt=np.int64(3), dtype="int8")
    assert repr(odd) == "Feature(table='int', keys=<list>, salt=3, dtype='int8')"
    with pytest.raises(TypeError, match="pad"):
        kvjax.Feature(table, IDS, pad=-1)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lengths": [1, 2]}, ValueError, "want a combiner beside lengths, got none"),
        ({"weights": np.ones((3, 3)), "empty": np.zeros(2)}, ValueError, "want a combiner beside weights, empty"),
        ({"combiner": "avg"}, ValueError, "want combiner in .*'avg'"),
        ({"combiner": "sum", "lengths": [1, 2]}, ValueError, r"want keys \(n,\) beside lengths"),
        ({"combiner": "sum", "segment_ids": np.zeros(9)}, ValueError, "num_segments together"),
        ({"combiner": "sum", "empty": np.zeros(3)}, ValueError, r"want a row \(2,\)"),
        ({"combiner": "max", "weights": np.ones((3, 3))}, ValueError, "no weights"),
        ({"max_norm": -1.0}, ValueError, "want max_norm > 0"),
        ({"pad_id": 0.5}, TypeError, "pad_id"),
        ({"salt": 0.5}, TypeError, "salt"),
        ({"salt": np.arange(4)}, ValueError, "a salt for each key"),
        ({"missing": "zero"}, ValueError, "want missing='init', 'zeros' or a row, got 'zero'"),
        ({"missing": np.zeros(3)}, ValueError, r"want a missing row \(2,\)"),
        ({"dtype": "int32"}, TypeError, "want a dtype of floats for the rows, got 'int32'"),
        ({"dtype": "flot", "combiner": "sum"}, TypeError, "want a dtype of floats for the rows, got 'flot'"),
    ],
)
def test_errors_name_the_feature(make, options, error, words):
    table = make(2)
    with pytest.raises(error, match=words) as caught:
        kvjax.lookup_many({"a": (table, IDS), "f": kvjax.Feature(table, IDS, **options)})
    assert str(caught.value).startswith(f"kvjax: table {table.name!r}, lookup_many, feature 'f'")


def test_lookup_many_refuses_what_it_does_not_know(make):
    table = make(2)
    with pytest.raises(TypeError, match="want features by name, got list"):
        kvjax.lookup_many([(table, [1])])
    layer = kvjax.flax.nnx.Embed(table)
    for feature in (table, (table,), [table, np.array([1])], layer, (layer, np.array([1]))):
        with pytest.raises(TypeError, match=r"feature 'f': .*; a layer makes one by layer.feature\(keys\)$"):
            kvjax.lookup_many({"f": feature})
    for feature in (table, (table,), (np.array([1]), table), [table, np.array([1])]):
        with pytest.raises(TypeError, match=r"feature 'f'.*: want a kvjax"):
            kvjax.lookup_many({"f": feature})
    with pytest.raises(TypeError, match="feature 'f'"):
        kvjax.lookup_many({"f": (table, np.array([1.5]))})
    with pytest.raises(ValueError, match="feature 'f': want a mask"):
        kvjax.lookup_many({"f": (table, np.array([1]), np.array([True, False]))})
    with pytest.raises(TypeError, match=r"feature 'f'.* got -1; of padding by an id give .*\(table, ids, pad_id=-1\)"):
        kvjax.lookup_many({"f": (table, np.array([1, -1]), -1)})
    with pytest.raises(TypeError, match=r"feature 'f': want a mask as the third of \(table, keys, mask\), got keys"):
        kvjax.lookup_many({"f": (table, kvjax.keys([1]), kvjax.keys([1]))})
    stale, live = table, table.upsert(1, np.ones(2))
    with pytest.raises((ValueError, RuntimeError), match="stale"):
        finished(kvjax.lookup_many({"a": (live, 1), "b": (stale, 1)}))


def test_features_of_a_program_get_their_salts_in_one_hash(make):
    """XLA takes longer for the hash than for anything else of a feature."""
    table, salts, lengths = make(dim=2), [0, None, 3, 3, -1, 2**40], [2, 2, 2, 3, 3, 1]

    def features(keys, count):
        chosen = list(zip(salts, lengths, strict=True))[:count]
        return {str(i): kvjax.Feature(table, keys[:n], salt=salt) for i, (salt, n) in enumerate(chosen)}

    def read(keys, count=6):
        return kvjax.lookup_many(features(keys, count))

    keys = kvjax.keys(np.array([7, -5, 2**50]))
    for name, feature in features(keys, 6).items():
        alone = table.lookup(feature.keys if feature.salt is None else feature.keys.salted(feature.salt))
        np.testing.assert_array_equal(jax.jit(read)(keys)[name], alone)
    hashes = [str(jax.make_jaxpr(functools.partial(read, count=count))(keys)).count("= mul ") for count in (3, 6)]
    assert hashes == [2, 2]
