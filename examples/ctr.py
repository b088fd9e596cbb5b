"""Click prediction: a DLRM over 26 categorical columns of any size, trained in one pass over a click log.

    python examples/ctr.py                       # a synthetic log whose attainable AUC is known
    python examples/ctr.py --data train.txt.gz   # a log in the Criteo format, streamed; its tail is the test
    python examples/ctr.py --data train.txt --predict test.txt clicks.txt
    python examples/ctr.py --tables many         # 26 tables instead of one with salted keys
    python examples/ctr.py --admit 3 --max-capacity 50000   # rows for what comes back, and no more than so many

No vocabulary is built and no category is hashed down to a bucket: one that turns up for the first time on
the last day is a new row of a table. The synthetic log has many of those. Its labels are drawn from a planted
click probability, so the AUC of that probability on the test rows is what a perfect model would reach. The
exit code is 0 if the DLRM reaches 95 % of its lift over 0.5, else 1.
"""

import argparse
import collections
import functools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import criteo
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from arguments import parsed, positive, writable
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import kvjax

DIM = 16  # floats per embedding row
GOAL = 0.95  # the share of the attainable lift over an AUC of 0.5 to reach on the synthetic log
WINDOW = 50  # steps that the running AUC looks back

Log = criteo.Rows | criteo.File
Summary = dict[str, Any]


class DLRM(nn.Module):
    """A bottom MLP, the dot products of all pairs of feature vectors, a top MLP; gives logits."""

    many: bool  # a table for each column, or one for all of them
    options: Any  # what `kvjax.get_table` is told beside

    @nn.compact
    def __call__(self, dense: jax.Array, keys: Any) -> jax.Array:
        # A small random start: a category not seen before should say next to nothing.
        embed = functools.partial(kvjax.flax.Embed, initializer=kvjax.initializers.normal(0.01), **self.options)
        if self.many:
            rows = jnp.stack([embed(f"C{c + 1}", DIM)(keys[:, c]) for c in range(criteo.CATS)], axis=1)
        else:
            rows = embed("criteo", DIM)(keys)
        bottom = nn.Dense(DIM)(nn.relu(nn.Dense(64)(dense)))
        vectors = jnp.concatenate([bottom[:, None], rows], axis=1)  # (n, 27, 16)
        dots = jnp.einsum("nic,njc->nij", vectors, vectors)
        first, second = np.triu_indices(1 + criteo.CATS, 1)  # every pair once
        x = jnp.concatenate([bottom, dots[:, first, second]], axis=1)
        for width in (64, 32):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[:, 0]


class Batch(NamedTuple):
    label: np.ndarray  # (n,) float32
    dense: np.ndarray  # (n, 13) float32
    keys: Any  # (n, 26) kvjax.Keys


def to_batch(rows: criteo.Rows, many: bool, size: int) -> Batch:
    """A batch of `size` rows, the last one repeated if there are fewer: a new shape would compile again."""
    pad = np.minimum(np.arange(size), len(rows) - 1)
    label = np.zeros(size, np.float32) if rows.label is None else rows.label[pad]
    cats = rows.cats[pad]  # a missing category, -1, is a key like any other and learns its own row
    if not many:
        # The same number means different things in different columns; the column as salt keeps them apart.
        cats = kvjax.hash_keys(cats, salt=np.arange(criteo.CATS))
    return Batch(label, criteo.log_dense(rows.dense[pad]), kvjax.keys(cats))


@jax.jit
def predict(state: TrainState, batch: Batch) -> jax.Array:
    return state.apply_fn({"params": state.params}, batch.dense, batch.keys)


def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array, jax.Array]:
    """One update; also the loss and logits from before it, which judge the model on rows it has not seen."""

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = state.apply_fn({"params": params}, batch.dense, batch.keys)
        return optax.sigmoid_binary_cross_entropy(logits, batch.label).mean(), logits

    (loss, logits), grads = kvjax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss, logits


def auc(label: np.ndarray, score: np.ndarray) -> float:
    """The chance that a click outscores a non-click, a tie counting half; NaN unless there are both."""
    _, place, ties = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(ties) - (ties - 1) / 2)[place]  # from 1; equal scores share the mean of their ranks
    clicks = int(np.sum(label > 0.5))
    others = len(label) - clicks
    if clicks == 0 or others == 0:
        return math.nan
    return float((rank[label > 0.5].sum() - clicks * (clicks + 1) / 2) / (clicks * others))


def log_loss(label: np.ndarray, logit: np.ndarray) -> float:
    """The mean negative log likelihood, in nats."""
    logit = logit.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, logit) - label * logit))


