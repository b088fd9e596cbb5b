"""Paths of other stores are refused wherever a path is taken, and nothing is written under their names."""

import asyncio
import os
import pathlib

import numpy as np
import pytest
from etils import epath

import kvjax
from kvjax import convert
from kvjax._command.main import main
from kvjax._formats.local import local
from kvjax.checkpoint import compact, diff, prune, restore, save, verify
from kvjax.serving import FrozenTable, Releases

GS = "gs://bucket/x"
KEEP = kvjax.Prune(zero_rows=True)


class Creating:
    """Where Orbax's v1 API makes a folder."""

    path = epath.Path(GS)

    async def await_creation(self):
        return self.path


# What is called, for a path of another store, with a table and the checkpoint of it.
DOORS = {
    "save": lambda path, table, here: save(path, [table]),
    "restore": lambda path, table, here: restore(path),
    "restore: base": lambda path, table, here: restore(here, base=path),
    "verify": lambda path, table, here: verify(path),
    "diff": lambda path, table, here: diff(here, path),
    "prune": lambda path, table, here: prune(path, None, KEEP),
    "prune: out": lambda path, table, here: prune(here, path, KEEP),
    "compact": lambda path, table, here: compact(path, here),
    "compact: out": lambda path, table, here: compact(here, path),
    "TableSave": lambda path, table, here: kvjax.orbax.TableHandler().save(path, kvjax.orbax.TableSave({"t": table})),
    "TableRestore": lambda path, table, here: kvjax.orbax.TableHandler().restore(path),
    "StatefulTables": lambda path, table, here: asyncio.run(kvjax.orbax.StatefulTables({"t": table}).save(Creating())),
    "StatefulTables: load": lambda path, table, here: asyncio.run(kvjax.orbax.StatefulTables().load(path)),
    "to_npz": lambda path, table, here: table.export().to_npz(path),
    "to_parquet": lambda path, table, here: table.export().to_parquet(path),
    "to_safetensors": lambda path, table, here: table.export().to_safetensors(path),
    "to_deeprec": lambda path, table, here: table.export().to_deeprec(path, "t"),
    "from_npz": lambda path, table, here: convert.from_npz(path),
    "from_parquet": lambda path, table, here: convert.from_parquet(path),
    "from_safetensors": lambda path, table, here: convert.from_safetensors(path),
    "from_deeprec": lambda path, table, here: convert.from_deeprec(path, "t"),
    "from_tfplus": lambda path, table, here: convert.from_tfplus(path, "t"),
    "from_tfra": lambda path, table, here: convert.from_tfra(path, "t"),
    "from_sok": lambda path, table, here: convert.from_sok(path, "t"),
    "export_checkpoint": lambda path, table, here: convert.export_checkpoint(path, here, format="npz"),
    "export_checkpoint: path": lambda path, table, here: convert.export_checkpoint(here, path, format="npz"),
    "import_checkpoint": lambda path, table, here: convert.import_checkpoint(path, here, format="npz"),
    "import_checkpoint: path": lambda path, table, here: convert.import_checkpoint(here, path, format="npz"),
    "FrozenTable.write": lambda path, table, here: FrozenTable.write(path, table),
    "FrozenTable.write: source": lambda path, table, here: FrozenTable.write(here, path),
    "FrozenTable.open": lambda path, table, here: FrozenTable.open(path),
    "FrozenTable.update": lambda path, table, here: FrozenTable.write(f"{here}.frozen", table).update(path=path),
    "Releases": lambda path, table, here: Releases(path),
    "Releases.follow": lambda path, table, here: Releases(f"{here}.releases").follow(path),
    "Mmap": lambda path, table, here: kvjax.storage.Mmap(path),
}


@pytest.mark.parametrize("door", DOORS)
def test_paths_of_other_stores_are_refused(door, make, tmp_path, monkeypatch):
    """As strings, and as Orbax has them: else there is a folder "gs:" here, and nothing in the store."""
    monkeypatch.chdir(tmp_path)
    table = make(2).upsert(np.arange(3), np.ones((3, 2)))
    save("one", [table])
    before = sorted(os.listdir())
    for path in (GS, epath.Path(GS)):
        with pytest.raises(ValueError, match=r"^kvjax: .*: want a path of this machine's .*'gs://bucket/x'; save to a"):
            DOORS[door](path, table, "one")
    assert [name for name in sorted(os.listdir()) if name not in (*before, "one.frozen")] == []


@pytest.mark.parametrize("command", [["inspect"], ["convert", "one"], ["convert", "--from", "npz"], ["verify"]])
def test_commands_refuse_them_too(command, make, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save("one", [make(2)])
    args = [*command, GS] if "--from" not in command else ["convert", GS, "two", "--from", "npz"]
    assert main(args) == 2 and "want a path of this machine's" in capsys.readouterr().err
    assert os.listdir() == ["one"]


def test_what_is_local():
    for path in ("a", "a/b:c", "/gs:", "s3:", "c:/x", pathlib.Path("a"), epath.Path("/a/b"), "a b://", b"a/b"):
        assert local(path, "op") == pathlib.Path(os.fsdecode(path)) and type(local(path, "op")) is type(pathlib.Path())
    for path in ("s3://b", pathlib.Path("s3://b/x"), "abfss://c@d/x", "HTTP://x/y"):
        with pytest.raises(ValueError, match=r"^kvjax: op: want a path of this machine's"):
            local(path, "op")
    with pytest.raises(ValueError, match="give the path alone, without 'file://'"):
        local("file:///tmp/x", "op")
