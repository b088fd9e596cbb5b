"""A spec is a value: compiled programs and handles find tables by it."""

import dataclasses
import inspect

import pytest

import kvjax
from kvjax._spec.options import ENTRIES
from kvjax._spec.sharding import Sharding


def test_a_spec_does_not_change(make):
    spec = make(dim=4).spec
    before = hash(spec)
    for name in ("name", "dim", "seed", "placement"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"cannot change {name} of the spec of table"):
            setattr(spec, name, None)
    assert hash(spec) == before
    assert dataclasses.replace(spec, dim=5).dim == 5 and spec.dim == 4


def test_the_signature_of_get_table_is_made_of_the_options():
    parameters = list(inspect.signature(kvjax.get_table).parameters.values())
    sharding = [field.name for field in dataclasses.fields(Sharding)]
    assert [p.name for p in parameters] == ["name", "dim", *ENTRIES, *sharding]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[1:])
    assert {p.name: p.default for p in parameters[2:]} == {
        **{name: entry.default for name, entry in ENTRIES.items()},
        **{field.name: field.default for field in dataclasses.fields(Sharding)},
    }


@pytest.mark.parametrize("given, text", [({"dmi": 4}, "unexpected keyword argument 'dmi'"), ({}, "argument: 'name'")])
def test_what_get_table_does_not_take(given, text):
    name = ("t",) if given else ()
    with pytest.raises(TypeError, match=rf"^get_table\(\) .*{text}"):
        kvjax.get_table(*name, **given)


def test_a_sharded_table_is_found_without_its_mesh_but_not_with_parts_of_it(mesh):
    kvjax.get_table("parts", dim=1, mesh=mesh(2))
    assert kvjax.get_table("parts", dim=1).spec.num_shards == 2
    with pytest.raises(ValueError, match="want mesh= or devices= beside replicated="):
        kvjax.get_table("parts", dim=1, replicated=True)
