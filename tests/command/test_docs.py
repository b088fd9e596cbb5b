"""The commands of docs/command-line.md print what it says."""

import re
import shlex
from pathlib import Path

import pytest

import kvjax
from kvjax._command.main import main
from tests.support.marks import slow

TEXT = (Path(__file__).parents[2] / "docs/command-line.md").read_text()


def plain(output):
    """Without what differs from one format of checkpoints, or width of a terminal, to another."""
    output = re.sub(r"[\d.]+ (B|KiB|MiB)\b|\d+ files|[\d-]+ [\d:]+ UTC|/\S+/(?=\w+day)", "...", output)
    lines = [re.sub(r"\s+", " ", re.sub("─+", "─", line)).strip() for line in output.splitlines()]
    return [line for line in lines if line]


@slow
def test_the_commands_print_what_the_page_says(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.chdir(tmp_path)
    (made,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    exec(compile(made, "command-line.md", "exec"), {})
    kvjax.drop_table("user")
    (runs,) = re.findall(r"```console\n(.*?)```", TEXT, re.S)
    commands = re.findall(r"^\$ kvjax (.*?)\n(.*?)(?=^\$ |\Z)", runs, re.M | re.S)
    assert len(commands) == runs.count("$ kvjax")
    said = {"inspect", "top", "get", "verify", "diff", "prune", "merge", "convert", "releases"}
    assert {command.split()[0] for command, _ in commands} == said
    for command, printed in commands:
        status = main(shlex.split(command))
        out, err = capsys.readouterr()
        assert plain(out) == plain(printed) and err == "", f"{command}:\n{out}{err}"
        assert status == (1 if command.startswith(("diff", "get")) else 0)
