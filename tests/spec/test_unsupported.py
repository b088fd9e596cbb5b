"""Options that tables on CUDA do not support yet are refused."""

import numpy as np
import pytest

import kvjax
from tests.support.engines import Memory
from tests.support.tables import KEYS

pytestmark = pytest.mark.cpu_table

Device = kvjax.storage.Device


ASKED = {
    "max_capacity=": {"max_capacity": 1000},
    "evict=": {"evict": kvjax.evict.MaxAge(3).every(2)},
    "a row that unadmitted keys share": {"admit": kvjax.admit.MinCount(2, unadmitted=7)},
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_device_table_cannot_do_yet_is_refused(asked, mesh, elsewhere):
    options, two = ASKED[asked], mesh(2)
    refused = pytest.raises(
        ValueError, match=rf"mesh= beside {asked}.*not on CUDA yet; leave it out, or storage=kvjax.storage.Host"
    )
    with refused:
        kvjax.get_table("refused", dim=2, storage=Device(), mesh=two, **options)
    assert kvjax.tables() == {}
    table = kvjax.get_table("refused", dim=2, mesh=two, **options).upsert(KEYS, np.ones((len(KEYS), 2)))
    with refused:
        table.to(Device())
    assert table.size() == len(table) > 0
    table = kvjax.get_table("moved", dim=2, storage=Device(), **options)
    with refused:
        kvjax.reshard(table, two)
    assert len(table) == 0


def test_shards_of_a_device_table_choose_no_rows_yet(mesh, elsewhere):
    table = kvjax.get_table("sharded", dim=2, storage=Device(), mesh=mesh(2))
    for choose in (lambda: table.evict(kvjax.evict.MaxAge(3)), lambda: table.restrict(4)):
        with pytest.raises(
            ValueError, match=r"of a table with mesh=, which is not on CUDA yet; kvjax.reshard\(table, None\)"
        ):
            choose()


def test_an_engine_is_not_for_tables_that_are_emulated(monkeypatch):
    """Where host threads stand for a GPU, all storage is a device's, and the engine would never be called."""
    monkeypatch.setattr("kvjax.ffi.is_device", lambda backend: True)
    with pytest.raises(ValueError, match=r"storage.External, which is not on CUDA yet; test it without KVJAX_EMULATED"):
        kvjax.get_table("engine", dim=2, storage=kvjax.storage.External(Memory()))


def test_what_a_device_table_can_do_is_taken(elsewhere):
    evict = kvjax.evict.MaxAge(3) | kvjax.evict.LeastFrequent()
    options = {"admit": kvjax.admit.MinCount(2), "evict": evict, "on_full": "evict", "max_capacity": 100}
    table = kvjax.get_table("taken", dim=2, storage=Device(), dtype="bfloat16", **options)
    assert kvjax.get_table("taken", dim=2, dtype="bfloat16", **options).spec == table.spec
