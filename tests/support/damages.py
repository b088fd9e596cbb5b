"""Damages: whatever may become of a checkpoint's files is refused, by name and in kvjax's words, or does no harm.

python -m tests.support.damages [N] [SEED]      # N of them, in a folder of its own
"""

import collections
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import optax

import kvjax
from kvjax.checkpoint import CheckpointError, restore, save
from tests.support.checkpoints import IDS, assert_equal, rewrite, trained
from tests.support.tables import drop_all

STEPS = ("base", "delta")
"""Folders that are damaged; "other" is whole, and of another step."""


def write(folder):
    """Two tables: whole, a delta upon that, and whole at another step; gives what the delta restores to."""
    tx = optax.rmsprop(0.1, momentum=0.9)  # two slots of one shape
    admit = kvjax.admit.MinCount(2)
    one = kvjax.get_table("one", dim=2, initializer=np.eye(2), admit=admit).upsert(IDS, np.ones((5, 2)))
    limits = {"evict": kvjax.evict.MaxAge(50).every(30), "constraint": kvjax.constraints.max_norm(9.0)}
    two = kvjax.get_table("two", dim=2, **limits)
    one, two = trained(one.pin(IDS[:2]), tx), trained(two, tx, steps=2)
    save(folder / "base", [one, two], cursor="c")
    one, two = trained(one.remove(IDS[:1]), tx), trained(two, tx)
    save(folder / "delta", [one, two], since="c")
    want = {table.name: table.export(slots=True) for table in (one, two)}
    save(folder / "other", [trained(one.remove(IDS[1:2]), tx), trained(two.remove(IDS[2:3]), tx)])
    for name in want:
        kvjax.drop_table(name)
    return want


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


# ---- of one file: `old` is a copy elsewhere, and what each makes of it is `new` -------------------------------------


