"""Exported programs run without the code that they were made of, and read what the tables hold now."""

import dataclasses
import gc
import json
import pickle
import subprocess
import sys
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kvjax
from kvjax._export.program import _HEAD, ProgramError
from kvjax._process import PROCESS
from tests.support.marks import few, slow
from tests.support.tables import AWKWARD

SHAPES = (None, "b, ...")


def score(params, keys):
    return params["scale"] * jnp.sum(params["table"].lookup(keys), -1)


def read_all(table, keys):
    return table.lookup(keys)


@pytest.fixture
def table(make):
    return make(2, initializer=0.5).upsert(AWKWARD, np.arange(16.0).reshape(8, 2))


@slow
def test_follows_its_tables(table):
    """Any batch, whatever has been written since; as bytes, for each platform."""
    program = kvjax.export(score, {"scale": np.float32(2), "table": table}, kvjax.keys([1]), shapes=SHAPES)
    program = pickle.loads(pickle.dumps(kvjax.Program.deserialize(program.serialize())))
    assert program.platforms == ("cpu", "cuda") and program.tables[table.name].dim == 2
    assert program.inputs == {"0/scale": "float32[]", "1/0": "uint32[b,2]"}
    params = {"scale": np.float32(10)}
    assert program(params, kvjax.keys(AWKWARD[:3])).tolist() == [10.0, 50.0, 90.0]
    table = table.upsert(AWKWARD[0], [4.0, 4.0])
    for rest in (params | {"table": table}, params | {"table": None}, kvjax.orbax.split(params | {"table": table})[0]):
        assert program(rest, kvjax.keys(AWKWARD[:1])).tolist() == [80.0]
    assert program(params, kvjax.keys([77])).tolist() == [10.0]


class Net(nn.Module):
    @nn.compact
    def __call__(self, users, watched, x):
        e = kvjax.flax.Embed("user", features=4, pad_id=-1)(users)
        bag = kvjax.flax.EmbedBag("video", features=4, pad_id=-1)(watched)
        return nn.Dense(1)(jnp.concatenate([e, bag, x], -1))[:, 0]


_SERVER = """
import sys
import numpy as np
import kvjax
kvjax.checkpoint.restore(sys.argv[1])
program = kvjax.Program.deserialize(open(sys.argv[2], "rb").read())
given = np.load(sys.argv[3])
params = {"params": {"Dense_0": {"kernel": given["kernel"], "bias": given["bias"]}}}
for n in (5, 1, 3):
    got = program(params, kvjax.keys(given["users"][:n]), kvjax.keys(given["watched"][:n]), given["x"][:n])
    np.testing.assert_allclose(got, given["want"][:n], rtol=1e-5)
assert "flax" not in sys.modules
"""


