"""The code in the README and the docs runs and prints what they say."""

import re
from pathlib import Path

import pytest

from tests.support.marks import few

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# How many blocks of code there are in each.
TEXTS = {
    "README.md": 4, "docs/checkpoints.md": 5, "docs/command-line.md": 1, "docs/cuda.md": 0, "docs/decisions.md": 0,
    "docs/deltas.md": 3, "docs/design.md": 0, "docs/exports.md": 3, "docs/format.md": 1, "docs/frozen-format.md": 1,
    "docs/laziness.md": 4, "docs/migration.md": 1, "docs/optimizers.md": 4, "docs/recipes.md": 20,
    "docs/reference.md": 0, "docs/restarts.md": 5, "docs/scaling.md": 0, "docs/serving.md": 5, "docs/sharding.md": 5,
    "docs/tables.md": 11, "docs/troubleshooting.md": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", few(TEXTS, "README.md"))
def test_code_blocks(name, tmp_path, capsys, monkeypatch, promotion):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / name).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == TEXTS[name]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace = {}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", text, re.M)
    if name == "README.md":
        assert int(namespace["state"].step) == 50


def test_all_docs_are_run():
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= TEXTS.keys()


def test_no_placeholder_is_left():
    assert not re.search(r"^[A-Z_]{4,}$", README, re.M)


def test_links():
    for name in TEXTS:
        for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text()):
            assert (ROOT / name).parent.joinpath(link).exists(), link


def test_links_to_headings():
    for name in TEXTS:
        for path, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / name).read_text()):
            text = (ROOT / name).parent.joinpath(path).read_text() if path else (ROOT / name).read_text()
            titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
            found = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in found, f"{name}: {path}#{heading}"


def test_files_that_are_named():
    files = [
        path.as_posix()
        for folder in ("kvjax", "tests", "benchmarks", "examples")
        for path in ROOT.glob(f"{folder}/**/*")
    ]
    for name in (*TEXTS, "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/NOTES.md"):
        for file in re.findall(r"`([\w./-]+\.(?:py|h|cc|cu|cuh|sh))`", (ROOT / name).read_text()):
            assert any(path.endswith(f"/{file}") for path in files), f"{name}: {file}"
