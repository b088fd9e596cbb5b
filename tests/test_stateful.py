"""Random sequences of operations give what the reference model gives."""

import jax
import numpy as np
import optax
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from model import Model

import kvjax

AWKWARD = [0, 1, -1, 2**31 - 1, -(2**31), 2**32 + 1, 2**40 + 7, 2**63 - 1, -(2**63), -2, -3]
# Few distinct keys, so that sequences meet; the awkward ones and some that crowd one spot of the index.
# Four sizes, because XLA compiles for each.
KEYS = st.sampled_from([0, 1, 6, 24]).flatmap(
    lambda n: st.lists(st.sampled_from([*AWKWARD, *range(10, 40)]), min_size=n, max_size=n)
)
SMALL = st.floats(-4, 4, width=16)
DIM = 3
LR = 0.5


def adagrad(value, slot, grad):
    slot = np.full(DIM, 0.1, np.float32) if slot is None else slot
    slot = slot + grad * grad
    scale = np.where(slot > 0, 1 / np.sqrt(slot + np.float32(1e-7)), 0).astype(np.float32)
    return (value - np.float32(LR) * scale * grad).astype(np.float32), slot


class TableMachine(RuleBasedStateMachine):
    counter = 0

    @initialize()
    def make(self):
        TableMachine.counter += 1
        self.name = f"machine{TableMachine.counter}"
        init = kvjax.initializers.normal(1.0)
        self.table = kvjax.get_table(self.name, dim=DIM, initializer=init, seed=7)
        frozen = kvjax.get_table(self.name + "-initial", dim=DIM, initializer=init, seed=7)
        cache = {}

        def initial(key):
            if key not in cache:
                cache[key] = np.asarray(frozen.lookup(np.int64(key)))
            return cache[key]

        self.model = Model(DIM, initial)
        self.stale = None

    def write(self, new):
        self.stale, self.table = self.table, new

    @rule(keys=KEYS)
    def insert(self, keys):
        rows, new = self.table.lookup_or_insert(np.array(keys, np.int64))
        self.write(new)
        self.model.insert(keys)
        np.testing.assert_allclose(rows, self.model.lookup(keys), rtol=1e-5, atol=1e-5)

    @rule(keys=KEYS, data=st.data())
    def upsert(self, keys, data):
        values = data.draw(arrays(np.float32, (len(keys), DIM), elements=SMALL))
        self.write(self.table.upsert(np.array(keys, np.int64), values))
        self.model.upsert(keys, values)

    @rule(keys=KEYS, data=st.data(), step=st.one_of(st.none(), st.integers(0, 2**40)))
    def apply(self, keys, data, step):
        grads = data.draw(arrays(np.float32, (len(keys), DIM), elements=SMALL))
        sparse = kvjax.SparseRows(np.array(keys, np.int64), grads)
        new, _ = self.table.apply(optax.adagrad(LR), sparse, step=step)
        self.write(new)
        self.model.apply(keys, grads, adagrad, step)

    @rule(keys=KEYS)
    def remove(self, keys):
        self.write(self.table.remove(np.array(keys, np.int64)))
        self.model.remove(keys)

    @rule()
    def clear(self):
        self.write(self.table.clear())
        self.model.clear()

    @rule()
    def clear_slots(self):
        self.write(self.table.clear_slots())
        self.model.clear_slots()

    @rule()
    def save_and_load(self):
        copy = self.table.snapshot()
        self.write(self.table.clear())
        self.write(self.table.load(copy))

    @rule()
    def handle_is_dropped(self):
        self.table = kvjax.get_table(self.name)

    @rule(keys=KEYS)
    def stale_handle_is_refused(self, keys):
        if self.stale is not None:
            try:
                jax.block_until_ready(self.stale.upsert(np.array(keys, np.int64), np.ones((len(keys), DIM))))
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                assert "stale" in str(error)
            else:
                raise AssertionError("a stale handle was accepted")

    @rule(keys=KEYS)
    def reads(self, keys):
        ids = np.array(keys, np.int64)
        rows, found = self.table.lookup(ids, return_found=True)
        np.testing.assert_allclose(rows, self.model.lookup(keys), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found, self.model.found(keys))
        np.testing.assert_array_equal(self.table.contains(ids), self.model.found(keys))
        np.testing.assert_array_equal(self.table.frequency(ids), self.model.frequency(keys))
        version = np.minimum(self.model.version_of(keys), 2**31 - 1)
        np.testing.assert_array_equal(self.table.version_of(ids), version)

    @invariant()
    def same_contents(self):
        out = self.table.export()
        assert len(self.table) == len(out) == len(self.model.rows)
        values = self.model.lookup(out.keys.tolist())
        np.testing.assert_allclose(out.values, values, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(out.freqs, self.model.frequency(out.keys.tolist()))
        np.testing.assert_array_equal(out.versions, self.model.version_of(out.keys.tolist()))

    def teardown(self):
        kvjax.drop_table(self.name)
        kvjax.drop_table(self.name + "-initial")


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
