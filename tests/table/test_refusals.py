"""What calls say of arguments and handles that do not fit: in kvjax's words, with the mend."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from tests.support.marks import slow
from tests.support.tables import finished

SGD = optax.sgd(0.1)
GRADS = kvjax.SparseRows(np.array([7]), jnp.ones((1, 4)))
IDS = np.array([7])
ROW = np.ones((1, 4))
MASKED = np.ma.array([1, 2], mask=[0, 1])


@dataclasses.dataclass
class Unhashed:
    """A transform that compares by its contents."""

    init: object
    update: object


def loaded(table, **columns):
    """A table that gets its rows back, some columns of which are others."""
    return table.load(dataclasses.replace(table.upsert(IDS, ROW).export(), **columns))


WRONG = {
    "apply": (lambda t: t.apply("adam", GRADS), "table 'table[0-9]+', apply: want an optax transform, got 'adam'"),
    "without a hash": (lambda t: t.apply(Unhashed(*optax.sgd(1.0)), GRADS), "rowwise: want a transform with a hash"),
    "switch_optimizer": (lambda t: t.switch_optimizer(3), "switch_optimizer: want an optax transform, got 3"),
    "width": (lambda t: kvjax.optax.rowwise(SGD).init(-1), "want a width of rows of 1 or more, got -1"),
    "concatenate": (lambda t: kvjax.Keys.concatenate([[1]]), r"keys, concatenate: want several Keys, got \['list'\]"),
    "no parts": (lambda t: kvjax.Keys.concatenate([]), r"keys, concatenate: want several Keys, got \[\]"),
    "mask of text": (lambda t: t.lookup(IDS, mask="x"), "table 'table[0-9]+', lookup: want a mask of bool, got <U1"),
    "missing": (lambda t: t.lookup(IDS, missing={}), "lookup: want missing= 'init', 'zeros' or a row of real values"),
    "complex row": (lambda t: t.lookup(IDS, missing=[1.0, 1j]), "a row of real values, got complex"),
    "too large": (lambda t: t.lookup(IDS, missing=[0, 1e300]), "want values that float32 can hold, got 1e.300"),
    "exists": (lambda t: t.accum(IDS, ROW, ROW, None), "accum: want exists as bool, got object"),
    "weights": (lambda t: kvjax.lookup_bag(t, IDS[None], weights="x"), "want weights that are real numbers, got <U1"),
    "halvings": (lambda t: kvjax.admit.Sketch(2, halve_every=2**70), r"halve_every >= 1 and below 2\*\*63, or None"),
    "rate": (lambda t: kvjax.optax.gap_adam("x"), "gap_adam: want a finite number as learning_rate, got 'x'"),
    "a limit": (lambda t: kvjax.simulate([IDS], 1.5), r"want a list of limits as max_capacity=, got 1.5; give \[1.5\]"),
    "names": (lambda t: kvjax.optax.rename_tables((), "x"), "rename_tables: want names= as a mapping, got str"),
    "cursor": (lambda t: kvjax.checkpoint.save("c", [t], cursor=[]), r"want cursor= as the name of a cursor, got \[\]"),
    "partitions": (lambda t: t.export().to_deeprec("p", "v", partitions=None), "partitions, got None"),
    "frozen name": (lambda t: kvjax.serving.FrozenTable.write("f", t, name=0), "write: want name= as a text, got 0"),
    "mask": (lambda t: t.export().take(np.ones(3, bool)), r"export, take: want a mask of its 0 rows, got \(3,\)"),
    "rowwise": (lambda t: kvjax.optax.rowwise(SGD, count="all"), "want count 'auto', 'row' or 'global'"),
    "joint": (lambda t: kvjax.optax.joint("x"), "joint: want an optax transform"),
    "partition": (lambda t: kvjax.optax.partition("x", SGD), "partition: want an optax transform"),
    "tables": (
        lambda t: kvjax.optax.partition(SGD, "x").init({"t": t}),
        "partition, tables: want an optax transform, got 'x'",
    ),
    "a function of optax": (
        lambda t: kvjax.optax.partition(SGD, optax.adam),
        "partition, tables: want an optax transform, got <function adam",
    ),
    "a class of optax": (
        lambda t: kvjax.optax.partition(SGD, functools.partial(optax.adam, b1=0.5)),
        "partition, tables: want an optax transform, got functools.partial",
    ),
    "a function of kvjax": (
        lambda t: kvjax.optax.partition(SGD, kvjax.optax.ftrl),
        "partition, tables: want an optax transform, got <function ftrl",
    ),
    "a function of names": (
        lambda t: kvjax.optax.partition(SGD, lambda name: None).init({"t": t}),
        "table 'table[0-9]+', partition: want an optax transform, got None",
    ),
    "merge": (lambda t: kvjax.merge(jnp.ones(3)), "merge: want the SparseRows of a table"),
    "scale": (lambda t: kvjax.merge(GRADS, scale="x"), r"merge: want one real number as scale=, got str \(\)"),
    "limits": (lambda t: kvjax.simulate([IDS], 100), r"want a list of limits as max_capacity=, got 100; give \[100\]"),
    "prefetch": (lambda t: kvjax.prefetch({"t": t}, IDS), "prefetch: want a kvjax.Table, got dict"),
    "lookup_bag": (lambda t: kvjax.lookup_bag({"t": t}, IDS[None]), "lookup_bag: want a kvjax.Table, got dict"),
    "reshard": (lambda t: kvjax.reshard("t", None), "reshard: want a kvjax.Table, got str"),
    "load": (lambda t: t.load(None), r"load: want what table.export\(\) gives, got NoneType"),
    "column": (lambda t: loaded(t, keys=IDS[:, None]), r"load: want keys \(n,\), got an array \(1, 1\)"),
    "no column": (lambda t: loaded(t, freqs=None), r"load: want freqs \(n,\), got an array \(\)"),
    "no values": (lambda t: loaded(t, values=None), r"load: want values \(n, ...\), got an array \(\)"),
    "no slot": (lambda t: loaded(t, slots={"s": None}), r"load: want slot.s \(n, ...\), got an array \(\)"),
    "last step": (lambda t: loaded(t, last_step=None), "want last_step as an integer from 0 to .*, got None"),
    "wide last step": (lambda t: loaded(t, last_step=2**63), "want last_step as an integer from 0 to .*, got 92"),
    "row version": (lambda t: loaded(t, versions=np.array([-1])), "want versions from 0 to last_step=0, got -1"),
    "late version": (lambda t: loaded(t, versions=np.array([1])), "want versions from 0 to last_step=0, got 1"),
    "types of slots": (
        lambda t: t.load(t.export(), {"s": "flot32[2]"}),
        r"load: want slot_types as the arrays are, {}, got {'s': 'flot32\[2\]'}; leave slot_types out",
    ),
    "no types of slots": (lambda t: t.load(t.export(), 3), "load: want slot_types as a dict of types by name, got 3"),
    "masked column": (lambda t: loaded(t, freqs=MASKED[1:]), "'table[0-9]+', load: want all elements, got a masked"),
    "masked take": (lambda t: t.export().take(MASKED > 0), "export, take: want all elements, got a masked array"),
    "slots": (lambda t: loaded(t, slots=None), "load: want slots as a dict of arrays by name, got None"),
    "name of slots": (lambda t: loaded(t, slots={5: ROW}), "load: want slots as a dict of arrays by name, got {5"),
    "get_table": (lambda t: kvjax.get_table(t), "get_table: want a name, got Table"),
    "capacity": (
        lambda t: kvjax.get_table("c", dim=4, capacity=-1),
        r"want capacity in 0..2\*\*32 - 2 or None, got -1",
    ),
    "capacities": (
        lambda t: kvjax.get_table("c", dim=4, capacity=9, max_capacity=5, on_full="evict"),
        "want capacity of at most max_capacity=5 beside on_full='evict', got 9",
    ),
    "drop inside jit": (
        lambda t: jax.jit(lambda x: (kvjax.drop_table(t.name), x))(1.0),
        "drop_table: want a call outside of jit",
    ),
    "restore inside jit": (
        lambda t: jax.jit(lambda x: (kvjax.checkpoint.restore("nowhere"), x))(1.0),
        "restore: want a call outside of jit",
    ),
    "step": (lambda t: t.apply(SGD, GRADS, step=2**63), r"want a step of 0 or more, below 2\*\*63, got 92"),
    "masked step": (
        lambda t: t.apply(SGD, GRADS, step=MASKED[1]),
        "table 'table[0-9]+', apply, step: want all elements, got a masked array",
    ),
    "Table": (
        lambda t: kvjax.Table("user", dim=4),
        r"Table: want the version and the spec of a table, got 'user' and dim=; kvjax.get_table\(name, dim=\) makes",
    ),
    "Table of a name": (lambda t: kvjax.Table("user"), "Table: want the version and the spec of a table, got 'user'; "),
    "Table by names": (lambda t: kvjax.Table(name="user"), "Table: want .* of a table, got None and name=; "),
    "option": (
        lambda t: kvjax.get_table("c", dim=4, sede=3),
        "unexpected keyword argument 'sede'; did you mean 'seed'?",
    ),
    "dim without its name": (lambda t: kvjax.get_table("c", 4), "positional arguments; give options .*, as dim=$"),
    "layer": (
        lambda t: kvjax.flax.nnx.Embed("c", 4, sede=3),
        "unexpected keyword argument 'sede'; did you mean 'seed'?",
    ),
    "name": (lambda t: kvjax.get_table("table00"), "did you mean 'table0'"),
    "drop": (lambda t: kvjax.drop_table("table00"), "did you mean 'table0'"),
    "embed": (lambda t: kvjax.flax.nnx.Embed("table00"), "did you mean 'table0'"),
    "embed 3": (lambda t: kvjax.flax.nnx.Embed(3, 4), "Embed: want the name of a table or a kvjax.Table, got 3"),
    "masked ids": (lambda t: t.lookup(MASKED), "table 'table[0-9]+', lookup: want all elements, got a masked array"),
    "masked mask": (lambda t: t.lookup(IDS, mask=MASKED > 0), "lookup: want all elements, got a masked array"),
    "masked rows": (lambda t: t.upsert(IDS, MASKED), "upsert: want all elements, got a masked array"),
    "masked counts": (lambda t: kvjax.SparseRows(IDS, ROW, MASKED), "SparseRows: want all elements, got a masked"),
    "masked bags": (lambda t: kvjax.lookup_bag(t, IDS, lengths=MASKED), "lookup_bag: want all elements, got a masked"),
    "masked pool": (
        lambda t: kvjax.initializers.from_pool(np.ma.array([1.0, 2.0], mask=[0, 1])),
        "^kvjax: from_pool: want all elements, got a masked array",
    ),
    "ragged pool": (
        lambda t: kvjax.initializers.from_pool([[1.0, 2.0], [3.0]]),
        r"from_pool: want an initializer \(dim,\) or \(p, dim\), got rows of several lengths",
    ),
    "salt": (lambda t: kvjax.keys(IDS).salted(1.5), "want an integer .* as salt, got 1.5"),
    "hash_keys": (lambda t: kvjax.hash_keys(["a"], salt="user"), "want an integer .* as salt, got 'user'"),
    "counts": (lambda t: kvjax.SparseRows(IDS, jnp.ones((1, 4)), np.array([1.7])), "counts of integers.*float64"),
    "negative": (
        lambda t: kvjax.SparseRows(IDS, jnp.ones((1, 4)), [-1]),
        "counts of integers, 0 or more.*got -1 to -1",
    ),
    "negative in JAX": (
        lambda t: kvjax.SparseRows(IDS, jnp.ones((1, 4)), jnp.array([-1])),
        "counts of integers, 0 or more.*got -1 to -1",
    ),
    "large": (lambda t: kvjax.SparseRows(IDS, jnp.ones((1, 4)), [2**31]), r"below 2\*\*31, got 2147483648"),
    "state": (
        lambda t: kvjax.optax.partition(SGD, SGD).update(
            {"t": GRADS}, kvjax.optax.partition(SGD, SGD).init({}), {"t": t}
        ),
        "partition: want its part of the optimizer's state, got a state of tables",
    ),
    "strings": (lambda t: t.upsert(IDS, [["a"] * 4]), "table 'table[0-9]+', upsert: want real values, got <U1; conv"),
    "array of strings": (lambda t: t.assign(IDS, np.array([["a"] * 4])), "assign: want real values, got <U1"),
    "nothing": (lambda t: t.add(IDS, [[None] * 4]), "add: want real values, got object"),
    "uneven": (lambda t: t.upsert(np.arange(2), [[1.0] * 4, [1.0]]), "want real values, got lists that make no array"),
    "gradients of strings": (lambda t: kvjax.SparseRows(IDS, [["a"] * 4]), "want rows of real numbers, got <U1"),
    "set": (lambda t: setattr(t, "version", 3), "setattr: want a handle that stays as it is, got version to be set"),
    "slot": (lambda t: t.apply(optax.adagrad(0.1), GRADS)[0].slot("sum_of_square", 7), "did you mean 'sum_of_squares'"),
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_arguments(call, make):
    use, text = WRONG[call]
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError), match=text):
        use(make())


USES = {
    "lookup": lambda t: t.lookup(IDS),
    "upsert": lambda t: t.upsert(IDS, np.ones((1, 4))).version,
    "apply": lambda t: t.apply(SGD, GRADS)[0].version,
    "pin": lambda t: t.pin(IDS).version,
    "size": len,
    "export": lambda t: t.export(),
    "reserve": lambda t: t.reserve(3),
    "snapshot": lambda t: t.snapshot(),
    "copy": lambda t: t.copy("another"),
    "to": lambda t: t.to(kvjax.storage.Host()),
    "reshard": lambda t: kvjax.reshard(t, None),
    "load": lambda t: t.load(kvjax.get_table(t.name).export()),
    "switch_optimizer": lambda t: t.switch_optimizer(optax.adam(0.1)),
    "on_evict": lambda t: t.on_evict(None),
}


@pytest.mark.parametrize("use", USES)
def test_a_stale_handle_is_one_type_of_error(use, make):
    """Whether a program says so or a call of the host."""
    stale = make()
    stale.upsert(IDS, np.ones((1, 4)))
    with pytest.raises(RuntimeError, match=f"table '{stale.name}', {use}: want the live handle"):
        finished(USES[use](stale))


@pytest.mark.parametrize("use", ["size", "export", "reserve", "stats", "refresh", "to", "slot"])
def test_a_dropped_table_is_named_with_what_was_asked(use, make):
    uses = {
        **USES,
        "stats": lambda t: t.stats(),
        "refresh": lambda t: t.refresh(),
        "to": lambda t: t.to(kvjax.storage.Host()),
        "slot": lambda t: t.slot("x", 7),
    }
    table = make()
    kvjax.drop_table(table.name)
    with pytest.raises(KeyError, match=f"table '{table.name}', {use}: want a table of this name"):
        uses[use](table)


@pytest.mark.parametrize("use", ["lookup", "upsert", "apply"])
@pytest.mark.parametrize("options", [{"dim": 3}, {"dim": 4, "dtype": "bfloat16"}])
def test_another_table_of_the_name_is_said(use, options, make):
    """And not which shapes XLA has got."""
    table = make()
    kvjax.drop_table(table.name)
    kvjax.get_table(table.name, **options)
    with pytest.raises(RuntimeError, match=f"table '{table.name}', {use}: .*another of its name, with d"):
        USES[use](table)


@slow
def test_dir_shows_what_there_is_to_use():
    assert {"flax", "optax", "orbax", "get_table"} <= set(dir(kvjax))
    for module in (kvjax, kvjax.flax, kvjax.optax, kvjax.orbax):
        assert dir(module) == sorted(module.__all__)
    program = "import kvjax, rlcompleter; print(rlcompleter.Completer({'kvjax': kvjax}).attr_matches('kvjax.o'))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout
    assert "kvjax.optax" in out and "kvjax.orbax" in out


@pytest.mark.parametrize("op", ["upsert", "assign"])
@pytest.mark.parametrize(
    "values", [[[7e4, 1]], [[1e300, 1]], np.array([[1, -70000]]), np.array([[1e5, np.inf]]), np.array([[1e300, 1]])]
)
def test_numbers_that_a_dtype_cannot_hold(op, values, make):
    """They would be infinite, which exports refuse; what is not finite before is as it is."""
    table = make(2, dtype="float16").upsert(IDS, np.array([[np.inf, np.nan]]))
    with pytest.raises(ValueError, match=rf"table 'table\d+', {op}: want values that float16 can hold, got -?\d"):
        getattr(table, op)(IDS, values)
    assert len(table.upsert(IDS, [[65504.0, 1]])) == 1


def test_rows_of_a_program_may_come_in_a_list(make):
    write = jax.jit(lambda table, row: table.upsert(kvjax.keys(np.array([1, 2])), [row, [3.0, 4.0]]))
    assert write(make(2, dtype="float16"), jnp.arange(2.0)).lookup([1, 2]).tolist() == [[0, 1], [3, 4]]


def test_a_table_that_is_not_trained_is_written_by_hand(make):
    table = make(2, trainable=False)
    table, _ = table.apply(SGD, kvjax.SparseRows(IDS, jnp.ones((1, 2))))
    np.testing.assert_allclose(table.lookup(7), [-0.1, -0.1])
