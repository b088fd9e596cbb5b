"""Which tables a loss gives gradients, and that a gradient is of its table."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax


def test_tables_that_a_loss_closes_over_are_named(make):
    """They get no gradient, silently so far; a table that is another argument is not meant to have one."""
    table, other, frozen = make(), make(), make(trainable=False)
    params = {"w": jnp.ones(4), "t": table}
    ids = 7

    def loss(params, also=None, closed=()):
        used = [params["t"], *closed] + ([] if also is None else [also])
        return sum(jnp.sum(t.lookup(ids) * params["w"]) for t in used)

    for closed in (other, table):
        with pytest.warns(
            UserWarning, match=f"table '{closed.name}', value_and_grad: want the table in an arg"
        ) as said:
            kvjax.grad(lambda p, c=closed: loss(p, closed=[c]))(params)
        assert said[0].filename == __file__
    for given in ((params, other), (params, None, [other])):
        kvjax.value_and_grad(loss)(*given)
    kvjax.value_and_grad(loss)(params, also=other)
    kvjax.grad(lambda p: loss(p, closed=[frozen]))(params)


def test_gradients_belong_to_their_table(make):
    a, b = make(), make()
    grads = kvjax.grad(lambda p: jnp.sum(p["a"].lookup(np.array([1])) + p["b"].lookup(np.array([2]))))({"a": a, "b": b})
    assert (grads["a"].table, kvjax.merge(grads["b"]).table) == (a.name, b.name)
    tx = kvjax.optax.partition(dense=optax.sgd(1.0), tables=optax.sgd(1.0))
    swapped = {"a": grads["b"], "b": grads["a"]}
    for write in (
        lambda: a.apply(optax.sgd(1.0), grads["b"]),
        lambda: a.apply(optax.sgd(1.0), kvjax.merge(grads["b"], scale=0.5)),
        lambda: tx.update(swapped, tx.init({"a": a, "b": b}), {"a": a, "b": b}),
    ):
        with pytest.raises(
            ValueError, match=f"table '{a.name}', apply: want gradients of this table, got those of table"
        ):
            write()
    with pytest.raises(ValueError, match="merge: want gradients of one table"):
        kvjax.merge([grads["a"], grads["b"]])
    a, _ = a.apply(optax.sgd(1.0), kvjax.SparseRows(grads["b"].keys, grads["b"].rows))
    assert a.contains(np.array([2])).tolist() == [True]
