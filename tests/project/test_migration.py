"""Migration: what the READMEs of four TensorFlow systems show, in kvjax, checked by value.

Above each part stand the names of the original calls. TFRA: tensorflow/recommenders-addons; SOK: SparseOperationKit of
NVIDIA-Merlin/HugeCTR; DeepRec: DeepRec-AI/DeepRec; TFPlus: of intelligent-machine-learning/dlrover.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import kvjax
from tests.support.marks import few, slow


def train(table, keys, tx=None, grad=1.0, **options):
    """One training write in which every occurrence of a key has a gradient of `grad` in each column."""
    keys = np.asarray(keys)
    grads = kvjax.SparseRows(kvjax.keys(keys), jnp.full((*keys.shape, table.dim), grad, jnp.float32))
    return table.apply(tx or optax.sgd(1.0), grads, **options)[0]


def rows_of(table):
    """{key: first column}"""
    rows = table.export()
    return dict(zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True))


def descend(loss, params, tx, steps=1):
    """Trains as every loop does, and gives the parameters."""
    tx = kvjax.optax.partition(dense=optax.sgd(0.1), tables=tx)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(kvjax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return params


# ---- TFPlus ----------------------------------------------------------------------------------------------------------
# get_kv_variable("kv_embedding", embedding_dim, key_dtype, initializer=random_normal_initializer,
#   partitioner=fixed_size_partitioner(num_shards=5)), embedding_lookup, AdamOptimizer, AdagradOptimizer,
#   GroupAdamOptimizer, SparseGroupFtrlOptimizer, size

GROUPS = {"l1": 0.01, "l2": 0.01, "l21": 0.01}
TFPLUS = {
    "sgd": lambda: optax.sgd(0.5),
    "adagrad": lambda: optax.adagrad(0.5),
    "adam": lambda: optax.adam(0.5),
    "group_adam": lambda: kvjax.optax.group_adam(0.5, **GROUPS),
    "sparse_group_ftrl": lambda: kvjax.optax.sparse_group_ftrl(0.5, **GROUPS),
}


@pytest.mark.parametrize("shards", few([None, 5], 0))
@pytest.mark.parametrize("name", few(TFPLUS, "adagrad"))
def test_tfplus_kv_variable_trains_as_a_dense_one(name, shards, mesh, promotion):
    tx = TFPLUS[name]()
    options = {"dim": 128, "key_dtype": "int64", "initializer": kvjax.initializers.normal(1.0)}
    table = kvjax.get_table("kv_embedding", **options, mesh=shards and mesh(shards))
    ids = np.array([0, 1, 2, 3, 4, 2**40, -5])
    dense = np.asarray(table.lookup(ids))
    assert len({tuple(row) for row in dense}) == 7 and abs(dense.mean()) < 0.2 and abs(dense.std() - 1) < 0.1
    state = tx.init(dense)
    for _ in range(3):
        updates, state = tx.update(2 * dense, state, dense)
        dense = optax.apply_updates(dense, updates)
    keys = kvjax.keys(ids)
    table = descend(lambda t: jnp.sum(t.lookup(keys) ** 2), table, tx, steps=3)
    assert len(table) == 7
    np.testing.assert_allclose(table.lookup(ids), dense, rtol=1e-5, atol=1e-6)


# enter_threshold; GatherOrInsert, GatherOrZeros, GetCount, GetTimeStamp, Insert, ScatterAdd, Delete,
#   DeleteWithTimestamp, FullOrDeltaExport(cutoff_value)


def test_tfplus_operations(make):
    table = make(dim=1, initializer=0.5, admit=kvjax.admit.MinCount(2))  # enter_threshold=2
    keys = np.array([1, 2, 3])
    assert table.lookup(keys, missing="zeros")[:, 0].tolist() == [0, 0, 0]  # GatherOrZeros
    table = train(table, [1, 2], step=10)
    table = train(table, [1, 3], step=20)
    assert rows_of(table) == {1: -0.5}  # low-frequency keys read as their initial row, and are not trained
    assert (table.frequency(1), table.version_of(1)) == (2, 20)  # GetCount, GetTimeStamp
    rows, table = table.lookup_or_insert(keys)  # GatherOrInsert
    assert rows[:, 0].tolist() == [-0.5, 0.5, 0.5] and len(table) == 3
    table = table.upsert(np.array([4]), [[1e-25]]).add(np.array([3]), [[2.0]])  # Insert, ScatterAdd
    assert rows_of(table) == {1: -0.5, 2: 0.5, 3: 2.5, 4: np.float32(1e-25)}
    assert sorted(table.export(kvjax.Prune(min_norm=1e-20)).keys) == [1, 2, 3]  # cutoff_value
    table = table.remove(np.array([3]))  # Delete
    assert rows_of(train(table, [1], step=40).evict(kvjax.evict.MaxAge(19))) == {1: -1.5}  # DeleteWithTimestamp


# ---- TFRA ------------------------------------------------------------------------------------------------------------
# de.get_variable(name, devices, dim, initializer), upsert, lookup(return_exists), remove, clear, size, export,
#   accum (bp_v2), RestrictPolicy: TimestampRestrictPolicy, FrequencyRestrictPolicy, restrict


def test_tfra_variable():
    table = kvjax.get_table("dynamic_embeddings", dim=3, initializer=-1.0)
    table = table.upsert(np.array([1, 2, 2**40]), np.arange(9.0).reshape(3, 3))
    rows, exists = table.lookup(np.array([1, 5, 2**40]), return_found=True)
    assert rows.tolist() == [[0, 1, 2], [-1, -1, -1], [6, 7, 8]] and exists.tolist() == [True, False, True]
    table = table.remove(np.array([1, 5]))
    assert (table.size(), table.shape, rows_of(table)) == (2, (2, 3), {2: 3, 2**40: 6})
    assert table.clear().size() == 0


def test_tfra_accum(make):
    """bp_v2: what is missing and was missing is inserted, what is there and was there is moved, the rest is skipped."""
    table = make(dim=1).upsert(np.array([1, 2]), [[10.0], [20.0]])
    keys, exists = np.array([1, 2, 3, 4]), np.array([True, False, False, True])
    table = table.accum(keys, np.full((4, 1), 3.0), np.full((4, 1), 5.0), exists)
    assert rows_of(table) == {1: 12, 2: 20, 3: 5}


@pytest.mark.parametrize(("by", "left"), [("version", [1, 4]), ("frequency", [1, 3])])
def test_tfra_restrict(by, left, make):
    table = make(dim=1)
    for keys in ([3, 3, 3], [2], [4], [1, 1]):
        table = train(table, keys)
    assert sorted(table.restrict(2, by=by).export().keys) == left


# de.embedding_lookup, embedding_lookup_unique, embedding_lookup_sparse(combiner, sp_weights, max_norm),
#   safe_embedding_lookup_sparse(default_id)


@pytest.fixture
def weighted(make):
    """Rows [3, 4] under 1, [6, 8] under 2, [0, 5] under 2**40, and their values as plain numbers."""
    keys, rows = np.array([1, 2, 2**40]), np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 5.0]])
    return make(dim=2, initializer=9.0).upsert(keys, rows)


def test_tfra_embedding_lookup(weighted):
    ids = np.array([[2, 1], [2**40, 2]])  # any shape, duplicates are looked up once or twice to the same end
    assert weighted.lookup(ids).tolist() == [[[6, 8], [3, 4]], [[0, 5], [6, 8]]]
    layer = kvjax.flax.Embed(weighted, max_norm=5.0)
    np.testing.assert_allclose(layer.apply({"params": {"table": weighted}}, ids)[0], [[3, 4], [3, 4]], rtol=1e-6)


@pytest.mark.parametrize(
    ("combiner", "weights", "want"),
    [
        ("sum", None, [[9, 12], [0, 5], [0, 0]]),
        ("mean", None, [[4.5, 6], [0, 5], [0, 0]]),
        ("sqrtn", None, [[9 / 2**0.5, 12 / 2**0.5], [0, 5], [0, 0]]),
        ("sum", [1, 3, 2], [[21, 28], [0, 10], [0, 0]]),
        ("mean", [1, 3, 2], [[5.25, 7], [0, 5], [0, 0]]),
        ("sqrtn", [1, 3, 2], [[21 / 10**0.5, 28 / 10**0.5], [0, 5], [0, 0]]),
    ],
)
def test_tfra_embedding_lookup_sparse(combiner, weights, want, weighted):
    ids, indices = np.array([1, 2, 2**40]), np.array([0, 0, 1])  # a SparseTensor's values and the rows of its indices
    weights = None if weights is None else np.array(weights, np.float32)
    options = {"segment_ids": indices, "num_segments": 3, "weights": weights, "combiner": combiner}
    bags = kvjax.lookup_bag(weighted, ids, **options)
    np.testing.assert_allclose(bags, want, rtol=1e-6)


def test_tfra_safe_embedding_lookup_sparse(weighted):
    """An empty row is zeros, or a row that is learned, and never trains id 0 (which default_id=None did)."""
    ids = kvjax.keys(np.array([[1, 2], [-1, -1]]))

    def loss(params):
        bags = kvjax.lookup_bag(params["table"], ids, pad_id=-1, combiner="sum", empty=params["default"])
        return jnp.sum(bags)

    params = descend(loss, {"table": weighted, "default": jnp.zeros(2)}, optax.sgd(1.0))
    assert rows_of(params["table"]) == {1: 2, 2: 5, 2**40: 0}
    np.testing.assert_allclose(params["default"], [-0.1, -0.1])


# de.keras.layers.Embedding, de.DynamicEmbeddingOptimizer(Adam), get_slot_variables


class TwoTower(nn.Module):
    embed: type

    @nn.compact
    def __call__(self, users, movies):
        towers = [self.embed(name)(keys) for name, keys in (("user", users), ("movie", movies))]
        return nn.Dense(1, kernel_init=nn.initializers.ones)(jnp.concatenate(towers, -1))[:, 0]


@slow
def test_tfra_dynamic_embedding_optimizer(promotion):
    """The whole model, rows and slots, against the same one with embeddings of a fixed size."""

    def dense(name):
        return nn.Embed(4, 2, embedding_init=nn.initializers.ones, name=name)

    def dynamic(name):
        return kvjax.flax.Embed(name, 2, initializer=1.0, name=name)

    def fit(embed, value_and_grad, tx, *ids):
        net = TwoTower(embed)
        state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), *ids)["params"], tx=tx)
        for _ in range(3):
            _, grads = value_and_grad(lambda p: jnp.mean((net.apply({"params": p}, *ids) - jnp.arange(4.0)) ** 2))(
                state.params
            )
            state = state.apply_gradients(grads=grads)
        return state

    adam = optax.adam(0.1)
    numbers = np.array([0, 1, 2, 3]), np.array([0, 1, 1, 3])
    far = 2**50 - 1
    ids = [kvjax.keys(n * far) for n in numbers]
    want = fit(dense, jax.value_and_grad, adam, *numbers)
    got = fit(dynamic, kvjax.value_and_grad, kvjax.optax.partition(dense=adam, tables=adam), *ids)
    user, movie = (got.params[name]["table"] for name in ("user", "movie"))
    np.testing.assert_allclose(got.params["Dense_0"]["kernel"], want.params["Dense_0"]["kernel"], rtol=1e-5)
    np.testing.assert_allclose(user.lookup(ids[0]), want.params["user"]["embedding"], rtol=1e-5)
    np.testing.assert_allclose(movie.lookup(ids[1]), want.params["movie"]["embedding"][numbers[1]], rtol=1e-5)
    assert len(movie) == 3 and sorted(movie.stats().slots) == ["count", "mu", "nu"]
    for slot in ("mu", "nu"):
        moments = getattr(want.opt_state[0], slot)["user"]["embedding"]
        np.testing.assert_allclose(user.slot(slot, ids[0]), moments, rtol=1e-4, atol=1e-7)


# ---- SOK -------------------------------------------------------------------------------------------------------------
# sok.DynamicVariable(dimension=3, initializer="13"), embedding_lookup / sparse_read, lookup_sparse(combiners),
#   sok.OptimizerWrapper(SGD(1.0)).apply_gradients, sok.export, sok.assign, scatter_update, scatter_add, size

SOK_IDS = np.array([0, 1, 2**40])


def test_sok_dynamic_variable(make):
    table = make(dim=3, initializer=13.0)
    keys = kvjax.keys(SOK_IDS)
    np.testing.assert_array_equal(table.lookup(keys), np.full((3, 3), 13.0))
    assert table.size() == 0  # there, reading inserts; here it does not
    table = descend(lambda t: jnp.sum(t.lookup(keys)), table, optax.sgd(1.0))
    assert rows_of(table) == {0: 12, 1: 12, 2**40: 12} and table.size() == 3
    table = table.upsert(np.array([8]), np.full((1, 3), 3.0))  # sok.assign
    table = table.assign(np.array([0, 7]), np.full((2, 3), 5.0))  # scatter_update: only what exists
    table = table.add(np.array([1, 1, 9]), np.ones((3, 3)))  # scatter_add; what was missing starts from its initial row
    assert rows_of(table) == {0: 5, 1: 14, 2**40: 12, 8: 3, 9: 14}


def test_sok_lookup_sparse(make):
    """Two variables, each with ids and a combiner of its own; ragged ids come as values and lengths."""
    a, b = make(dim=3, initializer=13.0), make(dim=2).upsert(np.array([5, 6]), [[1.0, 2.0], [3.0, 4.0]])
    total = kvjax.lookup_bag(a, SOK_IDS, lengths=[2, 0, 1], combiner="sum")
    mean = kvjax.lookup_bag(b, np.array([5, 6, 6]), lengths=[3, 0, 0], combiner="mean")
    np.testing.assert_array_equal(total[:, 0], [26, 0, 13])
    np.testing.assert_allclose(mean, [[7 / 3, 10 / 3], [0, 0], [0, 0]], rtol=1e-6)


def test_sok_initializers(make):
    """ "ones", "zeros", "random": one row per key, the same however often it is read."""
    assert make(dim=3, initializer=kvjax.initializers.ones()).lookup(SOK_IDS).tolist() == [[1] * 3] * 3
    assert make(dim=3, initializer=kvjax.initializers.zeros()).lookup(SOK_IDS).tolist() == [[0] * 3] * 3
    table = make(dim=3, initializer=kvjax.initializers.uniform(-1.0, 1.0))
    rows = np.asarray(table.lookup(SOK_IDS))
    assert len(np.unique(rows)) == 9 and (abs(rows) < 1).all()
    np.testing.assert_array_equal(table.lookup_or_insert(SOK_IDS)[0], rows)


# ---- DeepRec ---------------------------------------------------------------------------------------------------------
# tf.get_embedding_variable("a", embedding_dim, ev_option=EmbeddingVariableOption(filter_option=CounterFilter(3) or
#   CBFFilter(3), evict_option=GlobalStepEvict(steps_to_live) or L2WeightEvict(l2_weight_threshold), init_option=
#   InitializerOption(default_value_dim, default_value_no_permission=0.0))), AdagradOptimizer(0.1, 0.1).minimize,
#   get_frequency, get_version, a saved "a-keys", "a-values", "a-freqs", "a-versions", "a-keys_filtered"

BATCHES = [1, 2, 3, 1], [1, 2, 4], [1, 2, 4], [5, 5, 5]  # 3 and 4 occur less than three times
ADAGRAD = optax.adagrad(0.1, initial_accumulator_value=0.1, eps=0.0)


@pytest.mark.parametrize("admit", [kvjax.admit.MinCount, kvjax.admit.Sketch], ids=["CounterFilter", "CBFFilter"])
def test_deeprec_filters(admit, make):
    table = make(dim=2, initializer=1.0, admit=admit(3, unadmitted="zeros"))
    for batch in (*BATCHES[:3], [5, 5], [5]):  # what occurs in one step is read as one
        table = train(table, batch, ADAGRAD)
    # default_value_no_permission, and the read that is the third occurrence of 4
    assert table.lookup(np.arange(3, 5)).tolist() == [[0, 0], [1, 1]]
    assert table.lookup(np.arange(3, 5), missing="init").tolist() == [[1, 1], [1, 1]]
    rows = table.export(slots=True)
    order = np.argsort(rows.keys)
    assert rows.keys[order].tolist() == [1, 2, 5]
    assert rows.freqs[order].tolist() == [4, 3, 3] and rows.versions[order].tolist() == [3, 3, 5]
    # The update of the step that admits a key counts: 1 has had two, 2 and 5 one.
    moved = [0.1 / 1.1**0.5 + 0.1 / 2.1**0.5, 0.1 / 1.1**0.5, 0.1 / 1.1**0.5]
    np.testing.assert_allclose(rows.values[order], np.repeat(1 - np.array(moved)[:, None], 2, 1), rtol=1e-6)
    np.testing.assert_allclose(rows.slots["sum_of_squares"][order, 0], [2.1, 1.1, 1.1], rtol=1e-6)


@slow
def test_deeprec_two_variables_in_one_model():
    """Each with a policy of its own, trained by one optimizer, and read back as the four arrays of a checkpoint."""
    counter = kvjax.admit.MinCount(3)
    oldest, smallest = kvjax.evict.MaxAge(0).every(4), kvjax.evict.MinNorm(1.2).every(4)
    params = {
        "a": kvjax.get_table("a", dim=2, initializer=1.0, admit=counter, evict=oldest),  # GlobalStepEvict
        "b": kvjax.get_table("b", dim=2, initializer=1.0, admit=counter, evict=smallest),  # L2WeightEvict
    }
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=ADAGRAD)
    state = tx.init(params)
    for batch in BATCHES:
        grads = kvjax.grad(lambda p, ids=batch: sum(jnp.sum(p[name].lookup(np.array(ids))) for name in "ab"))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    a, b = params["a"].export(), params["b"].export()
    assert (a.keys.tolist(), a.freqs.tolist(), a.versions.tolist()) == ([5], [3], [4])
    np.testing.assert_allclose(a.values, [[1 - 0.3 / 9.1**0.5] * 2], rtol=1e-6)
    assert dict(zip(b.keys.tolist(), b.freqs.tolist(), strict=True)) == {2: 3, 5: 3}
    assert b.versions[b.keys == 2] == 3
    np.testing.assert_allclose(b.values[b.keys == 2], [[1 - 0.1 / 1.1**0.5] * 2], rtol=1e-6)


def test_deeprec_filtered_keys_are_saved(make):
    """ "a-keys_filtered" and "-freqs_filtered": what has been counted is not lost in a restart."""
    options = {"dim": 1, "admit": kvjax.admit.MinCount(3)}
    first, second = train(make(**options), [7, 7, 8]), make(**options)
    second = second.load(first.snapshot())
    assert second.stats().tracked == 2 and rows_of(train(second, [7, 8])) == {7: -1}


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (kvjax.evict.MaxAge(0), {5}),  # GlobalStepEvict(steps_to_live=0)
        (kvjax.evict.MaxAge(1), {1, 2, 5}),
        (kvjax.evict.MinNorm((2 * 0.75) ** 0.5), {2, 5}),  # L2WeightEvict(0.75): half the sum of squares of 1 is 0.70
        (kvjax.evict.MaxAge(0) & kvjax.evict.MinNorm((2 * 0.75) ** 0.5), {2, 5}),
        (kvjax.evict.MaxAge(0) | kvjax.evict.MinNorm((2 * 0.75) ** 0.5), {5}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("when", ["by hand", "every 4 steps"])
def test_deeprec_eviction(policy, left, when, make):
    """There it runs as a checkpoint is saved; here when it is called, or every so many steps."""
    automatic = {"evict": policy.every(4)} if when != "by hand" else {}
    table = make(dim=2, initializer=1.0, admit=kvjax.admit.MinCount(3), **automatic)
    for batch in BATCHES:
        table = train(table, batch, ADAGRAD)
    if when == "by hand":
        values = table.lookup(np.array([1, 2, 5]))
        np.testing.assert_allclose(jnp.sum(values**2, 1) / 2, [0.698, 0.818, 0.811], atol=1e-3)
        table = table.evict(policy)
    assert set(rows_of(table)) == left
    assert sum(table.stats().evicted.values()) == 3 - len(left)
    assert table.frequency(1) == (4 if 1 in left else 0) and table.version_of(1) == (3 if 1 in left else -1)


def test_deeprec_default_value_dim(make):
    """default_value_dim rows of which each key gets one, the same after eviction; negative keys too."""
    pool = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    table = make(dim=8, initializer=pool)
    keys = np.arange(-50, 50)
    rows = np.asarray(table.lookup(keys))
    assert {tuple(row) for row in rows} == {tuple(row) for row in pool}
    table = train(table, keys).evict(kvjax.evict.MaxAge(0), step=9)
    assert len(table) == 0
    np.testing.assert_array_equal(table.lookup(keys), rows)
