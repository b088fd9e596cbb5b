"""Bags against a NumPy reference, their gradients against JAX's own on the looked-up rows, and TensorFlow's cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax._lookup.sums import CALLS
from kvjax._values.bags import combine
from tests.support.marks import examples, few, few_rows, slow, wide_is_slow

COMBINERS = ["sum", "mean", "sqrtn", "max"]


def reference(rows, bags, weights, combiner, empty, lib=np):
    """One row a bag; bags: for each the positions of its keys. With lib=jnp it is differentiable."""
    out = []
    for positions in bags:
        r, w = rows[np.array(positions, int)], weights[np.array(positions, int)]
        if len(positions) == 0:
            out.append(empty)
        elif combiner == "max":
            out.append(lib.take_along_axis(r, lib.argmax(r, 0)[None], 0)[0])  # its gradient too is the first one's
        else:
            divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": lib.sqrt((w * w).sum())}[combiner]
            out.append((r * w[:, None]).sum(0) / divisor)
    return lib.stack(out) if out else np.zeros((0, rows.shape[1]))


@st.composite
def calls(draw):
    """Keys, the arguments that say which make a bag, and for each bag the positions of its keys."""
    n, b = draw(st.integers(0, 12)), draw(st.integers(0, 5))
    form = draw(st.sampled_from(["padded", "lengths", "segments"]))
    if form == "padded":
        shape = draw(st.sampled_from([(b, n), (2, b, 3), (n,)]))
        mask = draw(st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        mask = np.array(mask, bool).reshape(shape)
        positions = np.arange(mask.size).reshape(-1, shape[-1]) if mask.size else [[]] * int(np.prod(shape[:-1]))
        bags = [[p for p in bag if mask.reshape(-1)[p]] for bag in positions]
        return shape, {"mask": mask}, bags, shape[:-1]
    if form == "lengths":
        cuts = sorted(draw(st.lists(st.integers(0, n), min_size=b, max_size=b)))
        starts = [0, *cuts[:-1]] if b else []
        bags = [list(range(s, c)) for s, c in zip(starts, cuts, strict=True)]
        return (n,), {"lengths": np.array([len(bag) for bag in bags], np.int64)}, bags, (b,)
    ids = np.array(draw(st.lists(st.integers(-2, b + 1), min_size=n, max_size=n)), np.int64)
    mask = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    bags = [[p for p in range(n) if ids[p] == i and mask[p]] for i in range(b)]
    return (n,), {"segment_ids": ids, "num_segments": b, "mask": mask}, bags, (b,)


@settings(max_examples=examples(8, 60))
@given(calls(), st.sampled_from(COMBINERS), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_matches_reference(call, combiner, weighted, with_empty, jit, seed):
    shape, form, bags, leading = call
    rng, dim = np.random.default_rng(seed), 3
    table = kvjax.get_table("bags", dim=dim, initializer=kvjax.initializers.normal(1.0))
    keys = rng.integers(-3, 4, shape)  # repeats
    weights = rng.uniform(0.5, 2.0, shape).astype(np.float32)
    empty = rng.normal(size=dim).astype(np.float32)
    options = {"weights": weights} if weighted and combiner != "max" else {}
    options |= {"empty": empty} if with_empty else {}

    def bag(table, keys, options):
        static = {k: v for k, v in form.items() if k == "num_segments"}
        return kvjax.lookup_bag(table, keys, combiner=combiner, **static, **options)

    arrays = {k: v for k, v in form.items() if k != "num_segments"} | options
    out = (jax.jit(bag) if jit else bag)(table, kvjax.keys(keys), arrays)
    rows = np.asarray(table.lookup(keys)).reshape(-1, dim)
    w = weights.reshape(-1) if "weights" in options else np.ones(keys.size, np.float32)
    want = reference(rows, bags, w, combiner, empty if with_empty else np.zeros(dim))
    assert out.shape == (*leading, dim) and out.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out).reshape(-1, dim), want.reshape(-1, dim), rtol=1e-5, atol=1e-6)
    kvjax.drop_table(table.name)


@wide_is_slow
@pytest.mark.parametrize("combiner", few(COMBINERS, "sqrtn", "max"))
def test_gradients(make, combiner, x64):
    """By rows, weights and the row for empty bags, through a loss that is no sum; a key that repeats, bags unsorted."""
    table = make(5, initializer=kvjax.initializers.normal(1.0))
    ids = np.array([2, 0, -1, 2, 9, 0, 2, 3])
    keys = np.array([7, 8, 9, 7, 7, 2**40, -1, 5])
    bags = [[p for p in range(8) if ids[p] == b] for b in range(5)]
    weights, empty = jnp.arange(1.0, 9.0, dtype=jnp.float32), jnp.arange(5.0, dtype=jnp.float32)

    def loss(table, weights, empty):
        options = {} if combiner == "max" else {"weights": weights}
        out = kvjax.lookup_bag(table, keys, segment_ids=ids, num_segments=5, combiner=combiner, empty=empty, **options)
        return jnp.sum(jnp.sin(out))

    def dense(rows, weights, empty):
        return jnp.sum(jnp.sin(reference(rows, bags, weights, combiner, empty, jnp)))

    function = jax.jit(kvjax.value_and_grad(loss, argnums=(0, 1, 2)))
    value, (sparse, got_w, got_e) = function(table, weights, empty)
    rows = table.lookup(keys)
    want, (want_rows, want_w, want_e) = jax.jit(jax.value_and_grad(dense, argnums=(0, 1, 2)))(rows, weights, empty)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert sparse.rows.shape == (8, 5) and sparse.rows.dtype == jnp.float32
    np.testing.assert_allclose(sparse.rows, want_rows, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(sparse.keys), keys)
    np.testing.assert_allclose(got_e, want_e, rtol=1e-5)
    if combiner != "max":
        np.testing.assert_allclose(got_w, want_w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("combiner", few(COMBINERS))
def test_derivatives_in_both_modes_to_any_order(combiner):
    """Hessians, and a penalty on the gradient as in meta-learning: the calls are one another's derivatives."""
    ids, weights = jnp.array([0, 2, 0, -1], jnp.int32), jnp.array([1.0, 2.0, 3.0, 4.0])
    rows = jax.random.normal(jax.random.key(0), (4, 3))

    def ours(rows, weights):
        return combine(jnp, CALLS, combiner, 3, ids, rows, None if combiner == "max" else weights)

    def dense(rows, weights):
        return reference(rows, [[0, 2], [], [1]], weights, combiner, jnp.zeros(3), jnp)

    def cubes(f):
        return lambda *args: jnp.sum(f(*args) ** 3)

    def penalty(f):
        return lambda *args: sum(jnp.sum(g**3) for g in jax.grad(cubes(f), (0, 1))(*args))

    modes = [lambda f: jax.jacfwd(cubes(f), (0, 1)), lambda f: jax.hessian(cubes(f), (0, 1)),
             lambda f: jax.jacfwd(jax.jacfwd(cubes(f))), lambda f: jax.jacrev(jax.jacfwd(cubes(f))),
             lambda f: jax.grad(penalty(f), (0, 1))]  # fmt: skip
    for mode in modes:
        got, want = (jax.tree.leaves(jax.jit(mode(f))(rows, weights)) for f in (ours, dense))
        for one, other in zip(got, want, strict=True):  # sums of numbers of up to 130, in whatever order
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=5e-5)


