"""Uses of the public API, for pyright to check what users are told (see pyproject.toml); nothing here runs.

An error that pyright must find has a comment that ignores it, and a comment that ignores nothing is an error.
"""

# pyright: basic
# pyright: reportUnnecessaryTypeIgnoreComment=true

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import kvjax


def tables(keys: kvjax.KeysLike):
    kvjax.get_tabel("t")  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(kvjax.get_table("t", dim=4, max_capacity=10), kvjax.Table)
    assert_type(kvjax.get_table(name="t"), kvjax.Table)
    kvjax.get_table("t", 4)  # pyright: ignore[reportCallIssue]
    kvjax.get_table("t", dmi=4)  # pyright: ignore[reportCallIssue]
    kvjax.get_table("t", dim="4")  # pyright: ignore[reportArgumentType]
    kvjax.get_table("t", dim=4, on_full="evcit")  # pyright: ignore[reportArgumentType]
    kvjax.get_table("t", dim=4, initializer="normal")  # pyright: ignore[reportArgumentType]
    kvjax.get_table("t", dim=4, storage=kvjax.storage.Host, evict=None)  # pyright: ignore[reportArgumentType]
    kvjax.get_table("t", dim=4, evict=kvjax.evict.MaxAge(9) & ~kvjax.evict.LeastRecent(3), on_full="evict")
    kvjax.get_table("t", dim=4, initializer=kvjax.initializers.normal(0.1), dtype=jnp.bfloat16, rounding="stochastic")
    kvjax.get_table("t", dim=2, initializer=[1.0, 2.0], admit=kvjax.admit.MinCount(3, unadmitted="zeros"))
    kvjax.get_table("t", dim=2, initializer=jax.nn.initializers.normal(), constraint=kvjax.constraints.max_norm(1.0))
    kvjax.get_table("t", dim=2, constraint=lambda row: row * 2, partitioner=lambda keys, n: keys.words[..., 0] % n)
    assert_type(kvjax.tables(), dict[str, kvjax.Table])
    assert_type(kvjax.stats()["t"], kvjax.Stats)
    assert_type(kvjax.keys(keys), kvjax.Keys)
    assert_type(kvjax.hash_keys(["a", "b"]), np.ndarray)


def checkpoints(path: str, keys: kvjax.KeysLike):
    for piece in kvjax.checkpoint.rows(path, "t", keys=keys, slots=True):
        assert_type(piece, kvjax.Exported)
    delta = kvjax.checkpoint.changes(path, since=())
    delta = kvjax.checkpoint.changes(path, "t", since=delta.checkpoint)
    assert_type(delta, kvjax.checkpoint.TableDelta)
    assert_type(delta.removed, np.ndarray)
    kvjax.checkpoint.rows(path, keys=["seven"])  # pyright: ignore[reportArgumentType]


def reads(table: kvjax.Table, keys: jax.Array, wants_found: bool):
    assert_type(table.lookup(keys), jax.Array)
    assert_type(table.lookup([[1, 2], [3, 4]], missing="zeros"), jax.Array)
    assert_type(table.lookup(np.arange(3), missing=[0.0, 1.0]), jax.Array)
    assert_type(table.lookup(kvjax.keys(7), return_found=True), tuple[jax.Array, jax.Array])
    assert_type(table.lookup(7, return_found=wants_found), jax.Array | tuple[jax.Array, jax.Array])
    table.lookup("seven")  # pyright: ignore[reportArgumentType]
    table.lookup(["seven"])  # pyright: ignore[reportArgumentType]
    table.lookup(None)  # pyright: ignore[reportArgumentType]
    table.lookup(keys, missing="zeroes")  # pyright: ignore[reportArgumentType]
    prefetched, table = kvjax.prefetch(table, keys)
    assert_type(prefetched, kvjax.Prefetched)
    table.lookup(prefetched)
    assert_type(table.export(), kvjax.Exported)
    assert_type(table.export(kvjax.Prune(top_k=3), dry_run=True), tuple[int, int])
    assert_type(kvjax.lookup_bag(table, keys, lengths=[1, 0, 2], combiner="sqrtn", empty=[9.0, 9.0]), jax.Array)
    kvjax.lookup_bag(table, keys, combiner="avg")  # pyright: ignore[reportArgumentType]
    assert_type(kvjax.lookup_many({"a": (table, keys), "b": (table, [1], keys > 0)}), dict[str, jax.Array])
    bags = kvjax.Feature(table, keys, pad_id=-1, combiner="mean", empty=[9.0])
    assert_type(kvjax.lookup_many({"a": bags}), dict[str, jax.Array])
    kvjax.Feature(table, keys, combiner="avg")  # pyright: ignore[reportArgumentType]


