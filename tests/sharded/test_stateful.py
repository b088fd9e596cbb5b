"""Random sequences of operations on tables that move from mesh to mesh give what the reference model gives."""

import jax
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

import kvjax
from tests.support.marks import examples
from tests.table import test_stateful as one_place

pytestmark = pytest.mark.cpu_table  # limits and eviction over a mesh


def over(n, kind="Auto", **options):
    kinds = (jax.sharding.AxisType[kind],)
    return {"mesh": jax.make_mesh((n,), ("x",), axis_types=kinds, devices=jax.devices()[:n]), **options}


PLACES = {
    "one place": lambda: {"mesh": None},
    "one device": lambda: over(1),
    "two": lambda: over(2),
    "three": lambda: over(3),
    "copies": lambda: over(4, replicated=True),
    "eight": lambda: over(8, "Explicit"),
}
PLACE = st.sampled_from(list(PLACES))


class ShardedMachine(one_place.TableMachine):
    @initialize(
        admission=st.sampled_from(one_place.ADMIT),
        full=st.sampled_from(one_place.FULL),
        count=st.sampled_from(one_place.COUNT),
        init=st.sampled_from(one_place.INITIAL),
        place=PLACE,
    )
    def make(self, admission, full, count, init, place):
        self.begin({"admit": admission, "count": count, **full}, init, **PLACES[place]())

    def sink(self, keys, values, slots, freqs, versions, reason):
        """Gets the rows of each shard by themselves."""
        for row in zip(keys.tolist(), values.tolist(), freqs.tolist(), versions.tolist(), strict=True):
            self.gone.append((reason, row[0], tuple(row[1]), *row[2:]))

    @rule(place=PLACE)
    def reshard(self, place):
        self.table = kvjax.reshard(self.table, **PLACES[place]())
        self.stale = None
        self.model.stats.clear()
        self.model.gone.clear()
        self.gone.clear()


TestSharded = ShardedMachine.TestCase
TestSharded.settings = settings(max_examples=examples(2, 30), stateful_step_count=20)
