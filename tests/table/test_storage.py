"""Where rows live: the same table in memory and in a file."""

import os
import tempfile

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import optax
import pytest

import kvjax
from kvjax import ffi
from tests.support.marks import examples, few, wide_is_slow

Host, Mmap = kvjax.storage.Host, kvjax.storage.Mmap


def rows_of(table):
    out = table.export(slots=True)
    arrays = {name: getattr(out, name) for name in ("keys", "values", "freqs", "versions")} | out.slots
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


# ---- one table, two storages ---------------------------------------------------------------------------------


keys_of = st.lists(st.sampled_from([0, -1, 7, 2**40, -(2**63), 2**63 - 1, *range(100, 180)]), max_size=80)


@pytest.mark.cpu_table
@wide_is_slow
@pytest.mark.parametrize("other", few([Host(huge_pages=True), "mmap"], 1))
def test_results_do_not_depend_on_the_storage(other, x64, promotion):
    tx = optax.adam(0.1)

    def act(table, operation, keys, values):
        match operation:
            case "train":
                return table.apply(tx, kvjax.SparseRows(keys, jax.numpy.asarray(values)))[0]
            case "upsert":
                return table.upsert(keys, values)
            case "insert":
                return table.lookup_or_insert(keys)[1]
            case "remove":
                return table.remove(keys)
            case "clear":
                return table.clear()

    operations_of = st.sampled_from(["train", "upsert", "insert", "remove", "clear"])

    @hypothesis.settings(max_examples=examples(4, 10))
    @hypothesis.given(st.lists(st.tuples(operations_of, keys_of), max_size=8))
    def run(operations):
        with tempfile.TemporaryDirectory() as folder:
            storage = Mmap(folder) if other == "mmap" else other
            # dim 10,000: 52 rows to a slab, so that few keys need several
            options = {"dim": 10_000, "initializer": kvjax.initializers.uniform(), "seed": 3}
            tables = [kvjax.get_table("a", **options), kvjax.get_table("b", storage=storage, **options)]
            for operation, ids in operations:
                keys = kvjax.keys(np.array(ids, np.int64))
                values = np.arange(len(ids), dtype=np.float32)[:, None] + np.linspace(0, 1, 10_000, dtype=np.float32)
                tables = [act(table, operation, keys, values) for table in tables]
                a, b = (np.asarray(table.lookup(keys)) for table in tables)
                np.testing.assert_array_equal(a, b)
            assert rows_of(tables[0]) == rows_of(tables[1])
            kvjax.drop_table("a")
            kvjax.drop_table("b")

    run()


@pytest.mark.cpu_table
def test_a_checkpoint_is_restored_into_any_storage(make, tmp_path, promotion):
    import orbax.checkpoint as ocp

    keys = np.arange(50)
    table = make(8, storage=Mmap(tmp_path))
    table, _ = table.apply(optax.adam(0.1), kvjax.SparseRows(kvjax.keys(keys), jax.numpy.ones((50, 8))))
    before, name = rows_of(table), table.name

    def restore(target):
        args = ocp.args.Composite(tables=kvjax.orbax.TableRestore({name: target}))
        return rows_of(manager.restore(0, args=args)["tables"][name])

    with ocp.CheckpointManager(tmp_path / "saved") as manager:
        manager.save(0, args=ocp.args.Composite(tables=kvjax.orbax.TableSave({name: table})))
        manager.wait_until_finished()
        assert restore(None) == before  # into the table that is there, wherever its rows are
        assert kvjax.get_table(name).spec.storage == Mmap(tmp_path)
        kvjax.drop_table(name)
        assert restore(None) == before
        assert kvjax.get_table(name).spec.storage == Host()
        kvjax.drop_table(name)
        seed = table.spec.seed
        assert restore(kvjax.get_table(name, dim=8, seed=seed, storage=Mmap(tmp_path))) == before


# ---- files ---------------------------------------------------------------------------------------------------


@pytest.mark.cpu_table
@pytest.mark.parametrize("name", ["a/b", "two\nlines", "../../up", "名前", "x" * 1000])
def test_any_name_has_a_file(name, tmp_path):
    table = kvjax.get_table(name, dim=2, storage=Mmap(tmp_path)).upsert(np.array([1]), [[1.0, 2.0]])
    assert table.lookup(1).tolist() == [1.0, 2.0]
    assert list(tmp_path.iterdir()) == []  # the file has no name, so nothing is left if the process is killed


@pytest.mark.cpu_table
def test_a_folder_that_is_none_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    cases = {"no/such": ("get_table", "No such file or directory"), "file": ("get_table", "Not a directory")}
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        cases["locked"] = ("storage", "Permission denied")
    for folder, (op, reason) in cases.items():
        with pytest.raises(ValueError, match=rf"table 't', {op}: .*{tmp_path / folder}': {reason}; make"):
            kvjax.get_table("t", dim=2, storage=Mmap(tmp_path / folder))
        with pytest.raises(KeyError):
            kvjax.get_table("t")
    kvjax.get_table("t", dim=2, storage=Mmap(tmp_path))  # the name is still free


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="wants Linux's /proc")
def test_tiny_tables_take_little_memory(make):
    """A slab is 2 MiB of addresses, of which only the pages that are written to are memory."""
    if ffi.is_device(make(1).spec.storage.backend):
        pytest.skip("a GPU's slabs are memory")

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    rows = make(8).upsert(np.arange(100), np.ones((100, 8))).export()
    tables = [make(8).load(rows) for _ in range(10)]
    before = resident()
    tables += [make(8).load(rows) for _ in range(40)]
    assert (resident() - before) / 40 < 100 * 1024 and len(tables[-1]) == 100