@slow
@pytest.mark.filterwarnings("ignore:.*want an init outside of jit")
def test_in_a_process_without_the_model(tmp_path, promotion):
    net = Net()
    users, watched = np.array([7, -1, 2**40, 9, 8]), np.array([[1, -1], [2, 1], [-1, -1], [3, 3], [2**50, 9]])
    batch = (kvjax.keys(users), kvjax.keys(watched), np.ones((5, 2), np.float32))
    params = jax.jit(net.init)(jax.random.key(0), *batch)
    dense, found = kvjax.orbax.split(params)
    for table in found.values():
        table.upsert([7, 9, 1], np.arange(12.0).reshape(3, 4))
    params = jax.tree.map(lambda x: x.refresh() if isinstance(x, kvjax.Table) else x, params,
                          is_leaf=lambda x: isinstance(x, kvjax.Table))  # fmt: skip
    kvjax.checkpoint.save(tmp_path / "tables", kvjax.orbax.split(params)[1])
    one = jax.tree.map(lambda x: x[:1], batch)
    program = kvjax.export(net.apply, params, *one, shapes=(None, *["b, ..."] * 3))
    assert program.tables.keys() == {"user", "video"}
    (tmp_path / "program").write_bytes(program.serialize())
    want = jax.jit(net.apply)(params, *batch)
    np.savez(tmp_path / "given.npz", users=users, watched=watched, x=batch[2], want=want, **dense["params"]["Dense_0"])
    command = [sys.executable, "-c", _SERVER, *(str(tmp_path / name) for name in ("tables", "program", "given.npz"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@slow
def test_initial_rows_of_a_function_are_in_the_program(make, x64):
    """So the process must have a table of the same seed."""
    options = dict(initializer=jax.nn.initializers.normal(1.0))
    table = make(3, seed=7, **options).upsert(1, np.ones(3))
    program = kvjax.export(lambda t, k: t.lookup(k), table, kvjax.keys([1]), shapes=SHAPES)
    assert program.tables[table.name].seed == 7
    for keys in (AWKWARD, np.arange(700)):
        np.testing.assert_allclose(program(None, kvjax.keys(keys)), table.lookup(keys), rtol=1e-6)
    kvjax.drop_table(table.name)
    kvjax.get_table(table.name, dim=3, seed=8, **options)
    with pytest.raises(ValueError, match=r"call: want a table with dim 3, .*seed 7 of .*, got .*seed 8 of"):
        program(None, kvjax.keys([1]))


@slow
def test_nnx_and_live_handles(table):
    class Tower(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.out = kvjax.flax.nnx.Embed(table), nnx.Linear(2, 1, rngs=rngs)

        def __call__(self, keys):
            return self.out(self.embed(keys))[:, 0]

    model = Tower(nnx.Rngs(0))
    graph, state = nnx.split(model)
    program = kvjax.export(lambda s, k: nnx.merge(graph, s)(k), state, kvjax.keys([1]), shapes=SHAPES)
    keys = kvjax.keys(AWKWARD)
    np.testing.assert_allclose(program(state, keys), model(keys), rtol=1e-6)
    live = table.live()
    closed = kvjax.export(lambda k: live.lookup(k), kvjax.keys([1, 2]))
    np.testing.assert_array_equal(closed(keys[:2]), table.lookup(keys[:2]))
    np.testing.assert_array_equal(jax.jit(closed)(keys[:2]), table.lookup(keys[:2]))


def test_parts_of_an_argument_have_shapes_of_their_own(table):
    def rows(params, batch):
        return params["table"].lookup(batch["keys"]) * batch["x"], batch["y"]

    batch = {"keys": kvjax.keys([1]), "x": np.ones((1, 2), np.float32), "y": np.ones(3, np.float32)}
    shapes = ({"table": None}, {"keys": "b, ...", "x": "b, 2", "y": None})
    program = kvjax.export(rows, {"table": table}, batch, shapes=shapes)
    for n in (1, 4):
        keys = kvjax.keys(np.arange(n))
        out, y = program(None, {"keys": keys, "x": np.full((n, 2), 2, np.float32), "y": batch["y"]})
        np.testing.assert_array_equal(out, 2 * table.lookup(keys))
        assert y.shape == (3,)


@slow
def test_what_cannot_be_exported(table, mesh):
    grads = kvjax.SparseRows(kvjax.keys([1]), jnp.ones((1, 2)))
    cached = jax.jit(lambda k: table.lookup(k))
    cached(kvjax.keys([1]))
    for function in (lambda k: table.lookup(k), cached):
        with pytest.raises(ValueError, match="export: want tables among the arguments, or following handles"):
            kvjax.export(function, kvjax.keys([1]))
    with pytest.raises(ValueError, match=r"want a handle of one version, .* that kvjax.export traces"):
        kvjax.export(lambda t: t.apply(optax.sgd(0.1), grads), table)
    with pytest.raises(ValueError, match="export: want a function that only reads its tables"):
        kvjax.export(lambda k: table.upsert(k, jnp.ones((1, 2))).version, kvjax.keys([1]))
    with pytest.raises(
        ProgramError, match=r"want shapes of argument 1 as None, a text, or a tree .*, got \{'k': None\}"
    ):
        kvjax.export(score, {"scale": 1.0, "table": table}, kvjax.keys([1]), shapes=(None, {"k": None}))
    with pytest.raises(ProgramError, match="want shapes of 2 arguments, got 1"):
        kvjax.export(score, {"scale": 1.0, "table": table}, kvjax.keys([1]), shapes=("b",))
    with pytest.raises(ProgramError, match=r"want a shape of 2 axes for '1/0', got 'b'; give 'b, ...'"):
        kvjax.export(score, {"scale": 1.0, "table": table}, kvjax.keys([1]), shapes=(None, "b"))
    with pytest.raises(ProgramError, match=r"want platforms of \['cpu', 'cuda'\], .* got \['tpu'\]"):
        kvjax.export(score, {"scale": 1.0, "table": table}, kvjax.keys([1]), platforms=("cpu", "tpu"))
    with pytest.raises(ProgramError, match=r"want platforms= of \['cpu', 'cuda'\], got \(\)"):
        kvjax.export(score, {"scale": 1.0, "table": table}, kvjax.keys([1]), platforms=())
    sharded = kvjax.get_table("sharded", dim=2, mesh=mesh(2))
    with pytest.raises(ValueError, match=r"want .*in one place.* got .*(one over a mesh|of several devices)"):
        kvjax.export(score, {"scale": 1.0, "table": sharded}, kvjax.keys([1]))
    merged = kvjax.export(lambda rows: kvjax.merge(kvjax.SparseRows(kvjax.keys([7, 7]), rows)).rows, jnp.ones((2, 1)))
    assert merged(np.ones((2, 1), np.float32)).tolist() == [[2.0], [0.0]]  # a call of kvjax's without a table


@slow
def test_calls_are_checked(table, make):
    program = kvjax.export(score, {"scale": np.float32(2), "table": table}, kvjax.keys([1]), shapes=SHAPES)
    good = ({"scale": np.float32(1)}, kvjax.keys([1, 2]))
    for args, want in (
        (({}, good[1]), "want arrays at 0/scale, got none there;"), (good[:1], "want arrays at 1/0, got none there;"),
        (({"scale": np.float32(1), "more": 1}, good[1]), "want no arrays at 0/more, got some there;"),
        (({"scale": np.ones(3, np.float32)}, good[1]), r"want 0/scale: float32\[\], got 0/scale: float32\[3\];"),
        ((good[0], kvjax.keys([])), r"want 1/0: uint32\[b,2\], got 1/0: uint32\[0,2\]; pad an empty batch"),
    ):  # fmt: skip
        with pytest.raises(ProgramError, match=want):
            program(*args)
    other = make(2)
    mine = {"scale": np.float32(1), "table": table}
    want = f"want table '{table.name}' at '0/table', which it finds by this name, got table '{other.name}'; export"
    for again in (program, kvjax.Program.deserialize(program.serialize())):
        assert again(mine | {"table": table.live()}, good[1]).tolist() == again(*good).tolist()
        with pytest.raises(ProgramError, match=want):
            again(mine | {"table": other}, good[1])
    kvjax.drop_table(table.name)
    with pytest.raises(KeyError, match="call: want the tables of the program in this process"):
        program(*good)
    for options in ({"dim": 3}, {"dim": 2, "dtype": "bfloat16"}):
        kvjax.get_table(table.name, **options)
        with pytest.raises(ValueError, match="call: want a table with dim 2, dtype float32, in one place, got a table"):
            program(*good)
        kvjax.drop_table(table.name)
    kvjax.get_table(table.name, dim=2, initializer=4.0)
    assert program(*good).tolist() == [8.0, 8.0]

    data = program.serialize()
    for bad in (b"", b"x" * 99, data[:-1], data[:40], data[:60] + b"?" + data[61:]):
        with pytest.raises(ProgramError, match="deserialize: want"):
            kvjax.Program.deserialize(bad)
    with pytest.raises(TypeError, match=r"want the bytes that Program.serialize returned, got str; of a file"):
        kvjax.Program.deserialize("program.bin")

    assert kvjax.Program.deserialize(memoryview(data)).tables == program.tables
    magic, length, size, _ = _HEAD.unpack_from(data)
    head, body = data[_HEAD.size : _HEAD.size + length], data[_HEAD.size + length :]
    said = json.loads(head)
    later = {table.name: {"dim": 2, "dtype": "float32", "seed": None, "later": 1}}
    odd = [{"tables": each} for each in (3, later, {"t": {"dim": "2", "dtype": "float32", "seed": None}})]
    odd += [{"inputs": each} for each in (["a"], None, [[]] * len(said["inputs"]))]
    odd += [{"frozen": {"a": 1}}, {"places": {"a": 1}}, {"places": None}]
    early = json.dumps({key: said[key] for key in ("tables", "inputs")}).encode()
    data = _HEAD.pack(magic, len(early), size, zlib.crc32(early + body)) + early + body
    assert kvjax.Program.deserialize(data).tables == program.tables
    for forged in (b"", b"null", b"\xff", b"[" * 10**5, *(json.dumps(said | each).encode() for each in odd)):
        bad = _HEAD.pack(magic, len(forged), size, zlib.crc32(forged + body)) + forged + body
        with pytest.raises(ProgramError, match="deserialize: want what a program says of its tables and 2 inputs, got"):
            kvjax.Program.deserialize(bad)

    program.exported = dataclasses.replace(program.exported, mlir_module_serialized=b"of a newer JAX")
    with pytest.raises(ProgramError, match=r"want a program that jax \S+ reads, got .*StableHLO"):
        kvjax.Program.deserialize(program.serialize())


def test_what_is_missing_is_said(table):
    program = kvjax.export(lambda table, keys: table.lookup(keys), table, kvjax.keys([1]), shapes=SHAPES)
    with pytest.raises(ProgramError, match="in the place of a table give None, or the handle"):
        program(kvjax.keys([1]))
    with pytest.raises(ProgramError, match=r"pad an empty batch \(1/0\), or do not call"):
        program(None, kvjax.keys(np.zeros(0, np.int64)))
    assert program(None, kvjax.keys(AWKWARD[:1])).tolist() == [[0.0, 1.0]]


def test_a_table_is_dropped_after_programs_that_read_it(table):
    program = kvjax.Program.deserialize(kvjax.export(read_all, table, kvjax.keys([1]), shapes=SHAPES).serialize())
    PROCESS.traced.discard(table.name)  # as where a restore has made it, and nothing else was traced
    rows = [program(None, kvjax.keys(np.resize(AWKWARD[0], 200_000))) for _ in range(3)]
    assert table.name in PROCESS.traced  # by which drop_table knows that there may be something to wait for
    kvjax.drop_table(table.name)
    assert all((np.asarray(each) == [0.0, 1.0]).all() for each in rows)


@slow
def test_what_a_program_compiles_goes_with_it(table):
    """A server loads one with each release, and calls it with batches of several sizes, also in its own `jit`."""
    client, want = jax.devices()[0].client, np.asarray(table.lookup(AWKWARD))
    data = kvjax.export(lambda table, keys: table.lookup(keys), table, kvjax.keys([1]), shapes=SHAPES).serialize()

    def executables():
        gc.collect()
        return len(client.live_executables())

    def serve():
        program = kvjax.Program.deserialize(data)
        before = executables()
        for n in (2, 1, 2):
            np.testing.assert_array_equal(program(None, kvjax.keys(AWKWARD[:n])), want[:n])
        assert executables() == before + 2  # one for each size
        inside = jax.jit(lambda keys: 2 * program(None, keys))(kvjax.keys(AWKWARD))
        np.testing.assert_array_equal(inside, 2 * want)

    serve()
    after_one = executables()
    for _ in range(3):
        serve()
    assert executables() == after_one


LOOKUPS = {
    "bags of lengths": lambda table, keys: kvjax.lookup_bag(table, keys, lengths=jnp.ones(keys.shape, jnp.int32)),
    "padded bags": lambda table, keys: kvjax.lookup_bag(table, keys.reshape(-1, 1), pad_id=7, combiner="max"),
    "bags of each": lambda table, keys: jax.vmap(
        lambda key: kvjax.lookup_bag(table, key[None], segment_ids=[0], num_segments=2, combiner="sum")
    )(keys),
    "features": lambda table, keys: kvjax.lookup_many({"a": (table, keys), "b": (table, keys.salted(1))}),
    "equal keys": lambda table, keys: (keys == kvjax.keys(7), keys[:, None] == keys),
    "counts": lambda table, keys: table.frequency(keys),
}


@pytest.mark.parametrize("what", few(LOOKUPS))
def test_any_batch(what, table, tmp_path):
    sources = [table, kvjax.serving.FrozenTable.write(tmp_path / "t", table).as_jax()]
    for source in sources[: 1 if what == "counts" else 2]:
        program = kvjax.export(LOOKUPS[what], source, kvjax.keys([1, 2]), shapes=SHAPES)
        got, want = (f(source, kvjax.keys(AWKWARD)) for f in (program, LOOKUPS[what]))
        jax.tree.map(np.testing.assert_array_equal, got, want)


@slow
def test_integers_of_64_bits_are_keys(table):
    with jax.enable_x64(True):
        program = kvjax.export(lambda table, ids: table.lookup(ids), table, np.arange(2), shapes=(None, "b"))
        np.testing.assert_array_equal(program(table, AWKWARD), table.lookup(AWKWARD))
        program = kvjax.export(lambda ids: jnp.asarray(kvjax.keys(ids)), np.arange(2), shapes=("b",))
        np.testing.assert_array_equal(program(AWKWARD), AWKWARD)


@slow
def test_an_argument_that_does_not_fit_is_named_alone(table):
    many = {f"w{i:02}": np.ones(3, np.float32) for i in range(30)}

    def score(params, keys, x):
        return jnp.sum(params["t"].lookup(keys)) + x.sum() + params["w00"].sum()

    args = (many | {"t": table}, kvjax.keys([1]), np.ones((1, 3), np.float32))
    program = kvjax.export(score, *args, shapes=(None, "b, ...", "b, 3"))
    params, keys = args[0], args[1]
    for given, want in (
        ((params, keys, np.ones((1, 4), np.float32)), "want 2: float32[b,3], got 2: float32[1,4];"),
        ((params, keys, np.ones((1, 3), np.int32)), "want 2: float32[b,3], got 2: int32[1,3];"),
        ((params, np.array([1]), args[2]), "want arrays at 1/0, got none there and others at 1;"),
        (({"t": None}, *args[1:]), "want arrays at 0/w00, 0/w01, 0/w02, 0/w03, 0/w04 and 25 more, got none there;"),
        ((params, keys, "x"), "want 2: float32[b,3], got 2: str;"),
        ((params, keys, np.ones((2, 3), np.float32)), "want arrays that fit each other and `Program.inputs`, got"),
    ):
        with pytest.raises(ProgramError) as caught:
            program(*given)
        assert want in str(caught.value)
