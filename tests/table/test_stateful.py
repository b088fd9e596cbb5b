"""Random sequences of operations on tables of all kinds give what the reference model gives."""

import tempfile

import jax
import numpy as np
import optax
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvjax
from kvjax import admit, evict
from tests.support.engines import Memory
from tests.support.marks import examples
from tests.support.model import Full, Model
from tests.support.policies import mix
from tests.support.tables import Small, finished

REFUSED = (ValueError, MemoryError, jax.errors.JaxRuntimeError)  # JAX decides which
NAME, DIM, LR, SEED = "machine", 3, 0.5, 7
AWKWARD = [0, 1, -1, 2**31 - 1, -(2**31), 2**32 + 1, 2**40 + 7, 2**63 - 1, -(2**63), -2, -3]
# Few distinct keys, so that sequences meet; the awkward ones and some that crowd one spot of the index.
# Four sizes, because XLA compiles for each.
KEY = st.sampled_from([*AWKWARD, *range(10, 40)])
KEYS = st.sampled_from([0, 1, 6, 24]).flatmap(lambda n: st.lists(KEY, min_size=n, max_size=n))
SMALL = st.integers(-16, 16).map(lambda n: n / 4)  # sums are exact, so that norms compare alike
STEP = st.one_of(st.none(), st.integers(0, 30), st.just(2**31 - 2))


def first(rows):
    return rows.values[:, 0]


LEAVES = [
    evict.MaxAge(2), evict.MaxAge(0), evict.MinFrequency(2), evict.MinNorm(1.5), evict.LeastRecent(3),
    evict.LeastFrequent(4), evict.LeastFrequent(2, half_life=2.0), evict.MinScore(0.0, first),
    evict.LowestScore(3, first),
]  # fmt: skip
POLICY = st.recursive(
    st.sampled_from(LEAVES),
    lambda p: st.one_of(p.map(lambda x: ~x), st.tuples(p, p).map(lambda x: x[0] & x[1]),
                        st.tuples(p, p).map(lambda x: x[0] | x[1])),
    max_leaves=4,
)  # fmt: skip
ADMIT = [
    None, admit.MinCount(2), admit.MinCount(3, unadmitted="zeros"), admit.MinCount(2, unadmitted=-1),
    admit.MinCount(3, unadmitted="zeros", max_age=3, max_waiting=6),
    admit.Probability(0.5), admit.Probability(0.5, unadmitted=12), admit.Sketch(2, size=2**21),
    admit.Sketch(3, size=2**21, halve_every=2, unadmitted="zeros"),
]  # fmt: skip
INITIAL = [kvjax.initializers.normal(1.0), jax.nn.initializers.normal(1.0), kvjax.initializers.from_pool(np.eye(3))]
COUNT = ["occurrences", "batch"]
# On a device none or some of the rows there are; 21 take a slab, and as many of their slots.
ON_HOST = [kvjax.storage.Mmap(tempfile.gettempdir()), kvjax.storage.External(Memory())]
STORAGES = [None, *([Small(0), Small(600)] if kvjax.ffi.on_device() else ON_HOST)]
LISTED = 64  # rows of a table that is full at once, and so large that evictions of a few rows are by shortlists
FULL = [
    {},
    {"evict": (evict.MaxAge(3) | evict.LeastFrequent(2) & evict.MinNorm(2.0)).every(2)},
    {"max_capacity": 16, "on_full": "error"},
    {"max_capacity": 16, "on_full": "grow"},
    {"max_capacity": 16, "on_full": "error", "evict": evict.LeastRecent(5).every(2)},
    {"max_capacity": 16, "on_full": "evict"},
    {"max_capacity": 16, "on_full": "evict", "evict": evict.LeastFrequent()},
    {"max_capacity": 16, "on_full": "evict", "evict": (evict.MaxAge(4) | evict.LowestScore(None, first)).every(3)},
    {"max_capacity": LISTED, "on_full": "evict"},
    {"max_capacity": LISTED, "on_full": "evict", "evict": evict.LeastFrequent(1) & evict.MaxAge(1)},
]


def adagrad(value, slot, grad):
    slot = np.full(DIM, 0.1, np.float32) if slot is None else slot
    slot = slot + grad * grad
    scale = np.where(slot > 0, 1 / np.sqrt(slot + np.float32(1e-7)), 0).astype(np.float32)
    return (value - np.float32(LR) * scale * grad).astype(np.float32), slot


@jax.jit
def train(table, keys, grads, step):
    return table.apply(optax.adagrad(LR), kvjax.SparseRows(keys, grads), step=step)[0]