def writes(table: kvjax.Table, keys: jax.Array, grads: kvjax.SparseRows):
    assert_type(table.upsert([1, 2], [[1.0], [2.0]]).remove(keys).clear(), kvjax.Table)
    assert_type(table.evict(kvjax.evict.MaxAge(5)), kvjax.Table)
    assert_type(table.evict(kvjax.evict.MaxAge(5), dry_run=True), dict[str, int])
    table.upsert(keys)  # pyright: ignore[reportCallIssue]
    table.restrict(3, by="size")  # pyright: ignore[reportArgumentType]
    table, state = table.apply(optax.adam(0.1), grads)
    assert_type(table, kvjax.Table)
    table.apply(kvjax.optax.rowwise(optax.adam(0.1), count="row"), grads, state, step=5)
    table.apply("adam", grads)  # pyright: ignore[reportArgumentType]
    table.on_evict(lambda keys, values, slots, freqs, versions, reason: print(len(keys), list(slots), reason))
    assert_type(kvjax.merge([grads, grads], scale=0.5), kvjax.SparseRows)


def training(params: dict[str, Any], batch: jax.Array):
    def loss(params: dict[str, Any], batch: jax.Array) -> jax.Array:
        return jnp.sum(params["table"].lookup(batch))

    value, grads = kvjax.value_and_grad(loss)(params, batch)
    kvjax.grad(loss)(params)  # pyright: ignore[reportCallIssue]
    tx = kvjax.optax.partition(dense=optax.adam(0.1), tables=optax.adagrad(0.1))
    kvjax.optax.partition(dense=optax.adam(0.1), tables={"t": kvjax.optax.rowwise(optax.sgd(0.1))})
    kvjax.optax.partition(dense=optax.adam(0.1), tables=lambda name: optax.sgd(0.1))
    kvjax.optax.partition(dense=optax.MultiSteps(optax.sgd(0.5), 2).gradient_transformation(), tables=optax.sgd(0.5))
    assert_type(tx, optax.GradientTransformationExtraArgs)
    updates, state = tx.update(grads, tx.init(params), params)
    _, tables = kvjax.orbax.split((optax.apply_updates(params, updates), state))
    assert_type(tables, dict[str, kvjax.Table])
    kvjax.orbax.TableSave(tables.values(), cursor="daily")
    return value, kvjax.orbax.TableSave(tables), kvjax.orbax.TableRestore({"t": None})


def reports(
    rows: kvjax.Exported, prune: kvjax.Prune, frozen: kvjax.serving.FrozenTable, tx: optax.GradientTransformation
):
    assert_type(prune.report(rows), kvjax.PruneReport)
    assert_type(prune.report(rows).dropped, kvjax.PrunedRows)
    assert_type(frozen.error, kvjax.QuantisationReport | None)
    assert_type(frozen.as_jax(), kvjax.serving.FrozenArrays)
    assert_type(kvjax.optax.check_compatibility(tx, 4).counts["global"], kvjax.optax.CountReport)


class Redis:
    """An engine, whose arguments have names of its own, as kvjax gives them by their places."""

    def get(self, what: str, ids: np.ndarray) -> np.ndarray:
        return ids

    def put(self, what: str, ids: np.ndarray, data: np.ndarray) -> None: ...

    def delete(self, ids: np.ndarray) -> None: ...


def storages(table: kvjax.Table):
    table.to(kvjax.storage.External(Redis()))
    kvjax.storage.External({})  # pyright: ignore[reportArgumentType]


def layers(keys: jax.Array, default: nnx.Param[jax.Array], table: kvjax.Table):
    kvjax.flax.Embed("u", features=4, seed=3)
    kvjax.flax.Embed("u", 4, param_dtype="bfloat16", dtype=None, pad_id=-1, name="users")
    kvjax.flax.Embed("u", features=4, sede=3)  # pyright: ignore[reportCallIssue]
    kvjax.flax.Embed("u", features=4, on_full="evcit")  # pyright: ignore[reportArgumentType]
    kvjax.flax.EmbedBag(table, combiner="sum", empty="learned")
    kvjax.flax.EmbedBag(table, combiner="avg")  # pyright: ignore[reportArgumentType]
    embed = kvjax.flax.nnx.Embed("u", 4, seed=3)
    kvjax.flax.nnx.Embed("u", 4, on_full="evcit")  # pyright: ignore[reportArgumentType]
    kvjax.flax.nnx.Embed("u", 4, sede=3)  # pyright: ignore[reportCallIssue]
    assert_type(embed(keys, salt=1), jax.Array)
    assert_type(embed.table.get_value(), kvjax.Table)
    assert_type(embed.feature(keys, mask=keys > 0, combiner="sum", lengths=[1, 2]), kvjax.Feature)
    embed.table = embed.table.get_value().upsert(keys, [[1.0]])
    embed.table = table.live()
    embed.table = 3  # pyright: ignore[reportAttributeAccessIssue]
    embed.feature(keys, combiner="avg")  # pyright: ignore[reportArgumentType]
    assert_type(kvjax.flax.EmbedBag(table).feature(keys, lengths=[1, 2]), kvjax.Feature)
    assert_type(kvjax.flax.EmbedBag(table).feature(keys, combiner="sum"), kvjax.Feature)
    kvjax.flax.EmbedBag(table).feature(keys, combiner="avg")  # pyright: ignore[reportArgumentType]
    assert_type(kvjax.flax.nnx.EmbedBag("v", 4, combiner="max")(keys, lengths=[1, 2]), jax.Array)
    kvjax.flax.nnx.EmbedBag("v", 4, combiner="avg")  # pyright: ignore[reportArgumentType]
    kvjax.lookup_bag(table, keys, empty=default)
