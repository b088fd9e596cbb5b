"""Calls that no program of kvjax makes, as a damaged exported program may: numbers out of range, and calls of a step or
a planned write in another order or of other sizes. Each is refused, and the table stays as it is."""

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.ffi import host
from tests.support.marks import slow

WORD, FALSE, TRUE = jax.ShapeDtypeStruct((), np.uint32), np.bool_(False), np.bool_(True)
REFUSED = (ValueError, RuntimeError)
DIM = 4


def words(*shape):
    return jax.ShapeDtypeStruct(shape, np.uint32)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)


class Calls:
    """The calls of one table, as its programs make them."""

    def __init__(self, table):
        self.name = table.name
        self.version = np.uint32(table.version)

    def __call__(self, target, results, *operands, **attributes):
        call = jax.ffi.ffi_call(f"kvjax_{target}", results, has_side_effect=True)
        return jax.block_until_ready(call(*operands, **{"table": self.name, **attributes}))

    def gradients(self, n):
        keys = np.arange(n, dtype=np.int64).view(np.uint32).reshape(n, 2)
        canary = np.array([host.CANARY], np.uint32)
        return keys, np.ones(n, np.int32), canary, np.ones((n, DIM), np.float32)

    def write(self, phase, n, op="upsert"):
        keys, _, _, rows = self.gradients(n)
        given = self.version, keys, np.zeros(0, bool), rows, np.zeros((0, DIM), np.float32)
        return self("write_rows", WORD, *given, phase=phase, op=op, narrow=FALSE)

    def write_keys(self, phase, n, op):
        given = self.version, self.gradients(n)[0], np.zeros(0, bool), np.zeros((0, DIM), np.float32)
        return self("write_keys", WORD, *given, phase=phase, op=op, narrow=FALSE)

    def route(self, shards, capacity):
        n, keys = 3, self.gradients(3)[0]
        results = words(n, 2), ints(n), ints(max(shards, 0) + 1), ints(n), ints(n), WORD
        given = keys, np.zeros(0, bool), np.zeros(0, np.int32), np.int32(0)
        return self("route", results, *given, shards=np.int64(shards), round_capacity=np.int64(capacity))[-1]

    def receive(self, n=8, senders=1, number=0, rounds=1, initial=0):
        given = np.int32(number), np.int32(rounds), *self.gradients(n), np.zeros((initial, DIM), np.float32)
        return self("receive", WORD, self.version, *given, narrow=FALSE, senders=np.int64(senders), sharded=TRUE)

    def plan_step(self, width=host.SUMMARY_WORDS):
        given = self.version, np.full(2, 0xFFFFFFFF, np.uint32), np.uint32(0), np.zeros((0, 2), np.uint32)
        program = np.zeros(0, np.int32)
        return self("plan_step", words(width, 2), *given, slots="", program=program, facts=FALSE)

    def prepare(self, shards=1, shard=0, width=host.SUMMARY_WORDS):
        results = words(host.TALLY_WORDS), WORD, WORD
        given = self.version, np.zeros((max(shards, 1), width, 2), np.uint32), np.int32(shard)
        return self("prepare", results, *given, op="apply", shards=np.int64(shards))[-1]

    def commit_step(self):
        return self("commit_step", (WORD, ints(), words(2)), self.version)

    def begin(self, n, slots=""):
        results = WORD, words(n, 2), ints(), words(2), jax.ShapeDtypeStruct((DIM,), np.float32), words(0, 9)
        given = np.full(2, 0xFFFFFFFF, np.uint32), np.zeros((0, DIM), np.float32)
        return self(
            "begin_apply", results, self.version, *self.gradients(n), *given, slots=slots, narrow=FALSE, reports=FALSE
        )

    def gather(self, begun, n, targets, slots="", widths=()):
        floats = jax.ShapeDtypeStruct((n, DIM), np.float32)
        slots_out = [jax.ShapeDtypeStruct((n, width), np.float32) for width in widths]
        results = floats, floats, jax.ShapeDtypeStruct((n,), np.bool_), words(n, 2), words(0, 9), *slots_out
        keys, _, _, rows = self.gradients(n)
        given = begun[0], targets, keys, rows, begun[4], np.zeros((0, 9), np.uint32), np.int32(0), np.int32(n)
        return self("gather", results, *given, slots=slots)

    def bag_sum(self, dim):
        given = np.zeros(8, np.int32), np.ones(8, np.float32), np.ones((8, DIM), np.float32)
        return self("bag_sum", jax.ShapeDtypeStruct((1, dim), np.float32), *given)

    def plan_of_slots(self, slots):
        return self.begin(8, slots)


def stepped(calls, *then):
    calls.receive()
    calls.plan_step()
    return [each() for each in then][-1]


def planned(calls, n, plan="upsert"):
    assert int(calls.write("plan", n, plan)) == 0
    return calls


def gathered(calls, slots="", other="", widths=(), row=None):
    begun = calls.begin(8, slots)
    targets = np.asarray(begun[1]) if row is None else np.stack([np.full(8, row), np.arange(8)], 1).astype(np.uint32)
    return calls.gather(begun, 8, targets, other, widths)