def train(state: TrainState, log: Log, count: int, args: argparse.Namespace) -> tuple[TrainState, Summary]:
    """One pass over the first `count` rows. A remainder smaller than a batch is left out."""
    step = jax.jit(train_step, donate_argnums=0)
    recent: collections.deque = collections.deque(maxlen=WINDOW)

    def running_auc() -> float:
        labels, logits = zip(*recent, strict=True)
        return auc(np.concatenate(labels), np.concatenate(logits))

    steps = count // args.batch
    columns = [TextColumn("train"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    scores = TextColumn("loss {task.fields[loss]:.4f}  running AUC {task.fields[auc]:.4f}")
    with Progress(*columns, scores) as progress:
        task = progress.add_task("train", total=steps, loss=math.nan, auc=math.nan)
        started = time.perf_counter()
        for i, rows in enumerate(log.batches(0, steps * args.batch, args.batch)):
            state, loss, logits = step(state, to_batch(rows, args.tables == "many", args.batch))
            recent.append((rows.label, logits))
            if i == 0:  # it compiled, which would spoil the rates: start the clock again
                jax.block_until_ready(loss)
                started = time.perf_counter()
            # To ask for a value is to wait for the device, so not at every step.
            if (i + 1) % 10 == 0 or i + 1 == steps:
                progress.update(task, completed=i + 1, loss=float(loss), auc=running_auc())
                if not progress.console.is_terminal and (i + 1) // 10 % max(steps // 100, 1) == 0:
                    # The bar is for terminals: a file has to say how far it came, whenever it ends.
                    progress.console.print(f"step {i + 1:,} of {steps:,}  loss {loss:.4f}  AUC {running_auc():.4f}")
    rate = (steps - 1) / (time.perf_counter() - started)
    speed = {"steps_per_s": rate, "keys_per_s": rate * args.batch * criteo.CATS}
    return state, {"train_rows": count, "steps": steps, "running_auc": running_auc()} | speed


def logits_of(state: TrainState, log: Log, start: int, args: argparse.Namespace) -> Iterator[tuple[Any, np.ndarray]]:
    """Labels and logits of rows `start` to the end, a batch at a time. Looking rows up changes no table."""
    for rows in log.batches(start, len(log), args.batch):
        logits = predict(state, to_batch(rows, args.tables == "many", args.batch))
        yield rows.label, np.asarray(logits)[: len(rows)]


def judge(label: np.ndarray, logit: np.ndarray, true_logit: np.ndarray | None) -> Summary:
    """The scores on the test rows, beside those of the plain click rate and, if known, of the true logits."""
    rate = np.clip(label.mean(), 1e-6, 1 - 1e-6)
    scores: Summary = {"test_rows": len(label), "auc": auc(label, logit), "log_loss": log_loss(label, logit)}
    scores["log_loss_of_the_click_rate"] = log_loss(label, np.full(len(label), np.log(rate / (1 - rate))))
    if true_logit is not None:
        best = auc(label, true_logit)
        scores |= {"attainable_auc": best, "attainable_log_loss": log_loss(label, true_logit)}
        scores["lift_share"] = (scores["auc"] - 0.5) / (best - 0.5)
    return scores


def count_rows() -> Summary:
    """What the tables hold, and what admission and the limit have done."""
    stats = list(kvjax.stats().values())
    numbers: Summary = {"table_rows": sum(s.size for s in stats)}
    if sum(s.refused for s in stats):
        numbers["occurrences_refused"] = sum(s.refused for s in stats) / sum(s.occurrences for s in stats)
        numbers["keys_waiting"] = sum(s.tracked for s in stats)
    if any(s.max_capacity for s in stats):
        numbers["rows_evicted"] = sum(sum(s.evicted.values()) for s in stats)
    return numbers


def report(summary: Summary, source: str, console: Console) -> None:
    table = Table(title=f"DLRM on {source}", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, shape in (
        ("train rows", ",d"), ("test rows", ",d"), ("table rows", ",d"), ("steps", ",d"),
        ("occurrences refused", ".1%"), ("keys waiting", ",d"), ("rows evicted", ",d"),
        ("steps per s", ",.1f"), ("keys per s", ",.0f"), ("running AUC", ".4f"), ("AUC", ".4f"),
        ("attainable AUC", ".4f"), ("lift share", ".1%"), ("log loss", ".4f"),
        ("attainable log loss", ".4f"), ("log loss of the click rate", ".4f"),
    ):  # fmt: skip
        value = summary.get(name.lower().replace(" ", "_"))
        if value is not None:
            table.add_row(name, format(value, shape))
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    log = parser.add_mutually_exclusive_group().add_argument
    log("--data", type=Path, metavar="PATH", help="a labelled log in the Criteo format, .gz or not")
    log("--save-log", type=writable, metavar="PATH", help="write the synthetic log in the Criteo format")
    add("--predict", type=Path, nargs=2, metavar=("LOG", "OUT"), help="write click probabilities")
    add("--tables", choices=("one", "many"), default="one", help="one table, or one for each column")
    add("--admit", type=positive, metavar="K", help="a category gets its row the K-th time it is seen (default: first)")
    add("--max-capacity", type=positive, metavar="N", help="rows of a table; those written longest ago are evicted")
    add("--rows", type=positive, default=800_000, help="rows of the synthetic log")
    add("--test-rows", type=positive, metavar="N", help="rows at the end to test on (default: a tenth)")
    add("--batch", type=positive, default=1024, help="rows a step; fewer if the log is small")
    add("--lr", type=float, default=5e-3, help="Adam's, of the dense layers; decays to 0")
    add("--table-lr", type=float, default=0.02, help="Adagrad's, of the tables")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="a short run, to see that it works; no goal to reach")
    add("--json", type=writable, metavar="PATH", help="write the summary")
    return parsed(parser, rows=20_000, batch=128)


def open_log(args: argparse.Namespace) -> tuple[Log, np.ndarray | None, int]:
    """The log, its true logits if it is the synthetic one, and how many of its rows are for training."""
    if args.data is None:
        log, true_logit = criteo.planted(args.rows, args.seed)
        if args.save_log:
            criteo.write(args.save_log, log)
    else:
        log, true_logit = criteo.File(args.data), None
    test_rows = len(log) // 10 if args.test_rows is None else args.test_rows
    if not 0 < test_rows < len(log):
        sys.exit(f"want rows to train on and rows to test on; {test_rows} of {len(log)} are for the test")
    if next(log.batches(0, 1, 1)).label is None:
        sys.exit(f"{args.data} has no labels (39 fields a line, not 40): --predict is for such a log")
    return log, true_logit, len(log) - test_rows


def new_state(sample: Batch, steps: int, args: argparse.Namespace) -> TrainState:
    options: dict[str, Any] = {}
    if args.admit:
        options["admit"] = kvjax.admit.MinCount(args.admit)
    if args.max_capacity:
        # A number of rows at once: to look for the oldest ones takes a look at all.
        oldest = kvjax.evict.LeastRecent(max(args.max_capacity // 100, 1))
        options |= {"max_capacity": args.max_capacity, "on_full": "evict", "evict": oldest}
    net = DLRM(many=args.tables == "many", options=options)
    params = net.init(jax.random.key(args.seed), sample.dense, sample.keys)["params"]
    adam = optax.adam(optax.cosine_decay_schedule(args.lr, steps))
    # The loss is a mean over the batch, so a row's gradient is of the size of 1 / batch. Beside the 0.1 at which
    # Adagrad's sums start its square is nothing, and Adagrad would not adapt.
    adagrad = optax.chain(optax.scale(args.batch), optax.adagrad(args.table_lr))
    tx = kvjax.optax.partition(dense=adam, tables=adagrad)
    return TrainState.create(apply_fn=net.apply, params=params, tx=tx)


def main() -> int:
    try:
        return run(parse_arguments())
    except (criteo.FormatError, OSError) as error:  # files that are not there, or something else
        sys.exit(str(error))


def run(args: argparse.Namespace) -> int:
    console = Console()
    log, true_logit, train_rows = open_log(args)
    if args.predict:  # better to learn now than after the training that one cannot be read or written
        next(criteo.File(args.predict[0]).batches(0, 1, 1))
        args.predict[1].touch()
    args.batch = min(args.batch, max(train_rows // 16, 1))
    first = to_batch(next(log.batches(0, 1, 1)), args.tables == "many", 1)
    state = new_state(first, train_rows // args.batch, args)

    state, summary = train(state, log, train_rows, args)
    label, logit = (np.concatenate(x) for x in zip(*logits_of(state, log, train_rows, args), strict=True))
    summary |= judge(label, logit, None if true_logit is None else true_logit[train_rows:])
    summary |= count_rows()
    report(summary, args.data.name if args.data else "a synthetic log", console)
    if args.json:
        finite = {name: value if math.isfinite(value) else None for name, value in summary.items()}
        args.json.write_text(json.dumps(finite, indent=2) + "\n")
    if args.predict:
        with args.predict[1].open("w") as file:
            for _, logits in logits_of(state, criteo.File(args.predict[0]), 0, args):
                file.writelines(f"{p:.6f}\n" for p in 1 / (1 + np.exp(-logits)))
    if true_logit is None or args.smoke:
        return 0
    reached = summary["lift_share"] >= GOAL
    console.print(f"{'Reached' if reached else 'MISSED'} the goal of {GOAL:.0%} of the attainable lift.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
