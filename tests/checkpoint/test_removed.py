"""Removed keys: what is made of a checkpoint without them has neither a row, nor a count, nor their bits."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax._command.main import main
from kvjax.checkpoint import compact, diff, prune, rows, save
from kvjax.serving import FrozenTable, Releases
from tests.support.marks import few

ROW, WAITS, OTHER, KEPT = 0x1122334455667788, -0x2233445566778899, 0x33445566778899AA, 7
VALUES = np.float32([[1.2345678, -2.3456789]])
GONE = [ROW, WAITS, 5]
ADMIT = kvjax.admit.MinCount(2)
ADAGRAD = optax.adagrad(0.1)


def seen(table, *keys):
    return table.apply(ADAGRAD, kvjax.SparseRows(np.int64(keys), jnp.ones((len(keys), 2))))[0]


def saved(folder, name):
    """A delta, of which a row and a waiting key are in the base; and the table."""
    table = kvjax.get_table(name, dim=2, admit=ADMIT).upsert([ROW, KEPT], np.concatenate([VALUES, [[3.0, 4.0]]]))
    table = seen(table.pin([ROW]), ROW, WAITS).assign([ROW], VALUES)
    save(folder / "0", [table], cursor=name)
    table = seen(table, OTHER)
    save(folder / "1", [table], since=name)
    return table


def has(path):
    """Whose bits are in the files there."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    found = b"".join(each.read_bytes() for each in files)
    bits = {"row": VALUES, "key": np.int64(ROW), "waits": np.int64(WAITS), "other": np.int64(OTHER)}
    return [name for name, one in bits.items() if one.tobytes() in found]


@pytest.mark.parametrize("way", few(["prune", "command", "save", "remove"], "prune", "command"))
def test_no_checkpoint_has_anything_of_them(way, tmp_path, capsys):
    table, out = saved(tmp_path, "removed"), tmp_path / "out"
    assert has(tmp_path / "0") == ["row", "key", "waits"]
    if way == "prune":
        report = prune(tmp_path / "1", None, kvjax.Prune(remove=GONE))["removed"]
        assert report == prune(tmp_path / "1", out, kvjax.Prune(remove=GONE))["removed"]
        assert (report.dropped.rows, report.by_rule["remove"].rows, report.waiting) == (1, 1, 1)
    elif way == "command":
        (tmp_path / "gone.txt").write_text("".join(f"{key}\n" for key in GONE) + "\n")
        arguments = ["prune", *map(str, (tmp_path / "1", out)), "--remove", str(tmp_path / "gone.txt")]
        assert main([*arguments[:2], "--dry-run", *arguments[3:]]) == 0
        assert "waiting keys" in capsys.readouterr().out
        assert main([*arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["removed"]
        assert found["by_rule"]["remove"]["rows"] == found["waiting"] == 1
    elif way == "save":
        save(out, [table], prune=kvjax.Prune(remove=GONE))
    else:  # by the table
        table = table.remove(GONE)
        save(tmp_path / "2", [table], since="removed")
        assert has(tmp_path / "2") == ["key", "waits"]  # a delta says which went
        compact(tmp_path / "2", out)
    assert has(out) == ["other"]
    save(tmp_path / "want", [table.remove(GONE)])
    assert diff(out, tmp_path / "want").same
    (piece,) = rows(out)
    assert piece.keys.tolist() == [KEPT]
    assert has(tmp_path / "0") == ["row", "key", "waits"]  # what is read is not changed


def test_files_for_servers_have_nothing_of_them(tmp_path):
    """Also where deltas are followed, and where a key that was removed comes back in one."""
    rule, name = kvjax.Prune(remove=GONE), "removed_served"
    table = saved(tmp_path / "steps", name)
    kvjax.convert.export_checkpoint(tmp_path / "steps", tmp_path / "rows.npz", prune=rule, slots=True)
    FrozenTable.write(tmp_path / "one.frozen", tmp_path / "steps", prune=rule)
    releases = Releases(tmp_path / "model")
    releases.follow(tmp_path / "steps")
    assert has(tmp_path / "model") == ["row"]
    releases.follow(tmp_path / "steps", prune=rule, keep=1)  # another rule: it writes all anew
    save(tmp_path / "steps/2", [table.assign([ROW, KEPT], np.concatenate([VALUES, [[5.0, 6.0]]]))], since=name)
    release = releases.follow(tmp_path / "steps", prune=rule, keep=1)
    assert release[name].contains([ROW, KEPT]).tolist() == [False, True] and release[name].lookup(KEPT)[0] == 5
    for path in ("rows.npz", "one.frozen", "model"):
        assert has(tmp_path / path) == [], path


def test_a_file_of_keys_that_is_none(tmp_path, capsys):
    saved(tmp_path, "removed_wrongly")
    (tmp_path / "words.txt").write_bytes(b"\xef\xbb\xbf5\r\nfive\r\n")  # as Windows writes text of UTF-8
    (tmp_path / "bytes").write_bytes(b"\x96")
    for file, says in (
        ("words.txt", "words.txt, line 2: want an integer of at most 64 bits, got five"),
        ("nothing.txt", "want a text file with a key on each line, got No such file or directory: "),
        ("bytes", "bytes, which is no text of UTF-8"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["prune", *map(str, (tmp_path / "1", tmp_path / "out")), "--remove", str(tmp_path / file)])
        assert says in capsys.readouterr().err and not (tmp_path / "out").exists()