@slow
def test_bags_of_many_examples_are_one_call():
    """Under vmap, of what differs between them and what does not, also of none; the same to the bit."""
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(-2, 5, (6, 9)), jnp.int32)  # three bags: others are padding of that example alone
    rows = jnp.asarray(rng.normal(size=(6, 9, 2)), jnp.float32)
    weights = jnp.asarray(rng.random(9), jnp.float32)

    def made(ids, rows, weights):
        return CALLS.sum(3, ids, weights, rows), jax.grad(lambda w: jnp.sum(CALLS.sum(3, ids, w, rows) ** 2))(weights)

    mapped, best = jax.vmap(made, (0, 0, None)), jax.value_and_grad(lambda rows, ids: jnp.sum(CALLS.max(3, ids, rows)))
    got, greatest = mapped(ids, rows, weights), jax.vmap(best)(rows, ids)
    for i in range(6):
        np.testing.assert_array_equal(got[0][i], made(ids[i], rows[i], weights)[0])
        np.testing.assert_array_equal(got[1][i], made(ids[i], rows[i], weights)[1])
        np.testing.assert_array_equal(greatest[1][i], best(rows[i], ids[i])[1])
    steps = {str(equation.primitive) for equation in jax.make_jaxpr(mapped)(ids, rows, weights).eqns}
    assert "kvjax_weighted_bags" in steps and not {"while", "scan"} & steps
    none = mapped(ids[:0], rows[:0], weights)
    assert none[0].shape == (0, 3, 2) and none[1].shape == (0, 9)
    many, message = jax.ShapeDtypeStruct((2**16, 9), jnp.int32), "2.*31 keys .* got 65536 examples of 9 keys and 32768 "
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.vmap(functools.partial(CALLS.sum, 2**15), (0, None, None)), many, weights, rows[0])


