"""The reader of the document on the format reads frozen tables as kvjax does."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import kvjax
from kvjax.serving import FrozenTable
from tests.support.marks import few
from tests.support.tables import AWKWARD

TEXT = (Path(__file__).parents[2] / "docs/frozen-format.md").read_text()


@pytest.mark.parametrize("initializer", [0.5, kvjax.initializers.normal(1.0), np.eye(3)], ids=["one", "random", "pool"])
@pytest.mark.parametrize("quantise", few([None, "float16", "bfloat16", "int8"], 0, "int8"))
def test_the_reader_of_the_document(make, tmp_path, quantise, initializer):
    (code,) = re.findall(r"```python\n(.*?)\n\n\nfolder = ", TEXT, re.S)
    reader = {}
    exec(compile(code, "frozen-format.md", "exec"), reader)
    keys = np.concatenate([np.arange(0, 300, 2), AWKWARD[2:]])
    rows = np.random.default_rng(0).normal(size=(len(keys), 3)).astype(np.float32)
    frozen = FrozenTable.write(tmp_path / "t", make(3, initializer=initializer).upsert(keys, rows), quantise=quantise)
    about, arrays = reader["opened"](frozen.path)
    asked = np.concatenate([np.arange(-3, 303), AWKWARD])
    want, found = frozen.lookup(asked, return_found=True)
    assert 0 < found.sum() < len(asked)
    for key, row, there in zip(asked.tolist(), want, found, strict=True):
        got = reader["looked_up"](about, arrays, key)
        assert (got is not None) == there
        if there:
            np.testing.assert_array_equal(got, row)


def test_every_field_is_described(make, tmp_path):
    about = FrozenTable.write(tmp_path / "t", make(3)).path.read_bytes()
    fields = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`[^|]*) \|", TEXT, re.M))))
    described = json.loads(about[about.rindex(b'{"bits"') : -16])
    assert described.keys() <= fields
    assert described["initial"].keys() | {"segments"} <= set(re.findall(r"`(\w+)`", TEXT))