def ids(keys):
    return kvjax.keys(np.array(keys, np.int64))


class TableMachine(RuleBasedStateMachine):
    @initialize(
        admission=st.sampled_from(ADMIT),
        full=st.sampled_from(FULL),
        count=st.sampled_from(COUNT),
        init=st.sampled_from(INITIAL),
        storage=st.sampled_from(STORAGES),
    )
    def make(self, admission, full, count, init, storage):
        self.begin({"admit": admission, "count": count, **full}, init, storage=storage)

    def begin(self, options, init, **where):
        # One name for all examples, so that JAX compiles little; the next table of a name has handles of its own.
        self.table = kvjax.get_table(NAME, dim=DIM, initializer=init, seed=SEED, **options, **where)
        frozen = kvjax.get_table(NAME + "-initial", dim=DIM, initializer=init, seed=SEED)
        cache = {}

        def initial(key):
            if key not in cache:
                cache[key] = np.asarray(frozen.lookup(ids(key)))
            return cache[key]

        self.model = Model(DIM, initial, seed=SEED, **options)
        self.stale = None
        self.gone = []
        self.table.on_evict(self.sink)
        if options.get("max_capacity") == LISTED:
            self.insert([*range(20, 20 + LISTED)])

    def sink(self, keys, values, slots, freqs, versions, reason):
        assert len(keys) and all(len(a) == len(keys) for a in (values, freqs, versions, *slots.values()))
        order = [(mix(k) % 2**16, k) for k in keys.tolist()]
        assert order == sorted(order)
        for row in zip(keys.tolist(), values.tolist(), freqs.tolist(), versions.tolist(), strict=True):
            self.gone.append((reason, row[0], tuple(row[1]), *row[2:]))

    def both(self, write, *model_calls):
        """Does the same to the table and to the model; if one refuses, so does the other."""
        before = self.table
        try:
            for call in model_calls:
                call()
        except Full:
            with pytest.raises(REFUSED, match="max_capacity"):
                finished(write())
            self.table = before.refresh()
            return
        self.stale, self.table = before, jax.block_until_ready(write())

    def values(self, data, keys):
        return data.draw(arrays(np.float32, (len(keys), DIM), elements=SMALL))

    @rule(keys=KEYS)
    def insert(self, keys):
        self.both(lambda: self.table.lookup_or_insert(ids(keys))[1], lambda: self.model.insert(keys))

    @rule(keys=KEYS, data=st.data())
    def upsert(self, keys, data):
        values = self.values(data, keys)
        self.both(lambda: self.table.upsert(ids(keys), values), lambda: self.model.upsert(keys, values))

    @rule(keys=KEYS, data=st.data())
    def assign(self, keys, data):
        values = self.values(data, keys)
        self.both(lambda: self.table.assign(ids(keys), values), lambda: self.model.assign(keys, values))

    @rule(keys=KEYS, data=st.data())
    def add(self, keys, data):
        values = self.values(data, keys)
        self.both(lambda: self.table.add(ids(keys), values), lambda: self.model.add(keys, values))

    @rule(keys=KEYS, data=st.data())
    def accum(self, keys, data):
        old, new = self.values(data, keys), self.values(data, keys)
        exists = data.draw(arrays(bool, len(keys)))
        self.both(
            lambda: self.table.accum(ids(keys), old, new, exists), lambda: self.model.accum(keys, old, new, exists)
        )

    @rule(keys=KEYS, data=st.data(), step=STEP)
    def apply(self, keys, data, step):
        grads = self.values(data, keys)
        self.both(
            lambda: train(self.table, ids(keys), grads, -1 if step is None else step),
            lambda: self.model.apply(keys, grads, adagrad, step),
        )

    @rule(keys=KEYS)
    def remove(self, keys):
        self.both(lambda: self.table.remove(ids(keys)), lambda: self.model.remove(keys))

    @rule(keys=st.lists(KEY, min_size=1, max_size=1), pinned=st.booleans())
    def pin(self, keys, pinned):
        write = self.table.pin if pinned else self.table.unpin
        self.both(lambda: write(ids(keys)), lambda: self.model.pin(keys, pinned))

    @rule(policy=POLICY, step=STEP)
    def evict(self, policy, step):
        self.both(lambda: self.table.evict(policy, step), lambda: self.model.evict(policy, step))

    @rule(policy=POLICY, step=STEP)
    def evict_in_a_dry_run(self, policy, step):
        assert self.table.evict(policy, step, dry_run=True) == self.model.victims(policy, step)

    @rule(policy=POLICY)
    def sink_fails(self, policy):
        def fail(*rows):
            raise KeyError("the disk is full")

        self.table.on_evict(fail)
        try:
            self.table = jax.block_until_ready(self.table.evict(policy))  # nothing to evict
        except REFUSED as error:
            assert "the disk is full" in str(error)
            self.table = self.table.refresh()
        self.table.on_evict(self.sink)

    @rule(n=st.integers(0, 30), by=st.sampled_from(["version", "frequency"]))
    def restrict(self, n, by):
        self.both(lambda: self.table.restrict(n, by), lambda: self.model.restrict(n, by))

    @rule()
    def clear(self):
        self.both(self.table.clear, self.model.clear)

    @rule()
    def clear_slots(self):
        self.both(self.table.clear_slots, self.model.clear_slots)

    @rule(n=st.integers(0, 5000))
    def reserve(self, n):
        self.table = self.table.reserve(n)

    @rule()
    def save_and_load(self):
        copy = self.table.snapshot()
        if self.model.max_capacity and len(copy.rows) > self.model.max_capacity and self.model.on_full != "grow":
            return
        removed = len(copy.rows)
        self.table = self.table.clear().load(copy)
        self.model.stats["removed"] += removed

    @rule()
    def handle_is_dropped(self):
        self.table = kvjax.get_table(NAME)

    @rule(keys=KEYS)
    def stale_handle_is_refused(self, keys):
        if self.stale is not None:
            with pytest.raises((RuntimeError, *REFUSED), match="stale"):
                finished(self.stale.remove(ids(keys)).version)

    @rule(keys=KEYS, data=st.data())
    def reads(self, keys, data):
        mask = data.draw(arrays(bool, len(keys)))
        rows, found = self.table.lookup(ids(keys), return_found=True)
        np.testing.assert_allclose(rows, self.model.lookup(keys), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found, self.model.found(keys))
        for missing in ("init", "zeros"):
            rows = self.table.lookup(ids(keys), mask=mask, missing=missing)
            np.testing.assert_allclose(rows, self.model.lookup(keys, mask, missing), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(self.table.contains(ids(keys)), self.model.found(keys))
        np.testing.assert_array_equal(self.table.frequency(ids(keys)), self.model.frequency(keys))
        np.testing.assert_array_equal(self.table.pinned(ids(keys)), self.model.pinned(keys))
        version = np.minimum(self.model.version_of(keys), 2**31 - 1)
        np.testing.assert_array_equal(self.table.version_of(ids(keys)), version)
        if self.table.stats().slots:
            slots = self.table.slot("sum_of_squares", ids(keys))
            np.testing.assert_allclose(slots, self.model.slot(keys), rtol=1e-5, atol=1e-5)

    @invariant()
    def same_contents(self):
        out = self.table.export()
        keys = out.keys.tolist()
        assert len(self.table) == len(out) == len(self.model.rows)
        np.testing.assert_allclose(out.values, self.model.lookup(keys), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(out.freqs, self.model.frequency(keys))
        np.testing.assert_array_equal(out.versions, self.model.version_of(keys))
        assert out.pinned.tolist() == [self.model.rows[k].pinned for k in keys]
        assert out.last_step == self.model.last_step

    @invariant()
    def same_evictions(self):
        assert [row[:2] for row in sorted(self.gone)] == [row[:2] for row in sorted(self.model.gone)]
        for got, want in zip(sorted(self.gone), sorted(self.model.gone), strict=True):
            assert got[3:] == want[3:]
            np.testing.assert_allclose(got[2], want[2], rtol=1e-5, atol=1e-5)

    @invariant()
    def same_statistics(self):
        stats, model = self.table.stats(), self.model.stats
        evicted = {}
        for reason, *_ in self.model.gone:
            evicted[reason] = evicted.get(reason, 0) + 1
        assert stats.evicted == evicted
        for name in ("inserted", "removed", "refused", "admitted", "occurrences", "over_capacity"):
            assert getattr(stats, name) == model[name], name
        assert stats.unique_ratio == (model["distinct"] / model["occurrences"] if model["occurrences"] else 1.0)
        assert stats.size == len(self.model.rows) and stats.tracked == len(self.model.admission.pending)

    def teardown(self):
        for name in kvjax.tables():
            kvjax.drop_table(name)


TestTable = TableMachine.TestCase
# The emulated device table takes its time over small calls.
TestTable.settings = settings(
    max_examples=25 if kvjax.backends()["cuda"] == "emulated" else examples(7, 80),
    stateful_step_count=25,
)