@slow
def test_tensorflow_cases(make):
    """What tf.nn.embedding_lookup_sparse documents: ids [[1, 3], [0], [], [1]], weights [[2, .5], [1], [], [3]]."""
    table = make(2).upsert(np.array([0, 1, 3]), [[10.0, 20.0], [1.0, 2.0], [4.0, 8.0]])
    keys, lengths, weights = np.array([1, 3, 0, 1]), [2, 1, 0, 1], [2.0, 0.5, 1.0, 3.0]
    want = {
        "sum": [[2 * 1 + 0.5 * 4, 2 * 2 + 0.5 * 8], [10, 20], [0, 0], [3, 6]],
        "mean": [[4 / 2.5, 8 / 2.5], [10, 20], [0, 0], [1, 2]],
        "sqrtn": [[4 / 4.25**0.5, 8 / 4.25**0.5], [10, 20], [0, 0], [1, 2]],
    }
    for combiner, rows in want.items():
        out = kvjax.lookup_bag(table, keys, lengths=lengths, weights=weights, combiner=combiner)
        np.testing.assert_allclose(out, rows, rtol=1e-6)
    np.testing.assert_allclose(kvjax.lookup_bag(table, keys, lengths=lengths)[0], [2.5, 5.0])
    # safe_embedding_lookup_sparse: an empty bag gets a default, and key 0 is neither read nor trained for it.
    grads = kvjax.grad(lambda t: kvjax.lookup_bag(t, np.array([[0]]), pad_id=0, empty=jnp.ones(2)).sum())(table)
    assert not np.asarray(grads.rows).any()


def test_weights_that_sum_to_zero_give_zeros_and_finite_gradients(make):
    table = make(2, initializer=1.0)
    for combiner, weights in (("mean", [1.0, -1.0]), ("sqrtn", [0.0, 0.0])):

        def loss(table, weights, combiner=combiner):
            return kvjax.lookup_bag(table, np.array([[5, 6]]), weights=weights, combiner=combiner).sum()

        value, (sparse, dense) = kvjax.value_and_grad(loss, argnums=(0, 1))(table, jnp.array([weights]))
        assert float(value) == 0 and np.isfinite(sparse.rows).all() and np.isfinite(dense).all()