def flip(rng, old, folder, new):
    data = bytearray(old.read_bytes() or b"0")
    for _ in range(rng.choice([1, 1, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    new.write_bytes(data)


def cut(rng, old, folder, new):
    data = old.read_bytes()
    new.write_bytes(data[: rng.randrange(len(data) + 1)] + bytes(rng.choice([0, 3, 1 << 16])))


def of_another_step(rng, old, folder, new):
    place = folder / "other" / Path(*new.relative_to(folder).parts[1:])
    shutil.copy(place if place.exists() else rng.choice(files(folder / "other")), new)


def of_another_file(rng, old, folder, new):
    shutil.copy(rng.choice([path for path in files(folder) if path != new]), new)


def lose(rng, old, folder, new):
    pass


def no_file(rng, old, folder, new):
    kinds = [os.mkfifo, os.mkdir, *(lambda path, to=to: os.symlink(to, path) for to in ("/dev/zero", new, "."))]
    rng.choice(kinds)(new)


def endless(rng, old, folder, new):
    """20 GB of zeros, of which the disk has none."""
    shutil.copy(old, new)
    os.truncate(new, 20 << 30)


def long_json(rng, old, folder, new):
    n = rng.choice([10, 10**5, 10**6])
    new.write_text(rng.choice(["[" * n, "9" * n, '{"contents": ' + "[" * n, "[" + "0," * n + "0]", '{"a":' * n]))


def forge(rng, old, folder, new):
    """Another value somewhere in what JSON says."""
    said = json.loads(old.read_bytes())
    forged(rng, said)
    new.write_text(json.dumps(said))


HOSTILE = [
    0, -1, 2**31, 2**40, 2**48, 2**63, 10**400, 1.5, 1e308, float("nan"), True, None, "", "x" * 300, "../../etc/passwd",
    "float32[1099511627776]", "\ud800", [], [[]], {}, {"rule": "Every"}, [2**40, 2**40], [2**48],
]  # fmt: skip


def forged(rng, said):
    """Changes a value in it, however deep, or its name, or loses it."""
    while True:
        key = rng.choice(list(said) if isinstance(said, dict) else range(len(said)))
        if isinstance(said[key], (dict, list)) and said[key] and rng.random() < 0.8:
            said = said[key]
            continue
        if isinstance(said, dict) and rng.random() < 0.2:
            said[rng.choice(["new", "", "../x"])] = said.pop(key)
        elif rng.random() < 0.1:
            del said[key]
        else:
            said[key] = rng.choice(HOSTILE)
        return


OF_A_FILE = [flip, cut, of_another_step, of_another_file, lose, no_file, endless]
OF_JSON = [flip, cut, lose, long_json, forge, no_file]


def of_a_file(rng, folder):
    found, old = [path for step in STEPS for path in files(folder / step)], folder / "old"
    # zarr.json is for other programs.
    path = rng.choice([path for path in found if path.name != "zarr.json" or rng.random() < 0.2])
    kind = rng.choice(OF_JSON if path.suffix == ".json" and path.name != "zarr.json" else OF_A_FILE)
    path.rename(old)
    kind(rng, old, folder, path)
    yield kind.__name__, path
    if path.is_symlink() or path.exists():
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    old.rename(path)


# ---- of several ------------------------------------------------------------------------------------------------------


def exchange(rng, folder):
    """Two chunks, arrays, tables, lists or manifests change places, of one step or of two."""
    depth = rng.choice(["*/*", "*/*/*.json", "*/*/shard*/*", "*/*/shard*/*/c.*"])
    one, other = rng.sample(sorted(folder.glob(depth)), 2)
    _exchange(one, other)
    yield "exchange", f"{one.relative_to(folder)} {other.relative_to(folder)}"
    _exchange(one, other)


def _exchange(one, other):
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def forge_with_digests(rng, folder):
    """What no table can be, written by a program that writes digests."""
    step, table = rng.choice(STEPS), rng.choice(["one", "two"])
    shutil.copytree(folder / step, folder.with_name("whole"), symlinks=True)
    meta = json.loads((folder / step / table / "kvjax.json").read_text())
    forged(rng, meta)
    (folder / step / table / "kvjax.json").write_text("{}")
    try:
        rewrite(folder / step, table, meta=meta)
        yield "forge with digests", f"{step} {table} {meta!r:.1000}"
    except (ValueError, KeyError, TypeError):  # not even a manifest can be made of it
        pass
    shutil.rmtree(folder / step)
    folder.with_name("whole").rename(folder / step)


KINDS = [of_a_file, of_a_file, of_a_file, of_a_file, exchange, forge_with_digests]


def check(folder, want, n, seed=0, say=lambda *_: None):
    """Damages the checkpoints of `write` n times, and undoes it before the next; gives how often each was refused."""
    rng, found, least = random.Random(seed), collections.Counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    restore(folder / "delta")
    for i in range(n):
        for kind, where in rng.choice(KINDS)(rng, folder):
            what = f"{i}: {kind} of {where}"
            found[kind, check_one(folder, want, kind, where, what)] += 1
        say(i, found)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - least < 1 << 20, what  # KiB
    for name, table in restore(folder / "delta").items():  # all is as it was
        assert_equal(table.export(slots=True), want[name])
    return found


def versions():
    return {name: int(table.version) for name, table in kvjax.tables().items()}


def check_one(folder, want, kind, where, what):
    started, with_digests = time.monotonic(), kind == "forge with digests"
    if with_digests:  # what is there of these names would have to be alike
        drop_all()
    before = versions()
    try:
        tables = restore(folder / (where.split()[0] if with_digests else "delta"))
    except ValueError as error:
        assert isinstance(error, CheckpointError), (what, error)
        text = str(error)
        assert text.startswith("kvjax: ") and len(text) < 3000, (what, text)
        assert versions() == before, what
        name = where.parent.name if isinstance(where, Path) else ""
        # The base of a delta is found by its manifest, or not at all.
        if name:
            told = name in text or where.name in text or "of digest" in text
        else:
            told = "table" in text or "kvjax.json" in text
        assert told, (what, text)
        assert time.monotonic() - started < 20, what
        return "refused"
    except BaseException as error:
        raise AssertionError(what) from error
    if with_digests:  # another table, but one
        drop_all()
        return "another table"
    for name, rows in want.items():
        try:
            assert_equal(tables[name].export(slots=True), rows)
        except AssertionError as error:
            raise AssertionError(what) from error
    return "harmless"


def main():
    n, seed = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 10_000), (2, 0)))

    def say(i, found):
        if (i + 1) % 500 == 0:
            print(i + 1, {f"{kind}, {became}": count for (kind, became), count in sorted(found.items())}, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "it").mkdir()
        check(Path(folder) / "it", write(Path(folder) / "it"), n, seed, say)


if __name__ == "__main__":
    main()
