"""The README's code runs and prints what it says."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_code_blocks(tmp_path, capsys, promotion):
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) == 6
    namespace = {"folder": tmp_path}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", README, re.M)
    assert int(namespace["state"].step) == 51


def test_no_placeholder_is_left():
    assert not re.search(r"^[A-Z_]{4,}$", README, re.M)


def test_links():
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[1] / link).exists(), link
