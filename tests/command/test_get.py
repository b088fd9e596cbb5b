"""``kvjax get``: the rows of some keys, from any checkpoint, and which keys have none."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._command.main import main
from tests.support.marks import few


@pytest.fixture
def get(capsys):
    """Runs it: gives its status and what it printed, decoded if it is JSON."""

    def get(*args):
        status = main(["get", *map(str, args)])
        out, err = capsys.readouterr()
        return status, json.loads(out) if "--json" in args and status < 2 else out + err

    return get


def saved(folder, key_dtype="int64"):
    """A delta of a table with a slot, in which a row is another, and one is gone."""
    info = np.iinfo(key_dtype)
    keys = np.array([5, info.min if info.min else 6, 7, info.max], key_dtype)
    values, n, yes = np.arange(40, dtype=np.float32).reshape(4, 10) / 8, np.arange(4), np.ones(4, bool)
    kept = keys.astype(np.uint64 if key_dtype.startswith("u") else np.int64)
    rows = kvjax.Exported(kept, values, n + 2, n, {"nu": values + 1}, yes, n > 2, 6, 4)
    table = kvjax.get_table("user", dim=10, key_dtype=key_dtype).load(rows)
    kvjax.checkpoint.save(folder / "0", {"user": table, "item": table}, cursor="c")
    table = table.remove(keys[2:3]).assign(keys[:1], np.full((1, 10), 0.1))
    kvjax.checkpoint.save(folder / "1", {"user": table, "item": table}, since="c")
    return table.export(slots=True), keys


@pytest.mark.parametrize("key_dtype", few(["int64", "uint64", "int32", "uint32"], "int64"))
def test_rows_are_those_of_the_table(key_dtype, get, tmp_path):
    rows, keys = saved(tmp_path, key_dtype)
    status, found = get(tmp_path, "--table", "user", "--slots", "--json", *keys, *keys[::-1])
    assert status == 1 and found["table"] == "user" and found["without_row"] == [7]
    assert [row["key"] for row in found["rows"]] == np.delete(keys, 2).tolist()  # in the order of the command
    for row in found["rows"]:
        (at,) = np.flatnonzero(rows.keys == row["key"])
        assert row["values"] == rows.values[at].tolist() and row["slot.nu"] == rows.slots["nu"][at].tolist()
        assert row["frequency"] == rows.freqs[at] and row["version"] == rows.versions[at]
        assert row["age"] == rows.last_step - rows.versions[at] and row["pinned"] == rows.pinned[at]
        assert row["norm"] == pytest.approx(np.linalg.norm(rows.values[at]))
    if key_dtype.startswith("int"):  # and its 64 or 32 bits without a sign are the same key
        unsigned = int(keys[1]) % 2 ** (64 if key_dtype == "int64" else 32)
        assert get(tmp_path, "--table", "user", "--json", unsigned)[1]["rows"][0]["key"] == keys[1]


def test_what_a_terminal_shows(get, tmp_path):
    saved(tmp_path)
    status, text = get(tmp_path, "--table", "user", 5, 7)
    assert status == 1 and "user: rows of 1 of 2 keys" in text and "no row" in text and "slot.nu" not in text
    assert "0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, ..." in text  # the first eight
    status, text = get(tmp_path / "0", "--table", "user", "--slots", 5, 7)
    assert status == 0 and "slot.nu" in text and "no row" not in text
    assert get(tmp_path, "--table", "user", 99)[0] == 1


def test_keys_that_wait_for_a_row(get, make, tmp_path):
    """Of a delta, too, and with the mark of a window beside the count; in words and in JSON."""
    table = make(1, key_dtype="uint64", admit=kvjax.admit.MinCount(5, max_age=9))
    table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.uint64([2**64 - 1, 3, 3]), jnp.ones((3, 1))))
    kvjax.checkpoint.save(tmp_path / "0", [table], cursor="waits")
    table, _ = table.apply(optax.sgd(1.0), kvjax.SparseRows(np.uint64([2**64 - 1]), jnp.ones((1, 1))))
    kvjax.checkpoint.save(tmp_path / "1", [table.remove([3])], since="waits")
    status, found = get(tmp_path / "0", "--json", -1, 3, 4)
    assert status == 1 and found["rows"] == [] and found["without_row"] == [2**64 - 1, 3, 4]
    assert found["waiting"] == [{"key": 2**64 - 1, "frequency": 1}, {"key": 3, "frequency": 2}]
    assert get(tmp_path / "1", "--json", -1, 3)[1]["waiting"] == [{"key": 2**64 - 1, "frequency": 2}]
    words = [line.split()[:3] for line in get(tmp_path / "0", 3, 4)[1].splitlines()[-2:]]
    assert words == [["3", "2", "-"], ["4", "-", "-"]]


def test_what_is_asked_wrongly(get, tmp_path, capsys):
    saved(tmp_path)
    assert get(tmp_path, 5) == (
        2, f"kvjax: {tmp_path / '1'}: want one table of the checkpoint, got ['item', 'user']; say which: --table\n"
    )  # fmt: skip
    assert "did you mean 'user'?" in get(tmp_path, "--table", "usr", 5)[1]
    for key in ("five", 2**64, -(2**63) - 1, "1.5"):
        with pytest.raises(SystemExit, match="2"):
            get(tmp_path, "--table", "user", key)
        assert "want an integer of at most 64 bits" in capsys.readouterr().err
    chunk = next((tmp_path / "1").glob("user/shard*/values/c.0.0"))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    status, text = get(tmp_path, "--table", "user", 5)
    assert status == 2 and "table 'user', get: want" in text and "damaged" in text
