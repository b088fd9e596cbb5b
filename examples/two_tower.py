"""Two-tower retrieval on raw 64-bit ids that arrive over time.

    python examples/two_tower.py                  # a built-in synthetic stream, within a minute
    python examples/two_tower.py --kill-at 300    # dies at step 300; the next run resumes
    python examples/two_tower.py --data gowalla/lightgcn_split.npz    # Gowalla in LightGCN's split
    python examples/two_tower.py --dense          # the same on nn.Embed, which must know every id beforehand
    python examples/two_tower.py --devices 4      # tables sharded over four devices, which the host makes if need be
    python examples/two_tower.py --coordinator localhost:5555 --processes 2 --process 0    # and --process 1 beside it

Each tower is one embedding row, refined by a small residual layer and normalised. The loss is an in-batch
softmax with the log-popularity correction; popularity is counted while the stream goes by. The run saves with
orbax as it trains, resumes to the same result bit for bit, ranks the whole catalogue, prunes, exports, and
draws a picture.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import time
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from arguments import natural, positive
from flax.training.train_state import TrainState
from rich import console, progress
from two_tower_data import Data, batches, gowalla, recall_and_ndcg, synthetic
from two_tower_devices import Devices, add_arguments, is_first, meet
from two_tower_report import closing_table, draw, export, export_dense

import kvjax

HISTORY = ("step", "loss", "seconds", "user", "item")  # noted down while training; the last two are rows
out = console.Console()


class TwoTower(nn.Module):
    """`vocabulary` holds the two sizes `nn.Embed` needs; None means kvjax, which needs none."""

    features: int
    vocabulary: dict[str, int] | None = None
    seed: int = 0  # of tables: a compiled `init` cannot take it from its key
    mesh: jax.sharding.Mesh | None = None  # of tables

    def setup(self) -> None:
        self.user, self.item = self._embed("user"), self._embed("item")
        self.user_layer, self.item_layer = self._layer(), self._layer()

    def _embed(self, name: str) -> nn.Module:
        if self.vocabulary:
            return nn.Embed(self.vocabulary[name], self.features)
        return kvjax.flax.Embed(name, features=self.features, seed=self.seed, mesh=self.mesh)

    def _layer(self) -> nn.Module:
        return nn.Dense(self.features, kernel_init=nn.initializers.zeros)  # so training starts from plain rows

    def users(self, ids: Any) -> jax.Array:
        return _tower(self.user(ids), self.user_layer)

    def items(self, ids: Any) -> jax.Array:
        return _tower(self.item(ids), self.item_layer)

    def __call__(self, users: Any, items: Any) -> tuple[jax.Array, jax.Array]:
        return self.users(users), self.items(items)


def _tower(rows: jax.Array, layer: nn.Module) -> jax.Array:
    rows = rows + layer(rows)
    return rows / optax.safe_norm(rows, 1e-6, axis=-1, keepdims=True)


class Popularity:
    """How often each item has come by so far: nobody knows the ids, let alone their shares, beforehand."""

    def __init__(self) -> None:
        self.counts: collections.Counter[int] = collections.Counter()
        self.total = 0

    def see(self, items: np.ndarray) -> None:
        self.counts.update(items.tolist())
        self.total += items.size

    def log_share(self, items: np.ndarray) -> np.ndarray:
        counts = np.fromiter(map(self.counts.__getitem__, items.tolist()), np.float32, items.size)
        return np.log(counts / np.float32(self.total))


@dataclasses.dataclass
class Run:
    """Everything one training run is made of."""

    args: argparse.Namespace
    data: Data
    net: TwoTower
    state: TrainState
    steps: int
    devices: Devices = dataclasses.field(default_factory=Devices)
    popularity: Popularity = dataclasses.field(default_factory=Popularity)
    history: dict[str, list] = dataclasses.field(default_factory=lambda: {name: [] for name in HISTORY})
    seconds: list[float] = dataclasses.field(default_factory=list)  # one per step since the last note

    def ids(self, ids: np.ndarray) -> Any:
        """Ids as the model takes them: a plain array of 64 bits would not survive `jit`."""
        return ids.astype(np.int32) if self.args.dense else kvjax.keys(ids)

    def rows(self) -> dict[str, int]:
        if self.args.dense:
            return dict(self.net.vocabulary)
        tables = kvjax.orbax.split(self.state)[1]
        return {name: tables[name].size(all_processes=True) for name in ("user", "item")}


def start(args: argparse.Namespace, data: Data, devices: Devices) -> Run:
    steps, vocabulary = data.users.size // args.batch * args.epochs, None
    if args.dense:
        data = data.renumbered()
        users = int(max(data.users.max(), data.test_users.max())) + 1
        vocabulary = {"user": users, "item": data.catalogue.size}
        tx, key = optax.adam(args.lr), np.zeros(1, np.int32)
    else:
        # Dense Adam moves a row on after it was met, by its momentum; a table does not, so its rate is higher.
        tx = kvjax.optax.partition(dense=optax.adam(args.lr), tables=optax.adam(args.table_lr))
        key = kvjax.keys(np.zeros(1, np.int64))
    net = TwoTower(args.features, vocabulary, args.seed, devices.mesh)
    init = jax.jit(net.init, out_shardings=devices.everywhere)
    state = TrainState.create(apply_fn=net.apply, params=init(jax.random.key(args.seed), key, key)["params"], tx=tx)
    return Run(args, data, net, devices.replicate(state), steps, devices)


def make_step(run: Run) -> Any:
    value_and_grad = jax.value_and_grad if run.args.dense else kvjax.value_and_grad
    temperature = run.args.temperature

    def loss_fn(params: Any, users: Any, items: Any, same: jax.Array, log_share: jax.Array) -> jax.Array:
        u, v = run.net.apply({"params": params}, users, items)
        logits = u @ v.T / temperature - log_share  # popular items are in-batch negatives all the more often
        # A negative that is the same item as the positive is none at all.
        twin = (same[:, None] == same[None, :]) & ~jnp.eye(same.size, dtype=bool)
        logits = jnp.where(twin, -jnp.inf, logits)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(same.size)).mean()

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=run.devices.everywhere)
    def step(state: TrainState, *batch: Any) -> tuple[TrainState, jax.Array]:
        loss, grads = value_and_grad(loss_fn)(state.params, *batch)
        return state.apply_gradients(grads=grads), loss

    return step


def train(run: Run, manager: ocp.CheckpointManager) -> None:
    args, done = run.args, int(run.state.step)
    for _, items in batches(run.data, args.batch, args.seed, 0, done):
        run.popularity.see(items)  # counts are a function of the stream: recounted, not saved
    step = make_step(run)
    columns = (progress.BarColumn(16), progress.MofNCompleteColumn(), "{task.fields[note]}")
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=out) as bar:
        task = bar.add_task("", total=run.steps, completed=done, note="")
        stream = batches(run.data, args.batch, args.seed, done, run.steps)
        for at, (users, items) in enumerate(stream, done + 1):
            began = time.perf_counter()
            run.popularity.see(items)
            same = np.unique(items, return_inverse=True)[1].astype(np.int32)
            batch = run.ids(users), run.ids(items), same, run.popularity.log_share(items)
            run.state, loss = step(run.state, *run.devices.cut(batch))
            loss.block_until_ready()
            run.seconds.append(time.perf_counter() - began)
            bar.update(task, completed=at)
            if at % args.log_every == 0 or at == run.steps:
                note = log(run, at, float(loss))
                bar.update(task, note=note)
                if not out.is_terminal:  # a bar is for terminals: a file has to say how far it came, whenever it ends
                    out.print(f"step {at:,} of {run.steps:,}  {note}")
            if args.save_every and (at % args.save_every == 0 or at == run.steps):
                save(run, manager, at)
            if at == args.kill_at:
                manager.wait_until_finished()  # so that it is known where the next run goes on
                os._exit(1)  # no goodbye, as a lost machine would
    manager.wait_until_finished()


def log(run: Run, at: int, loss: float) -> str:
    """Notes one point of the curves, and says it."""
    rows, seconds = run.rows(), float(np.median(run.seconds))
    for name, value in zip(HISTORY, (at, loss, seconds, *rows.values()), strict=True):
        run.history[name].append(value)
    run.seconds.clear()
    growth = "+".join(f"{n:,}" for n in rows.values())
    return f"loss {loss:.3f}  rows {growth}  {1 / seconds:.0f} steps/s"


def save(run: Run, manager: ocp.CheckpointManager, at: int) -> None:
    dense, tables = kvjax.orbax.split(run.state)
    history = copy.deepcopy(run.history)  # orbax writes it in the background, while the lists grow
    items = {"dense": ocp.args.StandardSave(dense), "history": ocp.args.JsonSave(history)}
    if tables:
        items["tables"] = kvjax.orbax.TableSave(tables)
    manager.save(at, args=ocp.args.Composite(**items))


def resume(run: Run, manager: ocp.CheckpointManager) -> None:
    dense, tables = kvjax.orbax.split(run.state)
    items = {"dense": ocp.args.StandardRestore(dense), "history": ocp.args.JsonRestore()}
    if tables:
        items["tables"] = kvjax.orbax.TableRestore(tables)
    saved = manager.restore(manager.latest_step(), args=ocp.args.Composite(**items))
    run.history = saved["history"]
    run.state = kvjax.orbax.combine(saved["dense"], saved["tables"] if tables else {})
    finished = manager.latest_step() == run.steps
    out.print(f"resumed at step {manager.latest_step()}" + (", the last: --fresh starts anew" if finished else ""))


def evaluate(run: Run) -> dict[str, Any]:
    """Ranks the whole catalogue for every user in the test. Ids never seen read as their initial rows."""

    def vectors(method: str, ids: np.ndarray) -> np.ndarray:
        apply = functools.partial(run.net.apply, method=method)
        tower = jax.jit(lambda params, ids: apply({"params": params}, ids), out_shardings=run.devices.everywhere)
        return np.asarray(tower(run.state.params, run.ids(ids)))

    data, users = run.data, np.unique(run.data.test_users)
    recall, ndcg = recall_and_ndcg(data, users, vectors("users", users), vectors("items", data.catalogue))
    counts = np.array([[run.popularity.counts[item]] for item in data.catalogue.tolist()], np.float32)
    popular = recall_and_ndcg(data, users, np.ones((users.size, 1), np.float32), counts)
    return {"recall": recall, "ndcg": ndcg, "popular": popular}


def report(run: Run, began: float) -> dict[str, Any]:
    """Evaluates, prunes, exports, draws. But for times, `summary.json` is the same after any kill."""
    args, history = run.args, run.history
    summary = evaluate(run)
    if args.dense:
        seen = {"user": run.data.users, "item": run.data.items}
        exported = export_dense(run.state.params, seen, args.out)
    else:
        exported = export(kvjax.orbax.split(run.state)[1], args.out, args.min_frequency)
    frequencies = exported.pop("frequencies")
    title = f"Two towers on {run.data.name}: Recall@20 {summary['recall']:.4f}, NDCG@20 {summary['ndcg']:.4f}"
    median = float(np.median(history["seconds"]))
    summary |= exported | {
        "data": run.data.name,
        "tables": "flax.linen.Embed" if args.dense else "kvjax",
        "steps": run.steps,
        "loss": history["loss"],
        "rows": run.rows(),
        "devices": jax.process_count() * args.devices,
        "seconds_per_step": median,
        "keys_per_second": 2 * args.batch / median,
        "seconds": time.perf_counter() - began,
    }
    if is_first():
        draw(history, frequencies, title, args.out / "two_tower.png")
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    return summary


def arguments() -> argparse.Namespace:
    path = pathlib.Path
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=path, help="Gowalla as lightgcn_split.npz; default: a synthetic stream")
    parser.add_argument("--out", type=path, help="default: runs/two_tower, named after the flags")
    parser.add_argument("--dense", action="store_true", help="nn.Embed of fixed size instead of kvjax")
    parser.add_argument("--smoke", action="store_true", help="a short run on a tiny stream")
    parser.add_argument("--fresh", action="store_true", help="start anew even if --out holds a checkpoint")
    parser.add_argument("--kill-at", type=natural, default=0, metavar="STEP", help="die there, to try resuming")
    parser.add_argument("--save-every", type=natural, metavar="STEPS", help="0: never")
    parser.add_argument("--log-every", type=positive, metavar="STEPS")
    parser.add_argument("--epochs", type=positive)
    parser.add_argument("--batch", type=positive)
    parser.add_argument("--features", type=positive, default=64)
    parser.add_argument("--lr", type=float, help="Adam's, of the dense parameters; default 0.003, with --dense 0.004")
    parser.add_argument("--table-lr", type=float, default=0.02, help="of kvjax tables; --dense has one rate")
    parser.add_argument("--temperature", type=float, default=0.1)
    parser.add_argument("--min-frequency", type=natural, default=2, help="rows seen less often are not exported")
    parser.add_argument("--seed", type=int, default=0)
    add_arguments(parser)
    args = parser.parse_args()
    defaults = {"epochs": 1, "batch": 512, "save_every": 200, "log_every": 10}
    if args.data:
        defaults = {"epochs": 15, "batch": 2048, "save_every": 1000, "log_every": 20}
    elif args.smoke:
        defaults |= {"epochs": 4, "batch": 128, "save_every": 20, "log_every": 1}
    defaults["lr"] = 0.004 if args.dense else 0.003  # each the best of a few for its kind of rows
    for name, value in defaults.items():  # what depends on the data
        if getattr(args, name) is None:
            setattr(args, name, value)
    flags = {"gowalla": args.data, "smoke": args.smoke, "dense": args.dense}
    name = "_".join(["two_tower", *(flag for flag, given in flags.items() if given)])
    args.out = (args.out or pathlib.Path("runs", name)).resolve()  # orbax wants whole paths
    return args


def prepare(args: argparse.Namespace) -> None:
    """Makes the output folder; refuses one with a run of other settings, which could not be resumed."""
    about_the_run = ("out", "fresh", "kill_at", "save_every", "devices", "coordinator", "processes", "process")
    settings = {name: str(value) for name, value in vars(args).items() if name not in about_the_run}
    path = args.out / "settings.json"
    if args.fresh:
        shutil.rmtree(args.out / "checkpoints", ignore_errors=True)
    elif path.exists() and json.loads(path.read_text()) != settings:
        raise SystemExit(f"{args.out} holds a run of other settings: give another --out, or --fresh to drop it")
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings, indent=1))


def main() -> None:
    began, args = time.perf_counter(), arguments()
    if args.data:
        data = gowalla(args.data)
    elif args.smoke:
        data = synthetic(args.seed, events=12_000, users=300, items=400, genres=16)
    else:
        data = synthetic(args.seed, events=1_500_000, users=30_000, items=12_000, genres=128)
    if data.users.size < args.batch:
        raise SystemExit(f"want {args.batch} interactions or more, got {data.users.size}; give --batch")
    devices = Devices.join(args)
    out.quiet = not is_first()
    if is_first():
        prepare(args)
    meet("the folder is ready")
    run = start(args, data, devices)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(args.out / "checkpoints", options=options) as manager:
        if manager.latest_step() is not None:
            resume(run, manager)
        train(run, manager)
    out.print(closing_table(report(run, began)))
    out.print(f"picture, tables and summary.json are in {args.out}")
    meet("the end")


if __name__ == "__main__":
    main()