CASES = {
    "rounds of no keys": lambda c: c.route(1, 0),
    "no shards": lambda c: c.route(0, 8),
    "less than no shards": lambda c: c.route(-1, 8),
    "no senders": lambda c: c.receive(senders=0),
    "senders with unlike parts": lambda c: c.receive(senders=3),
    "another number of senders": lambda c: (c.receive(senders=8, rounds=2), c.receive(number=1, rounds=2))[-1],
    "a second round without a first": lambda c: c.receive(number=1, rounds=2),
    "a round after the only one": lambda c: (c.receive(), c.receive(number=1, rounds=2))[-1],
    "a round after the plan": lambda c: stepped(c, lambda: c.receive(number=1)),
    "too few initial rows": lambda c: c.receive(n=16, initial=1),
    "a step that nobody has sent": lambda c: c.plan_step(),
    "a summary without words": lambda c: (c.receive(), c.plan_step(0))[-1],
    "a long summary": lambda c: (c.receive(), c.plan_step(1 << 16))[-1][0, 0],
    "summaries of no shards": lambda c: stepped(c, lambda: c.prepare(0)),
    "summaries of no words": lambda c: stepped(c, lambda: c.prepare(2, 0, 1)),
    "a shard that there is not": lambda c: stepped(c, lambda: c.prepare(2, 1 << 28)),
    "a step prepared twice": lambda c: stepped(c, c.prepare, c.prepare),
    "a commit of what is not prepared": lambda c: stepped(c, c.commit_step),
    "a step in chunks planned as a shard's": lambda c: (c.begin(8), c.plan_step())[-1][0, 0],
    "a step in chunks committed as a shard's": lambda c: (c.begin(8), c.commit_step())[-1],
    "a commit of fewer keys": lambda c: planned(c, 1000).write("commit", 1),
    "a commit of more keys": lambda c: planned(c, 1).write("commit", 1000),
    "a commit of another write": lambda c: planned(c, 8).write("commit", 8, "add"),
    "a pin of what is to be assigned": lambda c: planned(c, 1000, "assign").write_keys("commit", 1000, "pin"),
    "slots of another width": lambda c: gathered(c, "a|float32[64]|256", "a|float32[1]|4", (1,)),
    "slots of another size than their width": lambda c: gathered(c, *2 * ("a|float32[1]|4",), (2,)),
    "slots that are not there": lambda c: gathered(c, *2 * ("a|float32[1]|4",)),
    "bags of another dim": lambda c: c.bag_sum(DIM + 1),
    "an attribute that is not there": lambda c: c("clear", WORD, c.version, phase="whole"),
    "a table of another type": lambda c: c(
        "clear", WORD, c.version, phase="whole", slots_only=FALSE, table=np.int64(7)
    ),
    "a row that there is not": lambda c: gathered(c, row=1 << 20),
    "a slot of negative width": lambda c: c.plan_of_slots("a|x|-4"),
    "a slot wider than memory": lambda c: c.plan_of_slots("a|x|18446744073709551615"),
    "slots without parts": lambda c: c.plan_of_slots("7"),
}


@pytest.mark.cpu_table
@pytest.mark.parametrize("case", CASES)
def test_calls_that_no_program_makes_are_refused(case, make):
    table = make(DIM).upsert(np.arange(8), np.full((8, DIM), 2.0, np.float32))
    jax.block_until_ready(table)
    try:
        status = CASES[case](Calls(table))
    except REFUSED as error:
        assert "kvjax: " in str(error)
    else:
        assert int(jnp.ravel(jnp.asarray(status))[0]) != 0  # the number of a failure, which an agreement would raise
    live = table.refresh()
    assert live.version == table.version and len(live) == 8
    np.testing.assert_array_equal(live.lookup(np.arange(8)), np.full((8, DIM), 2.0))
    assert len(live.upsert([100], np.ones((1, DIM), np.float32))) == 9


@slow
@pytest.mark.parametrize("write", ["upsert", "pin", "add", "apply", "partition", "chunks"])
def test_of_two_threads_with_one_handle_one_writes_on_a_mesh_of_one_device(write, make, mesh):
    sizes = 3000, 3000
    batches = [(np.arange(n) + 1_000_000 * i, np.full((n, DIM), i + 1.0, np.float32)) for i, n in enumerate(sizes)]
    sort = optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.sort(x, -1), g))  # no row program
    writes = {
        "upsert": lambda t, k, r: t.upsert(k, r),
        "pin": lambda t, k, r: t.pin(k),
        "add": lambda t, k, r: t.add(k, r),
        "apply": lambda t, k, r: t.apply(optax.sgd(1.0), kvjax.SparseRows(k, -r))[0],
        "partition": lambda t, k, r: optax.apply_updates(
            {"t": t}, together.update({"t": kvjax.SparseRows(k, -r)}, state, {"t": t})[0]
        )["t"],
        "chunks": lambda t, k, r: t.apply(sort, kvjax.SparseRows(k, r))[0],
    }
    table = make(DIM, mesh=mesh(1))
    together = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
    state = together.init({"t": table})
    for keys, rows in batches:  # compiled
        table = jax.block_until_ready(writes[write](table, keys, rows))
    for _ in range(20):
        table, done, start = jax.block_until_ready(table.refresh().clear()), [], threading.Barrier(2)

        def run(i, table=table, done=done, start=start):
            start.wait()
            with contextlib.suppress(REFUSED):
                written = jax.block_until_ready(writes[write](table, *batches[i]))
                done.extend([i] if written.version != table.version else [])  # a device says later that it is refused

        threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with contextlib.suppress(REFUSED):
            kvjax.stats()
        live = table.refresh()
        assert len(done) <= 1 and len(live) == sum(sizes[i] for i in done)
        for i in done:
            keys, rows = batches[i]
            assert live.contains(keys).all()
            if write != "pin":
                np.testing.assert_array_equal(live.lookup(keys), rows)
