"""Paths of stores are refused where a file has to be here, and nothing is written under their names."""

import os
import pathlib

import numpy as np
import pytest
from etils import epath

import kvjax
from kvjax import convert
from kvjax._formats.paths import anywhere, local
from kvjax.checkpoint import save
from kvjax.serving import FrozenTable, Releases

GS = "gs://bucket/x"


# What is called, for a path of a store, with a table and the checkpoint of it.
DOORS = {
    "to_deeprec": lambda path, table, here: table.export().to_deeprec(path, "t"),
    "from_deeprec": lambda path, table, here: convert.from_deeprec(path, "t"),
    "from_tfplus": lambda path, table, here: convert.from_tfplus(path, "t"),
    "from_tfra": lambda path, table, here: convert.from_tfra(path, "t"),
    "from_sok": lambda path, table, here: convert.from_sok(path, "t"),
    "import_checkpoint": lambda path, table, here: convert.import_checkpoint(path, here, format="sok", variable="t"),
    "FrozenTable.write": lambda path, table, here: FrozenTable.write(path, table),
    "FrozenTable.open": lambda path, table, here: FrozenTable.open(path),
    "FrozenTable.update": lambda path, table, here: FrozenTable.write(f"{here}.frozen", table).update(path=path),
    "Releases": lambda path, table, here: Releases(path),
    "Mmap": lambda path, table, here: kvjax.storage.Mmap(path),
}


@pytest.mark.parametrize("door", DOORS)
def test_paths_of_stores_are_refused(door, make, tmp_path, monkeypatch):
    """As strings, and as Orbax has them: else there is a folder "gs:" here, and nothing in the store."""
    monkeypatch.chdir(tmp_path)
    table = make(2).upsert(np.arange(3), np.ones((3, 2)))
    save("one", [table])
    before = sorted(os.listdir())
    for path in (GS, epath.Path(GS)):
        with pytest.raises(ValueError, match=r"^kvjax: .*: want a path of this machine's .*'gs://bucket/x'; copy it"):
            DOORS[door](path, table, "one")
    assert [name for name in sorted(os.listdir()) if name not in (*before, "one.frozen")] == []


def test_what_is_local():
    for path in (
        "a",
        "a/b:c",
        "/gs:",
        "s3:",
        "c:/x",
        "./~/x",
        "~x",
        pathlib.Path("a"),
        epath.Path("/a/b"),
        "a b://",
        b"a/b",
    ):
        for taken in (local(path, "op"), anywhere(path, "op")):
            assert taken == pathlib.Path(os.fsdecode(path)) and type(taken) is type(pathlib.Path())
    for path in ("s3://b", pathlib.Path("s3://b/x"), "abfss://c@d/x", "HTTP://x/y"):
        with pytest.raises(ValueError, match=r"^kvjax: op: want a path of this machine's"):
            local(path, "op")
    for take in (local, anywhere):
        with pytest.raises(ValueError, match="give the path alone, without 'file://'"):
            take("file:///tmp/x", "op")
        for path in ("~", "~/x"):
            with pytest.raises(
                ValueError, match=r"op: want a path, got '~.*; give os.path.expanduser\(path\), or './~"
            ):
                take(path, "op")


def test_what_is_of_a_store():
    """Also as pathlib leaves it, with one slash of two."""
    path = anywhere(pathlib.Path("memory://bucket/a"), "op")
    assert str(path) == os.fspath(path) == "memory://bucket/a" and path == anywhere("memory://bucket//a/", "op")
    assert path / "b" != path and str(path.parent / "b/c") == "memory://bucket/b/c"
    assert path.parent.parent == path.parent and [str(each) for each in (path / "b").parents] == [
        "memory://bucket/a", "memory://bucket",
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match=r"^kvjax: op: want a path here, or of a store that fsspec knows, got 'nope://x'"
    ):
        anywhere("nope://x", "op")
    with pytest.raises(ValueError, match="give that of one store"):
        anywhere("simplecache::s3://b/x", "op")
