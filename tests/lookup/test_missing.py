"""What keys without a row read as, in a training loss."""

import jax.numpy as jnp
import optax

import kvjax


def test_a_key_that_reads_as_missing_still_occurs(make):
    """It gets a row at its initial value, without a gradient but with decay; a mask leaves it out."""
    table = make(2, initializer=4.0).upsert(8, [1.0, 1.0])
    keys, decays = kvjax.keys([7, 8]), optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.5))

    def loss(table, masked):
        rows = table.lookup(keys, missing="zeros", mask=table.contains(keys) if masked else None)
        return jnp.sum((rows - 3.0) ** 2) / 4

    for masked, counts in ((True, [0, 1]), (False, [1, 1])):
        value, grads = kvjax.value_and_grad(loss)(table, masked)
        assert value == (9.0 + 4.0) / 2 and grads.counts.tolist() == counts
        if not masked:
            assert grads.rows.tolist() == [[0.0, 0.0], [-1.0, -1.0]]
            table, _ = table.apply(decays, grads)
            assert table.lookup(keys).tolist() == [[3.0, 3.0], [1.25, 1.25]]
        else:
            assert len(table.apply(optax.set_to_zero(), grads)[0]) == 1
            table = table.refresh()
        assert table.frequency(keys).tolist() == [not masked, 1 + (not masked)]
