"""Tables through Orbax's CheckpointManager, and ways in which a checkpoint may be damaged."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorstore as ts

import kvjax
from kvjax.checkpoint._chains.catalog import write_manifest
from kvjax.checkpoint._disk.arrays import ArrayWriter, Spent
from kvjax.checkpoint._disk.format import digest

IDS = np.array([2**40, -1, 0, -(2**63), 2**63 - 1])


def save(folder, step, tables, **options):
    with ocp.CheckpointManager(folder) as manager:
        args = ocp.args.Composite(tables=kvjax.orbax.TableSave(tables, **options))
        manager.save(step, args=args)
        manager.wait_until_finished()


def restore(folder, step, tables=None):
    with ocp.CheckpointManager(folder) as manager:
        args = ocp.args.Composite(tables=kvjax.orbax.TableRestore(tables))
        return manager.restore(step, args=args)["tables"]


def array_at(path):
    """An array as anything that reads zarr finds it."""
    return np.array(ts.open({"driver": "zarr3", "kvstore": f"file://{path}"}).result().read().result())


def rewrite(folder, table, arrays=None, meta=None):
    """Writes arrays and fields of a table below `folder` as other contents, with all digests as they should be."""
    for path, array in (arrays or {}).items():
        shutil.rmtree(folder / table / path)
        (folder / table / path).mkdir()
        writer = ArrayWriter(folder / table / path, array.dtype, array.shape, Spent())
        writer.add(array)
        writer.end()
    path = folder / table / "kvjax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (meta or {})))
    for found in (folder / table).glob("shard-*.json"):
        parts = {name.split("/")[0] for name in json.loads(found.read_text())}
        found.write_text(json.dumps(listed(folder / table, parts)))
    write_manifest(folder)


def listed(folder, parts):
    """The list of some files, and of all files of some folders."""
    paths = [path for part in parts for path in (folder / part, *(folder / part).rglob("*")) if path.is_file()]
    data = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    return {name: (len(bytes), digest(bytes)) for name, bytes in data.items()}


def chunks_of(folder):
    """The chunks of an array, in their order."""
    return sorted(folder.glob("c.*"), key=lambda path: int(path.name.split(".")[1]))


def damage_delete(folder):
    shutil.rmtree(folder / "shard-00000-of-00001/values")


def damage_chunk_missing(folder):
    chunks_of(folder / "shard-00000-of-00001/values")[0].unlink()


def damage_bit(folder):
    path = chunks_of(folder / "shard-00000-of-00001/values")[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def damage_rows(folder):
    meta = json.loads((folder / "kvjax.json").read_text())
    (folder / "kvjax.json").write_text(json.dumps(meta | {"rows": 10**12}))


def damage_format(folder):
    (folder / "kvjax.json").write_text('{"format": "kvjax.table.v9", "num_buckets": 1, "num_shards": 1}')


def damage_field(folder):
    meta = json.loads((folder / "kvjax.json").read_text())
    del meta["slots"]
    (folder / "kvjax.json").write_text(json.dumps(meta))


def damage_json(folder):
    (folder / "kvjax.json").write_text("{")


DAMAGES = [
    damage_delete, damage_chunk_missing, damage_bit, damage_rows, damage_format, damage_field, damage_json,
]  # fmt: skip


def trained(table, tx=None, steps=3):
    tx = tx or optax.rmsprop(0.1)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        grads = kvjax.SparseRows(rng.choice(IDS, 8), jnp.asarray(rng.normal(size=(8, table.dim)), jnp.float32))
        table, _ = table.apply(tx, grads)
    return table


def many(table, n=500):
    """`table` with `n` more rows, of keys from the whole range."""
    keys = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, n)
    return table.upsert(keys, np.random.default_rng(2).normal(size=(n, table.dim)).astype(np.float32))


def assert_equal(a, b):
    for name in ("keys", "values", "freqs", "versions", "has_slots"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.slots.keys() == b.slots.keys() and a.last_step == b.last_step
    for name in a.slots:
        np.testing.assert_array_equal(a.slots[name], b.slots[name], err_msg=name)
