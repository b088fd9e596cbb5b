"""Calls with more operands or results than their operation has: refused before the table is touched."""

import jax
import numpy as np
import pytest

WORD = jax.ShapeDtypeStruct((), np.uint32)
REFUSED = (ValueError, jax.errors.JaxRuntimeError)


def call(target, results, operands, **attributes):
    return jax.ffi.ffi_call(target, results, has_side_effect=True)(*operands, **attributes)


def changed(table, operands=(), results=()):
    n = jax.ShapeDtypeStruct((2,), np.bool_)
    attributes = {"table": table.spec.name, "narrow": np.bool_(False), "sharded": np.bool_(False)}
    version = np.uint32(table.version)
    given = (version, version, np.zeros((2, 2), np.uint32), *operands)
    return call("kvjax_changed", (n, *results, WORD), given, **attributes)


def clear(table, operands=(), results=()):
    attributes = {"table": table.spec.name, "phase": "whole", "slots_only": np.bool_(False)}
    return call("kvjax_clear", (WORD, *results), (np.uint32(table.version), *operands), **attributes)


@pytest.mark.parametrize("target", [changed, clear])
def test_surplus_operands_and_results_are_refused(target, make):
    table = make(dim=2).upsert(np.arange(3), np.ones((3, 2), np.float32))
    with pytest.raises(REFUSED, match=r"want at most [13] operands, got [24]; call kvjax's Python functions"):
        jax.block_until_ready(target(table, operands=(np.int32(1),)))
    with pytest.raises(REFUSED, match=r"want at most [12] results, got [23]; call kvjax's Python functions"):
        jax.block_until_ready(target(table, results=(WORD,)))
    assert len(table) == 3 and table.refresh().version == table.version
    jax.block_until_ready(target(table))


def test_operands_that_are_only_waited_for_are_no_surplus(make):
    table = make(dim=2)
    given = (np.uint32(table.version), np.ones(3), np.int32(1))
    assert int(call("kvjax_after", WORD, given, table=table.spec.name)) == table.version
