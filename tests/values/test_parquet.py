"""Exports as Parquet files: every column, exactly, and a clear error without pyarrow."""

import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.checkpoints import IDS, trained


@pytest.mark.parametrize("key_dtype, dtype", [("int64", "float32"), ("uint64", "bfloat16"), ("int64", "float16")])
def test_parquet(key_dtype, dtype, make, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = trained(make(3, key_dtype=key_dtype, dtype=dtype).upsert(IDS, np.ones((5, 3))), optax.rmsprop(0.1))
    rows = table.export(slots=True)
    rows.to_parquet(tmp_path / "rows.parquet")
    found = parquet.read_table(tmp_path / "rows.parquet")
    assert found.schema.metadata[b"kvjax.last_step"] == b"3"
    assert found.column_names == list(rows.columns())
    for name, array in rows.columns().items():
        got = np.array(found[name].to_pylist(), array.dtype if dtype != "bfloat16" else None)
        np.testing.assert_array_equal(got, array.astype(np.float32) if array.dtype == jnp.bfloat16 else array)
    rows.take(np.zeros(5, bool)).to_parquet(str(tmp_path / "none.parquet"))
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0


def test_parquet_without_pyarrow(make, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"to_parquet: want pyarrow.*pip install pyarrow"):
        make(1).export().to_parquet(tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []
