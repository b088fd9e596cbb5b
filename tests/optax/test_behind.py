"""Rows that are behind are said to be, whoever reads them; and steps that rows have missed are replayed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.optax import catch_up, caught_up, sweep
from tests.optax.test_catch_up import DIM, ROWS, STAIRS, WARM, batches, caught, functions, functions_of
from tests.support.marks import few, slow

pytestmark = pytest.mark.usefixtures("promotion")


@slow
@pytest.mark.cpu_table
def test_rows_that_are_behind_are_said_to_be(make, tmp_path):
    """By whatever reads them as they are stored, until they are swept."""
    tx, grads = catch_up(optax.sgd(1.0, momentum=0.5)), jnp.ones((1, 2))
    table, state = make(2, initializer=1.0), tx.init(2)
    for key in (7, 8, 8):
        table, state = table.apply(tx, kvjax.SparseRows(np.array([key]), grads), state)
    now = caught_up(table, state, tx)
    with pytest.raises(ValueError, match="save: want the rows that are stored beside a cursor of deltas"):
        kvjax.checkpoint.save(tmp_path / "now", {"t": now}, cursor="c")
    kvjax.checkpoint.save(tmp_path / "now", {"t": now})
    rows = now.lookup(np.array([7, 8]))
    np.testing.assert_array_equal(kvjax.checkpoint.restore(tmp_path / "now", {"t": table})["t"].lookup([7, 8]), rows)
    table = table.refresh()
    reads = {
        "export": lambda t: t.export(),
        "live": lambda t: t.live(),
        "evict": lambda t: t.evict(kvjax.evict.MinNorm(1e-9) | kvjax.evict.MaxAge(100)),
        "clear_slots": lambda t: t.clear_slots(),
    }
    table, state = table.apply(tx, kvjax.SparseRows(np.array([8]), grads), state)
    again = make(2, initializer=1.0, seed=table.spec.seed)
    kvjax.checkpoint.save(tmp_path / "behind", {"t": table})  # with slots, by which they are caught up
    for op, read in {
        **dict(list(reads.items())[:2]),
        "save": lambda t: kvjax.checkpoint.save(tmp_path / "some", {"t": t}, prune=kvjax.Prune(min_frequency=1)),
        "restore": lambda t: kvjax.checkpoint.restore(tmp_path / "behind", {"t": again}, slots=False),
        "write": lambda t: kvjax.serving.FrozenTable.write(tmp_path / "frozen", tmp_path / "behind"),
        "prune": lambda t: kvjax.checkpoint.prune(tmp_path / "behind", None, kvjax.Prune(min_norm=1.0)),
        "merge": lambda t: kvjax.checkpoint.merge([tmp_path / "behind"], tmp_path / "merged"),
        "export ": lambda t: kvjax.convert.export_checkpoint(tmp_path / "behind", tmp_path / "out.npz", slots=True),
        "lookup": lambda t: t.lookup([7], slot="trace"),
    }.items():
        with pytest.warns(UserWarning, match=f"{op.strip()}: it reads rows as they are stored, .*(sweep|save what)"):
            read(table)
    kvjax.checkpoint.prune(tmp_path / "behind", None, kvjax.Prune(max_age=5, min_frequency=1))  # which read no rows
    with pytest.raises(ValueError, match="accum: want exists"):  # and says nothing before
        table.accum([9], jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.zeros((1, 2), bool))
    with pytest.warns(UserWarning, match="live: it reads rows as they are stored"):
        live = table.live()
    live.lookup([7], slot="trace")  # which says no more
    with pytest.warns(UserWarning, match="accum: it writes rows as they are stored"):
        table.accum([9], jnp.zeros((1, 2)), jnp.ones((1, 2)), jnp.zeros(1, bool))
    table = table.refresh().remove([9])
    with pytest.raises(ValueError, match=r"switch_optimizer: want rows of now, got some that are behind \(1 of 2"):
        table.switch_optimizer(optax.sgd(1.0))
    with pytest.warns(UserWarning, match="evict: it reads"):
        table = reads["evict"](table)
    table = sweep(table.restrict(2), state, tx)
    assert len(table) == 2
    for op in ("export", "live"):
        reads[op](table)
    table = reads["evict"](table)
    with pytest.warns(UserWarning, match="slots kept"):
        plain = table.switch_optimizer(optax.sgd(1.0, momentum=0.5))
    assert list(plain.stats().slots) == ["trace"]
    table, state = plain.clear_slots(), tx.init(2)
    table, state = table.apply(tx, kvjax.SparseRows(np.array([8]), grads), state)
    table, state = table.apply(tx, kvjax.SparseRows(np.array([7]), grads), state)
    with pytest.warns(UserWarning, match="clear_slots: it reads"):
        table.clear_slots()


@pytest.mark.cpu_table
@pytest.mark.parametrize("swept", few([False, True]))
def test_steps_without_any_key_leave_all_rows_behind(swept, make, tmp_path):
    """Also where a sweep was before, which leaves no trace in the rows, and where the table moves meanwhile."""
    tx, no_rows = catch_up(optax.sgd(1.0, momentum=0.5)), kvjax.SparseRows(np.zeros(0, np.int64), jnp.ones((0, 2)))
    table, state = make(2), tx.init(2)
    table, state = table.apply(tx, kvjax.SparseRows(np.array([7, 8]), jnp.ones((2, 2))), state)
    if swept:
        table, state = table.apply(tx, no_rows, state)
        table = sweep(table, state, tx)
    table = table.to(kvjax.storage.Mmap(tmp_path))
    assert len(table.export()) == 2  # of which none is behind
    for steps in (1, 2):
        table, state = table.apply(tx, no_rows, state)
        with pytest.warns(UserWarning, match=rf"are behind \(2 of 2, by up to {steps} steps"):
            table.export()
        with pytest.raises(ValueError, match=rf"rows of now, got some that are behind \(2 of 2, by up to {steps}"):
            table.switch_optimizer(optax.sgd(1.0))
        table = table.to(kvjax.storage.Host())
    table = sweep(table, state, tx).to(kvjax.storage.Mmap(tmp_path))
    table.export(), table.lookup([7])
    with pytest.warns(UserWarning, match="slots kept"):
        table.switch_optimizer(optax.sgd(1.0))


@slow
@pytest.mark.parametrize("place", ["one", "4"])
def test_a_state_that_is_older_than_its_rows(place, make, places):
    """It is an error where rows are read by it, of one step less and of one that is begun anew."""
    step, look = functions_of("adam")
    tx, table = caught("adam"), make(DIM, initializer=1.0, **({} if place == "one" else places[place]))
    states = [tx.init(DIM)]
    for keys, rows in batches(2):
        table, state = step(table, states[-1], kvjax.keys(keys), rows)
        states.append(state)
    look(table, states[2])
    for state in states[:2]:
        with pytest.raises(Exception, match="want the optimizer's state that the last write returned"):
            jax.block_until_ready(look(table, state))
        with pytest.raises(ValueError, match=r"got one of \d steps for rows of step 2"):
            caught_up(table, state, tx).export()


@slow
def test_the_state_of_another_transform(make):
    """It is an error where rows are read, outside of jit and in it: rates, betas and decay are told apart."""
    grads = kvjax.SparseRows(np.array([7]), jnp.ones((1, 2)))
    pairs = [
        (optax.adam(1e-2), optax.adam(1.01e-2)), (optax.adam(1e-2), optax.adam(1e-2, b1=0.89)),
        (optax.sgd(1.0, momentum=0.5), optax.sgd(1.0, momentum=0.6)), (optax.adamw(1e-2), optax.adamw(1e-2, eps=2e-8)),
        (optax.sgd(WARM, momentum=0.5), optax.sgd(STAIRS, momentum=0.5)),
        (optax.chain(optax.sgd(0.1), optax.add_decayed_weights(-1e-3)),
         optax.chain(optax.sgd(0.1), optax.add_decayed_weights(-2e-3))),
    ]  # fmt: skip
    for one, other in pairs:
        table, tx, wrong = make(2, initializer=1.0), catch_up(one), catch_up(other)
        table, state = table.apply(tx, grads, tx.init(2))
        with pytest.raises(ValueError, match="caught_up: want the transform by which the state was made"):
            caught_up(table, state, wrong)
        caught_up(table, state, catch_up(one)).lookup(7)
    with pytest.raises(Exception, match="or another transform"):
        jax.block_until_ready(jax.jit(lambda t, s: caught_up(t, s, wrong).lookup(7))(table, state))
    replayed = [catch_up(optax.adabelief(rate), replay=200) for rate in (1e-2, 2e-2)]
    for tx in (catch_up(optax.adam(1e-2)), replayed[0]):
        whole = kvjax.optax.partition(dense=optax.sgd(1.0), tables=tx)
        params = {"t": make(2)}
        with pytest.raises(ValueError, match="give what partition got as tables="):
            caught_up(params, whole.init(params), whole)
    with pytest.raises(ValueError, match="caught_up: want the transform by which"):
        caught_up(make(2), replayed[0].init(2), replayed[1])


@slow
def test_replayed_steps_are_those_of_dense_training(make):
    """Of a transform without a closed form, at a rate that is changed by hand."""
    made = optax.inject_hyperparams(optax.adabelief)(1e-2)
    tx, table = catch_up(made, replay=200), make(DIM, initializer=kvjax.initializers.normal(0.01), seed=3)
    step, look = functions(tx)
    want = np.asarray(table.lookup(np.arange(ROWS)), np.float64)
    far, state = np.zeros_like(want), tx.init(DIM)
    with jax.enable_x64(True):
        dense_state, update = made.init(jnp.asarray(want)), jax.jit(made.update)
    for i, (keys, rows) in enumerate(batches(40)):
        rate = 1e-3 if i % 9 > 4 else 1e-2
        state = optax.tree_utils.tree_set(state, learning_rate=jnp.float32(rate))
        table, state = step(table, state, kvjax.keys(keys), rows)
        grads = np.zeros_like(want)
        np.add.at(grads, keys[keys >= 0], rows[keys >= 0])
        with jax.enable_x64(True):
            dense_state = optax.tree_utils.tree_set(dense_state, learning_rate=jnp.asarray(np.float32(rate), float))
            moved, dense_state = update(grads, dense_state, want)
        want, far = want + np.asarray(moved), far + np.asarray(moved)
    now = look(table, state)
    np.testing.assert_allclose(now, want, rtol=0, atol=3e-5 * np.abs(far).max())
    np.testing.assert_allclose(sweep(table, state, tx).lookup(np.arange(ROWS))[:7], now[:7], rtol=1e-6)


@slow
@pytest.mark.parametrize(
    "tx", [optax.lion(0.1), optax.adam(0.1, b1=0.999, b2=0.99), optax.adabelief(0.1, b1=0.99)],
    ids=["lion", "betas", "too few"],
)  # fmt: skip
def test_steps_that_do_not_end_are_not_replayed(tx):
    with pytest.raises(ValueError, match=r"have hardly anything to move after 50 of them, got a row that is .* off"):
        catch_up(tx, replay=50)


def test_what_keeps_its_size_is_not_advised_to_be_replayed():
    for tx in (optax.lion(0.1), optax.inject_hyperparams(optax.lion)(0.1)):
        with pytest.raises(ValueError, match=r"; .*replay=200 is refused, too: leave it out"):
            catch_up(tx)


def test_what_cannot_be_caught_up():
    for replay in (-1, 1.5, 5000):
        with pytest.raises(ValueError, match=r"catch_up: want replay= in 0\.\.4096"):
            catch_up(optax.sgd(0.1), replay=replay)
    with pytest.raises(TypeError, match="catch_up goes around optax"):
        optax.chain(caught("adam"), optax.scale(1.0)).init(jnp.zeros((1, 2)))


@slow
@pytest.mark.parametrize("tx", [optax.adamw(0.1), optax.sgd(optax.linear_schedule(0.1, 0.01, 9), 0.9)])
def test_a_step_without_gradients_makes_up_for_a_lost_state(tx, make):
    """Of a step that failed outside of kvjax, when it had written the table."""
    tx, tables = catch_up(tx), [make(DIM), make(DIM)]
    states = [tx.init(DIM)] * 2
    for i, (keys, rows) in enumerate(batches(6)):
        gradient = kvjax.SparseRows(keys, rows)
        for j, (table, state) in enumerate(zip(tables, states, strict=True)):
            tables[j], states[j] = table.apply(tx, gradient, state)
            if i == 3 and j == 1:
                with pytest.raises((ValueError, RuntimeError), match="where a failed step has lost it, do one without"):
                    jax.block_until_ready(caught_up(tables[j], state, tx).lookup(keys))
                none = kvjax.SparseRows(keys[:0], rows[:0])
                tables[j], states[j] = tables[j].refresh().apply(tx, none, state)
    want, got = (caught_up(*one, tx).lookup(np.arange(ROWS)) for one in zip(tables, states, strict=True))
    np.testing.assert_array_equal(got, want)


@slow
def test_a_lookup_of_rows_that_are_behind_says_so(make):
    table, state = make(DIM), caught("adam").init(DIM)
    table.lookup([1])  # no step has left a row out yet
    step, look = functions_of("adam")
    for keys, rows in batches(2):
        table, state = step(table, state, kvjax.keys(keys), rows)
    jax.block_until_ready(table)  # a lookup waits for no step, so it warns only of those that have ended
    layer = kvjax.flax.Embed(table.name, DIM)
    for read in (
        lambda table: table.lookup([1]),
        jax.jit(lambda table: table.lookup([1])),
        lambda table: layer.apply({"params": {"table": table}}, np.array([1])),
        lambda table: kvjax.lookup_bag(table, [[1]]),
    ):
        with pytest.warns(UserWarning, match="lookup: it reads rows as they are stored"):
            read(table)
        read(caught_up(table, state, caught("adam")))
    look(table, state)
    for write in (lambda t: t.upsert([1], np.ones((1, DIM))), lambda t: t.add([1], np.ones((1, DIM)))):
        with pytest.warns(UserWarning, match="it writes rows as they are stored, so the steps .*sweep"):
            table = write(table)
    table = kvjax.optax.sweep(table, state, caught("adam"))
    table.lookup([1])
    table = table.upsert([1], np.ones((1, DIM)))
    np.testing.assert_array_equal(caught_up(table, state, caught("adam")).lookup([1]), np.ones((1, DIM)))


NORMAL = kvjax.initializers.normal(0.1)


@slow
@pytest.mark.parametrize(
    "init, place",
    [
        (NORMAL, "caught up"),
        (NORMAL, "swept"),
        (NORMAL, "checkpoint"),
        (0.0, "checkpoint"),
        (0.0, "swept"),
    ],
)
def test_nobody_guesses_what_keys_without_a_row_have_become(init, place, make, tmp_path):
    """By weight decay they are other than their initial rows; zeros stay, and so do rows without decay."""
    frozen, keys = kvjax.serving.FrozenTable, np.array([7, 8])
    for dense, moves in [(optax.adamw(0.1, weight_decay=0.5), init != 0.0), (optax.adam(0.1), False)]:
        tx = catch_up(dense)
        table = make(2, initializer=init, dtype="bfloat16")
        state, plain = tx.init(2), table.lookup(keys[1:])
        for _ in range(5):
            table, state = table.apply(tx, kvjax.SparseRows(keys[:1], jnp.ones((1, 2))), state)
        source = now = caught_up(table, state, tx)
        (path := tmp_path / table.name).mkdir()
        if place == "checkpoint":
            kvjax.checkpoint.save(source := path / "saved", {"t": now})
        rows = now.lookup(keys)
        assert np.array_equal(rows[1:], plain) != moves
        if place == "swept":
            source = sweep(table, state, tx)
        if moves:
            with pytest.raises(ValueError, match="write: want missing= beside"):
                frozen.write(path / "a", source)
            if place != "checkpoint":
                with pytest.raises(ValueError, match="write: want missing= beside"):
                    kvjax.serving.Releases(path / "r").publish({"t": source})
            np.testing.assert_array_equal(frozen.write(path / "b", source, missing="init").lookup(keys[1:]), plain)
            there = frozen.write(path / "c", source, missing=rows[1])
            if place == "swept":  # also without the rows by which it could be seen
                with pytest.raises(ValueError, match="write: want missing= beside"):
                    frozen.write(path / "d", source.remove(keys[:1]))
        else:
            there = frozen.write(path / "a", source)
        np.testing.assert_array_equal(there.lookup(keys), rows.astype(jnp.float32))
