"""What is known to crash a version of JAX is refused there, and only there."""

import tomllib
from pathlib import Path

import jax
import pytest

import kvjax
from kvjax._spec.sharding import placement_of

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def make_table(mesh):
    return kvjax.get_table("user", dim=1, mesh=mesh)


def reshard(mesh):
    return kvjax.reshard(kvjax.get_table("user", dim=1), mesh)


def restore(mesh):
    return placement_of(kvjax.orbax.TableRestore(mesh=mesh), "user", "restore")


@pytest.mark.parametrize("version", ["0.11.0", "0.11.2", "0.11.3.dev20261122"])
@pytest.mark.parametrize("call, op", [(make_table, "get_table"), (reshard, "reshard"), (restore, "restore")])
def test_a_mesh_is_refused_where_it_crashes(monkeypatch, version, call, op):
    monkeypatch.setattr(jax, "__version__", version)
    with pytest.raises(RuntimeError) as error:
        call(jax.make_mesh((1,), ("x",)))
    text = str(error.value)
    assert text.startswith(
        f"kvjax: table 'user', {op}: want a jax that runs tables with mesh=, got jax {version}, where "
    )
    assert "segmentation fault" in text
    assert text.endswith("; install jax 0.10 (Python 3.11 and newer) or 0.12 (3.12 and newer), or leave mesh= out")


@pytest.mark.parametrize("version", ["0.10.0", "0.10.2", "0.12.0.1", "0.12.1.dev20261122", "1.11.0", "0.110.0"])
def test_a_mesh_is_not_refused_elsewhere(monkeypatch, version):
    monkeypatch.setattr(jax, "__version__", version)
    assert make_table(jax.make_mesh((1,), ("x",))).spec.placement is not None


def test_the_range_of_jax_is_one():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"].values()
    ranges = {
        one.split("]")[-1].removeprefix("jax")
        for one in [*project["dependencies"], *(one for extra in extras for one in extra)]
        if one.startswith(("jax>", "jax["))
    }
    assert ranges == {">=0.10,<0.13"}