@slow
def test_max_norm(make):
    table = make(2).upsert(np.array([1, 2]), [[3.0, 4.0], [0.3, 0.4]])
    keys = np.array([[1, 2, 99]])  # a longer row, a shorter one and a zero row
    np.testing.assert_allclose(kvjax.lookup_bag(table, keys, combiner="sum", max_norm=1.0), [[0.9, 1.2]], rtol=1e-6)

    def loss(table):
        return (kvjax.lookup_bag(table, keys, combiner="sum", max_norm=1.0) * jnp.array([[1.0, 2.0]])).sum()

    def norm_of(row):
        return (row / jnp.linalg.norm(row) * jnp.array([1.0, 2.0])).sum()

    rows = kvjax.grad(loss)(table).rows[0]
    np.testing.assert_allclose(rows[0], jax.grad(norm_of)(jnp.array([3.0, 4.0])), rtol=1e-5)
    np.testing.assert_array_equal(rows[1:], [[1, 2], [1, 2]])
    embed = kvjax.flax.Embed(table, max_norm=1.0)
    np.testing.assert_allclose(embed.apply(embed.init(jax.random.key(0), keys), keys)[0, 0], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(kvjax.flax.nnx.Embed(table, max_norm=1.0)(keys)[0, 0], [0.6, 0.8], rtol=1e-6)


def test_max_takes_the_first_of_equal_rows_and_keeps_nan(make):
    table = make(1).upsert(np.arange(4), [[1.0], [1.0], [-np.inf], [np.nan]])

    def bag(t, keys):
        return kvjax.lookup_bag(t, np.array([keys]), combiner="max")

    rows = kvjax.grad(lambda t: bag(t, [2, 0, 1]).sum())(table).rows
    np.testing.assert_array_equal(rows[0], [[0], [1], [0]])
    assert float(bag(table, [2])[0, 0]) == -np.inf
    assert np.isnan(bag(table, [0, 3, 1])).all() and np.isnan(bag(table, [3, 0])).all()


PADDED = [
    ({"lengths": [2, 0]}, [1, 2, 3], {1, 2}),
    ({"segment_ids": [0, -1, 5], "num_segments": 2}, [1, 2, 3], {1}),
    ({"mask": np.array([[True, False, True]])}, [[1, 2, 3]], {1, 3}),
    ({"pad_id": 2, "mask": np.array([[True, True, False]])}, [[1, 2, 3]], {1}),
]


@pytest.mark.parametrize(("form", "keys", "trained"), few_rows(PADDED, 0, 3))
def test_padding_leaves_no_trace(make, form, keys, trained):
    """Only unmasked keys are trained and counted, in each of the forms."""
    table = make(2, initializer=1.0)
    grads = kvjax.grad(lambda t: kvjax.lookup_bag(t, keys, **form).sum())(table)
    table, _ = table.apply(optax.sgd(0.5), grads)
    assert set(table.export().keys.tolist()) == trained
    assert table.frequency(np.array([1, 2, 3])).tolist() == [int(k in trained) for k in (1, 2, 3)]


@slow
@wide_is_slow
def test_transformations(make, x64):
    table = make(3, initializer=kvjax.initializers.normal(1.0))
    keys = kvjax.keys(np.arange(24).reshape(4, 2, 3))
    flat, lengths = keys.reshape(24), jnp.array([3, 0, 5])

    def bag(keys):
        return kvjax.lookup_bag(table, keys, combiner="max")

    def by_lengths(lengths):
        return kvjax.lookup_bag(table, flat, lengths=lengths)

    want = bag(keys)
    np.testing.assert_array_equal(jax.vmap(bag)(keys), want)
    np.testing.assert_array_equal(jax.lax.scan(lambda c, k: (c, bag(k)), 0, keys)[1], want)
    np.testing.assert_array_equal(jax.vmap(by_lengths)(lengths[None])[0], by_lengths(lengths))
    checkpointed = jax.checkpoint(lambda t: jnp.sum(kvjax.lookup_bag(t, keys) ** 2))
    remat = jax.jit(kvjax.grad(checkpointed))(table)
    plain = kvjax.grad(lambda t: jnp.sum(kvjax.lookup_bag(t, keys) ** 2))(table)
    np.testing.assert_array_equal(remat.rows, plain.rows)
    by_weights = functools.partial(kvjax.lookup_bag, table, keys, combiner="sum")
    weights = jnp.ones(keys.shape)
    np.testing.assert_allclose(jax.jvp(lambda w: by_weights(weights=w), (weights,), (weights,))[1], by_weights())


def test_many_bags_are_the_same_to_the_bit_however_they_are_cut(make):
    """Enough rows that the C++ side uses several threads: sorted bags with padding between, and the same shuffled."""
    rng, n, b = np.random.default_rng(0), 40_000, 3000
    table = make(16, initializer=kvjax.initializers.normal(1.0))
    ids = np.sort(rng.integers(0, b, n))
    ids[rng.random(n) < 0.2] = -1
    keys, weights = rng.integers(0, 10**6, n), rng.random(n, np.float32)
    rows = np.asarray(table.lookup(keys))
    order = np.argsort(rng.permutation(b)[np.maximum(ids, 0)], kind="stable")  # bags shuffled, rows of a bag in order
    options = {"num_segments": b, "combiner": "sum"}
    want = np.zeros((b, 16), np.float32)
    np.add.at(want, ids[ids >= 0], (rows * weights[:, None])[ids >= 0])
    for o in (np.arange(n), order):
        out = kvjax.lookup_bag(table, keys[o], segment_ids=ids[o], weights=weights[o], **options)
        np.testing.assert_array_equal(out, want)
    best = np.full((b, 16), -np.inf, np.float32)
    np.maximum.at(best, ids[ids >= 0], rows[ids >= 0])
    out = kvjax.lookup_bag(table, keys, segment_ids=ids, num_segments=b, combiner="max")
    np.testing.assert_array_equal(out, np.where(np.isinf(best), 0, best))


def test_bfloat16(make):
    """Pooled in float32, then rounded once; or not, if the caller wants float32."""
    table = make(2, dtype="bfloat16").upsert(np.arange(3), [[1.0, 1.0], [2**-8, 1.0], [2**-8, 1.0]])
    keys = np.array([[0, 1, 2]])
    out = kvjax.lookup_bag(table, keys, combiner="sum")
    assert out.dtype == jnp.bfloat16 and float(out[0, 0]) == 1 + 2**-7  # in bfloat16, 1 + 2**-8 would be 1
    wide = kvjax.lookup_bag(table, keys, combiner="mean", dtype=jnp.float32)
    np.testing.assert_allclose(wide[0], [(1 + 2**-7) / 3, 1.0], rtol=1e-6)
    grads = kvjax.grad(lambda t: kvjax.lookup_bag(t, keys, dtype=jnp.float32).sum())(table)
    np.testing.assert_allclose(grads.rows, np.full((1, 3, 2), 1 / 3), rtol=1e-2)


arrow = pytest.importorskip("pyarrow")


class OfPandas(list):
    """A column as pandas has one of its own types, of which NumPy makes NaN where it is null."""

    dtype = "Float64"

    def isna(self):
        return np.array([x is None for x in self])

    def __array__(self, dtype=None, copy=None):
        return np.array([np.nan if x is None else x for x in self])


BAD = [
    (dict(combiner="avg"), "want combiner in"),
    (dict(weights=np.ones((2, 3)), combiner="max"), "no weights for combiner 'max'"),
    (dict(weights=np.ones(3)), r"want real weights \(2, 3\), got \(3,\)"),
    (dict(weights=np.ones((2, 3), bool)), "want weights that are real numbers, got bool"),
    (dict(weights=np.full((2, 3), 1e300)), r"want values that float32 can hold, got 1e\+300"),
    (dict(mask=arrow.array([True, None, True])), "want all elements, got a column with 1 null, .* in a mask by false"),
    (dict(mask=[[True, None, True]] * 2), "want a mask of bool, got object; give true for keys that count"),
    (dict(mask=np.ones((2, 3))), "want a mask of bool, got float"),
    (dict(mask=np.ones(3, bool)), r"want a mask \(2, 3\), got \(3,\)"),
    (dict(pad_id=[1, 2]), "one pad_id"),
    (dict(pad_id=jnp.int32(5)), "pad_id: want ids of 64 bits, got a JAX array of 32-bit integers"),
    (dict(max_norm=0.0), "max_norm > 0"),
    (dict(max_norm=True), "max_norm > 0"),
    (dict(empty=np.zeros(3)), r"want a row \(4,\) for empty bags"),
    (dict(weights=arrow.array([1.0, None])), "want all elements, got a column with 1 null, .*; fill"),
    (dict(empty=[1.0, 2.0, 3.0, None]), "want rows of real numbers, got object"),
    (dict(empty=[1.0, 2.0, 3.0, 4j]), "want rows of real numbers, got complex"),
    (dict(empty=np.array([1.0, 2.0, 3.0, 1e300])), r"want values that float32 can hold, got 1e\+300"),
    (dict(weights=OfPandas([1.0, None])), "want all elements, got a column with 1 null"),
    (dict(lengths=[1, 2]), r"want keys \(n,\) beside lengths"),
    (dict(lengths=[1], segment_ids=[1], num_segments=1), "want lengths or segment_ids"),
    (dict(num_segments=2), "segment_ids and num_segments together"),
    (dict(keys=5), r"want keys \(\.\.\., L\)"),
    (dict(keys=[1, 2], segment_ids=[0, 1]), "segment_ids and num_segments together"),
    (dict(keys=[1, 2], segment_ids=[0], num_segments=1), r"want segment_ids \(2,\)"),
    (dict(keys=[1, 2], segment_ids=[0, 1], num_segments=-1), "num_segments in 0"),
    (dict(keys=[1, 2], segment_ids=[0, 1], num_segments=2.0), "num_segments in 0"),
    (dict(keys=[1, 2], lengths=[[1, 1]]), r"want lengths \(b,\)"),
    (dict(keys=[1, 2], lengths=[1, np.nan]), "want integer lengths, got float.*null has length 0.*fill those"),
    (dict(keys=[1, 2], lengths=[-1, 3]), "lengths of at least 0, got -1 for bag 0"),
    (dict(keys=[1, 2], lengths=[1, 2]), "add up to at most 2, the number of keys, got more, from bag 1 on"),
    (dict(keys=[1, 2], lengths=[2**32]), "add up to at most 2"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_mistakes_name_the_table(make, options, message):
    table = make(4)
    options = dict(options)
    keys = options.pop("keys", [[1, 2, 3], [4, 5, 6]])
    with pytest.raises((ValueError, TypeError, jax.errors.JaxRuntimeError), match=message) as error:
        jax.block_until_ready(kvjax.lookup_bag(table, np.array(keys), **options))
    assert f"table {table.name!r}, lookup_bag" in str(error.value)


def test_wide_segment_ids_are_not_cut(make, x64):
    """2**32 would be bag 0 in 32 bits."""
    table = make(1, initializer=1.0)
    out = kvjax.lookup_bag(table, [1, 2], segment_ids=np.array([2**32, 1]), num_segments=2)
    np.testing.assert_array_equal(out, [[0], [1]])
    unsigned = np.array([255, 1], np.uint8)
    out = kvjax.lookup_bag(table, [1, 2], segment_ids=unsigned, num_segments=1000, combiner="sum")
    assert float(out[255, 0]) == 1 and float(out.sum()) == 2


def test_wide_integers_of_jax_where_x64_is_off(make):
    """JAX would cut them, so that 2**32 is bag 0, and such a length 0."""
    table, keys = make(1, initializer=1.0), kvjax.keys([1, 2, 3])
    with jax.enable_x64(True):
        ids, lengths = jnp.array([2**32, 1, -(2**32)]), jnp.array([2**32 + 2, 1])
        unsigned = jnp.array([2**63, 1, 0], jnp.uint64)
    bags = functools.partial(kvjax.lookup_bag, table, keys)
    by_ids = functools.partial(bags, num_segments=2, combiner="sum")
    for run in (by_ids, jax.jit(by_ids)):
        assert run(segment_ids=ids).tolist() == [[0], [1]]
        assert run(segment_ids=unsigned).tolist() == [[1], [1]]
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="lengths that add up to at most 3"):
        jax.block_until_ready(bags(lengths=lengths))


def test_traced_numbers_in_a_list(make):
    table, keys = make(1, initializer=1.0), kvjax.keys([1, 2, 3])
    sums = functools.partial(kvjax.lookup_bag, table, keys, combiner="sum")
    assert jax.jit(lambda n: sums(lengths=[n, 1]))(2).tolist() == [[2], [1]]
    assert jax.jit(lambda n: sums(segment_ids=[n, 0, 0], num_segments=2))(1).tolist() == [[2], [1]]
    assert jax.jit(lambda n: sums(segment_ids=[n, 0, 2**32], num_segments=2))(1).tolist() == [[1], [1]]
    merged = jax.jit(lambda n: kvjax.merge(kvjax.SparseRows(keys, jnp.ones((3, 1)), n)).counts)
    assert merged([2, 1, 0]).sum() == merged(nnx.Param(jnp.array([2, 1, 0]))).sum() == 3
    with jax.enable_x64(True):
        wide = jnp.array([2**32, 1, 0])
    assert sorted(merged(wide).tolist()) == [0, 1, 2**31 - 1]
