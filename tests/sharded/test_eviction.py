"""A full table that is sharded keeps the rows that it would keep in one place."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax import admit, evict
from tests.support import processes
from tests.support.eviction import POLICIES, REFUSED, SGD, filled, first, train
from tests.support.marks import examples, few, few_rows, slow
from tests.support.tables import same_rows


def cases(first, *rest):
    """Everything on four shards, and one case on other numbers of them: what is compiled takes the time."""
    return [*((4, case) for case in (first, *rest)), *((shards, first) for shards in (1, 2, 8))]


def both(make, mesh, shards, dim=1, **options):
    """The same table in one place and sharded."""
    return make(dim, **options), make(dim, **options, mesh=mesh(shards))


def alike(one, sharded):
    same_rows(one.export(slots=True), sharded.export(slots=True))
    for field in ("evicted", "over_capacity", "inserted", "admitted", "refused", "tracked", "last_step"):
        assert getattr(one.stats(), field) == getattr(sharded.stats(), field), field


@pytest.mark.parametrize(
    ("shards", "policy"), few_rows(cases(evict.LeastRecent(5) & evict.LeastFrequent(9), *POLICIES), 8, 12)
)
def test_policies_by_hand(shards, policy, make, mesh):
    one, sharded = (filled(t) for t in both(make, mesh, shards, dim=2))
    for step in (None, 8):
        dry = one.evict(policy, step, dry_run=True)
        assert sharded.evict(policy, step, dry_run=True) == dry
        rows = len(one)
        one, sharded = one.evict(policy, step), sharded.evict(policy, step)
        alike(one, sharded)
        assert rows - len(one) == sum(dry.values())


@pytest.mark.parametrize("shards", few([2, 8]))
def test_restrict_and_pins(shards, make, mesh):
    one, sharded = (filled(t).pin(np.array([3, 4])) for t in both(make, mesh, shards))
    for n, by in ((31, "version"), (20, "frequency"), (10**9, "version"), (0, "version")):
        one, sharded = one.restrict(n, by), jax.jit(lambda t, n=n, by=by: t.restrict(n, by))(sharded)
        alike(one, sharded)


@slow
def test_ties_are_broken_alike(make, mesh):
    """All rows tie, so that the hash alone decides, to its last bit."""
    one, sharded = (t.upsert(np.arange(3000), np.ones((3000, 1))) for t in both(make, mesh, 8))
    for n in (2999, 1500, 1499, 700, 3, 1):
        one, sharded = one.restrict(n), sharded.restrict(n)
        alike(one, sharded)


FULL = [
    {"on_full": "evict"},
    {"on_full": "grow"},
    {"on_full": "evict", "evict": evict.LeastRecent(4)},
    {"on_full": "evict", "evict": evict.MinFrequency(2)},
    {"on_full": "evict", "evict": evict.LeastFrequent(None, 2.0)},
    {"on_full": "evict", "evict": evict.LowestScore(None, first) & ~evict.MaxAge(3) | evict.LeastFrequent(2)},
    {"on_full": "evict", "evict": (evict.MaxAge(3) | evict.LeastFrequent(1)).every(3)},
    {"on_full": "grow", "evict": evict.LeastFrequent(5).every(2)},
]


@pytest.mark.parametrize(("shards", "options"), few_rows(cases(*FULL), 5), ids=str)
def test_training_at_capacity(shards, options, make, mesh):
    one, sharded = both(
        make, mesh, shards, max_capacity=360, initializer=kvjax.initializers.normal(0.1), seed=1, **options
    )
    rng = np.random.default_rng(5)
    step = jax.jit(lambda t, k: t.apply(SGD, kvjax.SparseRows(k, jnp.ones((*k.shape, 1))))[0])
    full = np.arange(360).reshape(-1, 12)
    bursts = rng.zipf(1.3, (4, 12)) % 900  # more than a shortlist of so small a table has
    drops = np.concatenate([rng.integers(360, size=(12, 10)), rng.integers(900, size=(12, 2))], 1)
    for i, batch in enumerate([*full, *bursts, *drops]):
        keys = kvjax.keys(batch)
        one, sharded = step(one, keys), step(sharded, keys)
        if i >= len(full):
            alike(one, jax.block_until_ready(sharded))


def dry_run(table, keys):
    assert table.evict(evict.MinFrequency(1) | evict.LeastRecent(3), dry_run=True).keys() == {
        "MinFrequency(1)", "LeastRecent(3)",
    }  # fmt: skip
    return table


WRITES = {
    "apply": lambda t, keys: train(t, keys),
    "upsert": lambda t, keys: t.upsert(keys, np.ones((len(keys), 1))),
    "add": lambda t, keys: t.add(keys, np.ones((len(keys), 1))),
    "accum": lambda t, keys: t.accum(keys, *np.ones((2, len(keys), 1)), keys % 3 == 0),
    "lookup_or_insert": lambda t, keys: t.lookup_or_insert(keys)[1],
    "pin": lambda t, keys: t.pin(keys[:2]),
    "unpin": lambda t, keys: t.unpin(keys),
    "remove": lambda t, keys: t.remove(keys[:3]),
    "assign": lambda t, keys: t.assign(keys, np.zeros((len(keys), 1))),
    "evict": lambda t, keys: t.evict(evict.LeastFrequent(3) & ~evict.LeastRecent(2)),
    "a dry run": dry_run,
    "restrict": lambda t, keys: t.restrict(9, "frequency"),
    "apply to others": lambda t, keys: train(t, keys + 7),
}


@settings(max_examples=examples(6, 25))
@given(
    writes=st.lists(st.tuples(st.sampled_from(sorted(WRITES)), st.lists(st.integers(-9, 30), min_size=5, max_size=5))),
    capacity=st.sampled_from([None, 8, 13]),
    on_full=st.sampled_from(["evict", "error", "grow"]),
    policy=st.sampled_from([None, evict.LeastFrequent(), evict.MinFrequency(2) | evict.LeastRecent(2)]),
    admission=st.sampled_from([None, admit.MinCount(2), admit.MinCount(2, unadmitted=-3), admit.Probability(0.5)]),
    shards=st.sampled_from([2, 4]),
)
def test_any_sequence_of_writes(writes, capacity, on_full, policy, admission, shards):
    if len(jax.devices()) < 4:
        pytest.skip("wants 4 devices")
    if capacity is None:
        on_full, policy = "grow", None if policy is None else evict.MinFrequency(2).every(2)
    elif on_full != "evict":
        policy = None if policy is None else evict.LeastFrequent(2).every(2)
    devices = jax.make_mesh((shards,), ("x",), devices=jax.devices()[:shards])
    options = {"dim": 1, "max_capacity": capacity, "on_full": on_full, "evict": policy, "admit": admission, "seed": 1}
    try:
        one, sharded = kvjax.get_table("one", **options), kvjax.get_table("sharded", **options, mesh=devices)
        for name, keys in writes:
            keys, failed = np.array(keys, np.int64), []
            for table in (one, sharded):
                try:
                    table = jax.block_until_ready(WRITES[name](table, keys))
                    failed.append(False)
                except REFUSED as error:
                    assert "max_capacity" in str(error)
                    failed.append(True)
                one, sharded = sharded, table.refresh()
            assert failed[0] == failed[1]
            alike(one, sharded)
            asked = np.arange(-12, 40)
            np.testing.assert_array_equal(one.lookup(asked), sharded.lookup(asked))
    finally:
        for name in kvjax.tables():
            kvjax.drop_table(name)


@pytest.mark.parametrize("write", few(["apply", "upsert", "add", "accum", "lookup_or_insert", "pin"], "apply", "accum"))
def test_on_full_error_is_about_all_shards_and_changes_nothing(write, make, mesh):
    table = make(1, max_capacity=6, on_full="error", mesh=mesh(4)).upsert(np.arange(5), np.ones((5, 1)))
    table = WRITES[write](table, np.array([1, 7]))  # the sixth, on whatever shard
    before = table.export()
    with pytest.raises(REFUSED, match=r"max_capacity=6 rows, got [78]"):
        jax.block_until_ready(WRITES[write](table, np.array([11, 13])))
    same_rows(before, table.refresh().export())
    assert int(table.refresh().version) == int(table.version)


def test_what_may_go_is_counted_on_all_shards(make, mesh):
    one, sharded = (
        t.upsert(np.arange(6), np.ones((6, 1))).pin(np.array([0, 1, 2]))
        for t in both(make, mesh, 4, max_capacity=6, on_full="evict")
    )
    for table in (one, sharded):
        with pytest.raises(REFUSED, match=r"got 10 of which 3 may go"):
            jax.block_until_ready(table.upsert(np.arange(10, 14), np.ones((4, 1))))
    alike(one.refresh(), sharded.refresh())
    alike(*(t.refresh().upsert(np.arange(10, 13), np.ones((3, 1))) for t in (one, sharded)))


@slow
def test_copies_choose_alone_and_alike(make, mesh):
    options = {"max_capacity": 9, "on_full": "evict", "evict": evict.LeastFrequent(3)}
    one, copied = make(1, **options), make(1, **options, mesh=mesh(4), replicated=True)
    grid = make(1, **options, mesh=mesh(data=2, model=4), axis="model")
    gone = [[], [], []]
    for table, keys in zip((one, copied, grid), gone, strict=True):
        table.on_evict(lambda k, *rest, keys=keys: keys.extend(k.tolist()))
    for seed in range(5):
        keys = np.random.default_rng(seed).integers(0, 30, 8)
        one, copied, grid = (jax.block_until_ready(train(t, keys)) for t in (one, copied, grid))
        alike(one, copied)
        alike(one, grid)
        policy = evict.MaxAge(1) | evict.LeastFrequent(2)
        dry = one.evict(policy, dry_run=True)
        assert copied.evict(policy, dry_run=True) == grid.evict(policy, dry_run=True) == dry
    assert len(gone[0]) > 9 and sorted(gone[0]) == sorted(gone[1]) == sorted(gone[2])


# ---- functions of the user's


@pytest.mark.parametrize("shards", few([2, 8], 0))
def test_sinks_get_each_row_once(shards, make, mesh):
    got = {"one": [], "sharded": []}

    def sink(name):
        return lambda keys, values, slots, freqs, versions, reason: got[name].extend(
            zip(
                keys.tolist(),
                values[:, 0].tolist(),
                freqs.tolist(),
                versions.tolist(),
                [reason] * len(keys),
                strict=True,
            )
        )

    one, sharded = both(make, mesh, shards, max_capacity=20, on_full="evict", evict=evict.MinFrequency(2))
    one.on_evict(sink("one"))
    sharded.on_evict(sink("sharded"))
    for seed in range(6):
        keys = np.random.default_rng(seed).integers(0, 60, 14)
        one, sharded = train(one, keys), jax.block_until_ready(train(sharded, keys))
    assert len(got["one"]) > 20 and sorted(got["one"]) == sorted(got["sharded"])


def test_a_dry_run_changes_nothing_on_any_shard(make, mesh):
    def score(rows):
        if 3 in rows.keys.tolist():
            raise RuntimeError("not key 3")
        return rows.keys

    table = filled(make(1, mesh=mesh(4))).on_evict(lambda *rows: 1 / 0)  # is not called
    before, stats = table.export(slots=True), table.stats()
    with pytest.raises(REFUSED, match="not key 3"):
        table.evict(evict.MinScore(5, score), dry_run=True)
    assert table.evict(evict.LeastRecent(7), dry_run=True) == {"LeastRecent(7)": 7}
    same_rows(before, table.export(slots=True))
    assert table.stats() == stats and int(table.version) == int(table.refresh().version)
    assert len(table.on_evict(None).evict(evict.LeastRecent(7))) == len(before) - 7


@pytest.mark.parametrize(
    ("write", "function"),
    few_rows([*itertools.product(["apply", "upsert", "evict"], ["sink", "score"]), ("restrict", "sink")], 1),
)
def test_a_function_that_fails_on_one_shard_changes_nothing_on_any(function, write, make, mesh):
    fails = [True]

    def refuse(keys):
        if fails[0] and 3 in keys.tolist():
            raise RuntimeError("not key 3")

    def score(rows):
        refuse(rows.keys)
        return rows.keys

    policy = evict.LowestScore(5, score) if function == "score" else evict.LeastFrequent(39)
    table = filled(make(1, max_capacity=40, on_full="evict", evict=policy, mesh=mesh(4)))
    before = table.export(slots=True)
    if function == "sink":
        table.on_evict(lambda keys, *rest: refuse(keys))
    writes = WRITES | {"evict": lambda t, keys: t.evict(policy), "restrict": lambda t, keys: t.restrict(1)}
    for _ in range(2):
        with pytest.raises(REFUSED, match="not key 3"):
            jax.block_until_ready(writes[write](table, np.array([50, 51])))
        table = table.refresh()
        same_rows(before, table.export(slots=True))
    fails[0] = False
    assert len(jax.block_until_ready(writes[write](table, np.array([50, 51])))) < 40


# ---- admission


@pytest.mark.parametrize(
    ("shards", "admission", "capacity"),
    few_rows(
        [
            *((shards, admit.MinCount(3, unadmitted=-1), 12) for shards in (1, 2, 4, 8)),
            (4, admit.MinCount(3, unadmitted=-1), None),
            (4, admit.MinCount(3), None),
            (4, admit.MinCount(3, unadmitted="zeros"), 12),
            (4, admit.Sketch(3, size=2**21, halve_every=4, unadmitted=7), None),
            (4, admit.Sketch(3, size=2**21, halve_every=4, unadmitted="zeros"), 12),
            (4, admit.Probability(0.4, unadmitted=7), 12),
        ],
    ),
)
def test_admission(shards, admission, capacity, make, mesh):
    full = {} if capacity is None else {"max_capacity": capacity, "on_full": "evict"}
    init = kvjax.initializers.normal(0.5) if capacity else jax.nn.initializers.normal(0.5)  # ours, and one of JAX
    one, sharded = both(make, mesh, shards, dim=3, admit=admission, initializer=init, seed=2, **full)
    tx = optax.adagrad(0.1)
    rng = np.random.default_rng(1)
    for _ in range(6):
        keys = rng.zipf(1.4, 20) % 30
        rows = rng.normal(size=(20, 3)).astype(np.float32)
        one, sharded = (t.apply(tx, kvjax.SparseRows(keys, rows))[0] for t in (one, sharded))
        a, b = one.export(slots=True), sharded.export(slots=True)
        for name in ("keys", "freqs", "versions", "pinned"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        np.testing.assert_allclose(a.values, b.values, rtol=2e-5, atol=2e-6)
        for field in ("evicted", "admitted", "refused", "tracked", "inserted"):
            assert getattr(one.stats(), field) == getattr(sharded.stats(), field), field
        asked = np.arange(-3, 40)
        for missing in ({}, {"missing": "init"}, {"missing": "zeros"}, {"pad_id": 5}):
            np.testing.assert_allclose(
                one.lookup(asked, **missing), sharded.lookup(asked, **missing), rtol=2e-5, atol=2e-6
            )
        found = [t.lookup(asked, return_found=True)[1] for t in (one, sharded)]
        np.testing.assert_array_equal(*found)


@slow
def test_the_shared_row_is_looked_up_inside_shard_map(make, mesh):
    axes = mesh(4)
    one, sharded = both(make, mesh, 4, dim=2, admit=admit.MinCount(3, unadmitted=-1), initializer=0.5)
    one, sharded = (train(train(t, np.arange(8)), np.arange(4)) for t in (one, sharded))
    keys = kvjax.keys(np.arange(8))
    for check in (True, False):
        look = jax.shard_map(
            lambda t, k: t.lookup(k), mesh=axes, check_vma=check,
            in_specs=(jax.P(), jax.P("x")), out_specs=jax.P("x"),
        )  # fmt: skip
        np.testing.assert_array_equal(jax.jit(look)(sharded, keys), one.lookup(keys))


@slow
def test_eviction_inside_shard_map(make, mesh):
    axes = mesh(4)
    one, sharded = both(make, mesh, 4, max_capacity=10, on_full="evict", evict=evict.LeastFrequent(3))
    for check in (True, False):

        @jax.jit
        def step(table, keys, check=check):
            def body(table, keys):
                return table.apply(SGD, kvjax.SparseRows(keys, jnp.ones((*keys.shape, 1))))[0].restrict(8)

            specs = {"mesh": axes, "in_specs": (jax.P(), jax.P("x")), "out_specs": jax.P(), "check_vma": check}
            return jax.shard_map(body, **specs)(table, keys)

        for seed in range(3):
            keys = np.random.default_rng(seed).permutation(40)[:8]
            one, sharded = train(one, keys).restrict(8), step(sharded, kvjax.keys(keys))
            alike(one, sharded)


# ---- several processes


def choose_together(devices, n):
    """Prints the rows that the shards of this process keep and those that its sink got; then one sink fails."""
    mesh = jax.make_mesh((devices * n,), ("x",))
    table = kvjax.get_table("t", dim=1, max_capacity=20, on_full="evict", evict=evict.LeastFrequent(2), mesh=mesh)
    gone = []
    table.on_evict(lambda keys, *rest: gone.extend(keys.tolist()))
    for keys in _batches():
        table = jax.block_until_ready(train(table, keys))

    def rows(table):
        parts = [kvjax.ffi.host.export_table("t", i, int(table.version), False) for i in table.spec.kept]
        return [int(key) for part in parts for key in part["keys"]]

    before = rows(table)
    table.on_evict((lambda *rows: 1 / 0) if jax.process_index() == 1 else None)
    with pytest.raises(REFUSED, match="division" if jax.process_index() == 1 else "a failure in another process"):
        jax.block_until_ready(table.restrict(1))
    table = table.refresh()
    assert rows(table) == before
    dry = table.evict(POLICY, dry_run=True)
    table = jax.block_until_ready(table.on_evict(None).restrict(9))
    print(json.dumps({"before": before, "gone": gone, "dry": dry, "after": rows(table)}))


POLICY = evict.MinFrequency(3) | evict.LeastRecent(4)


def _batches():
    return [np.random.default_rng(seed).integers(0, 60, 14) for seed in range(6)]


@slow
def test_processes_choose_together(make):
    one, gone = make(1, max_capacity=20, on_full="evict", evict=evict.LeastFrequent(2)), []
    one.on_evict(lambda keys, *rest: gone.extend(keys.tolist()))
    for keys in _batches():
        one = jax.block_until_ready(train(one, keys))
    outputs = processes.run(choose_together, 2, 2, n=2, devices=2)
    told = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]

    def all_of(name):
        return sorted(key for t in told for key in t[name])

    assert all_of("before") == sorted(one.export().keys.tolist())
    assert all_of("gone") == sorted(gone)
    assert [t["dry"] for t in told] == [one.evict(POLICY, dry_run=True)] * 2
    assert all_of("after") == sorted(one.restrict(9).export().keys.tolist())
