"""What a command says of a path or an argument that is another command's, or of a package that is not here."""

import os

import numpy as np
import pytest

import kvjax
from kvjax._command.main import main
from kvjax.serving import Releases


@pytest.fixture
def text(capsys):
    def text(*args):
        assert main([str(arg) for arg in args]) == 2
        return capsys.readouterr().err

    return text


@pytest.fixture
def table(make):
    return make(2).upsert([1, 2], np.ones((2, 2)))


def test_releases_and_what_is_in_them(table, tmp_path, text):
    Releases(tmp_path).publish({"user": table})
    assert f"got {tmp_path}, a folder of releases; kvjax releases shows them" in text("inspect", tmp_path)
    for place in ("00000001", "00000001/user.frozen"):
        assert f"got {tmp_path / place}, which serving reads; " in text("verify", tmp_path / place)
        with pytest.raises(kvjax.checkpoint.CheckpointError, match="which serving reads"):
            kvjax.checkpoint.restore(tmp_path / place)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet"])
def test_files_of_rows(table, tmp_path, text, kind):
    path = tmp_path / f"user.{kind}"
    getattr(table.export(), f"to_{kind}")(path)
    said = text("get", path, "1")
    assert f"kvjax: get: want a checkpoint of tables, got {path}, rows as {kind}; kvjax.convert.from_{kind} " in said
    assert callable(getattr(kvjax.convert, f"from_{kind}"))


def test_what_describes_a_table_and_differs(tmp_path, capsys):
    for seed in ("1", "2"):
        kvjax.checkpoint.save(tmp_path / seed, [kvjax.get_table("described", dim=1, seed=int(seed))])
        kvjax.drop_table("described")
    assert main(["diff", str(tmp_path / "1"), str(tmp_path / "2")]) == 1
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = said.index(["described:", "described", "by"])
    assert said[at + 1] == ["field", "first", "second"] and said[at + 3] == ["seed", "1", "2"]


def test_frozen_tables_are_written_elsewhere(tmp_path, text):
    assert "got .frozen; say --to, or write frozen tables by kvjax.serving.FrozenTable.write" in text(
        "convert", tmp_path, tmp_path / "ad.frozen"
    )


def test_convert_says_convert(tmp_path, text):
    for out in ("out", "out.npz"):
        said = text("convert", tmp_path, tmp_path.parent / out)
        assert said.startswith(f"kvjax: convert: want a checkpoint of tables, got none in {tmp_path}; "), said


def test_an_option_of_another_command(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main(["get", str(tmp_path), "1", "--stats"])
    said = capsys.readouterr().err
    assert error.value.code == 2 and said.startswith("usage: kvjax get ") and "unrecognized arguments: --stats" in said


@pytest.mark.parametrize("option", ["--dim", "--partitions"])
def test_a_number_of_none_is_none(option, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main(["convert", str(tmp_path), "out", option, "0"])
    assert error.value.code == 2 and f"{option}: want a number from 1, got 0" in capsys.readouterr().err


def test_what_is_no_folder_hides_no_release(table, tmp_path, capsys):
    releases = Releases(tmp_path)
    for _ in range(3):
        releases.publish({"user": table}, keep=4)
    os.rename(tmp_path / "00000001", tmp_path / "one")
    os.symlink(tmp_path / "00000001", tmp_path / "00000001")
    os.rename(tmp_path / "00000002", tmp_path / "two")
    (tmp_path / "00000002").write_bytes(b"")
    assert [(info.number, info.damaged is None) for info in releases.history()] == [(1, False), (2, False), (3, True)]
    assert main(["releases", str(tmp_path)]) == 1
    assert "symbolic links" in capsys.readouterr().out


def test_a_package_that_is_not_here(text, monkeypatch):
    """As where kvjax was installed without what it needs, for frozen tables alone."""
    monkeypatch.setattr("importlib.import_module", lambda name: __import__("ml_dtypes_of_nobody.part"))
    wanted = "kvjax: inspect: want ml_dtypes_of_nobody, got no such module; pip install ml_dtypes_of_nobody\n"
    assert text("inspect", "anything") == wanted


def test_words_in_paths_are_no_arguments(table, tmp_path, text, monkeypatch):
    """As those of folders by column, which tools that write Parquet make."""
    kvjax.checkpoint.save(tmp_path / "base=3" / "run.dim=8", [table])
    monkeypatch.chdir(tmp_path)
    for place in ("base=3/run.table=user", tmp_path / "base=3/run.table=user"):
        assert f"got none in {place}, which" in text("inspect", place)
    said = text("prune", "base=3/run.dim=8", "base=3/run.dim=8", "--min-norm", "1")
    assert f"got {tmp_path}/base=3/run.dim=8, which exists; give another, or --overwrite" in said
